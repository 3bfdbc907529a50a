"""https, with certificates made here, and clients with and without one of their own."""

import ssl

import httpx
import pytest
from engram_server.app import create_app
from engram_server.commands.serve import uvicorn_config
from engram_server.errors import SettingsError
from engram_server.settings import load_settings

from tests.api.certificates import Authority
from tests.api.raw_http import listening
from tests.serving import photo


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def ask(server, context: ssl.SSLContext, path: str = "/livez", **options) -> httpx.Response:
    with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{server.port}") as client:
        return client.request("POST" if options else "GET", path, **options)


def test_predictions_over_https(world, authority):
    certificate, key = authority.certificate("127.0.0.1")
    trusting = ssl.create_default_context(cafile=str(authority.file))
    with listening(world, tls_certificate=str(certificate), tls_key=str(key)) as server:
        response = ask(server, trusting, "/predict?tasks=pets", content=photo(1))
        assert response.status_code == 200
        with pytest.raises(httpx.ConnectError, match="verify failed"):
            ask(server, ssl.create_default_context())
        with server.wire() as plain:  # http to an https port
            plain.send(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b"200" not in plain.wait_for_close()


def test_a_key_with_a_password(world, authority, tmp_path):
    certificate, key = authority.certificate("127.0.0.1", password=b"open sesame")
    password = tmp_path / "password"
    password.write_text("open sesame\n")
    settings = {
        "tls_certificate": str(certificate),
        "tls_key": str(key),
        "tls_key_password_file": str(password),
    }
    trusting = ssl.create_default_context(cafile=str(authority.file))
    with listening(world, **settings) as server:
        assert ask(server, trusting).status_code == 200


@pytest.mark.parametrize("clients", ["required", "optional"])
def test_client_certificates_are_verified(world, authority, tmp_path, clients):
    certificate, key = authority.certificate("127.0.0.1")
    ours = Authority(tmp_path, "clients")
    own = ssl.create_default_context(cafile=str(authority.file))
    own.load_cert_chain(*map(str, ours.certificate("127.0.0.2")))
    strange = ssl.create_default_context(cafile=str(authority.file))
    strange.load_cert_chain(*map(str, Authority(tmp_path, "strangers").certificate("127.0.0.3")))
    without = ssl.create_default_context(cafile=str(authority.file))
    with listening(
        world,
        tls_certificate=str(certificate),
        tls_key=str(key),
        tls_client_ca=str(ours.file),
        tls_client_certificates=clients,
    ) as server:
        assert ask(server, own).status_code == 200
        with pytest.raises(httpx.TransportError):
            ask(server, strange)
        if clients == "optional":
            assert ask(server, without).status_code == 200
        else:
            with pytest.raises(httpx.TransportError):
                ask(server, without)


def test_limits_hold_over_https(world, authority):
    certificate, key = authority.certificate("127.0.0.1")
    trusting = ssl.create_default_context(cafile=str(authority.file))
    with (
        listening(world, tls_certificate=str(certificate), tls_key=str(key)) as server,
        httpx.Client(verify=trusting) as client,
    ):
        url = f"https://127.0.0.1:{server.port}/livez"
        assert client.get(url, headers={"X-Long": "a" * 40_000}).status_code == 431


def test_unusable_files_are_clear_errors(settings, authority, tmp_path):
    certificate, key = authority.certificate("127.0.0.1", password=b"open sesame")
    for changes, sentence in (
        ({"tls_certificate": str(tmp_path / "nowhere.pem")}, "No such file"),
        ({"tls_certificate": str(certificate), "tls_key": str(key)}, "ENGRAM_TLS_CERTIFICATE"),
        (
            {"tls_certificate": str(certificate), "tls_key_password_file": str(tmp_path / "no")},
            "ENGRAM_TLS_KEY_PASSWORD_FILE",
        ),
    ):
        chosen = settings.model_copy(update=changes)
        with pytest.raises(SettingsError, match=sentence):
            uvicorn_config(create_app(chosen), chosen)
    with pytest.raises(SettingsError, match="tls_certificate"):
        load_settings(tls_key="key.pem")
