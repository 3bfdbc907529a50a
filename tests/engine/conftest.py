"""What tests of the engine share."""

import time
from collections.abc import Callable

import pytest

from tests.engine.bundles import WAIT_SECONDS


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """`until(condition)`: waits for it, and fails if it does not come."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    return wait
