"""What layers take on this device, and what the device reaches: a part of `benchmarks/gpu.py`."""

from collections.abc import Callable
from typing import Any

import torch

from megatron.vlm import platform
from megatron.vlm.models.attention.core_attention import IsolatedAttention, choose_kernel
from megatron.vlm.models.chain import Chain
from megatron.vlm.profiling.layer_costs import KindMeasurement
from megatron.vlm.profiling.profiler import ProfileJob, profile_on_this_machine
from megatron.vlm.profiling.stage_pass import StagePass, synthetic_pack
from megatron.vlm.profiling.stopwatch import median_seconds
from megatron.vlm.single import single_process
from omnibal_ext.chain import RECOMPUTABLE_KINDS
from omnibal_ext.modalities.modality import Budgets

CALLS, ROUNDS = 10, 5


def layers(model: str, budgets: tuple[int, int], steps: int, bf16: bool) -> dict[str, Any]:
    """A profile of every layer kind, the kernels it ran on, what the device reaches, and bytes it took."""
    most = dict(zip(("tiles", "tokens"), budgets, strict=True))
    job = ProfileJob(model, most, bf16=bf16, steps=steps, distributed_optimizer=True)
    profile = profile_on_this_machine(job, {"device": platform.device_name()})
    assert profile is not None
    with single_process(model, job.flags()) as inputs:
        args, chain = inputs.args, Chain.of(inputs.args, inputs.architecture)
        kinds = [kind for kind in RECOMPUTABLE_KINDS if kind in chain.kinds]
        taken = {kind: allocated(args, chain, kind, most) for kind in kinds}
        kernels = {"layers": args.transformer_impl, "attention": choose_kernel(chain.language)}
        reached = reaches(chain, budgets[1])
    return {
        "profile": profile.to_record(),
        "kernels": kernels,
        "reached": reached,
        "allocated_bytes": taken,
        "reserved_bytes": torch.cuda.memory_reserved(),
    }


def allocated(args: Any, chain: Chain, kind: str, budgets: Budgets) -> float:
    """Bytes that the device's allocator gave to one layer's forward pass and has not got back; 0 on the CPU."""
    measured = KindMeasurement(args, chain, kind, budgets)
    step = StagePass(chain, measured.module, measured.packs[0])
    before = torch.cuda.memory_allocated()
    step.forward()
    return (torch.cuda.memory_allocated() - before) / measured.count


def reaches(chain: Chain, tokens: int) -> dict[str, float]:
    """Operations a second of matrices and of attention at the language model's shapes, bytes a second of memory."""
    config, dtype = chain.language, chain.language.params_dtype
    wide, narrow = config.ffn_hidden_size, config.hidden_size
    entering, weight = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((tokens, narrow), (narrow, wide)))
    square = torch.randn(max(wide, tokens), narrow, device="cuda", dtype=dtype)
    pack = synthetic_pack(chain.architecture, {}, [tokens])
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
def seconds_of(work: Callable[[], object]) -> float:
    """Of one call: the median round's, after two to warm up."""

    def one_round() -> None:
        for _ in range(CALLS):
            work()

    return median_seconds(one_round, ROUNDS) / CALLS
