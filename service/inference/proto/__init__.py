"""The protocol's messages: `inference.proto`, and `pb`, what the compiler of protocol buffers made of it."""

from typing import Any

from service.inference.proto import inference_pb2

#: The classes are built when the module is imported, so their types aren't known before.
pb: Any = inference_pb2
