"""Is a device right: loss and gradients of a small chain, on one rank and on two. Parts of `benchmarks/gpu.py`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.data.arrival import to_device
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.specs import NORMS_INSIDE
from megatron.vlm.pipeline.communicator import Communicator, Receive
from megatron.vlm.pipeline.executor import Executor
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.single import single_process
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.language.rope import Rope
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.schedule import splits_backward
from tests.distributed import harness

CHECKED = Architecture(
    "checked",
    VisionArchitecture(layers=2, hidden_size=64, heads=4, ffn_hidden_size=128, patch_size=4, image_size=16),
    LanguageArchitecture((Layer(Attention(4, 2, 32, Rope(1e4)), 256),) * 2, hidden_size=128, vocab_size=128),
)
"""Small, with heads of a width that every attention kernel takes."""


@dataclass(frozen=True)
class Answers:
    """Of one process, on the host: what it started from and what it found, by the names of checkpoints."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: float

    @classmethod
    def load(cls, path: str | Path) -> "Answers":
        """Those that a process has saved."""
        return cls(**torch.load(path, weights_only=True))


def stored_name(name: str) -> str:
    """A parameter's name in checkpoints, whichever spec it is of."""
    name = name.partition("links.")[2]
    for inside, outside in NORMS_INSIDE.items():
        name = name.replace(inside, outside)
    return name


def make_known() -> None:
    """Let the small chain be found by its name."""
    harness.MODELS[CHECKED.name] = PRESETS[CHECKED.name] = CHECKED


def answers(flags: list[str], given: dict[str, Tensor] | None) -> Answers:
    """Loss and gradients of the small chain on this device, started from `given` weights or its own."""
    make_known()
    platform.multiply_exactly()
    flags = ["--use-cpu-initialization", "--no-gradient-accumulation-fusion", *flags]  # nothing wraps the stage
    with single_process(CHECKED.name, flags) as inputs:
        chain = Chain.of(inputs.args, inputs.architecture)
        stage = Stage(chain, 0, len(chain.kinds)).cuda()
        parameters = {stored_name(name): weight for name, weight in stage.named_parameters()}
        start_from(parameters, given)
        weights = {name: weight.detach().float().cpu().clone() for name, weight in parameters.items()}
        total, count = 0.0, 0.0
        for pack in map(to_device, harness.sample_packs()):
            loss, weight, _ = harness.token_loss("token", pack, stage(pack))
            loss.backward()
            total, count = total + loss.item(), count + weight.item()
        found = {name: weight.grad.float().cpu() / count for name, weight in parameters.items()}
    return Answers(weights, found, total / count)


def start_from(parameters: dict[str, Any], given: dict[str, Tensor] | None) -> None:
    """Fill in weights that another process started from."""
    for name, weight in parameters.items() if given is not None else ():
        assert given is not None
        weight.data.copy_(given[name])


def difference(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, of its largest number."""
    scale = max(tensor.abs().max().item() for tensor in wanted.values())
    return max(((mine[name] - wanted[name]).abs().max() / scale).item() for name in mine)


class HostCommunicator(Communicator):
    """Messages by way of the host, for ranks that share a device: NCCL takes one rank of each."""

    device = "cpu"

    def _send(self, tensor: Tensor, target: int, channel: Any) -> None:
        super()._send(tensor.cpu(), target, channel)

    def _receive(self, *how: Any) -> Receive:
        return _FromHost(**vars(super()._receive(*how)))


class _FromHost(Receive):
    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor.to("cuda")


SCHEDULES = (("1f1b", (4,)), ("1f1b", (2, 4, 6)), ("zb_h1", (4,)), ("zb_v", (2, 4, 6)))
"""Names, and where the small chain is cut."""


def pipeline(expected: Answers) -> dict[str, float]:
    """Two ranks on one device, every kind of schedule: the largest difference from one process, by schedule."""
    make_known()
    platform.multiply_exactly()
    args = harness.start(CHECKED, 1, 2, ["--use-cpu-initialization"], backend="gloo")
    count = sum(pack.loss_mask.sum().item() for pack in harness.sample_packs() if pack.loss_mask is not None)
    communicator = HostCommunicator(harness.parallel_state.get_pipeline_model_parallel_group(), harness.edges(2))
    found = {}
    for schedule, cuts in SCHEDULES:
        chunks = (len(cuts) + 1) // 2
        args.delay_wgrad_compute = platform.HAS_TRANSFORMER_ENGINE and splits_backward(schedule)
        chain = Chain.of(args, CHECKED)
        plan = Plan.from_cuts(chain.kinds, cuts, schedule=schedule, virtual_pipeline_model_parallel_size=chunks)
        model = harness.build_model(chain, plan)
        # gloo reduces none of a GPU's several tensors at once
        harness.get_model_config(model[0]).finalize_model_grads_func = None
        named = {stored_name(name): weight for module in model for name, weight in module.named_parameters()}
        start_from(named, expected.weights)
        executor = Executor(schedule)
        executor._communicator = communicator
        loss = harness.run_iteration(model, plan, list(map(to_device, harness.sample_packs())), executor)
        gradients = {name: weight.main_grad.float().cpu() / count for name, weight in named.items()}
        worst = max(difference(gradients, expected.gradients), abs(loss - expected.loss) / expected.loss)
        everyone: list[float] = [0.0, 0.0]
        torch.distributed.all_gather_object(everyone, worst)
        found[f"{schedule}, {chunks} chunks a rank"] = max(everyone)
    return found
