"""A tower beside the pipeline as a user starts it: the cut's losses; saved, killed and gone on with as any layout."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm.data.dataset import ChatDataset
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import evaluations, training_intervals
from tests.distributed import beside_cases
from tests.endurance import kills
from tests.programs import refusal, run_ranks, tool
from tests.system.test_training import TINY, make_dataset

pytestmark = pytest.mark.starts
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", 20000)
FROZEN = ("--freeze", "vit", "projector")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 conversations of two files, packed for iterations of four packs; a fifth of them held out."""
    folder = tmp_path_factory.mktemp("beside")
    make_dataset(folder, samples=80)
    budgets = ("--vit-budget", 40, "--llm-budget", 320, "--micro-batches", 4)
    tool("pack_data.py", "--data", folder / "data", *budgets, "--held-out", 0.2, "--output-dir", folder / "packs")
    tool("pack_data.py", "--data", folder / "data", "--held-out-of", folder / "packs", "--output-dir", folder / "held")
    return folder


def train(
    folder: Path, run: str, plan: Sequence[object], *flags: object, shape: tuple[int, int] = (1, 2), ranks: int = 2,
    ours: Sequence[object] = (), iterations: int = 4, load: Path | None = None, check: bool = True,
) -> Any:  # fmt: skip
    """Losses of a run on (tensor, pipeline) ranks; `plan`: the flags that give one, `ours`: others of the launcher."""
    done = tool(
        "launch.py", "--preset", "tiny", "--data", folder / "data", "--packs", folder / "packs",
        "--run-dir", folder / run, "--nproc-per-node", ranks, "--tensor-model-parallel-size", shape[0],
        "--pipeline-model-parallel-size", shape[1], *([] if load else ["--from-scratch"]), "--eval-data",
        folder / "data", "--eval-packs", folder / "held", *plan, *ours, "--", "--train-iters", iterations, "--lr",
        "1e-3", "--lr-decay-iters", 9, "--log-interval", 1, "--save-interval", 2, "--eval-interval", 2, *flags,
        *(["--load", load] if load else []), check=check,
    )  # fmt: skip
    return losses(folder / run) if check else done


def losses(run: Path) -> dict[int, tuple[float, ...]]:
    """By iteration those of training, its sources, and the evaluation behind it."""
    held_out = evaluations(run / "metrics.jsonl")
    return {
        line["iteration"]: (
            line["loss"],
            *line["source_losses"].values(),
            *([held_out[line["iteration"]]["loss"]] if line["iteration"] in held_out else []),
        )
        for line in training_intervals(run / "metrics.jsonl")
    }


def road(name: str) -> tuple[object, ...]:
    return "--analytic", "h100", "--tower", name


def gone_back(folder: Path, run: str, iteration: int = 2) -> Path:
    """Saves of a run, which is put back to an iteration."""
    saves = folder / run / "checkpoints"
    (saves / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return saves


def alike(found: dict[int, tuple[float, ...]], expected: dict[int, tuple[float, ...]]) -> bool:
    """To a millionth, of the iterations that were run."""
    return all(values == pytest.approx(expected[iteration], rel=1e-6) for iteration, values in found.items())


def same_save(one: Path, other: Path, iteration: int = 4) -> bool:
    """Whether all tensors of two saves, the optimizer's too, are equal to the bit."""
    first, second = (kills.tensors(run / "checkpoints" / f"iter_{iteration:07d}") for run in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, dict[int, tuple[float, ...]]]:
    return {name: train(folder, f"trained-{name}", road(name)) for name in ("cut", "beside")}


@pytest.mark.parametrize("what", ["trained", "frozen"])
def test_losses_are_those_of_a_cut_pipeline_and_a_resumed_run_is_bit_equal(
    folder: Path, what: str, trained: dict[str, dict[int, tuple[float, ...]]]
) -> None:
    """With evaluations and saves; killed behind its second iteration it ends with the same bits."""
    ours = FROZEN if what == "frozen" else ()
    if what == "frozen":
        trained = {name: train(folder, f"frozen-{name}", road(name), ours=ours) for name in trained}
    cut, beside = trained["cut"], trained["beside"]
    assert len(cut) == 4
    assert alike(beside, cut)
    plan = Plan.load(folder / f"{what}-beside/plan.json")
    assert plan.tower is not None
    assert plan.tower.mode == ("ahead" if what == "frozen" else "bubbles")
    saves = gone_back(folder, f"{what}-beside")
    again = train(folder, f"{what}-again", road("beside"), ours=ours, load=saves)
    assert again == {iteration: beside[iteration] for iteration in (3, 4)}
    assert same_save(folder / f"{what}-again", folder / f"{what}-beside")


def test_a_resumed_run_may_have_other_owners_or_cut_the_tower(
    folder: Path, trained: dict[str, dict[int, tuple[float, ...]]]
) -> None:
    """From the middle with other owners, as a cut, and beside once more: the losses of the run left alone."""
    beside, name = trained["beside"], "trained-beside"
    plan, saves = Plan.load(folder / name / "plan.json"), gone_back(folder, name)
    assert plan.tower is not None
    owners = tuple(1 - owner for owner in plan.tower.owners)
    replace(plan, tower=replace(plan.tower, owners=owners)).save(folder / "owners-changed.json")
    other = train(folder, "owners-changed", ("--plan", folder / "owners-changed.json"), load=saves)
    assert list(other) == [3, 4]
    assert alike(other, beside)
    train(folder, "through", road("cut"), "--save-interval", 3, load=saves)
    back = train(folder, "back", road("beside"), load=gone_back(folder, "through", 3))
    assert list(back) == [4]
    assert alike(back, beside)


def test_sharded_and_overlapping_it_has_the_same_losses(
    folder: Path, trained: dict[str, dict[int, tuple[float, ...]]]
) -> None:
    """Sharded over data-parallel ranks, tensor ranks with sequence parallelism: the losses of the cut on two ranks; to
    the bit from the middle; the state of other owners is refused, which lies in other buckets."""
    shape, flags = {"shape": (2, 2), "ranks": 4}, (*SHARDED, "--sequence-parallel")
    beside = train(folder, "sharded-beside", road("beside"), *flags, **shape)
    assert alike(beside, trained["cut"])
    saves = gone_back(folder, "sharded-beside")
    again = train(folder, "sharded-again", road("beside"), *flags, **shape, load=saves)  # planned anew, and alike
    assert again == {iteration: beside[iteration] for iteration in (3, 4)}
    plan = Plan.load(folder / "sharded-beside/plan.json")
    assert plan.tower is not None
    owners = tuple(3 - owner for owner in plan.tower.owners)
    replace(plan, tower=replace(plan.tower, owners=owners)).save(folder / "owners.json")
    refused = train(
        folder, "sharded-owners", ("--plan", folder / "owners.json"), *flags, **shape, load=saves, check=False
    )
    assert refused.returncode == 2
    assert "owners of the tower" in refused.stdout + refused.stderr


def test_a_broken_image_takes_its_sample_out_of_the_loss_on_all_ranks(
    folder: Path, trained: dict[str, dict[int, tuple[float, ...]]]
) -> None:
    """The ranks that read it, and those that weigh the losses, which hear of it; the cut's losses, whoever reads.

    Of a frozen tower those of the first iteration, from which on it learns otherwise.
    """
    packs, data = PackedIndex.open(folder / "packs"), ChatDataset(folder / "data")
    first = [int(sample) for pack in range(packs.num_packs) for sample in packs.samples(pack)]
    sample = next(sample for sample in first if data.sizes.tiles[sample])
    image = folder / "demo" / data.sample(sample).images[0].path
    whole = image.read_bytes()
    image.write_bytes(whole[:50])
    try:
        cut, beside, ahead = (
            train(folder, f"broken-{number}", road(name), ours=ours, iterations=2)
            for number, (name, ours) in enumerate((("cut", ()), ("beside", ()), ("beside", FROZEN)))
        )
    finally:
        image.write_bytes(whole)
    assert alike(beside, cut)
    assert alike({1: ahead[1]}, cut)
    assert cut[1] != pytest.approx(trained["cut"][1], rel=1e-6)


def planned(folder: Path) -> Plan:
    """A plan written by hand: all ranks encode all microbatches, at any place."""
    question = beside_cases.Question("small", (), "all", "token")
    case = beside_cases.Case(question, "1f1b", 1, "none", False, False, 5)
    microbatches = PackedIndex.open(folder / "packs").global_batch
    plan = beside_cases.Beside(case, "bubbles", "kept", True, microbatches).plan(TINY.chain, 2, 1)
    return replace(plan, model="tiny", model_hash=TINY.hash)


def test_a_wrong_list_is_refused_by_rank_and_word_before_there_are_ranks(folder: Path) -> None:
    """An action left out; work on a part of a tower's layers, which no list has."""
    record = planned(folder).to_record()
    first, second = record["lists"]
    wrong = {
        "rank 1 never does V(microbatch 2, rank 1)": second.replace(" V2.1", ""),
        "lists: of rank 1, 'E2.1:0-3' is no action": second.replace("E2.1", "E2.1:0-3"),
    }
    for message, words in wrong.items():
        (folder / "wrong.json").write_text(json.dumps(record | {"lists": [first, words]}))
        done = train(folder, "wrong", ("--plan", folder / "wrong.json", "--check"), check=False)
        line = refusal(done)
        assert "wrong.json" in line
        assert message in line


def test_dropout_where_ranks_share_images_is_refused_before_there_are_ranks(folder: Path) -> None:
    planned(folder).save(folder / "shared.json")
    given = ("--plan", folder / "shared.json", "--check")
    assert train(folder, "shared", given, "--hidden-dropout", 0, check=False).returncode == 0
    done = train(folder, "shared", given, "--hidden-dropout", 0.1, check=False)
    assert "--hidden-dropout 0.1: 2 ranks encode microbatch 0 together" in refusal(done)


def test_ranks_with_unlike_plans_are_refused_before_they_meet(folder: Path) -> None:
    """On both."""
    index, plan = PackedIndex.open(folder / "packs"), planned(folder)
    plan.save(folder / "one.json")
    words = plan.lists[1].split()
    at = next(place for place in range(len(words)) if words[place][0] == "V" and words[place - 1][0] != "V")
    words[at - 1 : at + 1] = words[at], words[at - 1]
    lists = (plan.lists[0], " ".join(words))
    replace(plan, lists=lists).save(folder / "other.json")
    flags = ("--preset", "tiny", "--data", folder / "data", "--packs", folder / "packs", "--global-batch-size",
             index.global_batch, "--train-iters", 1, "--lr", "1e-3", "--from-scratch")  # fmt: skip
    words = [str(word) for word in (folder / "one.json", folder / "other.json", *flags)]
    with pytest.raises(AssertionError, match="exit code 2") as failure:
        run_ranks("tests.system.unlike_plans", 2, words)
    for rank in (0, 1):
        assert f"rank {rank} was given another than rank {1 - rank}; all ranks obey one" in str(failure.value)
