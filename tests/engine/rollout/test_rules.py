"""Automatic rollback: by the operator's rules, for the newest version only, and never twice."""

import asyncio

import pytest
from engram_server.engine.rollout import service
from engram_server.engine.rollout.rules import Rule, Window
from engram_store import MoveAlias, Publish

from tests.engine.rollout.conftest import pets_store, varied_bundle
from tests.serving import photo, predict


@pytest.mark.parametrize("text", ["errors", "errors>2", "latency>0.1", "errors>x", ""])
def test_invalid_rule_is_rejected_with_an_example(text):
    with pytest.raises(ValueError, match=r"is not a rule. Examples: errors>0.05"):
        Rule.parse(text)


def test_window_names_the_rule_that_it_breaks():
    window = Window()
    window.add(150, {"errors": 1, "out_of_distribution": 90})
    window.add(50, {"out_of_distribution": 30})
    assert window.broken([Rule("errors", 0.05)]) is None
    reason = window.broken([Rule("errors", 0.05), Rule.parse("out_of_distribution>0.5")])
    assert reason == "rolled back automatically: out_of_distribution 0.6 > 0.5 on 200 images"


def failing_passes(passes, version_tasks):
    """Fail every pass with one of these tasks."""
    run = passes.run

    def failing(backbone, pixels, warm, requested, *args, **options):
        if any(task in version_tasks() for tasks in requested for task in tasks):
            raise RuntimeError("this version breaks the pass")
        return run(backbone, pixels, warm, requested, *args, **options)

    passes.run = failing


@pytest.mark.parametrize("rules", [("errors>0.05",), ()])
def test_new_version_that_fails_is_rolled_back_if_a_rule_says_so(
    backbone, running, passes, until, monkeypatch, rules
):
    monkeypatch.setattr(service, "WINDOW_IMAGES", 2)
    store = pets_store(backbone)
    with running(backbone, store, rollback_rules=rules) as engine:
        asyncio.run(predict(engine, [photo(1)], ["pets"]))
        engine.tasks.commit(MoveAlias("pets", "default", 2))
        (bad,) = engine.tasks.snapshot.resolve(["pets"])
        failing_passes(passes, lambda: set(bad.slot.loaded.on.values()))
        for seed in range(2):
            with pytest.raises(Exception, match="the model failed"):
                asyncio.run(predict(engine, [photo(seed)], ["pets"]))
        if not rules:
            engine.rollouts.count()
            assert store.catalog().task("pets").aliases["default"] == 2
            return
        until(lambda: store.catalog().task("pets").aliases["default"] == 1)
        entry = store.history("pets", 1)[0]
        assert entry.stamp.actor == "rollback-rule"
        assert entry.event.note.startswith("rolled back automatically: errors 1 > 0.05")
        # Version 1 is not the newest: no rule applies to it.
        (old,) = engine.tasks.snapshot.resolve(["pets@1"])
        failing_passes(passes, lambda: set(old.slot.loaded.on.values()))
        store.commit(Publish("pets", varied_bundle(backbone, 3), aliases=("other",)))
        engine.tasks.sync()
        engine._roll_back("pets", 1, "again")
        assert store.catalog().task("pets").aliases["default"] == 1
