"""The tensor store: receives tensors by owner and name, hands on pins, entries and holds."""

from service.store.conditions import ANY, UNCONDITIONAL, Conditions
from service.store.content import Content, Hold, Pin, tensor_of
from service.store.contents import new_id
from service.store.local import LocalStore
from service.store.names import NAME, valid
from service.store.store import Binding, Entry, StoreSettings, TensorStore

__all__ = [
    "ANY",
    "NAME",
    "UNCONDITIONAL",
    "Binding",
    "Conditions",
    "Content",
    "Entry",
    "Hold",
    "LocalStore",
    "Pin",
    "StoreSettings",
    "TensorStore",
    "new_id",
    "tensor_of",
    "valid",
]
