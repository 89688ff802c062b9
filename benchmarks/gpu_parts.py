"""The parts of `benchmarks/gpu.py`, each a program: they print one RESULT line.

python -m benchmarks.gpu_parts start | kernels | queues
python -m benchmarks.gpu_parts attention TOKENS
python -m benchmarks.gpu_parts waits | host MODEL...
python -m benchmarks.gpu_parts answers ANSWERS.pt [--bf16] [--weights ANSWERS.pt]
python -m benchmarks.gpu_parts pipeline ANSWERS.pt       on two ranks, which may share a device
python -m benchmarks.gpu_parts layers MODEL VIT_BUDGET LLM_BUDGET STEPS [--bf16]
python -m benchmarks.gpu_parts training MODEL VIT_BUDGET LLM_BUDGET ITERATIONS

answers, pipeline and layers run on any device, the CPU too.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import benchmarks.bare  # noqa: F401 (before what may be missing)
import megatron.vlm  # noqa: F401 (readies the machine, before megatron.core is imported)
from benchmarks import gpu_probes, gpu_training
from megatron.vlm import platform
from megatron.vlm.data.arrival import to_device
from megatron.vlm.models.attention.core_attention import IsolatedAttention, choose_kernel
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.specs import NORMS_INSIDE
from megatron.vlm.pipeline.communicator import Communicator, Receive
from megatron.vlm.pipeline.executor import Executor
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.profiling.layer_costs import KindMeasurement
from megatron.vlm.profiling.profiler import Job, profile_on_this_machine
from megatron.vlm.profiling.step import Step
from megatron.vlm.profiling.stopwatch import timed
from megatron.vlm.profiling.synthetic import synthetic_pack
from megatron.vlm.single import single_process
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.architectures.vision import VisionArchitecture
from omnibal_ext.chain import RECOMPUTABLE_KINDS
from omnibal_ext.costs.profile import Profile
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.schedule import splits_backward
from tests.distributed import harness

CHECKED = Architecture(
    "checked",
    VisionArchitecture(layers=2, hidden_size=64, heads=4, ffn_hidden_size=128, patch_size=4, image_size=16),
    LanguageArchitecture(
        layers=2, hidden_size=128, heads=4, kv_heads=2, ffn_hidden_size=256, vocab_size=128, rope_theta=1e4
    ),
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
        return cls(**torch.load(path))


def stored_name(name: str) -> str:
    """A parameter's name in checkpoints, whichever spec it is of."""
    name = name.partition("links.")[2]
    for inside, outside in NORMS_INSIDE.items():
        name = name.replace(inside, outside)
    return name


def answers(flags: list[str], given: dict[str, Tensor] | None) -> Answers:
    """Loss and gradients of the small chain on this device, started from `given` weights or its own."""
    harness.MODELS[CHECKED.name] = PRESETS[CHECKED.name] = CHECKED
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
    harness.MODELS[CHECKED.name] = CHECKED
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


def layers(model: str, budgets: tuple[int, int], steps: int, bf16: bool) -> dict[str, Any]:
    """A profile of every layer kind, the kernels it ran on, what the device reaches, and bytes it took."""
    job = Job(model, *budgets, bf16=bf16, steps=steps)
    profile = profile_on_this_machine(job, {"device": platform.device_name()})
    assert profile is not None
    with single_process(model, job.flags()) as inputs:
        args, chain = inputs.args, Chain.of(inputs.args, inputs.architecture)
        taken = {kind: allocated(args, chain, kind, budgets) for kind in RECOMPUTABLE_KINDS}
        kernels = {"layers": args.transformer_impl, "attention": choose_kernel(chain.language)}
        reached = reaches(chain, budgets[1])
    return {
        "profile": profile.to_record(),
        "kernels": kernels,
        "reached": reached,
        "allocated_bytes": taken,
        "reserved_bytes": torch.cuda.memory_reserved(),
    }


def allocated(args: Any, chain: Chain, kind: str, budgets: tuple[int, int]) -> float:
    """Bytes that the device's allocator gave to one layer's forward pass and has not got back; 0 on the CPU."""
    measured = KindMeasurement(args, chain, kind, budgets)
    step = Step(chain, measured.module, measured.packs[0])
    before = torch.cuda.memory_allocated()
    step.forward()
    return (torch.cuda.memory_allocated() - before) / measured.count


def reaches(chain: Chain, tokens: int) -> dict[str, float]:
    """Operations a second of matrices and of attention at the language model's shapes, bytes a second of memory."""
    config, dtype = chain.language, chain.language.params_dtype
    wide, narrow = config.ffn_hidden_size, config.hidden_size
    entering, weight = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((tokens, narrow), (narrow, wide)))
    square = torch.randn(max(wide, tokens), narrow, device="cuda", dtype=dtype)
    pack = synthetic_pack(chain.architecture, 0, [tokens])
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    query = torch.randn(tokens, 1, heads, width, device="cuda", dtype=dtype)
    key = torch.randn(tokens, 1, groups, width, device="cuda", dtype=dtype)
    attention, segments = IsolatedAttention(config), pack.segments
    return {
        "peak_flops": 2 * square.shape[0] ** 2 * narrow / seconds_of(lambda: square @ square.t()),
        "matrix_flops": 2 * tokens * narrow * wide / seconds_of(lambda: entering @ weight),
        "attention_flops": 2 * heads * width * tokens**2
        / seconds_of(lambda: attention(query, key, key, packed_seq_params=segments)),
        "memory_bytes_a_second": 3 * entering.nbytes / seconds_of(lambda: entering + entering),
    }  # fmt: skip


@torch.no_grad()
def seconds_of(work: Callable[[], object], calls: int = 10, rounds: int = 5) -> float:
    """Of one call: the median round's, after one to warm up."""

    def one_round() -> None:
        for _ in range(calls):
            work()

    return statistics.median(taken / calls for taken in timed(*[one_round] * (rounds + 1))[1:])


def profile_of(found: dict[str, Any]) -> Profile:
    """The profile in what `layers` gave."""
    return Profile.from_record(found["profile"])


PROBES: dict[str, Callable[..., Any]] = {
    probe.__name__: probe
    for probe in (
        gpu_probes.start, gpu_probes.kernels, gpu_probes.attention, gpu_probes.waits, gpu_probes.host, gpu_probes.queues
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("answers", "pipeline", "layers", "training", *PROBES))
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--weights", type=Path)
    asked = parser.parse_args()
    platform.take_device()
    if asked.part in PROBES:
        result: Any = PROBES[asked.part](*([asked.arguments] if asked.arguments else []))
    elif asked.part in ("layers", "training"):
        model, *numbers = asked.arguments
        vit, llm, times = map(int, numbers)
        budgets = (vit, llm)
        result = (
            layers(model, budgets, times, asked.bf16)
            if asked.part == "layers"
            else gpu_training.training(model, budgets, times)
        )
    elif asked.part == "pipeline":
        result = pipeline(Answers.load(asked.arguments[0]))
    else:
        given = Answers.load(asked.weights).weights if asked.weights else None
        found = answers(["--bf16"] if asked.bf16 else [], given)
        torch.save(vars(found), asked.arguments[0])
        result = {"loss": found.loss}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print("RESULT " + json.dumps(result))
    if torch.distributed.is_initialized():
        harness.parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
