"""`engram replicas`: which servers share a store, and what each serves."""

from engram_client.client import Client
from engram_client.commands.output import asks_server, write_list
from engram_client.options import ApiKey


@asks_server(ApiKey)
def list_replicas(client: Client, in_json: bool) -> None:
    """List the live servers of a store and the generation each serves."""
    write_list(
        client.replicas(),
        in_json,
        {
            "replica": lambda one: f"{one.id} (asked)" if one.this else one.id,
            "generation": lambda one: one.generation,
            "seen": lambda one: f"{one.age_seconds:.1f} s ago",
            "address": lambda one: one.address or one.hostname,
            "backbone": lambda one: one.backbone,
            "version": lambda one: one.version,
            "started": lambda one: one.started,
        },
    )
