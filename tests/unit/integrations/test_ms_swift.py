"""Two budgets behind ms-swift's `--packing true`: its data sets, their worker processes, its counting of lengths."""

import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.integrations import peers
from tests.unit.integrations.peers import check, drawn, sample

peers.needs("swift", "ms-swift")

from datasets import Dataset  # noqa: E402
from swift.dataset import packing  # noqa: E402
from swift.pipelines.train import sft  # noqa: E402

from omnibal_ext.integrations.ms_swift import TwoBudgets, install  # noqa: E402
from tests.waiting import PATIENCE  # noqa: E402

THEIRS = packing.calculate_matched_group
COUNT, BUDGETS = 2300, (12, 300)


class Template:
    max_length = BUDGETS[1]
    packing = padding_free = False

    def encode(self, row: dict[str, Any], return_length: bool = False) -> dict[str, Any]:
        return {**sample(row["number"], row["tiles"], row["tokens"]), "lengths": [row["tokens"]]}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((packing, "calculate_matched_group"), (sft, "AddLengthPreprocessor")):
        monkeypatch.setattr(module, name, getattr(module, name))
    kept = packing.PackingDataset.__dict__["create_packed_idx"]
    monkeypatch.setattr(packing.PackingDataset, "create_packed_idx", kept)
    monkeypatch.setattr(packing.PackingDataset, "_worker_jobs", packing.PackingDataset._worker_jobs)
    for _ in range(2):  # as the plugin runs once more in a worker that is forked
        install(vit_budget=BUDGETS[0])


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_data_set(start: str, workers: int) -> None:
    tiles, tokens = drawn(COUNT)
    rows = [{"number": n, "tiles": int(tiles[n]), "tokens": int(tokens[n])} for n in range(COUNT)]
    counting = sft.AddLengthPreprocessor(template=Template())
    table = Dataset.from_list([counting.preprocess(dict(row)) for row in rows])
    packs = packing.PackingDataset(Template(), table, packing_num_proc=workers, multiprocessing_context=start)
    check(packs.packed_idx, tiles, tokens, BUDGETS)
    assert packs.packed_length == [int(tokens[pack].sum()) for pack in packs.packed_idx]
    assert [row["number"] for row in packs[0]] == packs.packed_idx[0]
    # Without the plugin it is a data set like any other: a cached one is no trap.
    assert table["lengths"][:3] == [[row["tokens"]] for row in rows[:3]]


@pytest.mark.parametrize("name", peers.CORPORA)
def test_no_more_packs_than_theirs_and_less_waiting(name: str) -> None:
    """By a thousand samples; tiles are limited to those of their fullest pack."""
    tiles, tokens, packing_length = peers.lengths(name, 1000)
    theirs, _ = THEIRS(list(enumerate(tokens.tolist())), packing_length)
    packs = [[number for number, _ in pack] for pack in theirs]
    random.Random(0).shuffle(packs)
    fullest = max(int(tiles[pack].sum()) for pack in packs)
    items = [(n, int(tokens[n]), int(tiles[n])) for n in range(len(tokens))]
    ours, _ = TwoBudgets(fullest).calculate_matched_group(items, packing_length)
    numbers = [[item[0] for item in pack] for pack in ours]
    check(numbers, tiles, tokens, (fullest, packing_length))
    peers.assert_no_more_packs_and_less_waiting(numbers, packs, tiles, tokens)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.rows


def test_a_stream() -> None:
    tiles, tokens = drawn(700)
    rows = [{"number": n, "tiles": int(tiles[n]), "tokens": int(tokens[n])} for n in range(700)]
    packs = packing.IterablePackingDataset(Template(), Stream(rows), packing_interval=128)
    numbers = [[int(row["input_ids"][0]) for row in pack] for pack in packs]
    check(numbers, tiles, tokens, BUDGETS)
    for worker in packs.workers:
        worker.terminate()


def test_a_worker_that_fails_does_not_leave_the_trainer_waiting() -> None:
    queue: Any = multiprocessing.Queue()
    with pytest.raises(ValueError, match="unpack"):
        TwoBudgets(12).create_packed_idx(3, 0, [["a"]], queue, 300, "binpack")
    assert queue.get(timeout=PATIENCE) == (3, [], -1)


def test_lengths_without_tiles_and_an_order_that_is_not_kept_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    queue: Any = multiprocessing.Queue()
    TwoBudgets(12).create_packed_idx(0, 5, [(10, None), (20, None)], queue, 300, "sequential")
    rank, (pack,), count = queue.get(timeout=PATIENCE)
    assert (rank, sorted(pack), count) == (0, [(5, 10), (6, 20)], 2)
    said = capsys.readouterr().err
    assert "warning: 2 of 2 samples have no tiles counted" in said
    assert "do not keep the order" in said
