"""Run as a program on one or several tensor-parallel ranks: adapters against peft on transformers' models.

adapted.py FAMILY...

Prints, for each family, the largest difference of logits, over the largest of them above 1, and of the loss; of the
adapters' gradients relative to each one's largest; of the logits of the merged weights; and whether adapters go back to
peft's format bit by bit.
"""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file

from megatron.vlm.hf.convert import KeyMap, from_hugging_face, to_hugging_face, to_peft
from megatron.vlm.hf.folder import WeightFolder
from megatron.vlm.hf.names import table_name
from megatron.vlm.pipeline.stage import Stage
from omnibal_ext.adapters import Adapters, adapted_matrices
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import PARTS
from omnibal_ext.families.registry import family_of
from tests.unit.hf import models
from tests.unit.hf.parity import compare_all, compared_gradient, computed, load, packed, reference, save

RANK, ALPHA = 3, 7.0
WITHOUT = ("lm_head", "input_proj", "embedding_projection", "merging_layer", "merger.proj", "patch_dense", "conv_out")
"""Ends of the names of layers that get no adapters: the head, patch embeddings, Gemma 4's projector, sounds."""
NEVER = "shared_expert"
"""Part of the names of others that get none."""


def compare(family: str, folder: Path, args: Namespace) -> dict[str, float]:
    theirs = models.build(family, seed=1)
    if torch.distributed.get_rank() == 0:
        theirs.save_pretrained(folder / "theirs")
        adapted(theirs).save_pretrained(folder / "peft")
        theirs = models.build(family, seed=1)
        from_hugging_face(folder / "theirs", folder / "ours", folder / "peft")
    torch.distributed.barrier()
    model = peft.PeftModel.from_pretrained(theirs, folder / "peft", is_trainable=True, torch_device="cpu").eval()
    architecture = preset(str(folder / "ours"))
    targets = tuple(part for part in PARTS if adapted_matrices(architecture).get(part))
    adapters = Adapters(RANK, ALPHA, targets)
    stage = load(architecture, folder / "ours", args, frozen=tuple(PARTS), adapters=adapters)
    batch, samples = packed(architecture)
    expected_logits, expected_loss = reference(model, samples)
    logits, loss = computed(stage, batch)
    found = {
        "logits": (logits - expected_logits).abs().max().item() / max(1.0, expected_logits.abs().max().item()),
        "loss": abs(loss - expected_loss), "gradients": gradient_difference(stage, model, folder),
        "scale": (expected_logits - reference(models.build(family, seed=1), samples)[0]).abs().max().item(),
        **dict.fromkeys(("bits lost", "merged", "by peft"), 0.0),
    }  # fmt: skip
    save(stage, folder, args, adapters=adapters.to_record())
    if torch.distributed.get_rank() == 0:
        to_peft(folder / "saved", folder / "back", like=folder / "theirs")
        before, after = (load_file(folder / name / "adapter_model.safetensors") for name in ("peft", "back"))
        same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        found |= {"bits lost": float(not same)}
        back = peft.PeftModel.from_pretrained(models.build(family, seed=1), folder / "back", torch_device="cpu")
        to_hugging_face(folder / "saved", folder / "merged", like=folder / "theirs")
        for name, other in (("by peft", back), ("merged", type(theirs).from_pretrained(folder / "merged"))):
            logits, _ = reference(other.eval().requires_grad_(True), samples)
            found |= {name: (logits - expected_logits).abs().max().item()}
    torch.distributed.barrier()
    return found


def adapted(theirs: torch.nn.Module) -> Any:
    """With adapters on every linear layer that ours can have some beside, in which nothing is zero."""
    layers = [
        name for name, layer in theirs.named_modules()
        if type(layer) is torch.nn.Linear and not name.endswith(WITHOUT) and not re.search(NEVER, name)
    ]  # fmt: skip
    return models.with_random_adapters(
        peft.get_peft_model(theirs, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers))
    )


def gradient_difference(stage: Stage, model: torch.nn.Module, folder: Path) -> float:
    """Largest difference over all adapters, each relative to its largest; theirs brought to our form part by part."""
    keys = KeyMap.of(folder / "theirs", WeightFolder(folder / "theirs").stored)
    expected = {
        table_name(
            name.removeprefix("base_model.model.").replace(".default", ""), family_of(keys.architecture)
        ): weight.grad
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    mine = {name: weight for name, weight in stage.named_parameters() if weight.requires_grad}
    worst = 0.0
    for layer in keys.layers.values():
        if f"{layer.adapter_name}.a" not in mine:
            continue
        a = torch.cat([expected.pop(f"{name}.lora_A.weight") for name in layer.theirs])
        parts = [expected.pop(f"{name}.lora_B.weight") for name in layer.theirs]
        b = keys.join(f"{layer.name}.weight", parts)
        for one, whole in (("a", a), ("b", b)):
            difference, _ = compared_gradient(layer.name, mine.pop(f"{layer.adapter_name}.{one}"), whole)
            worst = max(worst, difference)
    assert not mine, f"adapters of ours that come from nowhere: {list(mine)}"
    assert not expected, f"adapters of theirs that we lack: {list(expected)}"
    return worst


if __name__ == "__main__":
    compare_all(compare)
