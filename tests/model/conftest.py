import pytest

from server.model import Backbone, load_backbone


@pytest.fixture(scope="session")
def backbone_of(folder_of):
    """`backbone_of(family, **overrides)`: the backbone read from that family's saved folder."""
    loaded = {}

    def backbone(family: str, seed: int = 0, **overrides) -> Backbone:
        key = (family, seed, tuple(sorted(overrides.items())))
        if key not in loaded:
            loaded[key] = load_backbone(folder_of(family, seed, **overrides))
        return loaded[key]

    return backbone
