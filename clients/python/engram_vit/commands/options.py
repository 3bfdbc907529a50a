"""Options shared by several commands, here and in `engram_training`."""

from functools import partial
from typing import Annotated, Literal

import typer

from engram_vit import DEFAULT_SERVER as DEFAULT_SERVER

Task = Annotated[str, typer.Argument(metavar="TASK", help="Task name.")]
Server = Annotated[
    str, typer.Option("--server", metavar="URL", envvar="ENGRAM_SERVER", help="Server address.")
]
_api_key = partial(typer.Option, "--api-key", metavar="KEY", show_default=False)
ApiKey = Annotated[
    str | None, _api_key(envvar="ENGRAM_API_KEY", help="API key, if the server requires one.")
]
# Changing tasks may need another key than reading.
AdminKey = Annotated[
    str | None,
    _api_key(
        envvar=["ENGRAM_ADMIN_KEY", "ENGRAM_API_KEY"],
        help="API key for changing tasks, if the server requires one.",
    ),
]
Patience = Annotated[
    float, typer.Option(min=0, help="Seconds to retry while the server is busy or unreachable.")
]
Wait = Annotated[
    Literal["all"] | None,
    typer.Option(
        "--wait", help="Wait until every replica serves the change (exit code 3 if not in time)."
    ),
]
WaitSeconds = Annotated[
    float, typer.Option("--timeout", min=0, help="Seconds to wait for the replicas.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with code 1 if an image cannot be read.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, also in a terminal.")]
AsTable = Annotated[bool, typer.Option("--table", help="Print a table, also in a pipe.")]
