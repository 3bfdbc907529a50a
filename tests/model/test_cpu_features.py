"""AMX is not used where a virtual machine announces it without its tiles."""

import pytest
from engram_server.model.kernels import cpu_features


@pytest.mark.parametrize(
    ("announced", "palettes", "set_before", "limit"),
    [
        (True, 0, None, "AVX512_CORE_FP16"),
        (True, 1, None, None),  # complete
        (True, None, None, None),  # cannot be read
        (False, 0, None, None),
        (True, 0, "AVX2", "AVX2"),  # the operator's choice
    ],
)
def test_amx_without_tiles_is_disabled(monkeypatch, announced, palettes, set_before, limit):
    monkeypatch.setattr(cpu_features, "_announces_amx", lambda: announced)
    monkeypatch.setattr(cpu_features, "_tile_palettes", lambda: palettes)
    environment = {} if set_before is None else {"ONEDNN_MAX_CPU_ISA": set_before}
    monkeypatch.setattr(cpu_features.os, "environ", environment)
    cpu_features.disable_unusable_amx.__wrapped__()
    assert environment.get("ONEDNN_MAX_CPU_ISA") == limit


@pytest.mark.skipif(not cpu_features._announces_amx(), reason="no AMX here")
def test_palettes_are_a_small_number():
    assert cpu_features._tile_palettes() in (0, 1)
