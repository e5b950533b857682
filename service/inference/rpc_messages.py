"""gRPC's messages and the protocol's JSON documents: receives one, hands on the other.

Documents are what both ways share, so a request means the same over gRPC as over HTTP.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf import json_format

from service.decode import GemmRequest
from service.errors import ServiceError
from service.inference.models import DATATYPES
from service.inference.proto import pb
from service.inference.reply import document_of
from service.inference.request import Inference
from service.outcome import Outcome

#: Where typed contents of a datatype are; the 16-bit types come as bytes only.
_CONTENTS_IN = {"FP32": "fp32_contents", "FP64": "fp64_contents"}


def infer_document(message: Any, contents: list[bytes]) -> dict[str, Any]:
    """A ModelInferRequest as the document of the same request over HTTP; `contents`: its raw_input_contents."""
    raw = iter(contents)
    inputs = [_input(one, raw, sent_raw=bool(contents)) for one in message.inputs]
    if next(raw, None) is not None:
        raise _wrong("raw_input_contents", "there are more than inputs that need one")
    outputs = [{"name": one.name, "parameters": _output_parameters(one)} for one in message.outputs]
    parameters = {**_values(message.parameters), "binary_data_output": True}
    return {"id": message.id, "inputs": inputs, "outputs": outputs, "parameters": parameters}


def _input(one: Any, raw: Iterator[bytes], *, sent_raw: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
    parameters = _values(one.parameters)
    parameters.pop("binary_data_size", None)
    document["parameters"] = parameters
    if "shared_memory_region" in parameters or "handle" in parameters:
        return document
    if sent_raw:
        content = next(raw, None)
        if content is None:
            raise _wrong("raw_input_contents", f"there is none for {one.name[:80]}")
        if one.HasField("contents"):
            raise _wrong(one.name, "comes as contents and as raw_input_contents")
        parameters["binary_data_size"] = len(content)
        return document
    field = _CONTENTS_IN.get(one.datatype)
    if field is None:
        if one.datatype in DATATYPES:
            raise _wrong(one.name, f"{one.datatype} comes as raw_input_contents only")
        return {**document, "data": []}  # parse says what is wrong with the type
    filled = [name.name for name, _ in one.contents.ListFields()]
    if filled not in ([], [field]):
        raise _wrong(one.name, f"{one.datatype} comes in {field}, found {', '.join(filled)}")
    return {**document, "data": list(getattr(one.contents, field))}


def _output_parameters(one: Any) -> dict[str, Any]:
    # Results are always bytes here; binary_data speaks of HTTP.
    return {name: value for name, value in _values(one.parameters).items() if name != "binary_data"}


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as plain values."""
    values = {}
    for name, one in parameters.items():
        kind = one.WhichOneof("parameter_choice")
        if kind is None:
            raise _wrong(name[:80], "has no value")
        values[name] = getattr(one, kind)
    return values


class Received(NamedTuple):
    """A message as it came, and of how many bytes: to ask the message would write it anew."""

    message: Any
    nbytes: int

    @classmethod
    def reader(cls, kind: Any) -> Callable[[bytes], Received]:
        """What reads messages of a kind."""
        return lambda data: cls(kind.FromString(data), len(data))


@dataclass(frozen=True, slots=True)
class InferReply:
    """A ModelInferResponse: all but D's bytes, and those."""

    head: Any
    content: bytes

    def encoded(self) -> bytes:
        """As it is sent."""
        return b"".join(self._parts())

    def streamed(self) -> bytes:
        """The same as a ModelStreamInferResponse, and said to be the request's last: it has no other."""
        # Clients that take several answers to a request look for this.
        self.head.parameters["triton_final_response"].bool_param = True
        parts = self._parts()
        return b"".join((_before(_IN_STREAM, sum(map(len, parts))), *parts))

    def _parts(self) -> tuple[bytes, ...]:
        # Fields may stand in any order, and this one's bytes are many: protobuf would copy them several times.
        # There is one for each output, as C++ clients read it: empty where D is elsewhere.
        return self.head.SerializeToString(), _before(_CONTENTS_OUT, len(self.content)), self.content


_CONTENTS_OUT: int = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_IN_STREAM: int = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_LENGTH_DELIMITED = 2


def _before(number: int, nbytes: int) -> bytes:
    """What stands before the bytes of a field: its number, its kind and their count, as protobuf writes them."""
    written = bytearray([number << 3 | _LENGTH_DELIMITED])
    while nbytes > 0x7F:
        written.append(nbytes & 0x7F | 0x80)
        nbytes >>= 7
    written.append(nbytes)
    return bytes(written)


def infer_reply(
    inference: Inference, request: GemmRequest, outcome: Outcome, kept: dict[str, Any] | None
) -> InferReply:
    """The reply of a result; D's bytes are copied."""
    document = document_of(inference, request, outcome, kept=kept)
    head = pb.ModelInferResponse(
        model_name=document["model_name"], model_version=document["model_version"], id=inference.id
    )
    _fill(head.parameters, document["parameters"])
    for output in document["outputs"]:
        head.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
    return InferReply(head, bytes(request.out.view()) if kept is None else b"")


_FIELDS = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}


def _fill(parameters: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(parameters[name], _FIELDS[type(value)], value)


def message_of(kind: Any, document: dict[str, Any]) -> Any:
    """A document as a message; what the message has no field for is left out."""
    return json_format.ParseDict(document, kind(), ignore_unknown_fields=True)


def system_registration(message: Any) -> dict[str, Any]:
    """A registration of system shared memory as its document."""
    return {"key": message.key, "offset": message.offset, "byte_size": message.byte_size}


def cuda_registration(message: Any) -> dict[str, Any]:
    """A registration of CUDA shared memory as its document."""
    handle = {"b64": base64.b64encode(message.raw_handle).decode()}
    return {"raw_handle": handle, "device_id": message.device_id, "byte_size": message.byte_size}


def _wrong(field: str, detail: str) -> ServiceError:
    return ServiceError("invalid", f"{field}: {detail}", field=field)
