"""Mutated bundles: a file from a stranger is valid or refused, and nothing in between."""

import json

import pytest

from tests.fuzz.conftest import Case, run_cases
from tests.fuzz.mutator import Mutator
from tests.task_store.hostile import join, split

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def bundles(world) -> list[bytes]:
    parent = world.bundles["pets"]
    made = [
        world.bundle(700, classes=3),
        world.bundle(701, classes=2, task_type="multi_label", golden=False),
        world.bundle(702, classes=1, task_type="regression", memory=0),
        world.bundle(703, classes=4, memory=-1, golden=False),
        world.bundle(704, classes=2, extends=(parent,)),
    ]
    return [bundle.to_bytes() for bundle in made]


def damaged(mutator: Mutator, data: bytes, others: list[bytes]) -> bytes:
    """Wrong somewhere: in its bytes, in its header, in its manifest, or in a tensor."""
    how = mutator.dice.randrange(4)
    if how == 0:
        return mutator.damaged(data, others)
    header, body = split(data)
    if how == 1:
        return join(mutator.damaged_json(header), body)
    if how == 2:
        manifest = mutator.damaged_json(json.loads(header["__metadata__"]["engram"]))
        header["__metadata__"]["engram"] = manifest.decode("utf-8", "replace")
        return join(header, body)
    return join(header, mutator.damaged(body)[: len(body)].ljust(len(body), b"\0"))


def test_mutated_bundles_are_valid_or_refused(send, world, bundles):
    def run_one(number: int) -> tuple[int, object]:
        mutator = Mutator(f"bundle {number}")
        content = damaged(mutator, bundles[number % len(bundles)], bundles)
        # Most are only validated, because a published bundle stays in the store.
        if number % 20:
            case = Case("POST", "/tasks/validate", content)
            return send(case).status_code, case
        case = Case("PUT", "/tasks/fuzzed", content)
        status = send(case).status_code
        answer = send(Case("POST", "/predict?tasks=pets,scene,age", b"GIF89a"))
        assert answer.status_code == 422, "the server is as before"
        return status, case

    run_cases("bundles", run_one)
    send(Case("DELETE", "/tasks/fuzzed"))
