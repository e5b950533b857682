"""What the protocol calls models: receives names and versions, hands on their metadata, configuration and state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.errors import ServiceError

#: Element types by the protocol's names.
DATATYPES = {"FP16": "fp16", "BF16": "bf16", "FP32": "fp32", "FP64": "fp64"}
DATATYPE_OF = {dtype: datatype for datatype, dtype in DATATYPES.items()}

#: Operands by the protocol's input names.
INPUTS = {"A": "a", "B": "b", "C": "c", "bias": "bias"}
INPUT_OF = {operand: name for name, operand in INPUTS.items()}
OUTPUT = "D"

VERSION = "1"
_PLATFORM = "gemm"


@dataclass(frozen=True, slots=True)
class Model:
    """A name under which products are asked for; `dtype` None takes every type."""

    name: str
    dtype: str | None

    @property
    def datatype(self) -> str:
        """The type that metadata tells; the protocol has no word for any type."""
        return DATATYPE_OF[self.dtype or "fp32"]

    def metadata(self) -> dict[str, Any]:
        """The metadata document. A -1 may be any extent; 3-D shapes (batch first) are taken as well."""
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": _PLATFORM,
            "inputs": [{"name": name, "datatype": self.datatype, "shape": _dims(name)} for name in INPUTS],
            "outputs": [{"name": OUTPUT, "datatype": self.datatype, "shape": [-1, -1]}],
        }

    def config(self) -> dict[str, Any]:
        """The configuration document, which also tells that C and bias may be left out."""
        kind = f"TYPE_{self.datatype}"
        inputs = [
            {"name": name, "data_type": kind, "dims": _dims(name), "optional": _optional(name)}
            for name in INPUTS
        ]
        return {
            "name": self.name,
            "platform": "",
            "backend": _PLATFORM,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": 0,
            "input": inputs,
            "output": [{"name": OUTPUT, "data_type": kind, "dims": [-1, -1]}],
            "instance_group": [],
            "model_transaction_policy": {"decoupled": False},
            "parameters": {"dtypes": {"string_value": ",".join([self.dtype] if self.dtype else DATATYPE_OF)}},
        }


def _dims(name: str) -> list[int]:
    return [-1] if name == "bias" else [-1, -1]


def _optional(name: str) -> bool:
    return name in ("C", "bias")


MODELS = {
    model.name: model
    for model in (Model("gemm", None), *(Model(f"gemm_{dtype}", dtype) for dtype in DATATYPE_OF))
}


class Repository:
    """Which models take requests; all do when the service starts."""

    def __init__(self) -> None:
        self._unloaded: set[str] = set()

    def find(self, name: str, version: str = "") -> Model:
        """The model; ServiceError not_found for another name or version."""
        model = MODELS.get(name)
        if model is None:
            known = ", ".join(MODELS)
            raise ServiceError("not_found", f"there is no model {name[:80]!r}; there are {known}")
        if version not in ("", VERSION):
            raise ServiceError("not_found", f"model {name} has no version {version[:20]!r}, only {VERSION}")
        return model

    def ready(self, name: str, version: str = "") -> Model:
        """The model, where it takes requests; ServiceError no_worker where it was unloaded."""
        model = self.find(name, version)
        if name in self._unloaded:
            raise ServiceError("no_worker", f"model {name} isn't ready: it was unloaded")
        return model

    def load(self, name: str, *, configured: bool = False) -> None:
        """Take requests for the model; `configured`: with files or a configuration, which none here takes."""
        if configured:
            raise ServiceError("not_implemented", "models here take no files and no other configuration")
        self._unloaded.discard(self.find(name).name)

    def unload(self, name: str) -> None:
        """Take no more requests for the model; those under way end as they would."""
        self._unloaded.add(self.find(name).name)

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """All models with their state, or those that are ready."""
        rows = []
        for name in MODELS:
            gone = name in self._unloaded
            if not (ready and gone):
                state, reason = ("UNAVAILABLE", "unloaded") if gone else ("READY", "")
                rows.append({"name": name, "version": VERSION, "state": state, "reason": reason})
        return rows
