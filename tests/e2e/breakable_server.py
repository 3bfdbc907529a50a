"""`engram serve` with a device that a test can break: `python -m tests.e2e.breakable_server`.

The file that `BREAK_DEVICE` names says how: `error` fails every pass while it is there, and
`death` ends the thread that makes the next one, once.
"""

import os
from pathlib import Path

import server.engine.worker
from server.cli import serve
from server.model.masked_pass import masked_pass


def main() -> None:
    order = Path(os.environ["BREAK_DEVICE"])

    def breakable_pass(*args, **options):
        try:
            how = order.read_text()
        except FileNotFoundError:
            return masked_pass(*args, **options)
        if how == "death":
            order.unlink(missing_ok=True)
            raise SystemExit("the thread was told to die")
        raise RuntimeError("the device was told to fail")

    server.engine.worker.masked_pass = breakable_pass
    serve()


if __name__ == "__main__":
    main()
