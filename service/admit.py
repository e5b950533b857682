"""Who gets in: receives a request's size and the queue's state, hands on admission or a refusal with its code.

Pure: the time is an argument. Sizes of bodies and shapes are bounded in decode, before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.batch import Queue, Rate, Work
from service.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the queue: requests and bytes of operands and results."""

    requests: int
    nbytes: int


def admit(work: Work, queue: Queue, bounds: Bounds, now: float) -> None:
    """Let `work` in or raise ServiceError: deadline (already passed), queue_full (429 with Retry-After)."""
    if work.deadline is not None and work.deadline <= now:
        raise ServiceError(
            "deadline", "the deadline passed before the request was queued", field="deadline_ms"
        )
    retry = max(1.0, queue.seconds)
    if queue.depth >= bounds.requests:
        raise ServiceError(
            "queue_full", f"{queue.depth} requests are waiting", limit=bounds.requests, retry_after=retry
        )
    if queue.depth and queue.nbytes + work.held_nbytes > bounds.nbytes:
        raise ServiceError(
            "queue_full",
            f"{queue.nbytes} bytes of operands are waiting",
            limit=bounds.nbytes,
            retry_after=retry,
        )


class Rates:
    """FLOPs a second of each key, as a token bucket of one second's worth that may go into debt once.

    So a product larger than a second's worth passes a full bucket, and then pays for it by waiting. A quota that is
    changed begins a bucket anew: one is never filled at another's rate.
    """

    def __init__(self) -> None:
        self._buckets: dict[Rate, tuple[float, float]] = {}

    def wait(self, rate: Rate, flops: float, now: float) -> float:
        """Seconds until the bucket permits `flops`, if nobody takes from it meanwhile; 0 where it does now."""
        wanted = min(flops, rate.flops_per_second)
        return max(0.0, (wanted - self._tokens(rate, now)) / rate.flops_per_second)

    def spend(self, rate: Rate, flops: float, now: float) -> None:
        """Take `flops` from the bucket or raise ServiceError quota with the seconds until it has some again."""
        wait = self.wait(rate, flops, now)
        if wait:
            raise ServiceError(
                "quota",
                "this key's FLOPs a second are used up",
                limit=rate.flops_per_second,
                retry_after=max(1.0, wait),
            )
        if rate not in self._buckets:
            self._forget_full(now)
        self._buckets[rate] = (self._tokens(rate, now) - flops, now)

    def _tokens(self, rate: Rate, now: float) -> float:
        """FLOPs in the bucket; below 0 they are owed."""
        tokens, seen = self._buckets.get(rate, (rate.flops_per_second, now))
        return min(rate.flops_per_second, tokens + (now - seen) * rate.flops_per_second)

    def _forget_full(self, now: float) -> None:
        """A full bucket is as one never seen, and keys come and go."""
        self._buckets = {
            rate: bucket
            for rate, bucket in self._buckets.items()
            if self._tokens(rate, now) < rate.flops_per_second
        }
