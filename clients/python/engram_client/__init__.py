"""The client of an Engram server: `Client`, `AsyncClient` and the `engram` command.

from engram_client import Client

with Client("http://127.0.0.1:8000") as client:
    print(client.predict("cat.jpg", tasks=["cifar10"])[0]["cifar10"].top)

It installs without torch or the server. `engram_client.cli` is the command, `engram_client.plugins`
finds the commands that installed distributions, this one among them, add to it. This package
imports nothing of the server, the task store or training.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram_client.answers import Answers, ImageAnswer, Prediction, TaskAnswer, Taught
    from engram_client.async_client import AsyncClient
    from engram_client.client import Client, teach
    from engram_client.errors import ClientError

__all__ = [
    "Answers",
    "AsyncClient",
    "Client",
    "ClientError",
    "ImageAnswer",
    "Prediction",
    "TaskAnswer",
    "Taught",
    "__version__",
    "teach",
]

__version__ = version("engram-client")
DEFAULT_SERVER = "http://127.0.0.1:8000"


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is asked for
    """Loaded when asked for: the command shows its help without waiting for httpx."""
    for home in ("answers", "errors", "client", "async_client") if name in __all__ else ():
        module = import_module(f"engram_client.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'engram_client' has no attribute '{name}'")
