"""The client side of Engram: the `engram` command, installable without torch or the server.

`engram_client.cli` is the command, `engram_client.plugins` finds the commands that other installed
distributions add to it. This package imports nothing of the server, the task store or training.
"""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("engram-client")
