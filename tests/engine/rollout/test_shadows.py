"""Shadow versions: compared on every request, never returned, dropped before callers wait."""

import asyncio

import numpy as np
from engram_store import MoveAlias, Publish, Purge, RemoveAlias, open_store

from tests.engine.rollout.conftest import ask_each, compared, pets_store, varied_bundle
from tests.serving import MetricListener, make_bundle, photo, predict, reference_logits


def ask(engine, images, tasks):
    return asyncio.run(predict(engine, images, tasks))


def ask_together(engine, count):
    async def scenario():
        requests = (predict(engine, [photo(seed)], ["pets"]) for seed in range(count))
        await asyncio.gather(*requests)

    asyncio.run(scenario())


def logits_of(answer, task="pets"):
    return np.stack([image.tasks[task].logits for image in answer.images])


def evidence_of(engine, until, images):
    """The evidence once this many images were compared or dropped."""
    until(lambda: compared(engine) >= images)
    return engine.rollouts.evidence("pets")


def test_shadow_is_compared_and_never_returned(backbone, running, until):
    photos = [photo(seed) for seed in range(6)]
    with running(backbone, pets_store(backbone)) as engine:
        answers = ask_each(engine, photos, until)
        assert {image.tasks["pets"].served.version for image in answers} == {1}
        assert all(list(image.tasks) == ["pets"] for image in answers)
        (pair,) = engine.rollouts.evidence("pets")
    assert pair.versions == (1, 2)
    first, second = (
        np.stack([reference_logits(backbone, varied_bundle(backbone, seed), one) for one in photos])
        for seed in (1, 2)
    )
    agreed = first.argmax(axis=1) == second.argmax(axis=1)
    assert (pair.images, pair.agreed, pair.dropped) == (6, agreed.sum(), 0)
    assert pair.agreed_top_k == 6  # five classes
    assert sum(images for images, _ in pair.classes.values()) == 6
    assert sum(agreed for _, agreed in pair.classes.values()) == pair.agreed


def test_disagreeing_images_are_listed_by_digest(backbone, running, until):
    photos = [photo(seed) for seed in range(12)]
    with running(backbone, pets_store(backbone)) as engine:
        answers = ask_each(engine, photos, until)
        (pair,) = engine.rollouts.evidence("pets")
        listed = engine.rollouts.disagreements("pets", (1, 2))
    assert len(listed) == pair.images - pair.agreed > 0
    assert {one.digest for one in listed} <= {image.digest for image in answers}
    assert all(one.baseline != one.candidate for one in listed)


def test_thumbnails_of_disagreements_are_kept_only_if_the_operator_wants_them(
    backbone, running, until
):
    for wanted in (False, True):
        with running(backbone, pets_store(backbone), shadow_thumbnails=wanted) as engine:
            ask_each(engine, [photo(seed) for seed in range(12)], until)
            listed = engine.rollouts.disagreements("pets", (1, 2))
        assert listed
        assert {one.thumbnail[:4] for one in listed} == {b"RIFF" if wanted else b""}


def test_answers_are_equal_to_the_last_bit_with_and_without_shadows(backbone, running):
    photos = [photo(seed) for seed in range(8)]
    answers = []
    for with_shadow in (True, False):
        store = pets_store(backbone)
        if not with_shadow:
            store.commit(RemoveAlias("pets", "shadow"))
        with running(backbone, store) as engine:
            # One batch, so that both runs multiply matrices of the same size.
            answers.append(logits_of(ask(engine, [photos[0]], ["pets"])))
            answers.append(logits_of(ask(engine, [photos[0]], ["pets"])))  # cached
    assert np.array_equal(answers[0], answers[2])
    assert np.array_equal(answers[1], answers[3])


def test_shadows_are_dropped_while_images_wait(backbone, running, passes, until):
    dropped = []

    class Recorder(MetricListener):
        def shadows_dropped(self, count, task, version):
            dropped.append((task, version))

    run, batches = passes.run, []

    def watched(*args, **options):
        batches.append(args[1] is not None)  # with pixels: a batch of callers
        return run(*args, **options)

    passes.run = watched
    budget = 2 * backbone.geometry.tokens  # an image or two a batch
    with running(backbone, pets_store(backbone), Recorder(), budget_rows=budget) as engine:
        batches.clear()
        ask_together(engine, 12)
        (pair,) = evidence_of(engine, until, 12)
    assert pair.dropped == len(dropped) > 0
    assert pair.images + pair.dropped == 12
    assert dropped[0] == ("pets", "2")


def test_broken_shadow_harms_no_answer(backbone, running, passes, until):
    run = passes.run

    def failing(backbone, pixels, warm, *args, **options):
        if pixels is None:
            raise RuntimeError("the shadow fails")
        return run(backbone, pixels, warm, *args, **options)

    with running(backbone, pets_store(backbone)) as engine:
        passes.run = failing
        for seed in range(5):
            answer = ask(engine, [photo(seed)], ["pets"])
            assert answer.images[0].tasks["pets"].error is None
        assert engine.status.ready
        (pair,) = evidence_of(engine, until, 5)
    assert (pair.images, pair.dropped) == (0, 5)


def test_versions_with_other_labels_are_compared_by_name(backbone, running, until):
    store = open_store("memory://")
    made = make_bundle(backbone, 1, memory=-1, golden=False)
    order = [3, 1, 4, 0, 2]
    shuffled = type(made)(
        made.manifest.model_copy(update={"labels": tuple(made.labels[i] for i in order)}),
        {name: tensor[order] for name, tensor in made.tensors.items()},
    )
    store.commit(Publish("pets", made))
    store.commit(Publish("pets", shuffled, aliases=("shadow",)))
    with running(backbone, store) as engine:
        ask_each(engine, [photo(seed) for seed in range(8)], until)
        (pair,) = engine.rollouts.evidence("pets")
    assert pair.agreed == pair.images == 8
    assert pair.score_difference < 1e-4


def test_shadow_that_is_the_default_or_requested_itself_is_not_compared(backbone, running, until):
    with running(backbone, pets_store(backbone)) as engine:
        ask(engine, [photo(1)], ["pets", "pets:shadow"])
        engine.tasks.commit(MoveAlias("pets", "default", 2))
        answer = ask(engine, [photo(2)], ["pets"])
        assert answer.images[0].tasks["pets"].served.version == 2
        engine.rollouts.count()
        assert engine.rollouts.evidence("pets") == []


def test_purged_task_is_forgotten(backbone, running, until):
    store = pets_store(backbone)
    with running(backbone, store) as engine:
        ask(engine, [photo(seed) for seed in range(4)], ["pets"])
        evidence_of(engine, until, 4)
        engine.rollouts.write()
        assert list(store.objects.listing("evidence"))
        engine.tasks.commit(Purge("pets"))
        assert engine.rollouts.evidence("pets") == []
        engine.rollouts.write()
        assert list(store.objects.listing("evidence")) == []
