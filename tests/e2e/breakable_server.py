"""`engram serve` with a device that a test can break: `python -m tests.e2e.breakable_server`.

The file that `BREAK_DEVICE` names says how: `error` fails every pass while it is there, and
`death` ends the thread that makes the next one, once.
"""

import os
from functools import partial
from pathlib import Path

import engram_server.app
from engram_server.commands.serve import serve
from engram_server.engine.engine import Engine
from engram_server.model.masked_pass import masked_pass


def main() -> None:
    order = Path(os.environ["BREAK_DEVICE"])

    def breakable_pass(*args, **options):
        try:
            how = order.read_text()
        except FileNotFoundError:
            return masked_pass(*args, **options)
        if how == "death":
            order.unlink(missing_ok=True)
            raise SystemExit("injected death of the thread")
        raise RuntimeError("injected device failure")

    engram_server.app.Engine = partial(Engine, run_pass=breakable_pass)
    serve()


if __name__ == "__main__":
    main()
