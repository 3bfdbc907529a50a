"""The composition root: what the settings become, how an application starts, and that two can."""

import socket
from importlib import metadata

import pytest
import torch
from engram_server.app import choose_devices, create_app, engine_config
from engram_server.engine.types import EngineConfig
from engram_server.errors import SettingsError
from engram_server.model.kernels.linear import has_int8_linear
from engram_server.settings import Settings
from engram_store import open_store
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem

START_SECONDS = 60


@pytest.fixture
def own(settings, tmp_path):
    """Settings of an application with an engine of its own."""
    return settings.model_copy(update={"store": str(tmp_path / "store"), "drain_seconds": 5.0})


def test_application_starts_its_engine_and_stops_it(own, world, cat):
    open_store(own.store).publish("pets", world.bundles["pets"])
    app = create_app(own)
    with TestClient(app) as client:
        engine = app.state.runtime.starting.result(START_SECONDS)
        assert client.get("/readyz").status_code == 200
        response = client.post("/predict?tasks=pets", content=cat)
        assert response.status_code == 200
        assert response.json()["backbone"] == own.backbone.rpartition("/")[2]
        assert b"engram_predictions_total{" in client.get("/metrics").content
    assert not engine.status.ready


def test_application_answers_while_it_starts(own, cat):
    # Not entered: nothing has started it.
    client = TestClient(create_app(own))
    assert client.get("/livez").status_code == 200
    ready = client.get("/readyz")
    assert ready.status_code == 503
    assert "starting" in ready.json()["reasons"][0]
    response = client.post("/predict", content=cat)
    assert_problem(response, 503, "not-started")
    assert response.headers["retry-after"]
    assert_problem(client.get("/tasks"), 503, "not-started")
    assert client.get("/").status_code == 200  # the console, which says so


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backbone": "./no-such-folder"}, "does not exist"),
        ({"store": "ftp://example.org"}, "ftp"),
        ({"devices": ("cuda:99",)}, "cuda:99"),
    ],
)
def test_application_that_cannot_start_says_so(own, changes, reason, caplog):
    app = create_app(own.model_copy(update=changes))
    with TestClient(app) as client:
        assert reason in str(app.state.runtime.starting.exception(START_SECONDS))
        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert "failed to start" in ready.json()["reasons"][0]
    assert reason in caplog.text


def test_two_applications_live_in_one_process(own, world, cat, tmp_path):
    other = own.model_copy(update={"store": str(tmp_path / "other")})
    open_store(own.store).publish("pets", world.bundles["pets"])
    open_store(other.store).publish("scene", world.bundles["scene"])
    first, second = create_app(own), create_app(other)
    with TestClient(first) as one, TestClient(second) as two:
        for app in (first, second):
            app.state.runtime.starting.result(START_SECONDS)
        assert set(one.post("/predict", content=cat).json()["images"][0]["tasks"]) == {
            "base",
            "pets",
        }
        assert set(two.post("/predict", content=cat).json()["images"][0]["tasks"]) == {
            "base",
            "scene",
        }
        assert b'task="scene"' not in one.get("/metrics").content
        assert b'task="pets"' not in two.get("/metrics").content


@pytest.mark.skipif(not has_int8_linear(), reason="int8 needs a processor with AVX2")
def test_int8_is_float32_with_other_matrices():
    config = engine_config(Settings(backbone="b", devices="cpu", precision="int8"))
    assert (config.int8, config.dtype) == (True, torch.float32)
    assert not engine_config(Settings(backbone="b", devices="cpu")).int8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": "meta"}, "is for CPUs only; ENGRAM_DEVICES has meta"),
        ({"devices": "cpu", "compile": True}, "mutually exclusive"),
    ],
)
def test_int8_is_rejected_where_it_would_do_nothing(settings, message):
    with pytest.raises(SettingsError, match=message):
        engine_config(Settings(backbone="b", precision="int8", **settings))


def test_int8_is_rejected_without_kernels_for_it(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "aarch64"})
    with pytest.raises(SettingsError, match="requires an x86-64 processor with AVX2"):
        engine_config(Settings(backbone="b", devices="cpu", precision="int8"))


def test_settings_become_the_engines_configuration():
    settings = Settings(
        backbone="b",
        devices="cpu,cpu",
        budget_rows=7,
        queue_images=99,
        decode_threads=3,
        max_pixels=5,
        cache_bytes="1MiB",
        cache_precision="bfloat16",
        cache_device="device",
        resident_bytes="2MiB",
        pinned_tasks="a,b",
        poll_seconds=4,
        heartbeat_seconds=2,
        port=9000,
        compile=True,
    )
    assert engine_config(settings) == EngineConfig(
        devices=("cpu", "cpu"),
        dtype=torch.float32,
        budget_rows=7,
        queue_images=99,
        decode_threads=3,
        max_pixels=5,
        cache_bytes=2**20,
        cache_dtype=torch.bfloat16,
        cache_device=None,
        resident_bytes=2**21,
        pinned_tasks=frozenset({"a", "b"}),
        poll_seconds=4,
        heartbeat_seconds=2,
        address="http://127.0.0.1:9000",
        version=metadata.version("engram-vit-server"),
        compiled=True,
    )


def test_devices_are_chosen_and_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_devices(("auto",)) == ("cpu",)
    with pytest.raises(SettingsError, match="'cuda:0' does not exist"):
        choose_devices(("cuda:0",))
    with pytest.raises(SettingsError, match="Unknown device 'gpu'"):
        choose_devices(("gpu",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert choose_devices(("auto",)) == ("cuda:0",)
    assert choose_devices(("cuda:1", "cpu")) == ("cuda:1", "cpu")
    automatic = Settings(backbone="b")
    assert engine_config(automatic).dtype == torch.bfloat16
    assert (
        engine_config(automatic.model_copy(update={"precision": "float16"})).dtype == torch.float16
    )


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("127.0.0.1", 8000, "http://127.0.0.1:8000"),
        ("::1", 8000, "http://[::1]:8000"),
        ("0.0.0.0", 8000, f"http://{socket.gethostname()}:8000"),
        ("127.0.0.1", 0, None),
    ],
)
def test_the_heartbeat_has_a_usable_address(host, port, address):
    settings = Settings(backbone="b", devices="cpu", host=host, port=port, api_key="long enough")
    assert engine_config(settings).address == address


def test_no_heartbeats_are_sent_when_that_is_set():
    settings = Settings(backbone="b", devices="cpu", heartbeat_seconds=0)
    assert engine_config(settings).heartbeat_seconds is None
