"""A promotion, and the death of the server that has made it."""

import time

import pytest
from engram_server.embedded import BACKBONE
from engram_server.model import load_backbone
from engram_vit import Client
from engram_vit.errors import Conflict

from tests.e2e.server_process import serving
from tests.serving import make_bundle, photo

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_evidence_of_a_promotion_survives_kill_9(tmp_path):
    backbone = load_backbone(BACKBONE)
    with serving(tmp_path) as server, Client(server.url) as client:
        client.push(make_bundle(backbone, 1).to_bytes(), "pets")
        client.push(make_bundle(backbone, 2).to_bytes(), "pets", aliases=["shadow"])
        for seed in range(8):  # one by one: shadows are dropped while images wait
            client.predict([photo(seed)], tasks="pets")
        deadline = time.monotonic() + 30
        while not (pairs := client.comparison("pets").pairs) or (
            pairs[0].images + pairs[0].dropped < 8
        ):
            assert time.monotonic() < deadline
        assert pairs[0].images
        with pytest.raises(Conflict, match=r"2,000 are required"):
            client.promote("pets", min_agreement=0, min_images=2000)
        promoted = client.promote("pets", min_agreement=0)
        assert promoted.aliases == {"default": 2, "shadow": 2}
        server.kill()
    with serving(tmp_path) as server, Client(server.url) as client:
        assert client.task("pets").version == 2
        entry = client.history("pets", 1)[0]
        assert entry.details["evidence"]["images"] == pairs[0].images
        assert entry.details["evidence"]["required"]["min_agreement"] == 0
