"""A bound request runs: receives it and a way to submit, hands on the outcome, and where D is if not in the slot."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from service.batch import Work
from service.decode import GemmRequest
from service.errors import ServiceError
from service.inference.regions import Use
from service.inference.request import Inference
from service.keys import Principal
from service.outcome import Outcome
from service.routes.gemm import keep, work_of
from service.services import Services

Submit = Callable[[Work], Awaitable[Outcome]]


async def compute(
    services: Services, principal: Principal, inference: Inference, request: GemmRequest, submit: Submit
) -> tuple[Outcome, dict[str, Any] | None]:
    """The outcome, and what the reply tells of D where it went to a region (nothing) or into the store.

    The operands are released here or with the work; D's slot stays the caller's.
    """
    with contextlib.ExitStack() as held:
        try:
            target = held.enter_context(_region(services, principal, inference, request))
            work = work_of(services, request, principal)
        except BaseException:
            request.release_operands()
            raise
        outcome = await submit(work)
        if target is not None:
            await target.write(request.out)
            return outcome, {}
        if request.out_handle is not None:
            entry = await keep(services, request, principal)
            return outcome, {"handle": entry.name, "etag": entry.etag, "durable": entry.durable}
        return outcome, None


def _region(
    services: Services, principal: Principal, inference: Inference, request: GemmRequest
) -> contextlib.AbstractContextManager[Use | None]:
    """The region that D goes to; in use until D is there."""
    place, nbytes = inference.place, request.plan.out.nbytes
    if place is None:
        return contextlib.nullcontext()
    if place.nbytes < nbytes:
        raise ServiceError(
            "invalid",
            f"D: shared memory of {place.nbytes} bytes was given, the result takes {nbytes}",
            field="shared_memory_byte_size",
        )
    return services.inference.regions.use(principal.owner, place)
