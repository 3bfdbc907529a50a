"""Logs: one JSON object per line for machines, or one readable line for people.

Both carry the id of the request that was being served. `configure` is for whoever owns the process
(`engram serve`); an application that embeds the server keeps its own logging.
"""

import json
import logging
import math
import sys
import time
from contextvars import ContextVar
from typing import Literal, TextIO

# The request this task or thread works for. Set by the outermost middleware.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

LogFormat = Literal["auto", "json", "text"]

# What every record has; anything else on it was given with `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# uvicorn repeats its messages with colours for its own formatter.
_NOISE = frozenset({"color_message"})
# What the access line says already.
_IN_MESSAGE = frozenset({"method", "path", "status"})
# OpenTelemetry would log every few seconds for as long as a collector of traces is away.
_REPEATED = "opentelemetry."
_REPEATED_SECONDS = 600


def configure(log_format: LogFormat, level: str, stream: TextIO | None = None) -> None:
    """Send every log of this process to `stream` (standard error), in one format."""
    stream = sys.stderr if stream is None else stream
    as_json = log_format == "json" or (log_format == "auto" and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # Our own access line says more.
    logging.getLogger("uvicorn.access").disabled = True
    # Start-up chatter and, at debug level, one line per request of the clients we use.
    for name in ("uvicorn.error", "httpx", "httpx2", "httpcore", "urllib3", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # What is wrong with a form is told to whoever sent it.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


class RateLimit(logging.Filter):
    """Lets each message of OpenTelemetry through once in ten minutes, and all others."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(_REPEATED):
            return True
        text = str(record.msg)  # before names and numbers are put in
        if record.created - self._last.get(text, -math.inf) < _REPEATED_SECONDS:
            return False
        self._last[text] = record.created
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per record; what was given with `extra` becomes members."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        current = request_id.get()
        if current is not None:
            line["request_id"] = current
        line |= _extras(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`12:00:00 info    message  name=value …`"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extras = _extras(record)
        current = request_id.get()
        if current is not None:
            extras.setdefault("request_id", current)
        pairs = (f" {name}={value}" for name, value in extras.items() if name not in _IN_MESSAGE)
        text = record.getMessage() + "".join(pairs)
        # Control characters of a stranger's path must not reach the terminal.
        printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        line = f"{clock} {record.levelname.lower():7} {printable}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _extras(record: logging.LogRecord) -> dict[str, object]:
    # What begins with an underscore is nobody's message: Ray puts such a time into every record.
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and name not in _NOISE and not name.startswith("_")
    }


def timestamp(seconds: float) -> str:
    """A moment in UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
