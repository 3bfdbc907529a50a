"""Settings: where they come from and what they reject."""

from unittest.mock import Mock

import pytest
from engram_server import embedded
from engram_server.commands import serve as serve_command
from engram_server.errors import SettingsError
from engram_server.settings import (
    DIVIDED,
    Settings,
    is_loopback,
    load_settings,
    unknown_variables,
)

from tests.documents import read_page


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No variable of the machine the tests run on."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"ENGRAM_{name.upper()}", raising=False)


def test_environment_is_read_on_load_and_overrides_win(monkeypatch):
    monkeypatch.setenv("ENGRAM_BACKBONE", "from-environment")
    monkeypatch.setenv("ENGRAM_PORT", "9000")
    monkeypatch.setenv("ENGRAM_DEVICES", "cuda:0, cuda:1")
    monkeypatch.setenv("ENGRAM_PINNED_TASKS", "pets,team/scene")
    monkeypatch.setenv("ENGRAM_CACHE_BYTES", "2GiB")
    settings = load_settings(port=9001, store=None)
    assert settings.backbone == "from-environment"
    assert settings.port == 9001
    assert settings.store == ".engram/store"
    assert settings.devices == ("cuda:0", "cuda:1")
    assert settings.pinned_tasks == ("pets", "team/scene")
    assert settings.cache_bytes == 2 * 1024**3


def test_without_any_setting_the_embedded_backbone_is_served():
    assert load_settings().backbone == str(embedded.BACKBONE)
    with pytest.raises(SettingsError, match="ENGRAM_BACKBONE"):
        load_settings(backbone=" ")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_needs_no_key(host):
    assert load_settings(backbone="b", host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_other_addresses_need_a_key_and_the_error_says_why(host):
    assert not is_loopback(host)
    with pytest.raises(SettingsError, match=r"no key is set.*ENGRAM_API_KEY"):
        load_settings(backbone="b", host=host)
    assert load_settings(backbone="b", host=host, api_key="long enough").host == host
    assert load_settings(backbone="b", host=host, admin_key="long enough").host == host


def test_keys_are_not_shown():
    settings = load_settings(backbone="b", api_key="hunter2-hunter2", admin_key="swordfish-9")
    assert "hunter2" not in repr(settings)
    assert "swordfish" not in repr(settings)
    with pytest.raises(SettingsError) as caught:
        load_settings(backbone="b", api_key="short")
    assert "short" not in str(caught.value).replace("shorter", "")


def test_keys_may_come_from_files(tmp_path, monkeypatch):
    for name in ("api", "admin"):
        (tmp_path / name).write_text(f"the {name} key of tests\n")
        monkeypatch.setenv(f"ENGRAM_{name.upper()}_KEY_FILE", str(tmp_path / name))
    settings = load_settings(host="0.0.0.0")
    assert settings.api_key.get_secret_value() == "the api key of tests"
    assert settings.admin_key.get_secret_value() == "the admin key of tests"
    assert "key of tests" not in repr(settings)


@pytest.mark.parametrize(
    ("content", "key", "sentence"),
    [
        (None, None, "ENGRAM_API_KEY_FILE: cannot read .*secret: No such file"),
        (b" \n", None, "ENGRAM_API_KEY_FILE: .*secret is empty"),
        (b"\xff\xfe", None, "ENGRAM_API_KEY_FILE: cannot read .*secret: it is not text"),
        (b"hunter2", None, "ENGRAM_API_KEY: .*at least 8"),
        (b"swordfish-9", "hunter2-hunter2", "ENGRAM_API_KEY_FILE are mutually exclusive"),
    ],
)
def test_a_key_file_that_gives_no_key_stops_the_start(tmp_path, content, key, sentence):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=sentence) as caught:
        load_settings(api_key=key, api_key_file=str(path))
    assert "hunter2" not in str(caught.value)
    assert "swordfish" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"port": "eighty"}, "ENGRAM_PORT: Input should be a valid integer"),
        ({"port": "tcp://10.0.0.1:8000"}, "enableServiceLinks"),
        ({"devices": " , "}, "ENGRAM_DEVICES: specify at least one device"),
        ({"devices": "auto,cpu"}, "'auto' cannot be combined"),
        ({"precision": "int4"}, "ENGRAM_PRECISION"),
        ({"cache_bytes": "lots"}, "ENGRAM_CACHE_BYTES"),
        ({"max_images": 500}, "must not exceed queue_images"),
        ({"colour": "blue"}, "ENGRAM_COLOUR"),
    ],
)
def test_wrong_values_are_one_line_errors(changes, sentence):
    with pytest.raises(SettingsError) as caught:
        load_settings(backbone="b", **changes)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_variables_are_noticed_and_strangers_are_not():
    environment = {"ENGRAM_CACHE_BYTE": "1", "ENGRAM_DEBUG": "1", "ENGRAM_PORT": "1", "PATH": ""}
    (sentence,) = unknown_variables(environment)
    assert "Did you mean ENGRAM_CACHE_BYTES?" in sentence
    (sentence,) = unknown_variables({"ENGRAM_BLUE_ELEPHANT": "1"})
    assert sentence == "Unknown setting ENGRAM_BLUE_ELEPHANT is ignored."


def test_variables_of_kubernetes_services_are_no_settings():
    for service in ("ENGRAM", "ENGRAM_STORE_S3"):
        environment = {
            f"{service}_SERVICE_HOST": "10.0.0.1",
            f"{service}_SERVICE_PORT": "8000",
            f"{service}_SERVICE_PORT_HTTP": "8000",
            f"{service}_PORT": "tcp://10.0.0.1:8000",
            f"{service}_PORT_8000_TCP": "tcp://10.0.0.1:8000",
            f"{service}_PORT_8000_TCP_PROTO": "tcp",
            f"{service}_PORT_8000_TCP_PORT": "8000",
            f"{service}_PORT_8000_TCP_ADDR": "10.0.0.1",
        }
        assert unknown_variables(environment) == []


def test_serve_reports_unknown_variables(monkeypatch, capsys):
    class Enough(Exception):
        pass

    monkeypatch.setenv("ENGRAM_CACHE_BYTE", "1")
    monkeypatch.setenv("ENGRAM_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(serve_command.logs, "configure", Mock())
    monkeypatch.setattr(serve_command, "listen", Mock(side_effect=Enough))
    with pytest.raises(Enough):
        serve_command.serve()
    written = capsys.readouterr().err
    assert "warning: Unknown setting ENGRAM_CACHE_BYTE is ignored." in written
    assert "SERVICE_HOST" not in written


def test_each_of_several_processes_gets_a_share_of_the_totals():
    settings = load_settings(processes=4, decode_threads=8, resident_bytes=1000, queue_images=512)
    share = settings.for_one_process(torch_threads=6)
    assert share.torch_threads == 1
    assert share.decode_threads == 2
    assert share.resident_bytes == 250
    assert share.queue_images == 128
    assert share.cache_bytes == settings.cache_bytes / 4
    assert share.connections == settings.connections, "holds for each process"


def test_a_share_is_enough_for_the_largest_request():
    settings = load_settings(processes=64)
    share = settings.for_one_process(torch_threads=1)
    assert (share.torch_threads, share.decode_threads) == (1, 1)
    assert share.queue_images == settings.max_images
    assert share.inflight_body_bytes == 2 * settings.body_bytes
    assert share.inflight_bundle_bytes == 2 * settings.bundle_bytes
    assert share.inflight_answer_bytes == 2 * settings.answer_bytes
    assert share.decoded_bytes == 8 * settings.max_pixels
    assert type(share.decoded_bytes) is type(settings.decoded_bytes)


def test_an_unset_total_stays_unset_and_a_set_number_of_threads_is_divided():
    share = load_settings(processes=2, torch_threads=6, cache_bytes=0).for_one_process(2)
    assert share.resident_bytes is None
    assert share.cache_bytes == 0
    assert share.torch_threads == 3


def test_the_documents_say_which_settings_are_totals():
    note = read_page("reference/configuration.md").partition("**Processes.**")[2]
    note = note.partition("\n\n")[0]
    for name in DIVIDED:
        assert f"`ENGRAM_{name.upper()}`" in note, name
