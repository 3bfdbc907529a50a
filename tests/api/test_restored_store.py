"""The last step of a restore: a server on what came back from the backup."""

import dataclasses

from engram_server.app import engine_config
from engram_server.engine.engine import Engine
from engram_store import open_store
from starlette.testclient import TestClient

from tests.serving import photo


def test_server_on_a_restored_backup_answers_as_the_first_did(world, client, tmp_path):
    backup, restored = (open_store(tmp_path / name) for name in ("backup", "restored"))
    world.store.copy_to(backup)
    backup.copy_to(restored)
    engine = Engine(world.backbone, restored, engine_config(world.settings), world.metrics)
    engine.start()
    again = dataclasses.replace(world, store=restored, engine=engine)
    try:
        with TestClient(again.app()) as other:
            assert other.get("/tasks").json() == client.get("/tasks").json()
            assert (
                other.get("/tasks/pets/history").json() == client.get("/tasks/pets/history").json()
            )
            image = photo(4242)  # that neither has in its cache
            first, second = (
                each.post("/predict", params={"tasks": "pets,scene,age"}, content=image).json()
                for each in (client, other)
            )
            assert second["images"][0]["tasks"] == first["images"][0]["tasks"]
    finally:
        engine.stop()
