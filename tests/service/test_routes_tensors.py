"""/tensors over the application: every form in and out, conditions, ranges, names, owners, limits."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from service import download
from tests.service.serving import RAW, Site, serving
from tests.service.storing import MIB, tensor

NPY = {"content-type": "application/x-npy"}
SAFETENSORS = {"content-type": "application/vnd.safetensors"}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path) as site:
        yield site


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


async def put(client: httpx.AsyncClient, name: str, array: np.ndarray, **options: Any) -> httpx.Response:
    params = {"dtype": "fp32", "shape": "x".join(map(str, array.shape))} | options.pop("params", {})
    headers = RAW | options.pop("headers", {})
    return await client.put(f"/tensors/{name}", content=array.tobytes(), params=params, headers=headers)


async def raw(client: httpx.AsyncClient, name: str, **headers: str) -> httpx.Response:
    headers = {key.replace("_", "-"): value for key, value in headers.items()}
    return await client.get(f"/tensors/{name}", headers={"accept": RAW["content-type"], **headers})


class TestPut:
    async def test_raw(self, site: Site) -> None:
        reply = await put(site.ann, "w", tensor(3, 4))
        assert reply.status_code == 201
        assert reply.headers["location"] == "/tensors/w"
        told = reply.json()
        assert reply.headers["etag"] == f'"{told["etag"]}"'
        assert (told["name"], told["dtype"], told["shape"], told["nbytes"]) == ("w", "fp32", [3, 4], 48)
        assert told["durable"] is True
        assert told["expires"] is None
        assert (await raw(site.ann, "w")).content == tensor(3, 4).tobytes()
        assert (await put(site.ann, "w", tensor(2, 2))).status_code == 200

    @pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("kind", ["<f4", ">f4", ">f8", "<f2"])
    async def test_npy(self, site: Site, version: tuple[int, int], order: Any, kind: str) -> None:
        array = np.asarray(tensor(5, 3).astype(kind), order=order)
        array[0, 0] = np.nan
        reply = await site.ann.put("/tensors/w", content=npy(array, version), headers=NPY)
        assert reply.status_code == 201, reply.text
        want = array.astype(array.dtype.newbyteorder("<"))
        assert (await raw(site.ann, "w")).content == want.tobytes(order="C")

    async def test_npy_whose_conversion_never_fits_is_too_large(self, tmp_path: Path) -> None:
        array = np.asfortranarray(tensor(512, 1024))  # 2 MiB, and as many again in C order
        async with serving(tmp_path / "small", key_bytes=3 << 20) as site:
            reply = await site.ann.put("/tensors/w", content=npy(array), headers=NPY)
            problem = reply.json()
            told = (reply.status_code, problem["code"], problem["field"], problem["limit"])
            assert told == (413, "too_large", "body", 3 << 20)

    async def test_npy_of_bf16(self, site: Site) -> None:
        array = tensor(4, 4).astype(ml_dtypes.bfloat16)
        body = npy(array.view("V2"))
        refused = await site.ann.put("/tensors/w", content=body, headers=NPY)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid")
        reply = await site.ann.put("/tensors/w", content=body, headers=NPY, params={"dtype": "bf16"})
        assert reply.json()["dtype"] == "bf16"
        assert (await raw(site.ann, "w")).content == array.tobytes()
        assert (await site.ann.get("/tensors/w", headers={"accept": NPY["content-type"]})).status_code == 406

    async def test_npy_of_objects(self, site: Site) -> None:
        body = npy(np.array([[{}]], dtype=object))
        reply = await site.ann.put("/tensors/w", content=body, headers=NPY)
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid")

    async def test_safetensors(self, site: Site) -> None:
        array = tensor(6, 2)
        body = safetensors.numpy.save({"anything": array})
        reply = await site.ann.put("/tensors/w", content=body, headers=SAFETENSORS)
        assert reply.status_code == 201
        assert (await raw(site.ann, "w")).content == array.tobytes()

    async def test_safetensors_of_several(self, site: Site) -> None:
        several = {"x": tensor(3, 3), "y": tensor(700, 700, seed=1), "z": tensor(2, 2, seed=2)}
        body = safetensors.numpy.save(several)
        reply = await site.ann.put("/tensors/w", content=body, headers=SAFETENSORS)
        assert (reply.status_code, reply.json()["field"]) == (422, "tensor")
        for name, array in several.items():
            reply = await site.ann.put(
                "/tensors/w", content=body, headers=SAFETENSORS, params={"tensor": name}
            )
            assert reply.is_success
            assert (await raw(site.ann, "w")).content == array.tobytes()

    async def test_in_chunks_without_a_length(self, site: Site) -> None:
        array = tensor(100, 100)

        async def body() -> AsyncIterator[bytes]:
            data = array.tobytes()
            for start in range(0, len(data), 999):
                yield data[start : start + 999]

        params = {"dtype": "fp32", "shape": "100,100"}
        reply = await site.ann.put("/tensors/w", content=body(), params=params, headers=RAW)
        assert reply.status_code == 201
        assert (await raw(site.ann, "w")).content == array.tobytes()

    async def test_time_to_live(self, site: Site) -> None:
        reply = await put(site.ann, "w", tensor(2, 2), params={"ttl_seconds": "10"})
        assert reply.json()["expires"] == site.clock.now + 10
        site.clock.now += 10
        assert (await raw(site.ann, "w")).status_code == 404

    async def test_conditions(self, site: Site) -> None:
        absent = {"if-none-match": "*"}
        first = await put(site.ann, "w", tensor(2, 2), headers=absent)
        assert first.status_code == 201
        assert (await put(site.ann, "w", tensor(2, 2), headers=absent)).status_code == 412
        match = {"if-match": first.headers["etag"]}
        assert (await put(site.ann, "w", tensor(3, 3), headers=match)).status_code == 200
        assert (await put(site.ann, "w", tensor(4, 4), headers=match)).status_code == 412
        assert (await site.ann.delete("/tensors/w", headers=match)).status_code == 412
        # An ETag of any form names the content.
        now = (await site.ann.get("/tensors/w")).headers["etag"]
        assert (await site.ann.delete("/tensors/w", headers={"if-match": now})).status_code == 204

    @pytest.mark.parametrize(
        ("params", "headers", "content", "code", "field"),
        [
            ({"shape": "2x2"}, RAW, bytes(16), "invalid", "dtype"),
            ({"dtype": "fp32"}, RAW, bytes(16), "invalid", "shape"),
            ({"dtype": "fp31", "shape": "2x2"}, RAW, bytes(16), "invalid", "dtype"),
            ({"dtype": "fp32", "shape": "2x"}, RAW, bytes(16), "invalid", "shape"),
            ({"dtype": "fp32", "shape": "2x2"}, RAW, bytes(15), "malformed", "body"),
            ({"dtype": "fp32", "shape": "2x2", "speed": "1"}, RAW, bytes(16), "invalid", "speed"),
            ({"dtype": "fp32", "shape": "2x2", "ttl_seconds": "0"}, RAW, bytes(16), "invalid", "ttl_seconds"),
            ({"dtype": "fp32", "shape": "2x2"}, {}, bytes(16), "unsupported_media_type", "content-type"),
            ({"shape": "2x2"}, NPY, b"", "invalid", "shape"),
            ({}, NPY, b"", "malformed", "body"),
            ({}, NPY, b"\x93NUMPY\x01\x00\x00\x00{}", "malformed", "body"),
            ({}, NPY, npy(tensor(2, 2))[:-1], "malformed", "body"),
            ({}, NPY, npy(tensor(2, 2)) + b"x", "malformed", "body"),
            ({}, SAFETENSORS, b"123", "malformed", "body"),
            ({}, SAFETENSORS, safetensors.numpy.save({}), "invalid", "tensor"),
            ({"dtype": "fp32"}, SAFETENSORS, b"", "invalid", "dtype"),
            ({"tensor": "x"}, SAFETENSORS, safetensors.numpy.save({"y": tensor(1, 1)}), "invalid", "tensor"),
            ({}, {**NPY, "content-encoding": "gzip"}, b"", "unsupported_media_type", "content-encoding"),
        ],
    )
    async def test_refused(
        self, site: Site, params: Any, headers: Any, content: bytes, code: str, field: str
    ) -> None:
        reply = await site.ann.put("/tensors/w", params=params, headers=headers, content=content)
        assert reply.headers["content-type"] == "application/problem+json"
        assert (reply.json()["code"], reply.json()["field"]) == (code, field)
        assert site.services.slots.bytes_by_state["request"] == 0
        assert (await raw(site.ann, "w")).status_code == 404

    @pytest.mark.parametrize("path", ["a%41", "%41", ".a", "-a", "a%0a", "x" * 129, "a%2fb", "%C3%BC", "a+b"])
    async def test_names_are_checked_as_they_were_sent(self, site: Site, path: str) -> None:
        url = httpx.URL("http://localhost", raw_path=f"/tensors/{path}?dtype=fp32&shape=1x1".encode())
        reply = await site.ann.put(url, content=bytes(4), headers=RAW)
        assert reply.status_code in {404, 422}
        assert (await site.ann.get("/tensors")).json()["tensors"] == []

    async def test_limits(self, tmp_path: Path) -> None:
        async with serving(tmp_path, max_body_bytes=1000, store_disk_bytes=2000) as site:
            assert (await put(site.ann, "w", tensor(16, 16))).json()["code"] == "too_large"
            assert (await put(site.ann, "w", tensor(15, 15))).status_code == 201
            assert (await put(site.ann, "v", tensor(15, 15))).json()["code"] == "no_room"
            body = npy(tensor(16, 16))

            async def chunks() -> AsyncIterator[bytes]:
                yield body

            reply = await site.ann.put("/tensors/w", content=chunks(), headers=NPY)
            assert (reply.status_code, reply.json()["limit"]) == (413, 1000)

    async def test_share_of_an_owner(self, site: Site) -> None:
        assert (await put(site.bob, "w", tensor(30, 30))).status_code == 201
        reply = await put(site.bob, "v", tensor(30, 30))
        assert (reply.status_code, reply.json()["code"], reply.json()["limit"]) == (429, "quota", 4096)
        assert (await put(site.ann, "v", tensor(30, 30))).status_code == 201
        assert (await site.bob.delete("/tensors/w")).status_code == 204
        assert (await put(site.bob, "v", tensor(30, 30))).status_code == 201

    async def test_what_is_beyond_the_share_is_refused_unread(self, site: Site) -> None:
        body, read = npy(tensor(30, 30)), []

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1000):
                read.append(start)
                yield body[start : start + 1000]

        assert (await put(site.bob, "w", tensor(30, 30))).status_code == 201
        reply = await site.bob.put("/tensors/v", content=chunks(), headers=NPY)
        assert (reply.status_code, reply.json()["code"]) == (429, "quota")
        assert len(read) < 3

    async def test_a_full_share_takes_a_new_version_in_every_form(self, site: Site) -> None:
        array = tensor(31, 32)

        async def chunks() -> AsyncIterator[bytes]:
            yield npy(array)

        assert (await put(site.bob, "w", array)).status_code == 201
        assert (await put(site.bob, "v", tensor(2, 32))).json()["code"] == "quota"
        assert (await put(site.bob, "w", array + 1)).status_code == 200
        for content, headers in (
            (npy(array), NPY),
            (chunks(), NPY),
            (safetensors.numpy.save({"x": array, "other": array}), SAFETENSORS),
        ):
            reply = await site.bob.put(
                "/tensors/w?tensor=x" if headers is SAFETENSORS else "/tensors/w",
                content=content,
                headers=headers,
            )
            assert reply.status_code == 200
        reply = await put(site.bob, "w", tensor(32, 32))
        assert (reply.status_code, reply.json()["code"]) == (429, "quota")
        body = {"a": array.tolist(), "b": np.eye(32).tolist(), "out": {"handle": "w"}}
        for durable in (True, False):
            assert (await site.bob.post("/gemm", json=body | {"durable": durable})).status_code == 200
        reply = await site.bob.post("/gemm", json=body | {"out": {"handle": "v"}})
        assert (reply.status_code, reply.json()["code"], reply.json()["field"]) == (429, "quota", "out")


class TestGet:
    @pytest.mark.parametrize("warm", [True, False])
    async def test_forms(self, site: Site, warm: bool) -> None:
        array = tensor(300, 301)
        await put(site.ann, "w", array)
        if not warm:
            self.cool(site)
        reply = await site.ann.get("/tensors/w")
        np.testing.assert_array_equal(safetensors.numpy.load(reply.content)["w"], array)
        reply = await site.ann.get("/tensors/w", headers={"accept": "application/x-npy"})
        np.testing.assert_array_equal(np.load(io.BytesIO(reply.content)), array)
        reply = await raw(site.ann, "w")
        assert reply.content == array.tobytes()
        assert (reply.headers["x-gemm-shape"], reply.headers["x-gemm-dtype"]) == ("300x301", "fp32")
        assert (site.services.store.contents.memory.nbytes > 0) == warm  # a download is no use that loads
        reply = await site.ann.get("/tensors/w", headers={"accept": "application/json"})
        np.testing.assert_array_equal(np.array(reply.json()["data"], np.float32), array)

    @staticmethod
    def cool(site: Site) -> None:
        memory = site.services.store.contents.memory
        memory.budget, budget = 0, memory.budget
        memory.trim()
        memory.budget = budget

    async def test_json_of_what_json_has_no_numbers_for(self, site: Site) -> None:
        await put(site.ann, "w", np.array([[np.nan, np.inf, -np.inf]], np.float32))
        reply = await site.ann.get("/tensors/w", headers={"accept": "application/json"})
        assert reply.json() == {"dtype": "fp32", "shape": [1, 3], "data": [["NaN", "Infinity", "-Infinity"]]}

    @pytest.mark.parametrize("accept", ["application/json", "application/x-npy", "*/*", RAW["content-type"]])
    @pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (1, 1)])
    async def test_small_shapes(self, site: Site, accept: str, shape: tuple[int, ...]) -> None:
        await put(site.ann, "w", np.ones(shape, np.float32))
        reply = await site.ann.get("/tensors/w", headers={"accept": accept})
        assert reply.status_code == 200
        assert reply.headers["x-gemm-shape"] == "x".join(map(str, shape))

    async def test_head(self, site: Site) -> None:
        await put(site.ann, "w", tensor(8, 8))
        for accept in ("*/*", "application/json"):
            got = await site.ann.get("/tensors/w", headers={"accept": accept})
            head = await site.ann.head("/tensors/w", headers={"accept": accept})
            assert head.content == b""
            told = {"etag", "content-type", "x-gemm-shape", "x-gemm-dtype", "accept-ranges"}
            assert {k: v for k, v in head.headers.items() if k in told} == {
                k: v for k, v in got.headers.items() if k in told
            }
        assert (await site.ann.head("/tensors/none")).status_code == 404

    @pytest.mark.parametrize("warm", [True, False])
    @pytest.mark.parametrize(
        "accept", ["application/vnd.safetensors", "application/x-npy", RAW["content-type"]]
    )
    async def test_ranges(self, site: Site, accept: str, warm: bool) -> None:
        await put(site.ann, "w", tensor(10, 10))
        if not warm:
            self.cool(site)
        whole = await site.ann.get("/tensors/w", headers={"accept": accept})
        length = len(whole.content)
        for first, last in [(0, 0), (3, 20), (100, 250), (length - 1, length - 1), (0, length + 9)]:
            headers = {"accept": accept, "range": f"bytes={first}-{last}"}
            part = await site.ann.get("/tensors/w", headers=headers)
            assert part.status_code == 206
            assert part.content == whole.content[first : last + 1]
            end = min(last, length - 1)
            assert part.headers["content-range"] == f"bytes {first}-{end}/{length}"
            assert part.headers["content-length"] == str(len(part.content))

    async def test_head_knows_no_ranges(self, site: Site) -> None:
        await put(site.ann, "w", tensor(2, 2))
        for asked in ("bytes=0-3", "bytes=99-"):
            reply = await site.ann.head("/tensors/w", headers={"accept": RAW["content-type"], "range": asked})
            assert (reply.status_code, reply.headers["content-length"]) == (200, "16")

    async def test_range_outside_or_of_another_version(self, site: Site) -> None:
        await put(site.ann, "w", tensor(2, 2))
        reply = await raw(site.ann, "w", range="bytes=16-")
        assert (reply.status_code, reply.headers["content-range"]) == (416, "bytes */16")
        reply = await raw(site.ann, "w", range="bytes=0-3", if_range='"other"')
        assert (reply.status_code, len(reply.content)) == (200, 16)

    async def test_not_modified(self, site: Site) -> None:
        etag = (await put(site.ann, "w", tensor(2, 2))).headers["etag"]
        got = await site.ann.get("/tensors/w")
        for tag in (etag, got.headers["etag"]):
            reply = await site.ann.get("/tensors/w", headers={"if-none-match": tag})
            assert (reply.status_code, reply.content) == (304, b"")
            assert reply.headers["etag"] == got.headers["etag"]
        await put(site.ann, "w", tensor(3, 3))
        assert (await site.ann.get("/tensors/w", headers={"if-none-match": etag})).status_code == 200
        assert (await site.ann.get("/tensors/w", headers={"if-match": etag})).status_code == 412

    async def test_a_header_that_comes_in_parts_is_one_list(self, site: Site) -> None:
        etag = (await put(site.ann, "w", tensor(2, 2))).headers["etag"]
        parts = [("if-none-match", etag), ("if-none-match", '"other"')]
        assert (await site.ann.get("/tensors/w", headers=parts)).status_code == 304
        parts = [("accept", "application/x-npy"), ("accept", "text/html")]
        got = await site.ann.get("/tensors/w", headers=parts)
        assert (got.status_code, got.headers["content-type"]) == (200, "application/x-npy")

    async def test_forms_have_their_own_etags(self, site: Site) -> None:
        await put(site.ann, "w", tensor(2, 2))
        tags = set()
        for accept in (
            "application/vnd.safetensors",
            "application/x-npy",
            "application/json",
            RAW["content-type"],
        ):
            reply = await site.ann.get("/tensors/w", headers={"accept": accept})
            assert reply.headers["vary"] == "accept"
            tags.add(reply.headers["etag"])
        assert len(tags) == 4

    async def test_of_another_owner(self, site: Site) -> None:
        await put(site.ann, "w", tensor(2, 2))
        for reply in [
            await site.bob.get("/tensors/w"),
            await site.bob.head("/tensors/w"),
            await site.bob.delete("/tensors/w"),
        ]:
            assert reply.status_code == 404
        assert (await site.bob.get("/tensors")).json() == {"tensors": [], "next": None}

    @pytest.mark.parametrize(
        ("accept", "status"), [("text/html", 406), ("text/html, */*;q=0.1", 200), ("application/*;q=0", 406)]
    )
    async def test_accept(self, site: Site, accept: str, status: int) -> None:
        await put(site.ann, "w", tensor(2, 2))
        assert (await site.ann.get("/tensors/w", headers={"accept": accept})).status_code == status

    async def test_deleted_while_it_is_sent(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(download, "CHUNK", 1024)
        array = tensor(256, 256)
        await put(site.ann, "w", array)
        self.cool(site)
        read = site.services.store.contents.read
        pieces = []

        async def read_slowly(*args: Any) -> Any:
            pieces.append(args)
            if len(pieces) == 2:
                await put(site.ann, "w", -array)
                await site.ann.delete("/tensors/w")
            return await read(*args)

        monkeypatch.setattr(site.services.store.contents, "read", read_slowly)
        assert (await raw(site.ann, "w")).content == array.tobytes()
        assert len(pieces) == 256
        await site.services.store.effects.settle()
        assert not list((site.services.settings.data / "tensors").iterdir())

    async def test_unknown_query(self, site: Site) -> None:
        await put(site.ann, "w", tensor(2, 2))
        assert (await site.ann.get("/tensors/w?form=npy")).json()["field"] == "form"


class TestList:
    async def test_pages(self, site: Site) -> None:
        for name in ("c", "a", "b"):
            await put(site.ann, name, tensor(1, 1))
        page = (await site.ann.get("/tensors", params={"limit": 2})).json()
        assert [one["name"] for one in page["tensors"]] == ["a", "b"]
        page = (await site.ann.get("/tensors", params={"after": page["next"]})).json()
        assert [one["name"] for one in page["tensors"]] == ["c"]
        assert page["next"] is None

    @pytest.mark.parametrize("params", [{"limit": 0}, {"limit": "x"}, {"limit": 9999}, {"page": 2}])
    async def test_refused(self, site: Site, params: Any) -> None:
        reply = await site.ann.get("/tensors", params=params)
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid")

    async def test_other_methods(self, site: Site) -> None:
        reply = await site.ann.post("/tensors/w")
        assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET, HEAD, PUT")
        reply = await site.ann.patch("/tensors")
        assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD")


async def test_openapi_tells_of_every_route(site: Site) -> None:
    paths = site.app.openapi()["paths"]
    assert set(paths["/tensors/{name}"]) == {"put", "get", "head", "delete"}
    put_ = paths["/tensors/{name}"]["put"]
    assert set(put_["requestBody"]["content"]) == {
        "application/vnd.safetensors",
        "application/x-npy",
        "application/octet-stream",
    }
    assert {"name", "dtype", "shape", "tensor", "ttl_seconds", "If-Match"} <= {
        parameter["name"] for parameter in put_["parameters"]
    }


async def test_of_four_mebibytes_stays_out_of_the_heap(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is what holds it: the slot that the body came into becomes the memory tier's."""
    array = tensor(1024, 1024)
    await put(site.ann, "w", array)
    assert site.services.slots.bytes_by_state["tensor"] == 4 * MIB
    pin = await site.services.store.pin("ann", "w")
    assert bytes(pin.view()) == array.tobytes()
    pin.release()
