"""gRPC's messages and the protocol's JSON documents: receives one, hands on the other.

Documents are what both ways share, so a request means the same over gRPC as over HTTP.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import json_format

from service.decode import GemmRequest
from service.errors import ServiceError
from service.inference.models import DATATYPES
from service.inference.proto import pb
from service.inference.reply import document_of
from service.inference.request import Inference
from service.outcome import Outcome

#: Where typed contents of a datatype are; the 16-bit types come as bytes only.
_CONTENTS = {"FP32": "fp32_contents", "FP64": "fp64_contents"}


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
    field = _CONTENTS.get(one.datatype)
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


def infer_response(
    inference: Inference, request: GemmRequest, outcome: Outcome, kept: dict[str, Any] | None
) -> Any:
    """The ModelInferResponse of a result; D's bytes are copied."""
    document = document_of(inference, request, outcome, kept=kept)
    response = pb.ModelInferResponse(
        model_name=document["model_name"], model_version=document["model_version"], id=inference.id
    )
    _fill(response.parameters, document["parameters"])
    for output in document["outputs"]:
        response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        # One for each output, as C++ clients read it: empty where D is elsewhere.
        response.raw_output_contents.append(bytes(request.out.view()) if kept is None else b"")
    return response


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
