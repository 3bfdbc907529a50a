"""Keys, patterns and quotas by themselves, and the commands that change a keys file."""

import asyncio
import json
import threading

import pytest
import typer
from engram_server.access.identity import SCOPES, Identity, matches
from engram_server.access.keys import CHECK_SECONDS, Keys, RejectedKey, read_keys
from engram_server.access.quotas import KeyLimits, Quota
from engram_server.commands.keys import add_key, list_keys, revoke_key, rotate_key
from engram_server.errors import KeysError, QuotaExceeded
from typer.testing import CliRunner

from tests.api.keys import FUTURE, PAST, make_key, secret_of, sends, write_keys


class Clock:
    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


# --- patterns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("*", ["pets", "team-a/pets", ""], []),
        ("team-a/*", ["team-a/pets"], ["team-b/pets", "team-a", "x/team-a/pets"]),
        ("pets", ["pets"], ["pets2", "team/pets"]),
        ("*/pets", ["team/pets"], ["pets"]),
        ("a*b*c", ["abc", "axxbxxc"], ["ab", "acb", "abcd"]),
        ("ab*ba", ["abba", "abxba"], ["aba"]),
        ("a.c", ["a.c"], ["abc"]),
    ],
)
def test_patterns(pattern, fitting, others):
    assert all(matches(pattern, name) for name in fitting)
    assert not any(matches(pattern, name) for name in others)


def test_a_scope_is_held_for_its_own_tasks():
    identity = Identity("key:x", "x", {"predict": ("team-a/*", "pets"), "read": ("*",)})
    assert identity.allows(("predict",), "team-a/birds")
    assert identity.allows(("predict",), "pets")
    assert not identity.allows(("predict",), "team-b/birds")
    assert identity.allows(("predict", "read"), "team-b/birds")
    assert not identity.allows(("publish",), "pets")
    assert identity.allows_all_tasks(("read",))
    assert not identity.allows_all_tasks(("predict", "publish"))


# --- quotas ---------------------------------------------------------------------------------------


def test_requests_are_accepted_at_their_rate_with_a_burst_of_one_second():
    clock = Clock()
    quota = Quota(KeyLimits(requests_per_second=4), clock)
    accepted, waits = 0, []
    for _ in range(100):  # ten seconds
        try:
            quota.take_request()
            accepted += 1
        except QuotaExceeded as error:
            waits.append(error.retry_after)
        clock.time += 0.1
    assert 40 <= accepted <= 44
    assert all(0 < seconds <= 0.25 for seconds in waits)


def test_a_cost_above_one_second_is_accepted_and_delays_the_next():
    clock = Clock()
    quota = Quota(KeyLimits(rows_per_second=100), clock)
    with quota.use(1, 1000):
        pass
    with pytest.raises(QuotaExceeded) as refused:
        quota.begin()
    assert refused.value.rejection == "key_rows"
    assert refused.value.retry_after == pytest.approx(9.01)
    clock.time += refused.value.retry_after
    quota.begin()


def test_images_count_until_they_are_answered():
    quota = Quota(KeyLimits(concurrent_images=3))
    end = quota.begin()
    with quota.use(2, 0):
        end_other = quota.begin()
        with pytest.raises(QuotaExceeded, match="3 images"), quota.use(2, 0):
            pass
        with quota.use(1, 0), pytest.raises(QuotaExceeded):
            quota.begin()
        end_other()
    with quota.use(3, 0):
        pass
    end()


def test_a_request_counts_as_an_image_before_its_body_is_read():
    quota = Quota(KeyLimits(concurrent_images=1))
    end = quota.begin()
    with pytest.raises(QuotaExceeded, match="1 images"):
        quota.begin()
    end()
    quota.begin()


def headers_of(quota) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in quota.headers()}


def test_headers_tell_the_rates_and_what_is_left():
    clock = Clock()
    quota = Quota(KeyLimits(requests_per_second=4, rows_per_second=1000), clock)
    policy = '"requests";q=4;w=1, "rows";q=1000;qu="rows";w=1'
    assert headers_of(quota) == {
        "ratelimit-policy": policy,
        "ratelimit": '"requests";r=4;t=0, "rows";r=1000;t=0',
    }
    quota.take_request()
    with quota.use(1, 2500):
        pass
    assert headers_of(quota)["ratelimit"] == '"requests";r=3;t=1, "rows";r=0;t=2'
    clock.time += 2
    assert headers_of(quota)["ratelimit"] == '"requests";r=4;t=0, "rows";r=500;t=1'


def test_a_rate_below_one_has_a_longer_window_and_agrees_with_the_error():
    clock = Clock()
    quota = Quota(KeyLimits(requests_per_second=0.4), clock)
    quota.take_request()
    assert headers_of(quota) == {
        "ratelimit-policy": '"requests";q=1;w=3',
        "ratelimit": '"requests";r=0;t=3',
    }
    clock.time += 1
    with pytest.raises(QuotaExceeded) as refused:
        quota.take_request()
    assert refused.value.retry_after == pytest.approx(1.5)
    assert headers_of(quota)["ratelimit"] == '"requests";r=0;t=2'


def test_a_quota_without_rates_has_no_headers():
    assert headers_of(Quota(KeyLimits(concurrent_images=3))) == {}


# --- the keys in force ----------------------------------------------------------------------------


def found(keys, key_id, secret=None):
    token = sends(key_id)["X-API-Key"] if secret is None else f"engram_{key_id}_{secret}"
    return asyncio.run(keys.identify(token))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def file(tmp_path):
    return write_keys(tmp_path / "keys.json", make_key("one", scopes={"read": ["*"]}))


def test_a_key_is_known_by_its_secret(file):
    keys = Keys(file=file)
    assert found(keys, "one").id == "key:one"
    for token in ("", "engram", "engram_one", "engram_one_", "engram_one_wrong", "other_one_x"):
        assert asyncio.run(keys.identify(token)) == RejectedKey("unknown")
    assert secret_of("one") not in file.read_text()


def test_only_the_holder_of_a_key_learns_that_it_is_expired_or_revoked(tmp_path):
    scopes = {"read": ["*"]}
    old = make_key("old", scopes=scopes, expires=PAST)
    gone = make_key("gone", scopes=scopes, revoked=PAST)
    keys = Keys(file=write_keys(tmp_path / "keys.json", old, gone))
    assert found(keys, "old") == RejectedKey("expired", "old")
    assert found(keys, "gone") == RejectedKey("revoked", "gone")
    assert found(keys, "gone", "guess") == RejectedKey("unknown")


def test_a_key_ends_when_its_time_comes(tmp_path):
    times = [FUTURE.timestamp() - 1, FUTURE.timestamp()]
    key = make_key("one", scopes={"read": ["*"]}, expires=FUTURE)
    keys = Keys(file=write_keys(tmp_path / "keys.json", key), now=lambda: times.pop(0))
    assert found(keys, "one").id == "key:one"
    assert found(keys, "one") == RejectedKey("expired", "one")


def test_a_changed_file_is_in_force_at_the_next_look(file, clock):
    keys = Keys(file=file, clock=clock)
    assert CHECK_SECONDS <= 0.5
    write_keys(file, make_key("two", scopes={"read": ["*"]}))
    assert found(keys, "one").id == "key:one"  # the file was checked a moment ago
    clock.time += CHECK_SECONDS
    assert found(keys, "one") == RejectedKey("unknown")
    assert found(keys, "two").id == "key:two"


def test_what_is_used_up_stays_so_when_the_file_changes(file, clock):
    limits = KeyLimits(requests_per_second=0.001)
    limited = make_key("slow", limits, scopes={"read": ["*"]})
    keys = Keys(file=write_keys(file, limited), clock=clock)
    found(keys, "slow").quota.take_request()
    write_keys(file, limited, make_key("new", scopes={"read": ["*"]}))
    clock.time += CHECK_SECONDS
    assert found(keys, "new").quota is None
    with pytest.raises(QuotaExceeded):
        found(keys, "slow").quota.take_request()


@pytest.mark.parametrize("content", [b"", b"{}}", b'{"keys": [{"id": "x"}]}', None])
def test_a_broken_file_opens_nothing_and_closes_nothing(file, clock, content, caplog):
    keys = Keys(file=file, clock=clock)
    good = file.read_bytes()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    for _ in range(3):
        clock.time += CHECK_SECONDS
        assert found(keys, "one").id == "key:one"
        assert found(keys, "two") == RejectedKey("unknown")
    assert keys.anonymous is None
    assert "keys.json" in keys.error
    assert len(caplog.records) == 1
    file.write_bytes(good)
    clock.time += CHECK_SECONDS
    assert found(keys, "one").id == "key:one"
    assert keys.error is None


def test_a_server_does_not_start_with_a_file_that_it_cannot_use(tmp_path):
    with pytest.raises(KeysError, match="Cannot read"):
        Keys(file=tmp_path / "none.json")
    twice = make_key("one", scopes={})
    with pytest.raises(KeysError, match="duplicate"):
        read_keys(write_keys(tmp_path / "keys.json", twice, twice))


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run("add", …)`: exit code, standard output, standard error."""
    monkeypatch.setenv("ENGRAM_KEYS_FILE", str(tmp_path / "keys.json"))
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    commands = {"add": add_key, "ls": list_keys, "revoke": revoke_key, "rotate": rotate_key}
    for name, command in commands.items():
        app.command(name)(command)

    def invoke(*arguments):
        return CliRunner().invoke(app, arguments)

    return invoke


def test_from_add_to_revoke(run, tmp_path, clock):
    file = tmp_path / "keys.json"
    done = run(
        "add", "ci", "--scope", "publish:team-a/*,pets", "--scope", "read", "--expires", "9d"
    )
    assert done.exit_code == 0, done.output
    token = done.stdout.strip()
    _, key_id, secret = token.split("_", 2)
    assert secret not in file.read_text()
    keys = Keys(file=file, clock=clock)
    identity = asyncio.run(keys.identify(token))
    assert identity.id == f"key:{key_id}"
    assert identity.grants == {"publish": ("team-a/*", "pets"), "read": ("*",)}
    shown = run("ls").stdout
    assert key_id in shown
    assert "publish:team-a/*,pets" in shown
    assert secret not in shown

    second = run("rotate", key_id, "--overlap", "1h").stdout.strip()
    third = run("rotate", key_id).stdout.strip()
    clock.time += CHECK_SECONDS
    assert len({token, second, third}) == 3
    assert asyncio.run(keys.identify(third)).id == identity.id
    assert asyncio.run(keys.identify(second)) == RejectedKey("unknown")

    assert run("revoke", key_id).exit_code == 0
    clock.time += CHECK_SECONDS
    assert asyncio.run(keys.identify(third)) == RejectedKey("revoked", key_id)
    assert "revoked" in run("ls").stdout


def test_the_old_secret_is_good_for_the_overlap(run, tmp_path):
    first = run("add", "ci", "--scope", "read").stdout.strip()
    key_id = first.split("_")[1]
    second = run("rotate", key_id, "--overlap", "1h").stdout.strip()
    times = iter([0, 1e12])
    until = read_keys(tmp_path / "keys.json")[0].replaced.until.timestamp()
    keys = Keys(file=tmp_path / "keys.json", now=lambda: until + next(times) - 1)
    assert asyncio.run(keys.identify(first)).id == f"key:{key_id}"
    assert asyncio.run(keys.identify(first)) == RejectedKey("unknown")
    assert asyncio.run(Keys(file=tmp_path / "keys.json").identify(second)).id == f"key:{key_id}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("add", "x", "--scope", "write"), "Unknown scope 'write'"),
        (("add", "x", "--scope", "read:Team A"), "scopes.read"),
        (("add", "x", "--scope", "read", "--expires", "soon"), "is not an age"),
        (("add", "x", "--scope", "read", "--requests-per-second", "0"), "requests_per_second"),
    ],
)
def test_mistakes_are_reported_and_nothing_is_written(run, tmp_path, arguments, sentence):
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())
    assert not (tmp_path / "keys.json").exists()


@pytest.mark.parametrize("arguments", [("revoke", "none"), ("rotate", "none"), ("ls",)])
def test_a_missing_key_or_file_is_an_error(run, arguments):
    assert isinstance(run(*arguments).exception, KeysError)


def test_writers_at_once_lose_no_key(run, tmp_path):
    def add(number):
        add_key(f"key {number}", tmp_path / "keys.json", ["read"])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {each["name"] for each in json.loads((tmp_path / "keys.json").read_text())["keys"]}
    assert names == {f"key {number}" for number in range(8)}


def test_every_scope_can_be_granted(run, tmp_path):
    run("add", "all", *(part for scope in SCOPES for part in ("--scope", scope)))
    assert set(read_keys(tmp_path / "keys.json")[0].scopes) == set(SCOPES)
