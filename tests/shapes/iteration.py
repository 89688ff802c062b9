"""Run as a program: what a GPU is asked for by whole iterations of a plan, on a rank of a pipeline.

iteration.py engine|local PRESET TENSOR_PARALLEL PIPELINE_PARALLEL TILES TOKENS...

Megatron's DDP and the trainer with two schedules, all its meters, until it is known whether the optimizer steps; two
layers of every kind, one pack without images, one with a broken sample. Prints for each preset, schedule and rank what
waits for the device within an iteration, and how many bytes the rank sent to its neighbours.
"""

import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # not as `tests`, which imports Megatron
from shapes import device
from shapes.program import padded_chain, start

MICROBATCHES = 4
BROKEN = 7
"""A sample whose image cannot be read."""


def every_rank(iteration: Callable[..., Any], ways: Sequence[str]) -> None:
    """Every preset, way and rank on one machine."""
    kind, *words = sys.argv[1:]
    result: dict[str, Any] = {}
    with device.machine(engine=kind == "engine"):
        for place in range(0, len(words), 5):
            name, *sizes = words[place : place + 5]
            tensor, pipeline, tiles, tokens = map(int, sizes)
            for rank, way in product(range(pipeline), ways):
                found = iteration(name, (tensor, pipeline), rank, (tiles, tokens), way)
                result.setdefault(name, {})[f"{way} {rank}"] = found
    device.end("RESULT " + json.dumps(result))


def started(name: str, ranks: tuple[int, int], rank: int) -> Any:
    """Megatron's arguments on a rank of the pipeline, of (tensor, pipeline) ranks."""
    from megatron.vlm.pipeline import communicator

    communicator.all_groups = lambda ranks: [tuple(ranks)]  # nobody answers a gather here
    communicator.names_of_ranks = lambda: [f"rank {number}" for number in range(ranks[0] * ranks[1])]
    device.rank_of(ranks[0])
    args = start(name, ranks[0])
    args.pipeline_model_parallel_size = ranks[1]
    device.rank_of(*ranks, rank)
    return args


def iteration(name: str, ranks: tuple[int, int], rank: int, sizes: tuple[int, int], schedule: str) -> dict[str, Any]:
    """The second iteration of a rank: in the first, kernels and channels are made."""
    from languages import with_layers
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config
    from shapes.counter import Count

    from omnibal_ext.architectures.presets import preset
    from omnibal_ext.plan import Plan

    args, pipeline = started(name, ranks, rank), ranks[1]
    model = preset(name)
    few = replace(model, vision=replace(model.vision, layers=2), language=with_layers(model.language, 2))
    chain = padded_chain(args, few)
    cuts = [len(chain.kinds) * (stage + 1) // pipeline for stage in range(pipeline - 1)]
    plan = Plan.from_cuts(
        few.chain, tuple(cuts), schedule=schedule, num_microbatches=MICROBATCHES,
        predicted={"stage_seconds": [1.0] * pipeline},
    )  # fmt: skip
    module = wrapped(args, chain, plan)
    get_model_config(module).finalize_model_grads_func = finalize_model_grads
    trainer, optimizer, packs = trainer_of(args, few, plan), Optimizer(), packs_of(few, *sizes)
    trainer.bad_steps.watch(optimizer, trainer.end_training_iteration)
    run = partial(trainer.forward_backward, model=[module], num_microbatches=MICROBATCHES)
    args.curr_iteration = 0
    run(data_iterator=[iter(packs)])
    with Count() as counted:
        run(data_iterator=[iter(packs)])
        assert trainer.stages.actions
        optimizer.prepare_grads()
        assert trainer.iteration == 1
    assert gc.get_freeze_count()  # what the start made is looked at no more
    return {"waits": counted.waits, "messages": dict(counted.messages)}


class Optimizer:
    """What the trainer needs of Megatron's: it reads the norm of the gradients."""

    def prepare_grads(self) -> bool:
        return False

    def get_loss_scale(self) -> float:
        return 1.0

    def get_grad_norm(self) -> float:
        from shapes.counter import Count

        assert Count.current is not None
        Count.current.catch_up()
        return 1.0


def trainer_of(args: Any, model: Any, plan: Any) -> Any:
    """The trainer, behind its first iterations, that knows of a broken sample; hosts ask each other for real."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from megatron.vlm import platform, pretrain
    from megatron.vlm.arguments import TrainingInputs
    from megatron.vlm.monitoring.bad_samples import Hosts
    from megatron.vlm.monitoring.stage_meter import WARM_UP

    def ask(hosts: Hosts, flag: bool, really: Any = Hosts.any) -> bool:
        with unset_fake_temporarily():
            answer: bool = really(hosts, flag)
        return answer

    class RealHosts(Hosts):
        any = ask

    pretrain.Trainer.sources = staticmethod(lambda _: ("made up",))
    platform.host_group = lambda _: None
    args.loss_reduction = "square"
    trainer = pretrain.Trainer(TrainingInputs(args, model, plan, (), ""))
    trainer.hosts = RealHosts()
    trainer.stages.iterations = WARM_UP
    trainer.bad_samples[True].known = {BROKEN: "gone"}
    return trainer


def packs_of(model: Any, tiles: int, tokens: int) -> list[Any]:
    import torch

    from megatron.vlm.profiling.stage_pass import equal_lengths, synthetic_pack

    lengths = equal_lengths(tokens, 4)
    segments, sources = (torch.empty(size, dtype=torch.long, device="cuda") for size in (tokens, 4))
    told = {"segment_ids": segments, "sources": sources, "sample_ids": (BROKEN, 1, 2, 3)}
    sizes = [*[tiles] * (MICROBATCHES - 1), 0]
    return [replace(synthetic_pack(model, {"tiles": tiles}, lengths), **told) for tiles in sizes]


def wrapped(args: Any, chain: Any, plan: Any) -> Any:
    """This rank's stage as Megatron wraps it, gradients reduced beside the backward pass."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    from megatron.vlm.pipeline.stage import Stage
    from megatron.vlm.pipeline.tower import owned_layers

    layers = plan.stages[parallel_state.get_pipeline_model_parallel_rank()].layers
    stage = Stage(chain, *layers, owned=owned_layers(plan, None))
    device.move(stage, torch.bfloat16)
    stage.bfloat16 = lambda: stage  # weights cannot change in place
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(chain.language, settings, Float16Module(chain.language, stage))


if __name__ == "__main__":
    every_rank(iteration, ("1f1b", "zb_h1"))
