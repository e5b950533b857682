"""All limits: receives the settings, hands on what /limits tells. Each limit lives where it is held."""

from __future__ import annotations

from typing import Any

from service import bounds, gate, journal, model, protocol, query, upload
from service.batch import PRIORITIES
from service.formats import base, elsewhere, npy, safetensors
from service.inference import regions as inference_regions
from service.inference import request as inference
from service.local import loans as local_loans
from service.local import server as local_server
from service.local import session as local_session
from service.routes import jobs, tensors
from service.settings import Settings

#: Settings that are limits of what a client may do, by name; times in seconds, sizes in bytes.
SETTINGS = (
    *("arena_bytes", "key_bytes", "local_bytes", "store_memory_bytes", "store_disk_bytes"),
    *("max_body_bytes", "max_json_bytes", "grpc_message_bytes", "max_output_bytes", "max_flops"),
    *("queue_requests", "queue_bytes", "batch_requests", "batch_delay_ms"),
    *("job_steps", "job_bytes", "result_ttl_seconds", "shared_memory_lease_seconds"),
    *("header_bytes", "header_seconds", "body_bytes_per_second", "write_stall_seconds"),
    *("keep_alive_seconds", "grace_seconds"),
)

#: Limits that no setting changes.
FIXED: dict[str, Any] = {
    # Of tensors and their names.
    "dimension": base.MAX_DIM,
    "dimensions": base.MAX_DIMS,
    "operand_dimensions": model.OPERAND_DIMENSIONS,
    "name_characters": model.NAME_CHARACTERS,
    "variant_characters": model.VARIANT_CHARACTERS,
    "safetensors_header_bytes": safetensors.MAX_HEADER,
    "safetensors_name_characters": upload.TENSOR_CHARACTERS,
    "npy_header_bytes": npy.MAX_HEADER,
    "json_fields": model.MOST_FIELDS,
    "json_other_values": elsewhere.MOST_VALUES,
    # Of requests.
    "query_fields": query.QUERY_FIELDS,
    "question_bytes": query.QUESTION_BYTES,
    "page_entries": tensors.PAGE_ENTRIES,
    "wait_seconds": jobs.LONGEST_WAIT,
    "deadline_ms": model.LONGEST_MS,
    "ttl_seconds": model.LONGEST_SECONDS,
    "idempotency_key_characters": jobs.KEY_CHARACTERS,
    "idempotency_seconds": journal.IDEMPOTENCY_SECONDS,
    "request_id_characters": gate.REQUEST_ID_CHARACTERS,
    "priorities": {"highest": PRIORITIES.start, "lowest": PRIORITIES.stop - 1},
    # Of connections.
    "pipelined_requests": protocol.PIPELINE,
    "linger_seconds": bounds.LINGER_SECONDS,
    # Of the inference protocol, and of clients that share memory.
    "inference_tensors": inference.TENSORS,
    "inference_regions": inference_regions.MOST_REGIONS,
    "local_sessions": local_server.MOST_SESSIONS,
    "local_regions": local_session.MOST_REGIONS,
    "local_running": local_session.MOST_RUNNING,
    "local_loans": local_loans.MOST_LOANS,
    "local_loan_seconds": local_loans.LOAN_SECONDS,
}


def limits_of(settings: Settings) -> dict[str, Any]:
    """All limits by name; times in seconds where no unit is named, sizes in bytes."""
    return {name: getattr(settings, name) for name in SETTINGS} | FIXED
