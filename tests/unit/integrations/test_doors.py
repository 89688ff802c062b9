"""Doors that need no trainer installed: what they refuse, samples of Bridge and NeMo-RL, the arguments of all."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnibal_ext.errors import UserError
from omnibal_ext.integrations import (
    axolotl,
    energon,
    llama_factory,
    ms_swift,
    nemo_automodel,
    streams,
    torch_loops,
    veomni,
)
from omnibal_ext.integrations.samples import size_of
from tests.unit.integrations.peers import check, drawn, sample


def swifts(**changed: Any) -> tuple[Any, Any]:
    """The modules of an ms-swift 4.6 that `install` looks at."""

    class PackingDataset:
        def _worker_jobs(self, jobs: Any) -> Any: ...

        @staticmethod
        def create_packed_idx(
            rank: Any, offset: Any, lengths: Any, out_queue: Any, packing_length: Any, packing_strategy: Any
        ) -> None: ...

    def calculate_matched_group(
        sequences: Any, packing_length: int, is_finished: bool = True, strategy: str = "binpack"
    ) -> None: ...

    for name, value in changed.items():
        setattr(PackingDataset, name, value)
    packing = SimpleNamespace(PackingDataset=PackingDataset, calculate_matched_group=calculate_matched_group)
    return packing, SimpleNamespace(PackingDataset=PackingDataset)


def test_an_ms_swift_that_packs_otherwise_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is called with other arguments dies, and ms-swift waits for it without end."""
    ms_swift.check_version("4.6.0", *swifts())

    def of_old(self: Any, rank: int, offset: int, lengths: list[int]) -> None: ...

    for wrong in (swifts(create_packed_idx=of_old), swifts(_worker_jobs=None)):
        with pytest.raises(
            UserError, match=r"ms-swift 4\.4\.2 packs by .* of swift.dataset.packing, not as 4.5.3 and 4.6"
        ):
            ms_swift.check_version("4.4.2", *wrong)
    with pytest.raises(UserError, match="packs by another PackingDataset"):
        ms_swift.check_version("5.0", swifts()[0], swifts()[1])
    monkeypatch.setitem(ms_swift.sys.modules, "swift.dev.dataset", SimpleNamespace())  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"swift\.dev packs by functions of its own"):
        ms_swift.check_version("4.7", *swifts())


class Table(dict):
    column_names = property(list)

    def __len__(self) -> int:
        return len(self["lengths"])


def test_tiles_stand_in_a_column_of_their_own_and_lengths_are_those_of_ms_swift() -> None:
    jobs = [(0, 0, [[5], 6], 300, "binpack"), (1, 2, [[3, 4]], 300, "binpack")]
    table = Table(lengths=[[5], 6, [3, 4]], omnibal_tiles=[2, 0, None])
    assert ms_swift.with_tiles(table, jobs) == [
        (0, 0, [(5, 2), (6, 0)], 300, "binpack"), (1, 2, [(7, None)], 300, "binpack")
    ]  # fmt: skip
    assert ms_swift.with_tiles(Table(lengths=[1, 2, 3]), jobs[:1])[0][2] == [(5, None), (6, None)]
    lazy = SimpleNamespace(dataset=table, __len__=table.__len__)  # encoded when they are read: `swift sft` by default
    assert ms_swift.with_tiles(lazy, jobs) == ms_swift.with_tiles(table, jobs)
    with pytest.raises(UserError, match="export it again"):
        ms_swift.with_tiles(table, [(0, 0, [[5, -3]], 300, "binpack")])


def bridges(number: int, tiles: int, tokens: int) -> Any:
    """QwenVLTaskSample of Bridge's main, packed by Energon."""
    given = sample(number, tiles, tokens)
    visual = {key: given[key] for key in ("pixel_values",) if key in given}
    prepared = SimpleNamespace(row={"input_ids": given["input_ids"]}, visual_values=visual, sequence_length=tokens)
    return SimpleNamespace(number=number, prepared_sequence=prepared, example=None)


def encoders(number: int, tiles: int, tokens: int) -> Any:
    """HFEncoderTaskSample of Bridge 0.5."""
    given = sample(number, tiles, tokens)
    visual = {"pixel_values": given.get("pixel_values")}
    return SimpleNamespace(number=number, input_ids=given["input_ids"], visual_tensors=visual)


def nemos(number: int, tiles: int, tokens: int) -> Any:
    """EncodedSFTSample of NeMo-RL; a message's pixels are a list, with None for those that have none."""
    shown = [{"pixel_values": SimpleNamespace(tensors=[torch.zeros(1, 3, 2, 2), None])} for _ in range(tiles)]
    log = [*shown, {"token_ids": torch.zeros(tokens)}]
    return SimpleNamespace(number=number, message_log=log, length=tokens - 1, packing_cost=tokens, group_key=number % 2)


@pytest.mark.parametrize(
    ("made", "padded"),
    [(bridges, "in_batch_packing_pad_to_multiple_of"), (encoders, ""), (nemos, "sequence_length_pad_multiple")],
)
def test_bridges_and_nemo_rls_samples_are_packed_padded_as_theirs_and_joined_by_their_encoder(
    made: Callable[..., Any], padded: str
) -> None:
    def marked(self: Any, samples: list[Any]) -> str:
        return f"joined by theirs: {len(samples)}"

    marked.__stateless__ = True  # type: ignore[attr-defined]
    theirs = type("Theirs", (), {"pack_selected_samples": marked, **({padded: 8} if padded else {})})
    encoder: Any = type("Encoder", (energon.TwoBudgetPacking, theirs), {"vit_budget": 12, "llm_budget": 304})()
    tiles, tokens = drawn(200)
    packs = encoder.select_samples_to_pack([made(n, int(tiles[n]), int(tokens[n])) for n in range(200)])
    check([[one.number for one in pack] for pack in packs], tiles, -(-tokens // 8) * 8 if padded else tokens, (12, 304))
    assert made is not nemos or all(len({one.group_key for one in pack}) == 1 for pack in packs)
    assert encoder.pack_selected_samples([1, 2]) == "joined by theirs: 2"
    assert encoder.pack_selected_samples.__stateless__


def test_an_encoder_that_joins_nothing_itself_gets_our_join_and_ones_own_stays() -> None:
    base = type("TaskEncoder", (), {"pack_selected_samples": None, "__module__": "megatron.energon.task_encoder.base"})
    plain: Any = type("Plain", (energon.TwoBudgetPacking, base), {})
    own: Any = type("Own", (energon.TwoBudgetPacking, base), {"pack_selected_samples": lambda *_: "own"})
    assert plain().pack_selected_samples([sample(1, 0, 3)])["input_ids"].tolist() == [1, 1, 1]
    assert own().pack_selected_samples([]) == "own"
    with pytest.raises(UserError, match="SimpleNamespace: a sample without input_ids: say its size, in sample_size"):
        size_of(SimpleNamespace(imgs=[]))


def test_every_door_takes_costs_and_effort() -> None:
    doors = (ms_swift.install, ms_swift.TwoBudgets, nemo_automodel.install, veomni.install, torch_loops.PackedBatches)
    for door in (*doors, veomni.TwoBudgetBatching, nemo_automodel.greedy_knapsack_vt_balanced):
        assert {"costs", "seconds"} <= inspect.signature(door).parameters.keys(), door
    for one in (llama_factory.install, streams.PackedStream):
        assert {"costs", "seconds"} <= inspect.signature(one).parameters.keys(), one
    for mixin in (energon.TwoBudgetPacking, axolotl.TwoBudgetPlugin):
        assert {"costs", "seconds"} <= vars(mixin).keys()
