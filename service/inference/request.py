"""What an inference request asks for: receives its parsed document, hands on tensors, places and fields, checked.

HTTP's JSON and gRPC's messages both come here as the protocol's JSON document. Nothing is allocated yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from service.batch import PRIORITIES
from service.errors import ServiceError
from service.formats import Tensor
from service.formats.base import MAX_DIMS, checked_shape
from service.inference.models import DATATYPE_OF, DATATYPES, INPUTS, OUTPUT, Model
from service.model import NAME, REFERENCE, Count, Flag, GemmFields, validate, validate_query
from service.query import handle_in

#: Parameters of the protocol itself that mean nothing here, or are taken apart before the others.
_IGNORED = frozenset({"binary_data_output", "sequence_start", "sequence_end", "headers"})
_LOWEST_PRIORITY = PRIORITIES.stop - 1
#: Most inputs, and most outputs, that a request may list.
TENSORS = 64

#: Bytes and offsets: what a C client can say.
Bytes = Annotated[Count, Field(ge=0, lt=1 << 63)]


class InferenceFields(GemmFields):
    """A request's parameters: those of a product, and handles of the tensor store in place of tensors."""

    a: str | None = Field(None, pattern=REFERENCE)
    b: str | None = Field(None, pattern=REFERENCE)
    c: str | None = Field(None, pattern=REFERENCE)
    bias: str | None = Field(None, pattern=REFERENCE)
    out: str = Field("inline", pattern=rf"^inline$|{REFERENCE}")


class RegionParameters(BaseModel):
    """Where in a registered region a tensor lies."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    shared_memory_region: str | None = None
    shared_memory_offset: Bytes = 0
    shared_memory_byte_size: Bytes | None = None


class InputParameters(RegionParameters):
    """Where an input's elements are, if not in `data`."""

    binary_data_size: Bytes | None = None
    handle: Annotated[str | None, Field(pattern=NAME)] = None


class OutputParameters(RegionParameters):
    """In which form D comes, or where it goes."""

    binary_data: Flag | None = None
    classification: Count = 0


class InputDocument(BaseModel):
    """A, B, C or bias."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    datatype: str
    shape: list[Count] = Field(max_length=MAX_DIMS)
    parameters: InputParameters = InputParameters()
    data: list[Any] | None = None


class OutputDocument(BaseModel):
    """D."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    parameters: OutputParameters = OutputParameters()


class Document(BaseModel):
    """A request. Its parameters are the fields of a product, and handles in place of inputs."""

    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "inputs": [
                        {"name": "A", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]},
                        {"name": "B", "shape": [2, 1], "datatype": "FP32", "data": [3, 4]},
                    ],
                    "parameters": {"alpha": 2, "activation": "relu"},
                }
            ]
        },
    )

    id: str = ""
    inputs: Annotated[list[InputDocument], Field(max_length=TENSORS)] = []
    outputs: Annotated[list[OutputDocument], Field(max_length=TENSORS)] = []
    parameters: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a registered region, of the kind that the owner of the name registered."""

    region: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Input:
    """One operand and where its elements are: the next bytes of the body, here, a region, or the store."""

    operand: str
    tensor: Tensor
    binary: bool = False
    data: list[Any] | None = None
    place: Place | None = None
    handle: str | None = None


@dataclass(frozen=True, slots=True)
class Inference:
    """A request, checked as far as it can be before its operands are there."""

    model: Model
    id: str
    fields: InferenceFields
    inputs: tuple[Input, ...]
    binary: bool
    place: Place | None

    @property
    def handles(self) -> dict[str, str]:
        """Stored tensors by the operand that they are."""
        named = {name: handle_in(getattr(self.fields, name)) for name in INPUTS.values()}
        named |= {one.operand: one.handle for one in self.inputs if one.handle is not None}
        return {name: handle for name, handle in named.items() if handle is not None}


def parse(document: Any, model: Model) -> Inference:
    """The request in a document of the protocol."""
    body = validate(Document, document)
    fields = fields_of(body.parameters, model)
    inputs = tuple(_input(one, model) for one in body.inputs)
    names = [one.operand for one in inputs]
    for name, operand in INPUTS.items():
        sent = names.count(operand) + (getattr(fields, operand) is not None)
        if sent > 1:
            raise _wrong("inputs", f"{name} is given {sent} times")
        if sent == 0 and name in ("A", "B"):
            raise _wrong("inputs", f"{name} is missing: model {model.name} needs A and B")
    binary, place = _output(body, fields)
    return Inference(model, body.id, fields, inputs, binary, place)


def fields_of(parameters: dict[str, Any], model: Model) -> InferenceFields:
    """The request's parameters; one that isn't known would change nothing unseen, so it is refused."""
    given = {
        name: value
        for name, value in parameters.items()
        if name not in _IGNORED and not name.startswith("triton_")
    }
    if given.pop("sequence_id", 0) not in (0, ""):
        raise ServiceError("not_implemented", "sequences have no meaning for products", field="sequence_id")
    if type(parameters.get("binary_data_output", False)) is not bool:
        raise _wrong("binary_data_output", "binary_data_output: true or false is taken")
    priority = given.get("priority", 0)
    if type(priority) is int and priority > _LOWEST_PRIORITY:
        given["priority"] = _LOWEST_PRIORITY
    timeout = given.pop("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise _wrong("timeout", "timeout: a whole number of microseconds is taken")
    fields = validate(InferenceFields, given | _read(given))
    if timeout:
        late = min(timeout / 1e3, 1e9 if fields.deadline_ms is None else fields.deadline_ms)
        fields = fields.model_copy(update={"deadline_ms": late})
    if model.dtype is not None and fields.out_dtype not in (None, model.dtype):
        raise _wrong(
            "out_dtype", f"out_dtype: model {model.name} gives {model.datatype}; model gemm gives any type"
        )
    return fields


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Values of parameters that came as text. Many clients know no number with a fraction: there alpha is "0.5"."""
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    if not texts:
        return {}
    fields = validate_query(InferenceFields, texts)
    return {name: getattr(fields, name) for name in texts}


def check_dtype(model: Model, operand: str, dtype: str) -> None:
    """Refuse a type that the model doesn't take."""
    if model.dtype not in (None, dtype):
        raise _wrong(
            operand, f"{operand} is {DATATYPE_OF[dtype]}, model {model.name} expects {model.datatype}"
        )


def _input(one: InputDocument, model: Model) -> Input:
    operand = INPUTS.get(one.name)
    if operand is None:
        known = ", ".join(INPUTS)
        raise _wrong(
            "inputs", f"unexpected input {one.name[:80]!r} for model {model.name}; there are {known}"
        )
    dtype = DATATYPES.get(one.datatype)
    if dtype is None:
        raise _wrong(
            one.name, f"{one.name}: datatype {one.datatype[:20]!r} isn't one of {', '.join(DATATYPES)}"
        )
    check_dtype(model, one.name, dtype)
    tensor = Tensor(dtype, checked_shape(one.shape, field=one.name))
    parameters = one.parameters
    place = _place(parameters, one.name)
    sources = (parameters.binary_data_size, one.data, place, parameters.handle)
    if sum(source is not None for source in sources) != 1:
        raise _wrong(
            one.name,
            f"{one.name}: exactly one of data, binary_data_size, shared_memory_region and handle is needed",
        )
    nbytes = parameters.binary_data_size if place is None else place.nbytes
    if nbytes is not None and nbytes != tensor.nbytes:
        raise _wrong(
            one.name,
            f"{one.name}: unexpected total byte size {nbytes}, shape and datatype take {tensor.nbytes}",
        )
    binary = parameters.binary_data_size is not None
    return Input(operand, tensor, binary, one.data, place, parameters.handle)


def _output(body: Document, fields: InferenceFields) -> tuple[bool, Place | None]:
    """Whether D comes as bytes, and the region that it goes to."""
    binary = bool(body.parameters.get("binary_data_output", False))
    if not body.outputs:
        return binary, None
    for one in body.outputs:
        if one.name != OUTPUT:
            raise _wrong("outputs", f"unexpected output {one.name[:80]!r}; there is {OUTPUT}")
    if len(body.outputs) > 1:
        raise _wrong("outputs", f"{OUTPUT} is asked for {len(body.outputs)} times")
    parameters = body.outputs[0].parameters
    if parameters.classification:
        raise ServiceError(
            "not_implemented", "classification has no meaning for products", field="classification"
        )
    place = _place(parameters, OUTPUT)
    if place is not None and fields.out != "inline":
        raise _wrong("out", "out: D goes to a region or to a handle, not both")
    return binary if parameters.binary_data is None else parameters.binary_data, place


def _place(parameters: RegionParameters, name: str) -> Place | None:
    region, nbytes = parameters.shared_memory_region, parameters.shared_memory_byte_size
    if region is None:
        return None
    if nbytes is None:
        raise _wrong(name, f"{name}: shared_memory_region needs shared_memory_byte_size")
    return Place(region, parameters.shared_memory_offset, nbytes)


def _wrong(field: str, detail: str) -> ServiceError:
    return ServiceError("invalid", detail, field=field)
