"""`engram replicas`."""

from engram_vit.answers import Replica
from engram_vit.client import Client
from engram_vit.commands.options import ApiKey
from engram_vit.commands.output import server_command, write_list


@server_command(ApiKey)
def list_replicas(client: Client, in_json: bool) -> None:
    """List the live replicas of a store and the generation each serves."""
    write_list(
        client.replicas(),
        in_json,
        "replica generation seen address backbone version started",
        lambda one: (
            f"{one.id} (this one)" if one.this else one.id,
            one.generation,
            f"{one.age_seconds:.1f} s ago",
            _place(one),
            one.backbone,
            one.version,
            one.started,
        ),
    )


def _place(replica: Replica) -> str:
    place = replica.address or replica.hostname
    return place if replica.process is None else f"{place} (process {replica.process})"
