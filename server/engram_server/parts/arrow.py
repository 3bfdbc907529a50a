"""pyarrow, which is an optional dependency."""

from typing import Any

from engram_server.errors import SettingsError


def require_pyarrow(what: str) -> tuple[Any, Any]:
    """Return `pyarrow` and `pyarrow.parquet`, which `what` requires; or raise SettingsError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise SettingsError(
            f"{what} requires pyarrow, which is not installed. Run pip install "
            f"'engram-vit-server[batch]'."
        ) from None
    return pyarrow, pyarrow.parquet
