"""Run as a program: what a GPU is asked for by whole iterations of a plan, on a rank of a pipeline.

iteration.py engine|local PRESET TENSOR_PARALLEL PIPELINE_PARALLEL TILES TOKENS...

Megatron's DDP, the executor with two schedules and the meter of stages; two links of every kind, one pack
without images. Prints for each preset, schedule and rank what waits for the device within an iteration, and how many
bytes the rank sent to its neighbours.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # not as `tests`, which imports Megatron
from shapes import device
from shapes.program import padded_chain, start

MICROBATCHES = 4


def main() -> None:
    """Every preset, schedule and rank on one machine."""
    kind, *words = sys.argv[1:]
    result: dict[str, Any] = {}
    with device.machine(engine=kind == "engine"):
        for place in range(0, len(words), 5):
            name, *sizes = words[place : place + 5]
            tensor, pipeline, tiles, tokens = map(int, sizes)
            for rank in range(pipeline):
                for schedule in ("1f1b", "zb_h1"):
                    found = iteration(name, tensor, pipeline, rank, tiles, tokens, schedule)
                    result.setdefault(name, {})[f"{schedule} {rank}"] = found
    print("RESULT " + json.dumps(result))


def iteration(
    name: str, tensor: int, pipeline: int, rank: int, tiles: int, tokens: int, schedule: str
) -> dict[str, Any]:
    """The second iteration of a rank: in the first, kernels and channels are made."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config
    from shapes.counter import Count

    from megatron.vlm.pipeline import communicator
    from megatron.vlm.pipeline.executor import Executor
    from megatron.vlm.stage_meter import WARM_UP, StageMeter
    from omnibal_ext.architectures.presets import preset
    from omnibal_ext.plan import Plan

    communicator._all_edges = lambda ranks: [*pairwise(ranks)]  # nobody answers a gather here
    device.rank_of(tensor)
    args = start(name, tensor)
    args.pipeline_model_parallel_size = pipeline
    device.rank_of(tensor, pipeline, rank)
    model = preset(name)
    few = replace(model, vision=replace(model.vision, layers=2), language=replace(model.language, layers=2))
    chain = padded_chain(args, few)
    cuts = [len(chain.kinds) * (stage + 1) // pipeline for stage in range(pipeline - 1)]
    plan = Plan.from_cuts(few.chain, tuple(cuts), schedule=schedule, predicted={"stage_seconds": [1.0] * pipeline})
    module = wrapped(args, chain, plan)
    get_model_config(module).finalize_model_grads_func = finalize_model_grads
    packs = packs_of(few, tiles, tokens)
    meter = StageMeter(plan)
    meter.iterations = WARM_UP
    executor = Executor(schedule, meter.watch)
    run = partial(executor, forward_step_func=forward_step, model=[module], num_microbatches=MICROBATCHES)
    run(data_iterator=[iter(packs)])
    with Count() as counted, meter.iteration(training=True):
        run(data_iterator=[iter(packs)])
    assert meter.actions
    return {"waits": counted.waits, "messages": dict(counted.messages)}


def packs_of(model: Any, tiles: int, tokens: int) -> list[Any]:
    from megatron.vlm.profiling.synthetic import equal_lengths, synthetic_pack

    full = [synthetic_pack(model, tiles, equal_lengths(tokens, 4)) for _ in range(MICROBATCHES - 1)]
    return [*full, synthetic_pack(model, 0, equal_lengths(tokens, 4))]


def wrapped(args: Any, chain: Any, plan: Any) -> Any:
    """This rank's stage as Megatron wraps it, gradients reduced beside the backward pass."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    from megatron.vlm.pipeline.stage import Stage

    stage = Stage(chain, *plan.stages[parallel_state.get_pipeline_model_parallel_rank()].layers)
    device.move(stage, torch.bfloat16)
    stage.bfloat16 = lambda: stage  # weights cannot change in place
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(chain.language, settings, Float16Module(chain.language, stage))


def forward_step(data: Any, model: Any) -> Any:
    from megatron.vlm.loss import token_loss

    batch = next(data)
    return model(batch), partial(token_loss, "token", batch)


if __name__ == "__main__":
    main()
