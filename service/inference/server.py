"""What the protocol tells of the server itself: receives the parts, hands on metadata and readiness."""

from __future__ import annotations

from typing import Any

from service.errors import ServiceError
from service.services import Services

EXTENSIONS = (
    "binary_tensor_data",
    "parameters",
    "statistics",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
)
SHARED_MEMORY = ("system_shared_memory", "cuda_shared_memory")


def server_metadata(services: Services, version: str) -> dict[str, Any]:
    """Name, version, and the extensions that are on."""
    shared = SHARED_MEMORY if services.settings.shared_memory else ()
    return {"name": "gemm-service", "version": version, "extensions": [*EXTENSIONS, *shared]}


def check_ready(services: Services) -> None:
    """ServiceError draining or no_worker where no work is taken now."""
    if not services.supervisor.ready:
        code = "draining" if services.supervisor.draining else "no_worker"
        raise ServiceError(code, "the service isn't ready")
