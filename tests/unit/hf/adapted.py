"""Run as a program on one or several tensor-parallel ranks: adapters against peft on transformers' models.

adapted.py FAMILY...

Prints, for each family, the largest difference of logits and loss, and of the adapters' gradients relative to each
one's largest; of the logits of the merged weights; and whether adapters go back to peft's format bit by bit.
"""

import json
import os
import queue
import re
import shutil
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from megatron.vlm.checkpoint.integrity import seal_by_one_process
from megatron.vlm.defaults import preset_defaults
from megatron.vlm.hf.convert import KeyMap, from_hugging_face, to_hugging_face, to_peft
from megatron.vlm.hf.folder import WeightFolder
from megatron.vlm.hf.names import table_name
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.configs import language_config, vision_config
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.single import single_process
from omnibal_ext.adapters import Adapters, adapted_matrices
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import PARTS
from omnibal_ext.plan import single_stage_plan
from tests.unit.hf import models
from tests.unit.hf.parity import local_part, packed, padded, reference

RANK, ALPHA = 3, 7.0
CLASSES = [models.classes(family) for family in models.FAMILIES]
"""Looked up here, where the fork server imports what they need for all ranks."""
WITHOUT = ("lm_head", "input_proj", "embedding_projection", "merging_layer", "merger.proj", "patch_dense")
"""Layers that get no adapters: the head, and Gemma 4's patch embedding and projector; and, anywhere in a name,"""
NEVER = "shared_expert|audio_tower"
"""those of shared experts and of audio towers."""


def main() -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    result = {}
    filesystem_async._results_queue = queue.SimpleQueue()  # as the trainer has it; core starts a process for its own
    flags = ["--tensor-model-parallel-size", str(ranks), "--ckpt-format", "torch_dist"]
    with single_process("tiny", [*flags, "--no-gradient-accumulation-fusion"]) as inputs:
        folders: list[str] = [tempfile.mkdtemp()]
        torch.distributed.broadcast_object_list(folders)
        for number, family in enumerate(sys.argv[1:]):
            found = compare(family, Path(folders[0]) / str(number), inputs.args)
            everywhere: list[dict[str, float]] = [{} for _ in range(ranks)]
            torch.distributed.all_gather_object(everywhere, found)
            result[family] = {name: max(rank[name] for rank in everywhere) for name in found}
    if os.environ["RANK"] == "0":
        shutil.rmtree(folders[0])
        print("RESULT " + json.dumps(result))


def compare(family: str, folder: Path, args: Namespace) -> dict[str, float]:
    theirs = models.build(family, seed=1)
    if torch.distributed.get_rank() == 0:
        theirs.save_pretrained(folder / "theirs")
        adapted(theirs).save_pretrained(folder / "peft")
        theirs = models.build(family, seed=1)
        from_hugging_face(folder / "theirs", folder / "ours", folder / "peft")
    torch.distributed.barrier()
    model = peft.PeftModel.from_pretrained(theirs, folder / "peft", is_trainable=True, torch_device="cpu").eval()
    stage = load(folder / "ours", args)
    batch, samples = packed(stage.chain.architecture)
    batch = padded(batch, torch.distributed.get_world_size())
    expected_logits, expected_loss = reference(model, samples)
    with torch.no_grad():
        logits = gather_from_tensor_model_parallel_region(stage(replace(batch, labels=None)))[:, : models.VOCABULARY]
    loss = (stage(batch) * batch.loss_mask).sum() / batch.loss_mask.sum()
    loss.backward()
    found = {
        "logits": (logits[: len(expected_logits)] - expected_logits).abs().max().item(),
        "loss": abs(loss.item() - expected_loss),
        "gradients": gradient_difference(stage, model, folder),
        "scale": (expected_logits - reference(theirs_alone(family), samples)[0]).abs().max().item(),
        **dict.fromkeys(("bits lost", "merged", "by peft"), 0.0),
    }
    save(stage, folder, args)
    if torch.distributed.get_rank() == 0:
        to_peft(folder / "saved", folder / "back", like=folder / "theirs")
        before, after = (load_file(folder / name / "adapter_model.safetensors") for name in ("peft", "back"))
        same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        back = peft.PeftModel.from_pretrained(theirs_alone(family), folder / "back", torch_device="cpu").eval()
        found |= {"bits lost": float(not same)}
        found |= {"by peft": (reference_logits(back, samples) - expected_logits).abs().max().item()}
        to_hugging_face(folder / "saved", folder / "merged", like=folder / "theirs")
        merged = type(theirs).from_pretrained(folder / "merged").eval()
        found |= {"merged": (reference_logits(merged, samples) - expected_logits).abs().max().item()}
    torch.distributed.barrier()
    return found


def adapted(theirs: torch.nn.Module) -> Any:
    """With adapters on every linear layer that ours can have some beside, in which nothing is zero."""
    layers = [
        name for name, layer in theirs.named_modules()
        if type(layer) is torch.nn.Linear and not name.endswith(WITHOUT) and not re.search(NEVER, name)
    ]  # fmt: skip
    model = peft.get_peft_model(theirs, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers))
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


def theirs_alone(family: str) -> torch.nn.Module:
    return models.build(family, seed=1)


@torch.no_grad()
def reference_logits(model: torch.nn.Module, samples: Any) -> Tensor:
    with torch.enable_grad():
        return reference(model.requires_grad_(True), samples)[0]


def load(folder: Path, args: Namespace) -> Stage:
    """Our model with the adapters of the converted checkpoint, read by Megatron."""
    architecture = preset(str(folder))
    plan = single_stage_plan(architecture.chain, model=architecture.name, model_hash=architecture.hash)
    values = {**vars(args), **preset_defaults(architecture, plan, args)}
    values["sequence_parallel"] = args.tensor_model_parallel_size > 1 and architecture.language.experts is not None
    language = language_config(Namespace(**values), architecture)
    targets = tuple(part for part in PARTS if adapted_matrices(architecture).get(part))
    chain = Chain(
        architecture, language, vision_config(language, architecture), vocab_size=256, seed=3, frozen=tuple(PARTS),
        adapters=Adapters(RANK, ALPHA, targets),
    )  # fmt: skip
    stage = Stage(chain, 0, len(chain.kinds))
    args.load, args.exit_on_missing_checkpoint = str(folder), True
    load_checkpoint([stage], None, None)
    return stage


def gradient_difference(stage: Stage, model: torch.nn.Module, folder: Path) -> float:
    """Largest difference over all adapters, each relative to its largest; theirs brought to our form part by part."""
    expected = {
        table_name(name.removeprefix("base_model.model.").replace(".default", "")): weight.grad
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    keys = KeyMap.of(folder / "theirs", WeightFolder(folder / "theirs").stored)
    mine = {name: weight for name, weight in stage.named_parameters() if weight.requires_grad}
    worst = 0.0
    for layer in keys.layers.values():
        if f"{layer.adapter_name}.a" not in mine:
            continue
        a = torch.cat([expected.pop(f"{name}.lora_A.weight") for name in layer.theirs])
        parts = [expected.pop(f"{name}.lora_B.weight") for name in layer.theirs]
        b = keys.join(f"{layer.name}.weight", parts)
        for one, whole in (("a", a), ("b", b)):
            weight = mine.pop(f"{layer.adapter_name}.{one}")
            assert weight.grad is not None
            if getattr(weight, "sequence_parallel", False):  # each rank has that of its tokens
                torch.distributed.all_reduce(weight.grad)
            wanted = local_part(whole, weight)
            worst = max(worst, ((weight.grad - wanted).abs().max() / whole.abs().max()).item())
            padding = local_part(torch.ones_like(whole), weight) == 0
            assert not weight.grad[padding].any(), f"{layer.name}: what fills up the ranks has a gradient"
    assert not mine, f"adapters of ours that come from nowhere: {list(mine)}"
    assert not expected, f"adapters of theirs that we lack: {list(expected)}"
    return worst


def save(stage: Stage, folder: Path, args: Namespace) -> None:
    args.save, args.no_save_optim, args.no_save_rng = str(folder / "saved"), True, True
    save_checkpoint(1, [stage], None, None, 0)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        seal_by_one_process(folder / "saved/iter_0000001", {"adapters": stage.chain.adapters.to_record()})
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
