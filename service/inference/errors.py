"""Refusals as the protocol's clients know them: receives a ServiceError, hands on the HTTP status under /v2.

Those clients tell bad arguments (400), things that aren't there (404), what can't be done (501), what can't be
done now (503) and faults (500) apart; of the rest only what HTTP itself means stays.
"""

from __future__ import annotations

from service.errors import ServiceError

_STATUS = {
    "not_acceptable": 400,
    "conflict": 400,
    "precondition_failed": 400,
    "unsupported_media_type": 400,
    "range_not_satisfiable": 400,
    "invalid": 400,
    "unsupported": 400,
    "lost": 404,
    "queue_full": 503,
    "deadline": 503,
    "no_room": 503,
}


def status_of(problem: ServiceError) -> int:
    """The status under /v2."""
    return _STATUS.get(problem.code, problem.status)
