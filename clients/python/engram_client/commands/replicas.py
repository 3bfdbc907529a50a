"""`engram replicas`: which servers share a store, and what each serves."""

from engram_client.commands.options import (
    DEFAULT_SERVER,
    ApiKey,
    AsJson,
    AsTable,
    Server,
    connect,
)
from engram_client.commands.output import wants_json, write_json, write_table


def list_replicas(
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    as_table: AsTable = False,
) -> None:
    """List the live servers of a store and the generation each serves."""
    in_json = wants_json(as_json, as_table)
    with connect(server, api_key) as client:
        found = client.replicas()
    if in_json:
        write_json(found)
        return
    rows = [
        (
            f"{one.id} (asked)" if one.this else one.id,
            one.generation,
            f"{one.age_seconds:.1f} s ago",
            one.address or one.hostname,
            one.backbone,
            one.version,
            one.started,
        )
        for one in found
    ]
    columns = ("replica", "generation", "seen", "address", "backbone", "version", "started")
    write_table(columns, rows)
