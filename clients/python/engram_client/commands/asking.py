"""What commands about a server share: the client, and how its answers are shown."""

import inspect
from collections.abc import Callable
from functools import wraps
from inspect import Parameter

from engram_client.client import Client
from engram_client.commands.output import wants_json
from engram_client.options import DEFAULT_SERVER, AsJson, AsTable, Server

Command = Callable[..., None]


def asks_server(key: object) -> Callable[[Command], Command]:
    """A command about a server: with its address, a key (`ApiKey` or `AdminKey`), --json, --table.

    The function decorated gets a client, and whether the answer shall be JSON.
    """
    shared = [
        Parameter("server", Parameter.KEYWORD_ONLY, default=DEFAULT_SERVER, annotation=Server),
        Parameter("api_key", Parameter.KEYWORD_ONLY, default=None, annotation=key),
        Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=AsJson),
        Parameter("as_table", Parameter.KEYWORD_ONLY, default=False, annotation=AsTable),
    ]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(
            *, server: str, api_key: str | None, as_json: bool, as_table: bool, **given: object
        ) -> None:
            in_json = wants_json(as_json, as_table)
            with Client(server, api_key) as client:
                command(client, in_json, **given)

        # What typer reads: the command's own parameters, then the shared ones.
        _, _, *own = inspect.signature(command).parameters.values()
        parameters = [*own, *shared]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate
