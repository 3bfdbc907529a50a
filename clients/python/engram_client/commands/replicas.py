"""`engram replicas`: which servers share a store, and what each serves."""

from engram_client.client import Client
from engram_client.commands.asking import asks_server
from engram_client.commands.output import write_json, write_table
from engram_client.options import ApiKey


@asks_server(ApiKey)
def list_replicas(client: Client, in_json: bool) -> None:
    """List the live servers of a store and the generation each serves."""
    replicas = client.replicas()
    if in_json:
        write_json(replicas)
        return
    write_table(
        replicas,
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
