"""Routes whose requests are in the audit log before anything is done."""

from fastapi import Depends, Request
from fastapi.params import Depends as Dependency

from server.api.auth import requires
from server.api.middleware import RequestRecord, audit_entry, put_on_record
from server.identity import Scope
from server.runtime import Runtime


async def begin_audit(request: Request) -> None:
    """AuditUnavailable unless the log says, on the disk, that this request is about to be done."""
    runtime: Runtime = request.app.state.runtime
    if runtime.audit is None:
        return
    record: RequestRecord = request.state.record
    await put_on_record(runtime.audit, audit_entry(request.scope, record, "begun"))
    record.begun = True


def requires_audited(*scopes: Scope) -> list[Dependency]:
    """As `requires`, for routes that change something."""
    return [*requires(*scopes), Depends(begin_audit)]
