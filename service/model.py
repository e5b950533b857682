"""The fields of a GEMM request: receives JSON values or query strings, hands on models and a schema.

One source of truth: `GemmFields` holds the parameters; JSON bodies, query strings and job steps add how they
name operands. The models also make the OpenAPI document, whose examples run as tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)

from service.errors import ServiceError
from service.faults import Place, refusal
from service.formats.numbers import SPECIAL, saturated

#: Longest name of a handle, job step or variant; longest times that a request may name.
NAME_CHARACTERS = VARIANT_CHARACTERS = 128
LONGEST_MS = LONGEST_SECONDS = 1e9
#: Fields of an object: each that isn't known is a complaint, and a million of these took seconds in the event loop.
MOST_FIELDS = 64
#: Dimensions of an operand: rows and columns, and a batch.
OPERAND_DIMENSIONS = 3

_NAME = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARACTERS - 1}}}"
#: A handle's name, whole.
NAME = rf"^{_NAME}$"
REFERENCE = rf"^handle:{_NAME}$"
PLACE = rf"^inline$|{REFERENCE}"

#: Validation context of query fields: all values are text.
QUERY = "query"
_NUMBER_TEXT = re.compile(r"[+-]?[0-9]{1,400}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,4})?", re.ASCII)

DTypeName = Literal["fp16", "bf16", "fp32", "fp64"]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True)]


def _special(value: Any, info: ValidationInfo) -> Any:
    """NaN and infinities by name; numbers of a query; whole numbers beyond fp64, infinite as 1e999 is."""
    if isinstance(value, str):
        if info.context == QUERY and _NUMBER_TEXT.fullmatch(value):
            return float(value)
        return SPECIAL.get(value, value)
    return saturated(value) if type(value) is int else value


#: Any IEEE number; JSON writes those that it has no sign for as strings.
Real = Annotated[
    float,
    Field(strict=True),
    BeforeValidator(_special),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": list(SPECIAL)}]}),
]
#: A finite number.
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class GemmFields(BaseModel):
    """D = act(alpha · op(A) · op(B) + beta · C + bias): everything but the operands."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trans_a: Flag = Field(False, description="A is stored [K, M]")
    trans_b: Flag = Field(False, description="B is stored [N, K]")
    alpha: Real = Field(
        1.0,
        description="Factor of the product, rounded to fp32 (fp64 where A is fp64): infinite above its range, "
        "0 below; with 0, A and B are not read",
    )
    beta: Real | None = Field(
        None,
        description="Factor of C, rounded as alpha is: 1 with `c`, else 0; with 0, C is not read",
    )
    bias_dim: Literal["n", "m"] = Field("n", description="Dimension of D that the bias runs along")
    activation: Literal["none", "relu", "gelu", "silu"] = "none"
    precision: Literal["ieee", "tf32"] = Field(
        "ieee", description="tf32 lets fp32 operands be rounded to TF32"
    )
    out_dtype: DTypeName | None = Field(None, description="Type of D; A's unless said")
    batch_invariant: Flag = Field(
        True,
        description="A row's bits depend neither on M nor on other requests; false lets the fastest way run",
    )
    variant: str = Field(
        "auto",
        min_length=1,
        max_length=VARIANT_CHARACTERS,
        description="Kernel variant, auto, or sharded: over all devices together",
    )
    deadline_ms: Annotated[Finite, Field(ge=0, le=LONGEST_MS)] | None = Field(
        None, description="Milliseconds after which the work is not begun (504)"
    )
    priority: Annotated[Count, Field(ge=0, le=10)] = Field(0, description="1 is the highest, 0 the default")
    durable: Flag = Field(False, description="With an `out` handle: answer once it is on disk")
    ttl_seconds: Annotated[Finite, Field(gt=0, le=LONGEST_SECONDS)] | None = Field(
        None, description="Time to live of an `out` handle"
    )


class Base64(BaseModel):
    """An operand as base64 of its little-endian, row-major bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    b64: str
    dtype: DTypeName
    shape: list[Count] = Field(max_length=OPERAND_DIMENSIONS)


class Handle(BaseModel):
    """An operand, or a place for D, on the service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    handle: str = Field(pattern=NAME)


class Step(BaseModel):
    """The result of an earlier step of the same job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: str = Field(pattern=NAME)


_NUMBER = {"anyOf": [{"type": "number"}, {"type": "string", "enum": list(SPECIAL)}]}
_VECTOR = {"type": "array", "items": _NUMBER}
_MATRIX = {"type": "array", "items": _VECTOR}
#: Nested lists are handed on as they are; formats.numbers looks at their elements.
Matrix = Annotated[
    Any, WithJsonSchema({"anyOf": [_MATRIX, {"type": "array", "items": _MATRIX}], "title": "Numbers"})
]
Vector = Annotated[Any, WithJsonSchema({**_VECTOR, "title": "Numbers"})]


def _form(value: Any) -> str:
    """Which form an operand has; what is neither a list nor says a form has none."""
    if isinstance(value, dict):
        forms = {"handle": "handle", "step": "step", "b64": "b64", "dtype": "b64", "shape": "b64"}
        return next((form for key, form in forms.items() if key in value), "none")
    if isinstance(value, Handle):
        return "handle"
    if isinstance(value, Step | Base64):
        return "step" if isinstance(value, Step) else "b64"
    return "numbers" if isinstance(value, list) else "none"


_Handle = Annotated[Handle, Tag("handle")]
_Base64 = Annotated[Base64, Tag("b64")]
_Step = Annotated[Step, Tag("step")]
MatrixOperand = Annotated[Annotated[Matrix, Tag("numbers")] | _Base64 | _Handle, Discriminator(_form)]
VectorOperand = Annotated[Annotated[Vector, Tag("numbers")] | _Base64 | _Handle, Discriminator(_form)]
MatrixInput = Annotated[Annotated[Matrix, Tag("numbers")] | _Base64 | _Handle | _Step, Discriminator(_form)]
VectorInput = Annotated[Annotated[Vector, Tag("numbers")] | _Base64 | _Handle | _Step, Discriminator(_form)]

EXAMPLES: list[Any] = [
    {"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]},
    {
        "a": [[1.5, -2.0, 0.25]],
        "b": [[1, 0, 2], [0, 1, "Infinity"]],
        "trans_b": True,
        "bias": [0.5, -0.5],
        "activation": "relu",
        "out_dtype": "bf16",
    },
    {
        "a": {"b64": "AACAPwAAAEAAAEBAAACAQA==", "dtype": "fp32", "shape": [2, 2]},
        "b": [[1, 0], [0, 1]],
        "c": [[10, 20], [30, 40]],
        "beta": 0.5,
    },
]


class GemmBody(GemmFields):
    """A GEMM in JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": EXAMPLES})

    a: MatrixOperand
    b: MatrixOperand
    c: MatrixOperand | None = None
    bias: VectorOperand | None = None
    out: Handle | Literal["inline"] = Field("inline", description="Where D goes: into the reply, or a handle")


class GemmQuery(GemmFields):
    """A GEMM whose operands are a binary body: the same parameters as query fields.

    Shapes (`2x3` or `2,3`) and dtypes go with application/octet-stream; safetensors brings its own.
    """

    a: str | None = Field(None, pattern=REFERENCE, description="handle:NAME in place of a tensor in the body")
    b: str | None = Field(None, pattern=REFERENCE, description="handle:NAME")
    c: str | None = Field(None, pattern=REFERENCE, description="handle:NAME")
    bias: str | None = Field(None, pattern=REFERENCE, description="handle:NAME")
    out: str = Field("inline", pattern=PLACE, description="inline, or handle:NAME")
    a_shape: str | None = Field(None, description="Stored shape of A, as 2x3 or 2,3 (4x2x3 with a batch)")
    b_shape: str | None = None
    c_shape: str | None = None
    dtype: DTypeName | None = Field(None, description="Type of A and B")
    c_dtype: DTypeName | None = Field(None, description="Type of C; `dtype` unless said")
    bias_dtype: DTypeName | None = Field(
        None,
        description="Type of the bias; `dtype` unless said. A bias is in the body where this is given, "
        "or where the body is longer by just its bytes",
    )


class StepBody(GemmFields):
    """One step of a job. Its operands may be results of earlier steps."""

    id: str = Field(pattern=NAME)
    a: MatrixInput
    b: MatrixInput
    c: MatrixInput | None = None
    bias: VectorInput | None = None
    out: Handle | Literal["inline"] = "inline"


Model = TypeVar("Model", bound=BaseModel)

#: What is told where an operand has another form.
_FORMS = (
    'should be nested lists of numbers, {"b64", "dtype", "shape"} or {"handle"}; a job takes {"step"} too'
)
_NAMES = f"NAME is a letter or digit, then up to {NAME_CHARACTERS - 1} of A-Za-z0-9._-"
#: What is said of types of error and of patterns.
_WORDS = {
    "union_tag_invalid": _FORMS,
    NAME: f"should be a NAME; {_NAMES}",
    REFERENCE: f"should be handle:NAME; {_NAMES}",
    PLACE: f"should be inline or handle:NAME; {_NAMES}",
}
#: Fields that say how D is kept.
_KEEPING = ("durable", "ttl_seconds")


def validate(model: type[Model], value: Any) -> Model:
    """A parsed JSON value as a model; ServiceError invalid names the field."""
    _check_count("body", value)
    if isinstance(value, dict):
        for field, inner in value.items():
            _check_count(field, inner)
    try:
        return _consistent(model.model_validate(value))
    except ValidationError as error:
        raise _invalid(error) from None


def validate_query(model: type[Model], fields: Mapping[str, str]) -> Model:
    """Query fields as a model."""
    try:
        return _consistent(model.model_validate_strings(fields, context=QUERY))
    except ValidationError as error:
        raise _invalid(error) from None


def _check_count(field: str, value: Any) -> None:
    if isinstance(value, dict) and len(value) > MOST_FIELDS:
        raise ServiceError(
            "invalid",
            f"{field[:64]}: has more than {MOST_FIELDS} fields",
            field=field[:64],
            limit=MOST_FIELDS,
        )


def _consistent(made: Model) -> Model:
    """Refuse what would be ignored: how to keep a D that isn't kept."""
    if isinstance(made, GemmFields) and getattr(made, "out", "inline") == "inline":
        for field in _KEEPING:
            if getattr(made, field):
                raise ServiceError("invalid", f"{field}: goes with an `out` handle", field=field)
    return made


def _invalid(error: ValidationError) -> ServiceError:
    errors = error.errors(include_url=False, include_input=False)
    return refusal(errors, field_of=_field, words=_WORDS)


def _field(place: Place) -> str:
    """The path's second part is the tag of a value's form, which is no field of the client's."""
    return ".".join(str(part) for at, part in enumerate(place) if at != 1 or isinstance(part, int))
