"""Operands of an inference request: receives what it asks for, hands on a `GemmRequest` with its operands in slots.

The bytes of binary tensors go from where they come straight into their place: one copy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from service.decode import GemmRequest, Operands
from service.errors import ServiceError
from service.formats import Tensor, numbers
from service.inference.models import INPUT_OF
from service.inference.regions import Regions
from service.inference.request import Inference, Input, check_dtype
from service.plan import plan, unfit
from service.query import handle_in

#: Takes the next bytes of the body into views, in order.
ReadBody = Callable[[list[memoryview]], Awaitable[None]]

#: Lists of more numbers than this are converted in a thread, so that other requests go on meanwhile.
_MANY = 1 << 14


async def bind(operands: Operands, inference: Inference, regions: Regions, read: ReadBody) -> GemmRequest:
    """Check that the operands fit together, take memory for them, and fill it."""
    with contextlib.ExitStack() as held:
        uses = {
            one.operand: held.enter_context(regions.use(operands.owner, one.place))
            for one in inference.inputs
            if one.place is not None
        }
        request = await _bind(operands, inference, read)
        for operand, use in uses.items():
            await use.read(operands.bounds[operand])
    return request


async def _bind(operands: Operands, inference: Inference, read: ReadBody) -> GemmRequest:
    tensors = {one.operand: one.tensor for one in inference.inputs}
    for operand, handle in inference.handles.items():
        pinned = await operands.pin(operand, handle)
        check_dtype(inference.model, INPUT_OF[operand], pinned.dtype)
        if tensors.setdefault(operand, pinned) != pinned:
            raise unfit(
                operand, f"handle {handle} is {pinned.dtype} {pinned.shape}, the request says otherwise"
            )
    sent = [one for one in inference.inputs if one.handle is None]
    arrays = {one.operand: await _array(one) for one in sent if one.data is not None}
    made = plan(inference.fields, tensors, operands.limits)
    operands.place({one.operand: one.tensor for one in sent}, made)
    await read([operands.bounds[one.operand].view() for one in sent if one.binary])
    for operand, array in arrays.items():
        operands.bounds[operand].view()[:] = array.reshape(-1).view("u1").data
    return operands.request(inference.fields, made, "raw", handle_in(inference.fields.out))


async def _array(one: Input) -> Any:
    """Numbers of a JSON tensor, flat or nested as its shape is."""
    tensor, name = one.tensor, INPUT_OF[one.operand]
    assert one.data is not None
    if tensor.nbytes == 0 and not one.data:
        return numbers.array([], tensor.dtype, field=name)
    if len(one.data) < _MANY and not isinstance(next(iter(one.data), None), list):
        array = numbers.array(one.data, tensor.dtype, field=name)
    else:
        array = await asyncio.to_thread(numbers.taken, one.data, tensor.dtype, field=name)
    if array.shape not in (tensor.shape, (Tensor(tensor.dtype, tensor.shape).nbytes // array.itemsize,)):
        raise ServiceError(
            "invalid",
            f"{name}: data of shape {array.shape} doesn't fill the shape {tensor.shape}",
            field=name,
        )
    return array
