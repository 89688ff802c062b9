"""Training as a user starts it: saved, resumed and resumed in another layout it goes on as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.data.dataset import ChatDataset
from omnibal_ext.architectures.presets import preset
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import evaluations, training_intervals
from omnibal_ext.trained import Trained
from tests.demo import demo_packs, preprocessed
from tests.distributed.conftest import run_program
from tests.figures import EVALUATION, ONLY_ON_GPUS, ONLY_WITH_FURTHER, TRAINING
from tests.programs import refusal, tool

TINY = preset("tiny")
HELD_OUT = 23


def make_dataset(folder: Path, samples: int, heldout_samples: int = 4) -> None:
    """Demo conversations in two files, preprocessed into `folder`/data; others are left in demo/heldout.jsonl."""
    counts = ("--samples", samples, "--heldout-samples", heldout_samples)
    tool("make_demo_data.py", "--output-dir", folder / "demo", *counts)
    lines = (folder / "demo/train.jsonl").read_text().splitlines(keepends=True)
    inputs = {folder / "demo/first.jsonl": lines[: samples // 3], folder / "demo/second.jsonl": lines[samples // 3 :]}
    for path, part in inputs.items():
        path.write_text("".join(part))
    sources = ("--input", *inputs, "--image-root", folder / "demo")
    text = ("--tokenizer-model", folder / "demo/tokenizer.model", "--chat-template", "internlm2-chat")
    tiles = ("--tile-size", 32, "--tokens-per-tile", 4, "--max-tiles", 32)
    tool("preprocess_data.py", *sources, *text, *tiles, "--output-dir", folder / "data")


def pack(folder: Path, micro_batches: int, output: str, vit_budget: int = 40, llm_budget: int = 320) -> None:
    """Pack `folder`/data into `folder`/`output`; small budgets are profiled and trained on in less time."""
    budgets = ("--vit-budget", vit_budget, "--llm-budget", llm_budget, "--micro-batches", micro_batches)
    tool("pack_data.py", "--data", folder / "data", "--method", "isf", *budgets, "--output-dir", folder / output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 80 conversations, packed for iterations of 4 packs; another, held out, for iterations of 3."""
    folder = tmp_path_factory.mktemp("training")
    make_dataset(folder, samples=80, heldout_samples=HELD_OUT)
    pack(folder, micro_batches=4, output="packs")
    epoch = PackedIndex.open(folder / "packs").num_packs
    assert epoch % 4, "an epoch must end inside an iteration, or a resume that starts anew is not seen"
    data = preprocessed(folder / "demo", folder / "demo/heldout.jsonl", folder / "heldout")
    held_out = demo_packs(data, folder / "heldout-packs", PackOptions(vit_budget=40, llm_budget=200, micro_batches=3))
    assert held_out.num_packs > 3
    assert held_out.num_packs % 3
    Plan.from_cuts(TINY.chain, (4,), [(2,), (7,)], model="tiny", model_hash=TINY.hash).save(folder / "two.json")
    Plan.from_cuts(TINY.chain, (), model="tiny", model_hash=TINY.hash).save(folder / "one.json")
    chunks = Plan.from_cuts(TINY.chain, (3, 5, 9), model="tiny", model_hash=TINY.hash, schedule="zb_v",
                            virtual_pipeline_model_parallel_size=2)  # fmt: skip
    chunks.save(folder / "chunks.json")
    return folder


def train(
    folder: Path, run: str, plan: str, pipeline: int, iterations: int, *flags: str, model: str = "tiny", ranks: int = 2
) -> list[dict[str, Any]]:
    """Train from random weights unless --load names some; the metrics of every iteration."""
    scratch = () if "--load" in flags else ("--from-scratch",)
    at = flags.index("--eval-data") if "--eval-data" in flags else len(flags)
    evaluation, flags = flags[at : at + 4], (*flags[:at], *flags[at + 4 :])  # the launcher's own
    tool(
        "launch.py", "--preset", model, "--data", folder / "data", "--packs", folder / "packs",
        "--run-dir", folder / run, "--plan", folder / plan, "--nproc-per-node", ranks, *scratch, *evaluation,
        "--pipeline-model-parallel-size", pipeline, "--", "--train-iters", iterations, "--lr", "1e-3",
        "--lr-decay-iters", "4", "--log-interval", "1", *flags,
    )  # fmt: skip
    return training_intervals(folder / run / "metrics.jsonl")


def held_out(folder: Path) -> tuple[str, ...]:
    return "--eval-data", str(folder / "heldout"), "--eval-packs", str(folder / "heldout-packs")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[dict[str, Any]]:
    """A run that evaluates after its second and fourth iteration, and saves."""
    flags = ("--save", str(folder / "checkpoints"), "--save-interval", "2", "--eval-interval", "2", *held_out(folder))
    return train(folder, "whole", "two.json", 2, 4, *flags)


@pytest.mark.parametrize(
    ("plan", "pipeline", "evaluates"),
    [("two.json", 2, False), ("one.json", 1, True), ("chunks.json", 2, True)],
    ids=["same layout, not evaluating", "other layout", "on a V, zero bubble"],
)
def test_resuming_goes_on_with_the_same_data_and_loss(
    folder: Path, uninterrupted: list[dict[str, Any]], plan: str, pipeline: int, evaluates: bool
) -> None:
    """In the middle of an epoch, in any layout, whether or not there are evaluations in between.

    By the tracker's word; where the tracker is empty and the newest save is damaged, the older one is gone on from.
    """
    checkpoints = folder / "checkpoints"
    newest = checkpoints / "iter_0000004" / "__1_0.distcp"
    whole, damaged = newest.read_bytes(), bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    if evaluates:
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    else:
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("")
        newest.write_bytes(damaged)
    flags = ("--load", str(folder / "checkpoints"), *(("--eval-interval", "4", *held_out(folder)) if evaluates else ()))
    run = f"resumed-{plan}"
    resumed = train(folder, run, plan, pipeline, 4, *flags)
    newest.write_bytes(whole)
    assert [line["iteration"] for line in resumed] == [3, 4]
    for line, expected in zip(resumed, uninterrupted[2:], strict=True):
        for name in ("samples", "consumed_samples", "epoch", "iterations"):
            assert line[name] == expected[name]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["source_losses"] == pytest.approx(expected["source_losses"], rel=1e-5)
    found, expected = (evaluations(folder / name / "metrics.jsonl") for name in (run, "whole"))
    assert list(found) == [4] * evaluates
    for evaluation in found.values():
        assert evaluation["loss"] == pytest.approx(expected[4]["loss"], rel=1e-5)


def test_an_evaluation_is_every_held_out_token_once(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    """On two ranks of packs, and on one sample at a time without our loader, loss or meters: the same mean."""
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    # Data-parallel, 4 packs an iteration instead of 3, and dropouts that evaluation must not obey.
    dropouts = ("--hidden-dropout", "0.5", "--attention-dropout", "0.5")
    flags = ("--load", str(folder / "checkpoints"), "--skip-train", *dropouts, *held_out(folder))
    assert not train(folder, "only-evaluated", "one.json", 1, 4, *flags)
    program = run_program("tests.system.held_out_loss", 1, str(folder / "checkpoints"), str(folder / "heldout"))
    expected = program["loss"]
    whole, alone = (evaluations(folder / run / "metrics.jsonl") for run in ("whole", "only-evaluated"))
    assert list(whole) == [2, 4]
    assert list(alone) == [4]
    # Megatron's evaluation after training is left out where the last one was of the same weights.
    assert (folder / "whole/metrics.jsonl").read_text().count("evaluation") == 2
    for evaluation in (whole[4], alone[4]):
        assert evaluation["loss"] == pytest.approx(expected, rel=1e-6)
        assert evaluation["samples"] == HELD_OUT
        assert evaluation["source_losses"] == {"heldout": evaluation["loss"]}


def test_figures_are_in_tensorboard_as_in_the_metrics(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "whole/tensorboard"))
    events.Reload()

    def curve(name: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(name)}

    for name in ("samples_per_second", "useful_tokens_per_second", "padding", "dist_ratio_vit", "dist_ratio_llm"):
        written = {line["iteration"]: line[name] for line in uninterrupted}
        assert curve(name.replace("_", "-")) == pytest.approx(written)
    for source in ("first", "second"):
        written = {line["iteration"]: line["source_losses"][source] for line in uninterrupted}
        assert curve(f"lm loss of {source}") == pytest.approx(written)
    found = evaluations(folder / "whole/metrics.jsonl")
    assert curve("lm loss validation") == pytest.approx({i: line["loss"] for i, line in found.items()})
    assert set(curve("lm loss validation of heldout")) == set(found) == {2, 4}


def test_every_figure_of_a_run_has_a_test(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    assert set().union(*uninterrupted) == set(TRAINING) - ONLY_ON_GPUS - ONLY_WITH_FURTHER
    found = evaluations(folder / "whole/metrics.jsonl")
    assert set().union(*found.values()) == set(EVALUATION)


def test_the_distributed_optimizer_resumes_without_apex_or_transformer_engine(folder: Path) -> None:
    """With dropout, which data-parallel ranks draw for other packs, and evaluations at other times: to the bit."""
    checkpoints = str(folder / "distributed")
    dropouts = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    flags = ("--use-distributed-optimizer", *dropouts, *held_out(folder))
    saved = ("--save", checkpoints, "--save-interval", "2", "--eval-interval", "2")
    # Overlapping, in several buckets: saving and evaluating, Megatron's loop turns it off and on.
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000")
    whole = train(folder, "distributed-whole", "one.json", 1, 4, *saved, *flags, *overlap)
    (folder / "distributed" / "latest_checkpointed_iteration.txt").write_text("2")
    other = ("--load", checkpoints, "--eval-interval", "3")
    resumed = train(folder, "distributed-resumed", "one.json", 1, 4, *other, *flags, *overlap)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole[2:]]
    passes = [evaluations(folder / run / "metrics.jsonl") for run in ("distributed-whole", "distributed-resumed")]
    assert passes[0][4]["loss"] == passes[1][4]["loss"]
    assert [list(found) for found in passes] == [[2, 4], [3, 4]]
    other = ("--use-distributed-optimizer", *dropouts, "--load", checkpoints, "--train-iters", 4, "--lr", "1e-3")
    before = ("--plan", folder / "one.json", *held_out(folder))
    refused = launch_error(folder, *before, "--", *other, "--lr-decay-iters", "4")
    assert "weights in a bucket None (was 20000)" in refused


def test_an_image_that_broke_weighs_nothing_on_any_layout(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    """The rank that weighs the losses reads the image, or hears of it."""
    packs = PackedIndex.open(folder / "packs")
    first = [int(sample) for pack in range(packs.num_packs) for sample in packs.samples(pack)]
    data = ChatDataset(folder / "data")
    sample = next(sample for sample in first if data.sizes.tiles[sample])
    image = folder / "demo" / data.sample(sample).images[0].path
    whole = image.read_bytes()
    image.write_bytes(whole[:50])
    try:
        two, one = (
            train(folder, f"broken-{plan}", plan, ranks, 2) for plan, ranks in (("two.json", 2), ("one.json", 1))
        )
    finally:
        image.write_bytes(whole)
    assert [line["samples"] for line in two] == [line["samples"] for line in uninterrupted[:2]]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert any(two[n]["loss"] != pytest.approx(uninterrupted[n]["loss"], rel=1e-6) for n in range(2))


def test_a_rank_on_which_nothing_trains_takes_part(folder: Path) -> None:
    """The ViT frozen, one rank has nothing to save; also cut short and started again, the loss is that of one stage."""
    plan = {"model": "tiny", "model_hash": TINY.hash, "trained": Trained(("vit", "projector"))}
    Plan.from_cuts(TINY.chain, (5,), **plan).save(folder / "frozen-two.json")
    Plan.from_cuts(TINY.chain, (), **plan).save(folder / "frozen-one.json")
    freeze = ("--freeze", "vit", "projector")
    one = train(folder, "frozen-one", "frozen-one.json", 1, 3, *freeze)
    shared = (*freeze, "--use-distributed-optimizer", "--overlap-grad-reduce")
    train(folder, "shared", "frozen-two.json", 2, 3, *shared, "--exit-interval", "2")
    for run, flags in (("plain", freeze), ("shared", shared)):
        two = train(folder, run, "frozen-two.json", 2, 3, *flags)
        assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)


def test_a_global_batch_that_breaks_the_position_is_refused(folder: Path, uninterrupted: object) -> None:
    pack(folder, micro_batches=3, output="packs-3")
    done = launch_error(folder, "--packs", folder / "packs-3", "--plan", folder / "one.json", "--", "--train-iters", 9,
                        "--lr", "1e-3", "--override-opt-param-scheduler", "--load", folder / "checkpoints")  # fmt: skip
    assert "--global-batch-size" in done


def complete(flags: tuple[object, ...]) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """The launcher's flags and Megatron's, with a learning rate and a length where those are not the matter."""
    split = flags.index("--") if "--" in flags else len(flags)
    ours, megatron = flags[:split], flags[split + 1 :]
    for flag, value in (("--lr", "1e-3"), ("--train-iters", 1)):
        megatron = megatron if flag in megatron else (*megatron, flag, value)
    return ours, megatron


def launch_error(folder: Path, *flags: object) -> str:
    files = {"--data": folder / "data", "--packs": folder / "packs", "--run-dir": folder / "bad"}
    ours, megatron = complete(flags)
    ours = ours if "--load" in megatron else ("--from-scratch", *ours)
    words = [word for pair in files.items() if pair[0] not in flags for word in pair]
    return refusal(tool("launch.py", "--preset", "tiny", *words, *ours, "--", *megatron, check=False))
