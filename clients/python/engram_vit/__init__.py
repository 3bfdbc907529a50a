"""The client of an Engram server: `Client`, `AsyncClient` and the `engram` command.

from engram_vit import Client

with Client("http://127.0.0.1:8000") as client:
    print(client.predict("cat.jpg", tasks=["cifar10"])[0]["cifar10"].top)

It installs without torch or the server. `engram_vit.commands.main` is the command;
`engram_vit.commands.plugins` adds the commands of installed distributions to it.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram_vit.answers import Answers, ImageAnswer, Prediction, TaskAnswer, TeachResult
    from engram_vit.async_client import AsyncClient
    from engram_vit.client import Client, teach
    from engram_vit.errors import ClientError

__all__ = [
    "Answers",
    "AsyncClient",
    "Client",
    "ClientError",
    "ImageAnswer",
    "Prediction",
    "TaskAnswer",
    "TeachResult",
    "__version__",
    "teach",
]

__version__ = version("engram-vit")
DEFAULT_SERVER = "http://127.0.0.1:8000"


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any exported name
    """Import on first use, so that `engram --help` does not wait for httpx."""
    for home in ("answers", "errors", "client", "async_client") if name in __all__ else ():
        module = import_module(f"engram_vit.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'engram_vit' has no attribute '{name}'")
