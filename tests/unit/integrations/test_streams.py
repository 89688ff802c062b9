"""Packs of a stream: every sample once, within both budgets; a resumed stream goes on as if it had not been stopped."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from omnibal_ext.errors import UserError
from omnibal_ext.integrations.streams import PackedStream
from tests.unit.integrations.peers import drawn, sample

BUDGETS, BUFFER, COUNT = (12, 300), 40, 150


class Samples:
    """A stream that can be told to go on somewhere, and counts what is read of it."""

    def __init__(self, count: int = COUNT, seed: int = 0) -> None:
        self.tiles, self.tokens = drawn(count, seed)
        self.at = self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < len(self.tiles):
            number, self.at, self.read = self.at, self.at + 1, self.read + 1
            yield sample(number, int(self.tiles[number]), int(self.tokens[number]))
        self.at = 0


class Plain(Samples):
    """One that cannot, and begins anew whenever it is iterated."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.at = 0
        return super().__iter__()


def stream_of(seeks: bool, **more: Any) -> PackedStream:
    return PackedStream((Samples if seeks else Plain)(), *BUDGETS, buffer=BUFFER, seeks=seeks, **more)


def numbers(batch: dict[str, Any]) -> list[int]:
    """Of a pack's samples: their tokens are their numbers."""
    return list(dict.fromkeys(batch["input_ids"].reshape(-1).tolist()))


@pytest.mark.parametrize("seeks", [False, True])
def test_every_sample_is_in_one_pack_of_each_epoch_and_no_pack_is_beyond_a_budget(seeks: bool) -> None:
    stream = stream_of(seeks)
    tiles, tokens = drawn(COUNT)
    for _ in range(2):
        packs = [numbers(batch) for batch in stream]
        assert sorted(number for pack in packs for number in pack) == list(range(COUNT))
        assert max(tiles[pack].sum() for pack in packs) <= BUDGETS[0]
        assert max(tokens[pack].sum() for pack in packs) <= BUDGETS[1]


def test_the_emptiest_pack_of_a_buffer_waits_for_samples_of_the_next() -> None:
    packs = [numbers(batch) for batch in stream_of(False)]
    assert any(min(pack) < BUFFER <= max(pack) for pack in packs)


@pytest.mark.parametrize("seeks", [False, True])
def test_a_stream_resumed_anywhere_goes_on_as_if_it_had_not_been_stopped(seeks: bool) -> None:
    whole = [numbers(batch) for batch in stream_of(seeks)]
    stopped = stream_of(seeks)
    for done, batch in enumerate(stopped, 1):
        assert numbers(batch) == whole[done - 1]
        resumed = stream_of(seeks)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert [numbers(one) for one in resumed] == whole[done:]
        assert [numbers(one) for one in resumed] == whole, "the epoch after it"


def test_a_stream_that_seeks_reads_again_what_waits_and_the_buffer_alone() -> None:
    stopped = stream_of(True)
    iterated = iter(stopped)
    whole = len([*stream_of(True)])
    for _ in range(whole - 1):
        next(iterated)
    resumed = stream_of(True)
    resumed.load_state_dict(stopped.state_dict())
    assert len([*resumed]) == 1
    assert 0 < stopped.state_dict()["first"] == COUNT - resumed.samples.read


def test_a_data_loader_takes_it_for_a_stream() -> None:
    loader = DataLoader(stream_of(False), batch_size=None)  # type: ignore[arg-type]
    assert [numbers(batch) for batch in loader] == [numbers(batch) for batch in stream_of(False)]


def test_an_empty_stream_has_no_packs_and_a_buffer_of_none_is_refused() -> None:
    assert list(PackedStream([], *BUDGETS)) == []
    with pytest.raises(UserError, match="buffer"):
        PackedStream([], *BUDGETS, buffer=0)


has_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed here")
has_webdataset = pytest.mark.skipif(
    importlib.util.find_spec("webdataset") is None, reason="webdataset is not installed here"
)


def of_row(row: dict[str, Any]) -> dict[str, Any]:
    return sample(row["number"], row["tiles"], row["tokens"])


def hugging_face(shards: int) -> Any:
    import datasets

    tiles, tokens = drawn(COUNT)
    table = datasets.Dataset.from_dict({"number": range(COUNT), "tiles": tiles.tolist(), "tokens": tokens.tolist()})
    return table.to_iterable_dataset(num_shards=shards)


@has_datasets
def test_a_streamed_data_set_of_hugging_face_is_resumed_exactly() -> None:
    def stream() -> PackedStream:
        return PackedStream(
            hugging_face(2), *BUDGETS, buffer=BUFFER, seeks=True, join=lambda rows: [row["number"] for row in rows],
            sample_size=lambda row: (row["tiles"], row["tokens"]),
        )  # fmt: skip

    whole, stopped = list(stream()), stream()
    assert sorted(number for pack in whole for number in pack) == list(range(COUNT))
    for done, _ in enumerate(stopped, 1):
        resumed = stream()
        resumed.load_state_dict(stopped.state_dict())
        assert list(resumed) == whole[done:]
    assert list(resumed) == whole


@has_webdataset
def test_a_webdataset_is_resumed_exactly(tmp_path: Path) -> None:
    import webdataset

    tiles, tokens = drawn(COUNT)
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as tar:
        for number in range(COUNT):
            row = {"number": number, "tiles": int(tiles[number]), "tokens": int(tokens[number])}
            tar.write({"__key__": f"{number:04}", "json": row})

    def stream() -> PackedStream:
        read = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode()
        return PackedStream(read.map(lambda one: of_row(one["json"])), *BUDGETS, buffer=BUFFER)

    whole, stopped = [numbers(batch) for batch in stream()], stream()
    done, iterated = len(whole) // 2, iter(stopped)
    for _ in range(done):
        next(iterated)
    resumed = stream()
    resumed.load_state_dict(stopped.state_dict())
    assert [numbers(batch) for batch in resumed] == whole[done:]
