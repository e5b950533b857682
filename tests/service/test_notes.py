"""Results that were answered before the index knew of them: what a start makes of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.errors import ServiceError
from service.store import notes
from service.store.index import ContentRow, NameRow
from service.store.notes import Notes
from tests.service.storing import Settings, open_store, put, tensor


def pair(id_: str, name: str = "d") -> notes.Note:
    row = ContentRow(id_, "ann", name, id_, "fp32", (8, 8), 256, whole=False)
    return row, NameRow("ann", name, id_, 5.0, None)


def test_what_was_not_dropped_is_open_after_a_start(tmp_path: Path) -> None:
    one = Notes(tmp_path / "notes")
    assert one.open() == []
    for id_, name in (("one", "a"), ("two", "b"), ("three", "c"), ("four", "c"), ("five", "c")):
        one.add(*pair(id_, name))
    one.drop(pair("two", "b")[1])
    one.drop(pair("four", "c")[1])  # has been replaced: that it is there says nothing of the last
    one.close()
    with open(tmp_path / "notes", "ab") as file:
        file.write(b'[["cut')
    again = Notes(tmp_path / "notes")
    assert again.open() == [pair("one", "a"), pair("five", "c")]
    again.close()


def test_a_long_file_is_replaced_by_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MOST_BYTES", 1000)
    one = Notes(tmp_path / "notes")
    one.open()
    one.add(*pair("open", "a"))
    for n in range(40):
        one.add(*pair(str(n)))
        assert os.path.getsize(tmp_path / "notes") < 1300
    one.drop(pair("39")[1])
    one.close()
    again = Notes(tmp_path / "notes")
    assert again.open() == [pair("open", "a")]
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    again.close()


async def test_a_result_that_the_index_never_got_is_lost_and_not_what_its_name_meant_before(
    tmp_path: Path,
) -> None:
    async with open_store(Settings(tmp_path)) as store:
        await put(store, "ann", "d", tensor(8, 8))
        await put(store, "ann", "e", tensor(8, 8))
        await put(store, "ann", "e", tensor(8, 8, seed=1), durable=False)
    one = Notes(tmp_path / "results.notes")
    assert one.open() == []
    one.add(*pair("new"))
    one.close()
    for _ in range(2):
        async with open_store(Settings(tmp_path)) as store:
            with pytest.raises(ServiceError) as caught:
                await store.pin("ann", "d")
            assert caught.value.status == 410
            (await store.pin("ann", "e")).release()
    async with open_store(Settings(tmp_path)) as store:
        await put(store, "ann", "d", tensor(8, 8))
        (await store.pin("ann", "d")).release()
