"""What several test modules share: one real service, for tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.service.real import Service

if TYPE_CHECKING:  # psycopg isn't everywhere
    from tests.service import shared


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A real service on the numpy reference, whose start needs no torch."""
    flags = ("--backend", "numpy", "--arena-bytes", "256MiB", "--log-level", "warning")
    made = Service(tmp_path_factory.mktemp("data"), *flags).ready()
    yield made
    made.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[shared.Postgres]:
    """A real PostgreSQL; each test takes a database of its own."""
    from tests.service import shared

    with shared.postgres() as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[shared.S3]:
    """A real S3 server; each test takes a bucket of its own."""
    from tests.service import shared

    with shared.s3() as server:
        yield server
