"""Tokens of an OpenID provider: whose are good, and what they allow."""

import base64
import hashlib
import hmac
import json
import threading
import time
import warnings
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from engram_server.access import oidc
from engram_server.access.identity import ANY_TASK
from engram_server.access.oidc import InvalidToken, OpenIdTokens, Provider, identity_of
from engram_server.errors import IssuerUnavailable
from engram_server.settings import load_settings
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem

ISSUER, AUDIENCE = "https://login.example", "engram"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
EDWARDS = ed25519.Ed25519PrivateKey.generate()


def public(key, key_id="one", **members):
    """A key as JWKS lists it."""
    kinds = {"RSA": RSAAlgorithm, "EC": ECAlgorithm, "Ed2": OKPAlgorithm}
    kind = next(kinds[name] for name in kinds if type(key).__name__.startswith(name))
    return {**kind.to_jwk(key.public_key(), as_dict=True), "kid": key_id, **members}


def claims(**changes):
    now = time.time()
    made = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + 600}
    made["scope"] = "openid engram:read"
    return {name: value for name, value in (made | changes).items() if value is not None}


def signed(key=RSA, algorithm="RS256", key_id="one", **changes):
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.encode(claims(**changes), key, algorithm, headers=headers)


def provider_of(path, **changes):
    options = {
        "issuer": ISSUER,
        "audience": AUDIENCE,
        "jwks": str(path),
        "algorithms": ("RS256", "ES256", "EdDSA"),
        "leeway_seconds": 5.0,
        "scope_claim": "scope",
    }
    return Provider(**(options | changes))


@pytest.fixture
def jwks(tmp_path):
    """`jwks(*keys)` writes the file."""
    path = tmp_path / "jwks.json"

    def write(*keys):
        path.write_text(json.dumps({"keys": keys}))
        return path

    write(public(RSA), public(EC, "two"), public(EDWARDS, "three"))
    return write


@pytest.fixture
def tokens(jwks, tmp_path):
    tokens = OpenIdTokens(provider_of(tmp_path / "jwks.json"))
    tokens.refresh()
    return tokens


# --- which tokens are good ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "algorithm", "key_id"),
    [(RSA, "RS256", "one"), (EC, "ES256", "two"), (EDWARDS, "EdDSA", "three"), (EC, "ES256", None)],
)
def test_a_token_of_the_issuer_is_good(tokens, key, algorithm, key_id):
    identity = tokens.identify(signed(key, algorithm, key_id))
    assert identity.id == "openid:ada"
    assert identity.grants == {"read": (ANY_TASK,)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"iss": "https://evil.example"}, "different issuer"),
        ({"iss": None}, "iss"),
        ({"aud": "another"}, "not for this server"),
        ({"aud": None}, "aud"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "subject"),
        ({"sub": "a\nb"}, "subject"),
        ({"sub": "a" * 300}, "subject"),
        ({"exp": None}, "exp"),
        ({"exp": time.time() - 60}, "expired"),
        ({"nbf": time.time() + 3600}, "not valid yet"),
        ({"iat": time.time() + 3600}, "not valid yet"),
        ({"exp": "soon"}, "malformed"),
        ({"exp": float("inf")}, "malformed"),
        ({"exp": [1]}, "malformed"),
        ({"exp": 10**400}, "malformed"),
    ],
)
def test_claims_that_are_not_for_us_or_not_for_now_are_rejected(tokens, changes, sentence):
    with pytest.raises(InvalidToken, match=sentence):
        tokens.identify(signed(**changes))


def test_clocks_may_differ_a_little(tokens):
    tokens.identify(signed(exp=time.time() - 2))
    tokens.identify(signed(nbf=time.time() + 2))


def test_an_expiry_may_be_text(tokens):
    assert tokens.identify(signed(exp=str(int(time.time()) + 60))).name == "ada"


def test_one_of_several_audiences_will_do(tokens):
    tokens.identify(signed(aud=["billing", AUDIENCE]))


def encoded(part):
    data = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def by_hand(header, signature=b""):
    return f"{encoded(header)}.{encoded(claims())}.{encoded(signature)}"


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "", None, 7, ["RS256"], {}])
def test_unsigned_tokens_are_rejected(tokens, algorithm):
    with pytest.raises(InvalidToken):
        tokens.identify(by_hand({"alg": algorithm, "kid": "one"}))


def test_the_public_key_is_no_shared_secret(tokens):
    pem = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    unsigned = by_hand({"alg": "HS256", "kid": "one"}).rpartition(".")[0]
    signature = hmac.new(pem, unsigned.encode(), hashlib.sha256).digest()
    with pytest.raises(InvalidToken, match="must be signed with RS256 or ES256 or EdDSA"):
        tokens.identify(f"{unsigned}.{encoded(signature)}")


@pytest.mark.parametrize(
    "token",
    [
        signed(OTHER_RSA),  # a stranger's key under a name that is known
        signed(EC, "ES256", "one"),  # a good key under another's name
        signed(RSA, "RS512"),  # an algorithm that is not allowed
        signed(RSA)[:-8] + "AAAAAAAA",
        signed(RSA).replace(".", ".e30", 1),
        "..",
        "a.b.c",
        "é.é.é",
        f"{encoded(b'[' * 20_000)}.{encoded({})}.",
        f"{encoded(b'{' + bytes([0xFF]))}.{encoded({})}.",
        f"{encoded([])}.{encoded({})}.",
        by_hand({"alg": "RS256", "kid": {"a": 1}}),
        by_hand({"alg": "RS256", "kid": "one", "crit": ["exp"]}, b"x" * 256),
        by_hand({"alg": "RS256", "kid": "one", "jku": "https://evil.example/keys"}, b"x" * 256),
    ],
)
def test_wrong_signatures_and_nonsense_are_rejected(tokens, token):
    with pytest.raises(InvalidToken):
        tokens.identify(token)


def test_a_key_is_only_for_the_algorithm_it_names(jwks, tokens):
    jwks(public(RSA, alg="RS512"))
    tokens.refresh()
    with pytest.raises(InvalidToken, match="unknown key"):
        tokens.identify(signed())


def test_keys_that_check_no_signature_are_passed_over(jwks, tokens):
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "one", "alg": "HS256"}
    private = {**RSAAlgorithm.to_jwk(OTHER_RSA, as_dict=True), "kid": "one"}
    jwks(secret, private, public(OTHER_RSA, "enc", use="enc"), {"kty": "RSA"}, 7, public(RSA))
    tokens.refresh()
    tokens.identify(signed())
    tokens.identify(signed(key_id=None))


# --- the keys -------------------------------------------------------------------------------------


def test_tokens_are_not_rejected_for_good_before_the_keys_are_read(tmp_path):
    tokens = OpenIdTokens(provider_of(tmp_path / "none.json"))
    tokens.refresh()
    assert tokens.error
    with pytest.raises(IssuerUnavailable):
        tokens.identify(signed())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"keys": []}', '{"keys": 7}', " " * 2**21])
def test_keys_stay_when_the_provider_is_away_or_answers_nonsense(tokens, tmp_path, content):
    (tmp_path / "jwks.json").write_text(content)
    tokens.refresh()
    assert tokens.error
    tokens.identify(signed())
    (tmp_path / "jwks.json").unlink()
    tokens.refresh()
    tokens.identify(signed(sub="bob"))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_of_the_provider_are_not_followed(tmp_path, jwks, status):
    """Not even for valid keys: the server there cannot be trusted."""

    class Redirecting(SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/jwks.json":
                super().do_GET()
            else:
                self.send_response(status)
                self.send_header("Location", "/jwks.json")
                self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), partial(Redirecting, directory=tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        direct, redirected = (
            OpenIdTokens(provider_of(f"{url}/{name}")) for name in ("jwks.json", "elsewhere")
        )
        direct.refresh()
        redirected.refresh()
        server.shutdown()
        thread.join()
    direct.identify(signed())
    assert "redirects to" in redirected.error
    with pytest.raises(IssuerUnavailable):
        redirected.identify(signed())


def test_rotated_keys_replace_the_old_ones_and_what_those_signed_is_forgotten(jwks, tokens):
    old, new = signed(), signed(OTHER_RSA, key_id="next")
    tokens.identify(old)
    with pytest.raises(InvalidToken, match="unknown key"):
        tokens.identify(new)
    jwks(public(RSA), public(OTHER_RSA, "next"))
    tokens.refresh()
    tokens.identify(old)
    tokens.identify(new)
    jwks(public(OTHER_RSA, "next"))
    tokens.refresh()
    with pytest.raises(InvalidToken):
        tokens.identify(old)


def test_unknown_keys_make_the_thread_look_once_in_a_while(tokens, jwks, monkeypatch):
    wakes = []
    monkeypatch.setattr(tokens._wake, "set", lambda: wakes.append(True))
    for number in range(100):
        with pytest.raises(InvalidToken):
            tokens.identify(signed(OTHER_RSA, key_id=f"unknown-{number}"))
    assert len(wakes) == 1
    tokens._requested_at -= oidc.UNKNOWN_KEY_SECONDS
    with pytest.raises(InvalidToken):
        tokens.identify(signed(OTHER_RSA, key_id="unknown"))
    assert len(wakes) == 2


def test_the_thread_finds_new_keys(jwks, tmp_path, wait_until):
    tokens = OpenIdTokens(provider_of(tmp_path / "jwks.json"))
    tokens.start()
    wait_until(lambda: tokens._keys)
    jwks(public(OTHER_RSA, "next"))
    with pytest.raises(InvalidToken):
        tokens.identify(signed(OTHER_RSA, key_id="next"))
    wait_until(lambda: tokens._keys[0].id == "next")
    tokens.identify(signed(OTHER_RSA, key_id="next"))
    tokens.stop()
    assert not tokens._thread.is_alive()


@pytest.fixture
def wait_until():
    def wait(condition):
        until = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)

    return wait


# --- tokens that were seen ------------------------------------------------------------------------


def test_a_token_is_verified_once_and_forgotten_when_it_expires(jwks, tmp_path, monkeypatch):
    now = [time.time()]
    tokens = OpenIdTokens(provider_of(tmp_path / "jwks.json"), now=lambda: now[0])
    tokens.refresh()
    token, verified = signed(), []
    real = jwt.decode
    monkeypatch.setattr(jwt, "decode", lambda *a, **k: verified.append(1) or real(*a, **k))
    assert {tokens.identify(token).id for _ in range(5)} == {"openid:ada"}
    assert len(verified) == 1
    now[0] += 700
    tokens.identify(token)  # PyJWT has its own clock, by which it is good
    assert len(verified) == 2


def test_only_so_many_tokens_are_remembered(tokens, monkeypatch):
    monkeypatch.setattr(oidc, "_CACHED_TOKENS", 3)
    for number in range(6):
        tokens.identify(signed(EC, "ES256", "two", sub=f"s{number}"))
    assert len(tokens._cache) == 3


# --- what they allow ------------------------------------------------------------------------------


def granted(scope, **more):
    return identity_of(claims(scope=scope, **more), "scope").grants


def test_scopes_are_mapped_with_their_patterns():
    assert granted("engram:predict:team-a/* engram:predict:shared engram:read profile") == {
        "predict": ("team-a/*", "shared"),
        "read": (ANY_TASK,),
    }
    assert granted(["engram:publish:pets", "engram:metrics"]) == {
        "publish": ("pets",),
        "metrics": (ANY_TASK,),
    }


def test_a_claim_of_tasks_limits_scopes_that_name_none():
    assert granted("engram:predict engram:read:pets", engram_tasks=["team-a/*", "shared"]) == {
        "predict": ("team-a/*", "shared"),
        "read": ("pets",),
    }
    assert granted("engram:predict", engram_tasks=[]) == {"predict": ()}


@pytest.mark.parametrize(
    "scope",
    [None, "", "openid", "predict", "engram:", "engram:root", "Engram:read", 7, {"engram:read": 1}],
)
def test_what_is_no_scope_of_ours_allows_nothing(scope):
    assert identity_of(claims(scope=scope), "scope").grants == {}


# --- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def issuer():
    with warnings.catch_warnings(record=True):  # what it imports is deprecated
        import oidc_provider_mock
    with oidc_provider_mock.run_server_in_thread() as server:
        yield f"http://127.0.0.1:{server.server_port}"


def login(issuer, subject, **custom):
    """An ID token as a browser and a confidential client get one: by an authorization code."""
    with httpx.Client(base_url=issuer) as browser:
        browser.put(f"/users/{quote(subject)}", json=custom).raise_for_status()
        redirect = "http://127.0.0.1:1/callback"
        answer = browser.post(
            "/oauth2/authorize",
            params={
                "client_id": AUDIENCE,
                "redirect_uri": redirect,
                "response_type": "code",
                "scope": "openid",
            },
            data={"sub": subject},
        )
        code = parse_qs(urlsplit(answer.headers["location"]).query)["code"][0]
        answer = browser.post(
            "/oauth2/token",
            data={"grant_type": "authorization_code", "code": code, "redirect_uri": redirect},
            auth=(AUDIENCE, "secret"),
        )
        return answer.raise_for_status().json()["id_token"]


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the provider's own code
def test_a_token_of_a_real_provider_opens_what_its_claims_say(
    world, issuer, cat, fresh, wait_until
):
    configuration = httpx.get(f"{issuer}/.well-known/openid-configuration").json()
    app = world.app(
        oidc_issuer=configuration["issuer"],
        oidc_audience=AUDIENCE,
        oidc_jwks=configuration["jwks_uri"],
        oidc_scope_claim="roles",
    )
    reader = login(issuer, "ada@example.com", roles=["engram:predict:pets", "engram:read"])
    writer = login(issuer, "bob@example.com", roles=["engram:publish"])
    with TestClient(app) as client:
        wait_until(lambda: app.state.runtime.openid._keys)
        assert_problem(client.get("/tasks"), 401, "key-required")
        assert client.get("/tasks", headers=bearer(reader)).status_code == 200
        answer = client.post("/predict?tasks=pets", content=cat, headers=bearer(reader))
        assert answer.status_code == 200
        answer = client.post("/predict?tasks=scene", content=cat, headers=bearer(reader))
        assert_problem(answer, 403, "not-permitted")
        body = world.bundle(90).to_bytes()
        answer = client.put(f"/tasks/{fresh}", content=body, headers=bearer(reader))
        assert_problem(answer, 403, "not-permitted")
        answer = client.put(f"/tasks/{fresh}", content=body, headers=bearer(writer))
        assert answer.status_code == 201
        history = client.get(f"/tasks/{fresh}/history", headers=bearer(reader)).json()
        assert history["entries"][0]["actor"] == "openid:bob@example.com"
        wrong = bearer(reader[:-6] + "AAAAAA")
        assert_problem(client.get("/tasks", headers=wrong), 401, "key-required")


def test_until_the_provider_has_been_reached_tokens_are_503(world, tmp_path):
    app = world.app(
        oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_jwks=str(tmp_path / "none.json")
    )
    with TestClient(app) as client:
        answer = client.get("/tasks", headers=bearer(signed()))
        assert_problem(answer, 503, "issuer-unavailable")
        assert answer.headers["retry-after"]


def test_the_provider_makes_a_server_on_any_address_safe_to_start():
    options = {"oidc_issuer": ISSUER, "oidc_audience": AUDIENCE, "oidc_jwks": "keys.json"}
    assert load_settings(backbone="b", host="0.0.0.0", **options).has_keys
