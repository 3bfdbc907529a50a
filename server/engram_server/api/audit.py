"""The audit of requests: which requests the audit log records, when, and with what.

A change is recorded twice: before it is made, and again before its response is sent. Other requests
are recorded when they end: refusals always, predictions if the settings say so.
`observability/audit.py` writes the records.
"""

import asyncio
from contextlib import suppress
from typing import Literal

from fastapi import Request
from starlette.types import Scope

from engram_server.access.keys import redact
from engram_server.edge.proxies import network_of
from engram_server.errors import AuditUnavailable
from engram_server.observability.audit import AuditLog, Record
from engram_server.runtime import RequestRecord, Runtime

# A disk that needs longer for one line is treated as failed.
_WRITE_SECONDS = 10.0


async def begin_audit(request: Request) -> None:
    """Record a request that changes something before it is carried out, or AuditUnavailable."""
    runtime: Runtime = request.app.state.runtime
    route = request.scope["route"].path_format
    await audit_begin(runtime.audit, request.scope, request.state.record, route)


async def audit_begin(
    audit: AuditLog | None, scope: Scope, record: RequestRecord, route: str
) -> None:
    if audit is None:
        return
    await _write(audit, _entry(scope, record, route, "begun"))
    record.audit_begun = True


async def audit_end(audit: AuditLog, scope: Scope, record: RequestRecord, route: str) -> None:
    """Record the end of a change before its response is sent; if that fails, the begin remains."""
    record.audit_begun = False
    with suppress(AuditUnavailable):
        await _write(audit, _entry(scope, record, route, "ended"))


def audit_finished(
    audit: AuditLog, scope: Scope, record: RequestRecord, route: str, *, predictions: bool
) -> None:
    """Record a finished request, without waiting for the disk."""
    if record.audit_begun:  # the response never started
        audit.note(_entry(scope, record, route, "ended"))
    elif record.problem is not None and record.problem.refusal:
        identity = record.identity
        source = network_of(record.address or "") if identity is None else identity.id
        audit.rejected(source, _entry(scope, record, route, "refused"))
    elif predictions and record.images is not None:
        audit.note(_entry(scope, record, route, "ended"))


async def _write(audit: AuditLog, entry: Record) -> None:
    """Return when the record is on the disk, or raise AuditUnavailable."""
    try:
        await asyncio.wait_for(asyncio.wrap_future(audit.write(entry)), _WRITE_SECONDS)
    except TimeoutError:
        raise AuditUnavailable("The audit log could not be written in time.") from None


def _entry(
    scope: Scope, record: RequestRecord, route: str, outcome: Literal["begun", "ended", "refused"]
) -> Record:
    """The audit record of a request; None values are omitted when it is written."""
    path = scope.get("path_params", {})
    identity = record.identity
    entry = {
        "action": getattr(scope.get("route"), "name", route),
        "outcome": outcome,
        "who": None if identity is None else identity.id,
        "name": None if identity is None else identity.name,
        "address": record.address,
        "proxy": record.proxy,
        "task": path.get("task", path.get("name")),
        "version": path.get("version"),
        "alias": path.get("alias"),
        **(record.audit_details or {}),
        "images": record.images,
        "method": scope["method"],
        "path": route,
        "status": record.status,
        "problem": None if record.problem is None else record.problem.name,
        "reason": record.reason,
        "request_id": record.id,
    }
    # A key that was pasted into a path, and from there into an error message.
    return {
        name: redact(value) if isinstance(value, str) else value for name, value in entry.items()
    }
