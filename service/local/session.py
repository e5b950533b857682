"""One client on this machine: receives its packets, hands on products, and gives all back when it goes.

Packets are read in a callback of the loop; a product of the client's memory alone begins there, each other is a task.
While many run, or the client doesn't take its
answers, nothing more is read. Memory that it lent is dropped with the session; work that a worker has is
finished first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from service import logs
from service.begun import Begun
from service.decode import GemmRequest, Operands
from service.errors import ServiceError, at_stage
from service.formats.raw import emit_shape
from service.gate import translate
from service.keys import ANONYMOUS, Principal
from service.local.loans import Loans
from service.local.messages import (
    HANDLE_BYTES,
    VERSION,
    Borrow,
    Done,
    Garbled,
    Hello,
    Multiply,
    Product,
    Refused,
    Return,
    Share,
    ToClient,
    ToService,
    Unshare,
    Welcome,
    close_all,
    decode_request,
    encode,
    receive,
)
from service.local.operands import alone, bind, bind_at_once
from service.outcome import Outcome
from service.raw_plan import Sent
from service.regions import Region
from service.reply import outcome_texts, stored_document
from service.routes.gemm import keep, work_of
from service.services import Services

#: Products of one session that may be under way; the next packet waits.
MOST_RUNNING = 32
#: Regions of one session.
MOST_REGIONS = 64
#: Seconds for the first packet.
HELLO_SECONDS = 10.0
#: Packets read in a row before the loop goes on with others.
_BURST = 8
#: Label of these requests in metrics and the log.
ROUTE = "local"
_CLIENT_LEFT = 499
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid

_log = logs.Log("local")


@dataclass(slots=True)
class _Asked:
    """A product that a client asked for: its packet, the memory that it names, and what became of it so far.

    Times are perf_counter's, 0 for what isn't yet. `release` gives memory back; again is no harm.
    """

    message: Multiply
    regions: dict[int, Region]
    request_id: str
    trace: logs.Trace
    started: float
    principal: Principal = ANONYMOUS
    entered: bool = False
    request: GemmRequest | None = None
    decoded: float = 0.0
    outcome: Outcome | None = None
    computed: float = 0.0
    begun: Begun | None = None

    def release(self) -> None:
        """What the work holds besides goes with it."""
        if self.request is not None:
            self.request.out.release()
        for region in self.regions.values():
            region.release()
        self.regions = {}


class Session:
    """A connection, from Hello to its end. `ended` is called once."""

    def __init__(
        self, services: Services, end: socket.socket, instance: str, ended: Callable[[Session], None]
    ) -> None:
        self._services = services
        self._end = end
        self._instance = instance
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._authorization: str | None = None
        self._regions: dict[int, Region] = {}
        self._loans = Loans(services)
        self._running: set[asyncio.Future[Any] | Begun] = set()
        self._unsent: deque[bytes] = deque()
        self._reading = self._writing = False
        self._closed = False
        self._greeted = False
        self._timer = self._loop.call_later(HELLO_SECONDS, self.close)
        self._go_on()

    # -- packets in and out -----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Read on, or stop until answers are taken or products end."""
        wanted = not (self._closed or self._unsent or len(self._running) >= MOST_RUNNING)
        if wanted and not self._reading:
            self._loop.add_reader(self._end, self._readable)
        elif self._reading and not wanted:
            self._loop.remove_reader(self._end)
        self._reading = wanted

    def _readable(self) -> None:
        for _ in range(_BURST):
            if not self._reading:
                return
            try:
                packet, descriptors = receive(self._end, 1)
            except BlockingIOError:
                return
            except (Garbled, OSError):
                self.close()
                return
            if not packet:
                close_all(descriptors)
                self.close()
                return
            self._take(packet, descriptors)
            self._go_on()

    def _take(self, packet: bytes, descriptors: list[int]) -> None:
        """One packet. Descriptors that it doesn't use are closed."""
        try:
            message = decode_request(packet)
            self._dispatch(message, descriptors)
        except Garbled:
            self.close()
        finally:
            close_all(descriptors)

    def _dispatch(self, message: ToService, descriptors: list[int]) -> None:
        match message:
            case Hello() if not self._greeted:
                self._greet(message)
            case Multiply() if self._greeted:
                self._begin(message)
            case Borrow() if self._greeted:
                self._run(self._borrow(message))
            case Return() if self._greeted:
                self._loans.end(message.loan)
                self._send(Done(message.id))
            case Share() | Unshare() if self._greeted:
                try:
                    self._send(self._change(message, descriptors))
                except (
                    Exception
                ) as error:  # As the gate has it: whatever was raised, the client gets an answer.
                    self._refuse(message.id, error, "")
            case _:
                raise Garbled("a session begins with one hello")

    def _send(self, message: ToClient) -> None:
        if self._closed:
            return
        self._unsent.append(encode(message))
        self._writable()

    def _writable(self) -> None:
        while self._unsent:
            try:
                self._end.send(self._unsent[0])
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(self._end, self._writable)
                    self._go_on()
                return
            except OSError:
                self.close()
                return
            self._unsent.popleft()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._end)
            self._go_on()

    def _refuse(self, number: int, error: Exception, request_id: str) -> ServiceError:
        problem = translate(error)
        if problem.code == "internal":
            _log.error("unhandled", exception=error, route=ROUTE)
        headers = {name.lower(): value for name, value in problem.headers.items()}
        if request_id:
            headers["x-request-id"] = request_id
        if problem.retry_after is not None:
            headers["retry-after"] = str(max(1, round(problem.retry_after + 0.5)))
        self._send(Refused(number, problem.status, headers, problem.body(request_id)))
        return problem

    def close(self) -> None:
        """End the session: what runs is left, what was lent is dropped. Again is no harm."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._reading = self._writing = False
        self._end.close()
        self._unsent.clear()
        for running in list(self._running):
            running.cancel()
        for region in self._regions.values():
            region.release()
        self._regions.clear()
        self._loans.close()
        self._ended(self)

    # -- who may ----------------------------------------------------------------------------------------------

    def _greet(self, hello: Hello) -> None:
        services = self._services
        try:
            if hello.version != VERSION:
                raise ServiceError(
                    "not_implemented", f"version {VERSION} of the local protocol is spoken here"
                )
            self._authorization = f"Bearer {hello.key}" if hello.key else None
            if not services.keys.required and not services.settings.insecure:
                check_user(self._end)
            self._who()
        except ServiceError as refusal:
            self._refuse(0, refusal, "")
            self._loop.call_soon(self.close)
            return
        self._greeted = True
        self._timer.cancel()
        self._send(Welcome(self._instance, VERSION, services.supervisor.gpus()))

    def _who(self) -> Principal:
        """Whose session it is; asked again for each product, since keys come and go."""
        if not self._services.keys.required:
            return ANONYMOUS
        return self._services.keys.check(self._authorization)

    # -- memory -----------------------------------------------------------------------------------------------

    def _change(self, message: Share | Unshare, descriptors: list[int]) -> ToClient:
        if isinstance(message, Unshare):
            region = self._regions.pop(message.region, None)
            if region is not None:
                region.release()
            return Done(message.id)
        principal = self._who()
        principal.require("gemm")
        if message.region in self._regions:
            raise ServiceError("conflict", "that region is shared already", field="region")
        if len(self._regions) >= MOST_REGIONS:
            raise ServiceError("no_room", "a session shares no more regions", limit=MOST_REGIONS)
        regions = self._services.supervisor.regions
        if message.handle:
            if len(message.handle) != HANDLE_BYTES or message.nbytes <= 0:
                raise ServiceError("invalid", f"handle: must have {HANDLE_BYTES} bytes", field="handle")
            if not self._services.supervisor.gpus():
                raise ServiceError("not_implemented", "no GPU computes here")
            region = regions.add_device(message.handle, message.nbytes, principal.owner)
        else:
            if not descriptors:
                raise ServiceError("invalid", "region: a descriptor must come with it", field="region")
            region = regions.add(descriptors.pop(), principal.owner)
        self._regions[message.region] = region
        return Done(message.id)

    # -- products ---------------------------------------------------------------------------------------------

    def _begin(self, message: Multiply) -> None:
        """Run a product over what is lent now, whatever the next packet takes back."""
        named = {piece.region for piece in message.body}
        if message.out is not None:
            named.add(message.out.region)
        regions = {number: self._regions[number].hold() for number in named if number in self._regions}
        request_id = message.request_id[:128] or logs.new_id()
        asked = _Asked(message, regions, request_id, logs.Trace.take(None), time.perf_counter())
        if (known := alone(message)) is not None:
            context = copy_context()
            context.run(self._begin_at_once, asked, known, context)
        else:
            self._run(self._multiply(asked), asked)

    def _run(self, work: Coroutine[Any, Any, None], asked: _Asked | None = None) -> None:
        """Do it beside what else the session does."""
        task = self._loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(partial(self._ran, asked))

    def _ran(self, asked: _Asked | None, task: asyncio.Future[Any]) -> None:
        if asked is not None:
            asked.release()
        self._running.discard(task)
        self._go_on()

    async def _borrow(self, message: Borrow) -> None:
        keys = self._services.keys
        try:
            principal = self._who()
            principal.require("tensors")
            keys.enter(principal)
            try:
                self._send(await self._loans.lend(principal.owner, message.name, message.id))
            finally:
                keys.leave(principal)
        except Exception as error:  # As the gate has it: whatever was raised, the client gets an answer.
            self._refuse(message.id, error, "")

    def _begin_at_once(self, asked: _Asked, known: Sent, context: Context) -> None:
        """A product of the client's memory alone: it is with the worker before the next packet is read.

        No task is made for it, since it waits for nothing but its outcome; `context` is this call's.
        """
        logs.bind(asked.request_id, asked.trace)
        try:
            self._enter(asked)
            operands = Operands(self._services, asked.principal.owner, time.monotonic())
            try:
                with at_stage("decode"):
                    request = bind_at_once(operands, asked.message, known, asked.regions)
                work = work_of(self._services, request, asked.principal)
            except BaseException:
                operands.release()
                raise
            asked.request = request
            asked.decoded = time.perf_counter()
            begun = self._services.supervisor.begin(
                work, lambda *became: context.run(self._computed, asked, *became)
            )
        except Exception as error:  # As the gate has it: whatever was raised, the client gets an answer.
            self._over(asked, error=error)
            return
        if not begun.done():
            asked.begun = begun
            self._running.add(begun)

    def _computed(self, asked: _Asked, outcome: Outcome | None, error: Exception | None) -> None:
        """What became of a product that was begun at once; neither where the client has left."""
        if asked.begun is not None:
            self._running.discard(asked.begun)
        if outcome is None:
            self._over(asked, error=error)
        else:
            try:
                self._send(self._product(asked, outcome))
            except Exception as late:  # As above.
                self._over(asked, error=late)
            else:
                self._over(asked, done=not self._closed)
        self._go_on()

    async def _multiply(self, asked: _Asked) -> None:
        """One product, from its packet to its answer, in log and metrics."""
        token = logs.bind(asked.request_id, asked.trace)
        try:
            self._enter(asked)
            self._send(await self._kept_or_not(asked))
        except Exception as error:  # As the gate has it: whatever was raised, the client gets an answer.
            self._over(asked, error=error)
        except BaseException:
            self._over(asked)
            raise
        else:
            self._over(asked, done=not self._closed)
        finally:
            logs.unbind(token)

    async def _kept_or_not(self, asked: _Asked) -> Product:
        """A product between stored tensors, or of one that is to be stored."""
        services = self._services
        operands = Operands(services, asked.principal.owner, time.monotonic())
        try:
            with at_stage("decode"):
                request = await bind(operands, asked.message, asked.regions)
            work = work_of(services, request, asked.principal)
        except BaseException:
            operands.release()
            raise
        asked.request = request
        asked.decoded = time.perf_counter()
        outcome = await services.supervisor.submit(work)
        product = self._product(asked, outcome)
        if request.out_handle is None:
            return product
        entry = await keep(services, request, asked.principal)
        document = stored_document(request, entry, outcome, asked.request_id)
        headers = {**product.headers, "etag": f'"{entry.etag}"'}
        return Product(product.id, headers, msgspec.json.encode(document))

    def _product(self, asked: _Asked, outcome: Outcome) -> Product:
        """The answer, of which a D that was kept has more to tell."""
        assert asked.request is not None
        asked.outcome, asked.computed = outcome, time.perf_counter()
        out = asked.request.plan.out
        headers = outcome_texts(outcome)
        headers["x-request-id"] = asked.request_id
        headers["x-gemm-shape"] = emit_shape(out.shape)
        headers["x-gemm-dtype"] = out.dtype
        return Product(asked.message.id, headers)

    def _enter(self, asked: _Asked) -> None:
        """Whose product it is; ServiceError where that key may not have it."""
        principal = self._who()
        principal.require("gemm")
        self._services.keys.enter(principal)
        asked.principal, asked.entered = principal, True

    def _over(self, asked: _Asked, *, done: bool = False, error: BaseException | None = None) -> None:
        """It was answered, is refused now, or nobody wants it: give all back; log and metrics are told aside."""
        services = self._services
        status, refused, stage = (200, "", "") if done else (_CLIENT_LEFT, "client_gone", "")
        if isinstance(error, Exception):
            problem = self._refuse(asked.message.id, error, asked.request_id)
            status, refused, stage = problem.status, problem.code, problem.stage
        if asked.entered:
            services.keys.leave(asked.principal)
        asked.release()
        seconds = time.perf_counter() - asked.started
        tell = partial(copy_context().run, self._tell, asked, seconds, status, refused, stage)
        services.metrics.aside.put(tell)

    def _tell(self, asked: _Asked, seconds: float, status: int, refused: str, stage: str) -> None:
        """Log, metrics and traces of what is over; in its context."""
        services = self._services
        services.metrics.request(ROUTE, status, seconds)
        if refused:
            services.metrics.reject(refused)
        stages = logs.stages()
        if asked.decoded:
            decoding = asked.decoded - asked.started
            services.metrics.took("decode", decoding)
            if asked.outcome is not None:
                stages["decode"] = decoding
                stages.update(asked.outcome.stages(asked.computed - asked.decoded))
        if services.tracer is not None:
            tell = services.tracer.request
            tell(ROUTE, asked.trace, seconds, stages, {"gemm.status": status}, failed=status >= 500)
        if _log.tells(logging.INFO):
            told = {"refused": refused} if refused else {}
            told |= {"stage": stage} if stage else {}
            took = {f"{stage}_seconds": round(took, 6) for stage, took in stages.items()}
            _log.info("request", route=ROUTE, code=status, seconds=round(seconds, 6), **told, **took)


def check_user(end: socket.socket) -> None:
    """ServiceError forbidden where the other side isn't this user's process."""
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user not in (os.geteuid(), 0):
        raise ServiceError("forbidden", "without keys only the service's own user may use it")
