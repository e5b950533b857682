"""The service in a Ray cluster that is there: receives settings and bounds, hands on an application for Ray Serve.

Ray starts and ends replicas, spreads requests over them, and lends each its GPUs (CUDA_VISIBLE_DEVICES, which workers
keep to). A replica is a whole front with its workers. What it stores lies in a folder of its node that the next
replica there takes over; a handle is known to its replica alone unless the settings name a shared store.

    serve deploy deploy/ray/serve.yaml
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from service import logs
from service.app import create_app
from service.errors import ServiceError
from service.folder import DataFolder, FolderTaken
from service.handle import State
from service.settings import Settings, load

#: Seconds between Ray's looks at a replica, and after which one that doesn't answer is replaced.
_HEALTH_SECONDS, _HEALTH_PATIENCE = 5.0, 30.0


class Arguments(BaseModel):
    """`args` of the application in a Serve config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of each replica, as `gemm-service serve --help` lists them",
    )
    num_gpus: float = Field(
        0,
        ge=0,
        description="GPUs a replica is lent: whole ones (a worker each), or a fraction that it shares",
    )
    num_cpus: float = Field(1, ge=0, description="CPUs a replica counts for")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float = Field(
        32, gt=0, description="Requests a replica has under way before another is started; batches need some"
    )


def application(arguments: Arguments) -> serve.Application:
    """The deployment, bound. `import_path: service.ray_serve:application` in a Serve config."""
    given = dict(arguments.settings)

    def build() -> FastAPI:
        """On a replica."""
        settings = replica_settings(given)
        logs.setup(settings.log_format, settings.log_level)
        return create_app(settings)

    deploy = serve.deployment(
        name="gemm",
        ray_actor_options={"num_gpus": arguments.num_gpus, "num_cpus": arguments.num_cpus},
        autoscaling_config={
            "min_replicas": arguments.min_replicas,
            "initial_replicas": arguments.min_replicas,
            "max_replicas": arguments.max_replicas,
            "target_ongoing_requests": arguments.target_ongoing_requests,
        },
        # Ray's router holds back what is above; the service's own queue then says 429 where it is full.
        max_ongoing_requests=max(64, int(4 * arguments.target_ongoing_requests)),
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HEALTH_PATIENCE,
        graceful_shutdown_timeout_s=60,
    )
    return deploy(serve.ingress(build)(Replica)).bind()


class Replica:
    """A front and its workers in one actor of Ray."""

    app: FastAPI  # Serve's wrapper has it

    def check_health(self) -> None:
        """Raises where no worker can come back without a person: Ray then replaces the replica."""
        supervisor = self.app.state.services.supervisor
        if all(handle.state is State.DOWN for handle in supervisor.handles):
            raise ServiceError("no_worker", supervisor.handles[0].detail or "every worker is down")


def replica_settings(given: dict[str, Any]) -> Settings:
    """Settings of one replica: `given`, then the environment, in the first data folder that nobody holds."""
    settings = load(given)
    for number in itertools.count():
        folder = settings.data / f"replica-{number}"
        if free(folder):
            return load({**given, "data": str(folder)})
    raise AssertionError("count() doesn't end")


def free(path: Path) -> bool:
    """Whether no front holds the folder."""
    folder = DataFolder(path)
    try:
        folder.open()
    except FolderTaken:
        return False
    folder.close()
    return True
