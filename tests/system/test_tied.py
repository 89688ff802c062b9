"""Tied embeddings in training: copies on two ranks, or on one rank of a V, learn and are saved as one weight."""

from pathlib import Path

import pytest

from megatron.vlm.data.dataset import ChatDataset
from omnibal_ext.architectures.presets import preset
from omnibal_ext.plan import Plan
from tests.system.test_training import folder as folder  # the demo dataset  # noqa: PLC0414
from tests.system.test_training import train
from tests.unit.hf import models

transformers = pytest.importorskip("transformers")


RESHARDABLE = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")


@pytest.mark.parametrize("flags", [(), RESHARDABLE], ids=["plain", "distributed optimizer"])
def test_a_tied_model_goes_on_in_another_layout(folder: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    vision = {**models.INTERN_VIT, "num_attention_heads": 4, "image_size": [32, 32], "patch_size": [8, 8]}
    text = {**models.QWEN, "vocab_size": 512, "tie_word_embeddings": True}
    token = ChatDataset(folder / "data").manifest["image_token_id"]
    transformers.InternVLConfig(vision_config=vision, text_config=text, image_token_id=token).save_pretrained(tmp_path)
    architecture = preset(str(tmp_path))
    assert architecture.tied
    made_for = {"model": architecture.name, "model_hash": architecture.hash}
    two, one, vee = (folder / f"tied-{layout}.json" for layout in ("two", "one", "vee"))
    Plan.from_cuts(architecture.chain, (len(architecture.chain) - 2,), **made_for).save(two)
    Plan.from_cuts(architecture.chain, (), **made_for).save(one)
    words, last = architecture.chain.index("word_embed"), len(architecture.chain) - 1
    ends = Plan.from_cuts(architecture.chain, (words + 1, words + 2, last), schedule="zb_v", num_microbatches=4,
                          virtual_pipeline_model_parallel_size=2, **made_for)  # fmt: skip
    assert ends.placement.ranks_of[0] == ends.placement.ranks_of[-1]  # word embedding and head, each in its chunk
    ends.save(vee)
    name = f"tied{len(flags)}"
    saved = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "2", *flags)
    whole = train(folder, name, vee.name, 2, 4, *saved, model=str(tmp_path))
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    loaded = ("--load", str(tmp_path / "checkpoints"), *flags)
    for plan, pipeline in ((one, 1), (two, 2)):
        resumed = train(folder, f"{name}-{pipeline}", plan.name, pipeline, 4, *loaded, model=str(tmp_path))
        assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in whole[2:]], rel=1e-5)
