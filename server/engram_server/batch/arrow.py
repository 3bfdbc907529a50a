"""pyarrow, which is an optional dependency."""

from typing import Any

from engram_server.errors import SettingsError


def require_pyarrow(what: str) -> tuple[Any, Any]:
    """Return `pyarrow` and `pyarrow.parquet`; SettingsError names `what` needs them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise SettingsError(
            f"{what} requires pyarrow, which is not installed. Run pip install "
            f"'engram-vit-server[batch]', or write CSV with --format csv."
        ) from None
    return pyarrow, pyarrow.parquet
