"""Log formats: JSON lines, or readable text. Both include the request id.

`engram serve` calls `configure`; an application that embeds the server keeps its own logging.
"""

import json
import logging
import math
import sys
import time
from contextvars import ContextVar
from typing import Literal, TextIO

# The current request. Set by the outermost middleware.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

LogFormat = Literal["auto", "json", "text"]

# Standard attributes; anything else on a record came from `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# uvicorn adds a coloured copy of its messages.
_NOISE = frozenset({"color_message"})
# Already part of the access line.
_IN_MESSAGE = frozenset({"method", "path", "status"})
# OpenTelemetry logs every few seconds while the collector is unreachable.
_REPEATED = "opentelemetry."
_REPEATED_SECONDS = 600


def configure(
    log_format: LogFormat,
    level: str,
    stream: TextIO | None = None,
    *,
    process: int | None = None,
) -> None:
    """Send all logs of this process to `stream` (default: stderr) in one format.

    Records have the number of the process if it is one of several.
    """
    stream = sys.stderr if stream is None else stream
    as_json = log_format == "json" or (log_format == "auto" and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(process) if as_json else TextFormatter(process))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # Replaced by our access line.
    logging.getLogger("uvicorn.access").disabled = True
    # Startup messages and, at debug level, one line per request of HTTP clients.
    for name in ("uvicorn.error", "httpx", "httpx2", "httpcore", "urllib3", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # Errors in forms are returned to the client.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


class RateLimit(logging.Filter):
    """Passes each OpenTelemetry message at most once in ten minutes."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(_REPEATED):
            return True
        text = str(record.msg)  # the template, without arguments
        if record.created - self._last.get(text, -math.inf) < _REPEATED_SECONDS:
            return False
        self._last[text] = record.created
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per record; `extra` values become members."""

    def __init__(self, process: int | None = None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process is not None:
            line["process"] = self._process
        current = request_id.get()
        if current is not None:
            line["request_id"] = current
        line |= _extras(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`12:00:00 info    message  name=value …`"""

    def __init__(self, process: int | None = None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extras = _extras(record)
        current = request_id.get()
        if current is not None:
            extras.setdefault("request_id", current)
        if self._process is not None:
            extras["process"] = self._process
        pairs = (f" {name}={value}" for name, value in extras.items() if name not in _IN_MESSAGE)
        text = record.getMessage() + "".join(pairs)
        # Control characters in a request path must not reach the terminal.
        printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        line = f"{clock} {record.levelname.lower():7} {printable}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _extras(record: logging.LogRecord) -> dict[str, object]:
    # Ray adds attributes with a leading underscore to every record.
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and name not in _NOISE and not name.startswith("_")
    }


def timestamp(seconds: float) -> str:
    """Format a Unix time as UTC with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
