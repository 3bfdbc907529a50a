"""One caller takes all it can of one thing; another is served by the same server."""

import pytest

from benchmarks.hostile_caller import ATTACKS
from benchmarks.shares import target

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(600)]

PREDICTION_SECONDS = 2.0
LIVEZ_SECONDS = 0.25
# A machine with other work to do may be late by itself: never several times in a row.
ATTEMPTS = 3


@pytest.fixture(scope="module")
def server():
    with target() as server:
        server.experience(10)
        yield server


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_caller_does_not_exclude_another(server, attack):
    for _ in range(ATTEMPTS):
        with server.attack(attack):
            seen = server.experience(15)
        assert seen.rejected == 0
        slowest, livez = max(seen.seconds), max(seen.livez)
        print(f"\n{attack}: {slowest:.2f} s, /livez {livez:.3f} s")
        if slowest <= PREDICTION_SECONDS and livez <= LIVEZ_SECONDS:
            return
    assert slowest <= PREDICTION_SECONDS
    assert livez <= LIVEZ_SECONDS
