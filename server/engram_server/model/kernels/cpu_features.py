"""Disable AMX in oneDNN on virtual machines that describe it incompletely.

Some hypervisors announce AMX but hide CPUID leaf 0x1D, which describes its tiles. oneDNN then
configures no tiles, and the process dies of an illegal instruction in bfloat16, float16 and int8.
"""

import ctypes
import logging
import mmap
import os
import platform
from functools import cache
from pathlib import Path

_log = logging.getLogger("engram.model")

_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_ISA_WITHOUT_AMX = "AVX512_CORE_FP16"  # the newest one without AMX
_TILE_LEAF = 0x1D
# push rbx; mov eax, edi; mov ecx, esi; cpuid; pop rbx; ret: eax of a leaf and a subleaf
_CPUID = bytes.fromhex("5389f889f10fa25bc3")


@cache
def disable_unusable_amx() -> None:
    """Set oneDNN's limit if AMX cannot work; oneDNN reads it before its first operation."""
    if _ISA_VARIABLE in os.environ or not _announces_amx() or _tile_palettes() != 0:
        return
    os.environ[_ISA_VARIABLE] = _ISA_WITHOUT_AMX
    _log.warning("This virtual machine announces AMX without its tiles; AMX is not used.")


def _announces_amx() -> bool:
    if platform.machine() != "x86_64":
        return False
    try:
        return " amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _tile_palettes() -> int | None:
    """Return the number of tile palettes, or None if memory may not be made executable."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(_CPUID)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    cpuid = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)(address)
    return int(cpuid(_TILE_LEAF, 0))
