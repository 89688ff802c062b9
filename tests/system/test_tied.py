"""Tied embeddings in training: copies on two ranks, or on one rank of a V, learn and are saved as one weight."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.hf.checkpoint import OurCheckpoint
from omnibal_ext.architectures.presets import preset
from omnibal_ext.plan import Plan
from tests.long import short
from tests.programs import tool
from tests.system.test_training import folder as folder  # the demo dataset  # noqa: PLC0414
from tests.system.test_training import train
from tests.unit.hf import models

transformers = pytest.importorskip("transformers")
RESHARDABLE = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")


def make_model(folder: Path, target: Path) -> None:
    """A folder of a small tied model, with weights, for the demo dataset."""
    vision = {**models.INTERN_VIT, "num_attention_heads": 4, "image_size": [32, 32], "patch_size": [8, 8]}
    text = {**models.QWEN, "vocab_size": 512, "tie_word_embeddings": True}
    token = ChatDataset(folder / "data").manifest["image_token_id"]
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=token, tie_word_embeddings=True
    )
    transformers.InternVLForConditionalGeneration(config).save_pretrained(target)


def save_plan(path: Path, model: Path, cuts: tuple[int, ...], **named: Any) -> Plan:
    """A plan of the model in a folder, cut so many layers behind the word embedding."""
    architecture = preset(str(model))
    assert architecture.tied
    words = architecture.chain.index("word_embed")
    made_for = {"model": architecture.name, "model_hash": architecture.hash}
    plan = Plan.from_cuts(architecture.chain, [words + cut for cut in cuts], **made_for, **named)
    plan.save(path)
    return plan


def save_ends_on_one_rank(path: Path, model: Path, schedule: str) -> None:
    """A plan for two pipeline ranks in which one has the word embedding and the head, each in its chunk."""
    cuts = {"zb_v": (1, 2, 3), "1f1b": (-2, 1, 2)}[schedule]
    named = {"num_microbatches": 2, "virtual_pipeline_model_parallel_size": 2}
    plan = save_plan(path, model, cuts, schedule=schedule, **named)
    embeds, heads = (
        next(n for n, stage in enumerate(plan.stages) if stage.layers[0] <= layer < stage.layers[1])
        for layer in (plan.chain.index("word_embed"), len(plan.chain) - 1)
    )
    assert embeds != heads
    assert plan.placement.ranks_of[embeds] == plan.placement.ranks_of[heads]


def weights(checkpoints: Path, step: int) -> dict[str, torch.Tensor]:
    saved = OurCheckpoint(checkpoints, step=step)
    return {name: saved.tensor(name) for name in saved.weights}


def alike(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


WAYS = {
    "V": ("zb_v", ()),
    "interleaved, distributed optimizer": ("1f1b", ("--use-distributed-optimizer",)),
    "interleaved, reshardable": ("1f1b", RESHARDABLE),
    "V, loaded in parallel": ("zb_v", (*RESHARDABLE, "--ckpt-fully-parallel-load")),
}


@pytest.mark.parametrize("way", short(WAYS, ["V, loaded in parallel"]))
def test_both_ends_on_one_rank_of_two_replicas(folder: Path, tmp_path: Path, way: str) -> None:
    """Saved, gone on with as if nothing had happened, and exported; also gone on with in another layout (one stage, or
    copies on two ranks) and from there."""
    schedule, flags = WAYS[way]
    make_model(folder, tmp_path)
    model, plan, unlike = str(tmp_path), f"ends-{schedule}.json", "unlike.json"
    save_ends_on_one_rank(folder / plan, tmp_path, schedule)
    ranks = 2 if flags else 1
    save_plan(folder / unlike, tmp_path, (2,) if flags else ())
    name = f"{tmp_path.name}-{schedule}"
    first, again, other, back = (tmp_path / run for run in ("first", "again", "other", "back"))

    def run(
        kind: str, plan: str, pipeline: int, save: Path, load: Path | None = None, step: int = 0, every: int = 2
    ) -> list[float]:
        loads: tuple[str, ...] = ()
        if load:
            (load / "latest_checkpointed_iteration.txt").write_text(str(step))
            loads = ("--load", str(load))
        flags_of = (*flags, *loads, "--save", str(save), "--save-interval", str(every))
        lines = train(folder, f"{name}-{kind}", plan, pipeline, 4, *flags_of, model=model, ranks=4)
        return [line["loss"] for line in lines]

    whole = run("whole", plan, 2, first)
    assert run("again", plan, 2, again, first, 2) == whole[2:]
    assert alike(weights(again, 4), weights(first, 4))
    written = tmp_path / "written"
    tool("convert_checkpoint.py", "--to-hf", again, "--output-dir", written, "--like", model)
    (words,) = [weight for name, weight in load_file(written / "model.safetensors").items() if "embed_tokens" in name]
    assert torch.equal(words, weights(first, 4)["links.word_embed.embedding.weight"][: len(words)])
    if flags == ("--use-distributed-optimizer",):
        return  # its state is of one layout
    assert run("other", unlike, ranks, other, first, 2, every=3) == pytest.approx(whole[2:], rel=1e-5)
    assert run("back", plan, 2, back, other, 3) == pytest.approx(whole[3:], rel=1e-5)
