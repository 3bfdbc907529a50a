"""How long the tests of endurance run: as long as the promise says in `make soak`, else less."""

import os

FULL = "SOAK" in os.environ
OVERLOAD_SECONDS = 60 if FULL else 15
CHAOS_SECONDS = 600 if FULL else 75
