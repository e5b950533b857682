"""/v2 over gRPC, as unmodified tritonclient[grpc] speaks it, against a real service."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from service import keys
from service.inference.proto import pb
from service.inference.rpc_messages import InferReply, Received
from tests.service.real import Service, running

RUN = f"gemmtest-{secrets.token_hex(6)}"
FLAGS = ("--grpc-port", "0", "--shared-memory", "--shared-memory-keys", f"{RUN}-*", "--log-level", "warning")
TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "fp64": np.float64}
TOLERANCE = {"fp16": 2e-3, "bf16": 2e-2, "fp32": 1e-5, "fp64": 1e-12}
RNG = np.random.default_rng(7)
Client = triton.InferenceServerClient


def address(service: Service) -> str:
    found = re.search(r"speaks gRPC on port (\d+)", service.output)
    assert found, service.output
    return f"127.0.0.1:{found[1]}"


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("spoken"), *FLAGS) as service:
        yield service.ready()


@pytest.fixture
def client(spoken: Service) -> Iterator[Client]:
    with Client(address(spoken)) as made:
        yield made


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def tensor(name: str, x: np.ndarray) -> triton.InferInput:
    made = triton.InferInput(name, list(x.shape), np_to_triton_dtype(x.dtype))
    return made.set_data_from_numpy(x)


def both(a: np.ndarray, b: np.ndarray) -> list[triton.InferInput]:
    return [tensor("A", a), tensor("B", b)]


def check(d: np.ndarray, a: np.ndarray, b: np.ndarray, tolerance: float = 1e-5) -> None:
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert d.shape == expected.shape
    np.testing.assert_allclose(d.astype(np.float64), expected, rtol=tolerance, atol=tolerance * 8)


def refused(call: Callable[[], Any], status: str, *words: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        call()
    assert caught.value.status() == f"StatusCode.{status}", caught.value
    for word in words:
        assert word in caught.value.message()


def test_server_and_models(client: Client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("gemm_fp16", "1")
    assert not client.is_model_ready("resnet")
    assert "system_shared_memory" in client.get_server_metadata().extensions
    metadata = client.get_model_metadata("gemm_bf16")
    assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [
        *(("A", "BF16", [-1, -1]), ("B", "BF16", [-1, -1]), ("C", "BF16", [-1, -1]), ("bias", "BF16", [-1]))
    ]
    config = client.get_model_config("gemm_bf16", as_json=True)["config"]
    assert config["input"][0]["data_type"] == "TYPE_BF16"
    assert config["input"][3]["optional"]
    refused(lambda: client.get_model_config("resnet"), "NOT_FOUND", "resnet")


def test_load_and_unload(client: Client) -> None:
    client.unload_model("gemm_fp64")
    index = client.get_model_repository_index()
    assert {one.name: one.state for one in index.models}["gemm_fp64"] == "UNAVAILABLE"
    a = normal(2, 2, dtype=np.float64)
    refused(lambda: client.infer("gemm_fp64", both(a, a)), "UNAVAILABLE", "unloaded")
    client.load_model("gemm_fp64")
    check(client.infer("gemm_fp64", both(a, a)).as_numpy("D"), a, a)
    refused(lambda: client.load_model("gemm", config="{}"), "UNIMPLEMENTED")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 7, 3), (0, 7, 3), (5, 0, 3), (5, 7, 0)])
def test_types_and_zero_sizes(client: Client, dtype: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = normal(m, k, dtype=TYPES[dtype]), normal(k, n, dtype=TYPES[dtype])
    for model in (f"gemm_{dtype}", "gemm"):
        result = client.infer(model, both(a, b), request_id="one")
        check(result.as_numpy("D"), a, b, TOLERANCE[dtype])
        assert result.get_response().id == "one"
        assert result.get_output("D").datatype == dtype.upper()


def test_parameters_handles_and_compression(client: Client, spoken: Service) -> None:
    a, b = normal(4, 6), normal(6, 3)
    spoken.put("rpc-b", b)
    parameters = {"b": "handle:rpc-b", "alpha": "2.0", "activation": "relu", "out": "handle:rpc-d"}
    kept = client.infer("gemm_fp32", [tensor("A", a)], parameters=parameters)
    assert kept.get_response().parameters["handle"].string_param == "rpc-d"
    assert list(kept.get_response().raw_output_contents) == [b""]
    stored = spoken.http.get("/tensors/rpc-d", headers={"accept": "application/octet-stream"}).content
    np.testing.assert_allclose(
        np.frombuffer(stored, np.float32).reshape(4, 3), np.maximum(2 * a @ b, 0), rtol=1e-5, atol=1e-5
    )
    wanted = [triton.InferRequestedOutput("D")]
    for way in ("gzip", "deflate"):
        result = client.infer("gemm_fp32", both(a, b), outputs=wanted, compression_algorithm=way, priority=1)
        check(result.as_numpy("D"), a, b)
    batched = normal(3, 4, 6)
    check(client.infer("gemm_fp32", both(batched, b)).as_numpy("D"), batched, b)


def test_typed_contents(spoken: Service) -> None:
    with grpc.insecure_channel(address(spoken)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelInferRequest(model_name="gemm_fp32")
        for name, shape, values in (("A", [1, 2], [1, 2]), ("B", [2, 1], [3, float("inf")])):
            one = request.inputs.add(name=name, datatype="FP32", shape=shape)
            one.contents.fp32_contents.extend(values)
        reply = stub.ModelInfer(request)
        assert np.frombuffer(reply.raw_output_contents[0], np.float32) == [np.inf]
        for change in (
            lambda r: r.inputs[0].contents.fp64_contents.append(1),
            lambda r: r.inputs[0].contents.fp32_contents.append(1),
            lambda r: r.raw_input_contents.append(b"\0" * 8),
            lambda r: setattr(r.inputs[0], "datatype", "FP16"),
            lambda r: setattr(r.inputs[0], "datatype", "INT8"),
            lambda r: r.inputs[0].shape.append(1 << 40),
            lambda r: r.parameters["alpha"].SetInParent(),
        ):
            wrong = service_pb2.ModelInferRequest()
            wrong.CopyFrom(request)
            change(wrong)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(wrong)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    assert spoken.metric("gemm_arena_bytes", state="request") == 0


def test_arguments_that_do_not_fit(client: Client) -> None:
    a, b = normal(2, 3), normal(3, 2)
    wide = a.astype(np.float64)
    refused(
        lambda: client.infer("gemm_fp32", [tensor("A", wide), tensor("B", b)]), "INVALID_ARGUMENT", "FP64"
    )
    refused(lambda: client.infer("gemm_fp32", both(a, a)), "INVALID_ARGUMENT", "K = 2")
    refused(lambda: client.infer("gemm_fp32", [tensor("A", a)]), "INVALID_ARGUMENT", "B is missing")
    refused(lambda: client.infer("none", both(a, b)), "NOT_FOUND")
    refused(lambda: client.infer("gemm", both(a, b), model_version="9"), "NOT_FOUND")
    refused(lambda: client.infer("gemm", both(a, b), parameters={"x": 1}), "INVALID_ARGUMENT", "x")
    refused(lambda: client.infer("gemm", both(a, b), timeout=1), "DEADLINE_EXCEEDED")
    refused(lambda: client.infer("gemm", both(a, b), sequence_id=3), "UNIMPLEMENTED")


def test_shared_memory(client: Client) -> None:
    a, b = normal(40, 30), normal(30, 20)
    made = shm.create_shared_memory_region("r", f"/{RUN}-r", 1 << 16)
    try:
        shm.set_shared_memory_region(made, [a, b])
        client.register_system_shared_memory("r", f"/{RUN}-r", 1 << 16)
        status = client.get_system_shared_memory_status().regions["r"]
        assert (status.key, status.offset, status.byte_size) == (f"/{RUN}-r", 0, 1 << 16)
        refused(lambda: client.register_system_shared_memory("r", f"/{RUN}-r", 64), "INVALID_ARGUMENT")
        inputs = [triton.InferInput(n, list(x.shape), "FP32") for n, x in (("A", a), ("B", b))]
        inputs[0].set_shared_memory("r", a.nbytes)
        inputs[1].set_shared_memory("r", b.nbytes, offset=a.nbytes)
        output = triton.InferRequestedOutput("D")
        output.set_shared_memory("r", 3200, offset=1 << 15)
        told = client.infer("gemm_fp32", inputs, outputs=[output]).get_response()
        assert list(told.raw_output_contents) == [b""]  # C++ clients read one for each output
        d = shm.get_contents_as_numpy(made, np.float32, [1 << 14])[1 << 13 :][:800].reshape(40, 20)
        check(d, a, b, 1e-4)
        client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status().regions
        refused(lambda: client.infer("gemm_fp32", inputs), "INVALID_ARGUMENT", "'r'")
    finally:
        shm.destroy_shared_memory_region(made)
    refused(lambda: client.register_cuda_shared_memory("c", b"AAAA", 0, 64), "INVALID_ARGUMENT", "64")
    assert not client.get_cuda_shared_memory_status().regions
    client.unregister_cuda_shared_memory()


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.get_trace_settings(),
        lambda c: c.update_trace_settings("gemm", {"trace_rate": "1"}),
        lambda c: c.get_log_settings(),
        lambda c: c.update_log_settings({"log_verbose_level": 1}),
    ],
)
def test_settings_of_traces_and_logging_are_not_here(client: Client, call: Callable[[Client], Any]) -> None:
    refused(lambda: call(client), "UNIMPLEMENTED")


def test_statistics(client: Client, spoken: Service) -> None:
    def successes() -> int:
        (row,) = client.get_inference_statistics("gemm_fp32").model_stats
        assert row.inference_stats.success.count == row.inference_count
        return row.inference_count

    a = normal(4, 4)
    before = successes()
    client.infer("gemm_fp32", both(a, a))
    assert successes() == before + 1
    assert len(client.get_inference_statistics().model_stats) == 5
    assert spoken.metric("gemm_requests_total", route="grpc/ModelInfer", code="200") > 0


def test_async_stream_and_aio(client: Client, spoken: Service) -> None:
    a, b = normal(16, 8), normal(8, 16)
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer("gemm_fp32", both(a, b), lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=20)
    assert error is None
    check(result.as_numpy("D"), a, b)
    client.start_stream(lambda result, error: answers.put((result, error)))
    for n in range(3):
        client.async_stream_infer("gemm_fp32", both(a * n, b), request_id=str(n))
    client.async_stream_infer("gemm_fp32", both(a, a))
    client.async_stream_infer("gemm_fp32", both(a, b))
    for n in range(3):
        result, error = answers.get(timeout=20)
        assert result.get_response().id == str(n)
        assert result.get_response().parameters["triton_final_response"].bool_param
        check(result.as_numpy("D"), a * n, b)
    assert "K = 8" in answers.get(timeout=20)[1].message()
    check(answers.get(timeout=20)[0].as_numpy("D"), a, b)
    client.stop_stream()

    async def run() -> None:
        async with triton_aio.InferenceServerClient(address(spoken)) as aio:
            results = await asyncio.gather(*(aio.infer("gemm_fp32", both(a + n, b)) for n in range(16)))
            for n, one in enumerate(results):
                check(one.as_numpy("D"), a + n, b, 1e-4)

    asyncio.run(run())
    assert spoken.metric("gemm_arena_bytes", state="request") == 0
    assert spoken.metric("gemm_arena_bytes", state="reply") == 0


def test_a_worker_is_replaced_beside_grpc(client: Client, spoken: Service) -> None:
    a = normal(3, 3)
    before = spoken.worker().pid
    spoken.worker().kill()
    spoken.until(lambda: [one for one in spoken.workers() if one.pid != before] and spoken.is_ready(), 60)
    check(client.infer("gemm_fp32", both(a, a)).as_numpy("D"), a, a)


def test_keys_hold_here_too(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    gemm = keys.add(path, "ann", scopes=["gemm"])[1]
    tensors = keys.add(path, "bob", scopes=["tensors"])[1]
    with running(tmp_path / "data", *FLAGS, "--keys-file", str(path)) as service:
        service.ready()
        a = normal(2, 2)
        with Client(address(service)) as client:
            assert client.is_server_ready()  # open, for probes

            def infer(token: str) -> Any:
                return client.infer("gemm_fp32", both(a, a), headers={"authorization": f"Bearer {token}"})

            check(infer(gemm).as_numpy("D"), a, a)
            refused(lambda: infer(tensors), "PERMISSION_DENIED", "gemm")
            refused(lambda: infer("gemm_x_y"), "UNAUTHENTICATED")
            refused(lambda: client.infer("gemm_fp32", both(a, a)), "UNAUTHENTICATED")
            refused(client.get_server_metadata, "UNAUTHENTICATED")
            headers = {"authorization": f"Bearer {gemm}"}
            refused(lambda: client.unload_model("gemm", headers=headers), "PERMISSION_DENIED", "admin")
            refused(
                lambda: client.register_system_shared_memory("r", f"{RUN}-r", 64, headers=headers),
                "PERMISSION_DENIED",
            )


@contextlib.contextmanager
def stream(folder: Path, quota: keys.Quota) -> Iterator[tuple[Callable[[], object], Callable[[], Any]]]:
    """An open stream of a key of that quota: what revokes the key, and what sends a message and takes its answer."""
    path = folder / "keys.json"
    key, token = keys.add(path, "ann", quota=quota)
    message = service_pb2.ModelInferRequest(model_name="gemm_fp32", raw_input_contents=[b"\0" * 4] * 2)
    for name in "AB":
        message.inputs.add(name=name, datatype="FP32", shape=[1, 1])
    unsent: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> Any:
        unsent.put(message)
        return next(answers)

    with (
        running(folder / "data", *FLAGS, "--keys-file", str(path)) as service,
        grpc.insecure_channel(address(service.ready())) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),)
        answers = stub.ModelStreamInfer(iter(unsent.get, None), metadata=metadata, timeout=60)
        try:
            yield partial(keys.revoke, path, key.id), ask
        finally:
            unsent.put(None)


def test_a_stream_ends_with_its_key(tmp_path: Path) -> None:
    with stream(tmp_path, keys.Quota()) as (revoke, ask):
        assert ask().error_message == ""
        revoke()
        time.sleep(1.5)  # the file is looked at once a second
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_each_message_of_a_stream_is_a_request(tmp_path: Path) -> None:
    """The first has been paid for by what opened the stream, in whose place all run."""
    with stream(tmp_path, keys.Quota(requests_per_second=0.01, concurrent_requests=1)) as (_, ask):
        assert ask().error_message == ""
        for _ in range(3):
            assert "more requests a second" in ask().error_message


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "RepositoryModelUnload"])
def test_who_may_not_is_refused_before_a_message_comes(tmp_path: Path, method: str) -> None:
    path = tmp_path / "keys.json"
    token = keys.add(path, "bob", scopes=["tensors"])[1]
    release = threading.Event()

    def unsent() -> Iterator[bytes]:
        release.wait(30)
        yield b""

    with running(tmp_path / "data", *FLAGS, "--keys-file", str(path)) as service:
        with grpc.insecure_channel(address(service.ready())) as channel:
            call = channel.stream_stream(f"/inference.GRPCInferenceService/{method}")
            try:
                for metadata, code in (
                    ((), grpc.StatusCode.UNAUTHENTICATED),
                    ((("authorization", f"Bearer {token}"),), grpc.StatusCode.PERMISSION_DENIED),
                ):
                    with pytest.raises(grpc.RpcError) as caught:
                        next(call(unsent(), metadata=metadata, timeout=20))
                    assert caught.value.code() is code
            finally:
                release.set()
            with pytest.raises(grpc.RpcError) as caught:
                next(channel.stream_stream("/inference.GRPCInferenceService/No")(iter([b""]), timeout=20))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert service.metric("gemm_requests_total", route=f"grpc/{method}", code="401") == 1
        assert service.metric("gemm_requests_total", route=f"grpc/{method}", code="403") == 1


class Counted(socketserver.BaseRequestHandler):
    """A connection to `target`, whose bytes from there are counted."""

    target: tuple[str, int]
    count = 0

    def handle(self) -> None:
        with socket.create_connection(self.target) as far:
            answering = threading.Thread(target=self._answers, args=(far,))
            answering.start()
            while piece := self.request.recv(1 << 16):
                far.sendall(piece)
            far.shutdown(socket.SHUT_WR)
            answering.join()

    def _answers(self, far: socket.socket) -> None:
        while piece := far.recv(1 << 16):
            type(self).count += len(piece)
            self.request.sendall(piece)


@pytest.mark.parametrize("way", ["none", "deflate", "gzip"])
def test_replies_are_compressed_where_that_is_set(tmp_path: Path, way: str) -> None:
    counted = type("Counted", (Counted,), {"count": 0})
    a, b = np.ones((500, 3), np.float32), np.ones((3, 400), np.float32)
    with running(tmp_path / "data", *FLAGS, "--grpc-compression", way) as service:
        counted.target = ("127.0.0.1", int(address(service.ready()).rpartition(":")[2]))
        with socketserver.ThreadingTCPServer(("127.0.0.1", 0), counted) as relay:
            threading.Thread(target=relay.serve_forever).start()
            try:
                with Client(f"127.0.0.1:{relay.server_address[1]}") as client:
                    check(client.infer("gemm_fp32", both(a, b)).as_numpy("D"), a, b)
            finally:
                relay.shutdown()
    assert (counted.count < 80_000) is (way != "none"), counted.count  # of 800,000


def test_a_taken_port_stops_the_start(spoken: Service, tmp_path: Path) -> None:
    port = address(spoken).partition(":")[2]
    with pytest.raises(AssertionError, match=f"grpc_port = {port}"), running(tmp_path, "--grpc-port", port):
        pass


def test_our_messages_are_the_protocols() -> None:
    """Every field of ours has the client's number, type and label."""
    ours = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(ours)
    theirs: dict[str, Any] = {}
    for module in (service_pb2, model_config_pb2):
        known = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(known)
        theirs |= {one.name: one for one in known.message_type}

    def compare(mine: Any, other: Any) -> None:
        fields = {one.name: one for one in other.field}
        for one in mine.field:
            twin = fields[one.name]
            assert (one.number, one.type, one.label) == (twin.number, twin.type, twin.label), one.name
        nested = {one.name: one for one in other.nested_type}
        for one in mine.nested_type:
            compare(one, nested[one.name])

    assert len(ours.message_type) > 40
    for message in ours.message_type:
        compare(message, theirs[message.name])


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
def test_replies_are_written_as_protobuf_writes_them(nbytes: int) -> None:
    head = pb.ModelInferResponse(model_name="gemm", id="7")
    content = bytes(n % 251 for n in range(1000)) * 3001
    reply = InferReply(head, content[:nbytes])
    whole = service_pb2.ModelInferResponse.FromString(reply.encoded())
    assert (whole.model_name, whole.id, list(whole.raw_output_contents)) == ("gemm", "7", [content[:nbytes]])
    told = service_pb2.ModelStreamInferResponse.FromString(reply.streamed())
    assert told.error_message == ""
    assert told.infer_response.parameters["triton_final_response"].bool_param
    assert list(told.infer_response.raw_output_contents) == [content[:nbytes]]
    assert Received.reader(pb.ModelInferResponse)(reply.encoded()).nbytes == len(reply.encoded())
