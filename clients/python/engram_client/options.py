"""Options that several commands have, here and in `training`."""

from functools import partial
from typing import Annotated, Literal

import typer

from engram_client import DEFAULT_SERVER as DEFAULT_SERVER

Server = Annotated[
    str,
    typer.Option(
        "--server", metavar="URL", envvar="ENGRAM_SERVER", help="The address of the server."
    ),
]
_api_key = partial(typer.Option, "--api-key", metavar="KEY", show_default=False)
ApiKey = Annotated[
    str | None, _api_key(envvar="ENGRAM_API_KEY", help="The key, where the server wants one.")
]
# Changing tasks may need another key than reading; where there is one key, it does both.
AdminKey = Annotated[
    str | None,
    _api_key(
        envvar=["ENGRAM_ADMIN_KEY", "ENGRAM_API_KEY"],
        help="The key for changing tasks, where the server wants one.",
    ),
]
Patience = Annotated[
    float,
    typer.Option(min=0, help="Seconds to go on trying while the server is busy or away."),
]
Wait = Annotated[
    Literal["all"] | None,
    typer.Option("--wait", help="Return when every replica serves it. Else exit code 3."),
]
WaitSeconds = Annotated[
    float, typer.Option("--timeout", min=0, help="Seconds to wait for the replicas.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, also in a terminal.")]
AsTable = Annotated[bool, typer.Option("--table", help="A table, also in a pipe.")]
