"""What an action takes beside the layers of its stage: executor, wrappers, the loss, the pack's boundaries."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.loss import token_loss
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.executor import Executor
from megatron.vlm.profiling.step import Step, wrapped_stage
from megatron.vlm.profiling.stopwatch import Stopwatch, Timer
from megatron.vlm.profiling.synthetic import synthetic_pack
from omnibal_ext.architectures.architecture import Architecture

FEW, MANY = (1, 2) if platform.HAS_CUDA else (2, 10)
"""Microbatches. A GPU keeps a thousand kernels that it was asked for, and no more, while it sleeps."""


def measure_actions(args: Namespace, architecture: Architecture, stopwatch: Stopwatch) -> tuple[float, float, float]:
    """Seconds of an action, and of an iteration, beside the layers; the host's of an action.

    1. A chain with one layer of every kind, on this rank alone, and the smallest packs.
    2. Iterations of few and of many microbatches: the difference is what a microbatch takes, the rest an iteration.
    3. Less what the same stage takes without executor, half for each of forward and backward.

    Differences are taken within a round, so that a disturbance of the whole machine leaves them as they are.
    """
    vision, language = (
        replace(architecture.vision, layers=min(1, architecture.vision.layers), feature_layers=(), side_by_side=()),
        replace(architecture.language, layers=1, shared_keys=None),
    )
    small = replace(architecture, vision=vision, language=language)
    chain = Chain.of(args, small)
    model = [wrapped_stage(chain, 0, len(chain.kinds))]
    tiles = small.least_tiles
    tokens = small.image_tokens(tiles) + 1
    tokens += -tokens % args.tensor_model_parallel_size
    pack = synthetic_pack(small, tiles, [tokens])
    executor = Executor()
    few_timer, many_timer, layers_timer = Timer(), Timer(), Timer()

    def iterate(count: int, timer: Timer) -> float:
        # Copies: what a pack computes once for all layers is computed again.
        packs = iter([replace(pack) for _ in range(count)])
        (seconds,) = timer(
            lambda: executor(forward_step_func=_forward_step, data_iterator=packs, model=model, num_microbatches=count)
        )
        return seconds

    def run() -> tuple[float, ...]:
        few, many, step = iterate(FEW, few_timer), iterate(MANY, many_timer), Step(chain, model[0], pack)
        microbatch = (many - few) / (MANY - FEW)
        return (microbatch - sum(layers_timer(step.forward, step.backward))) / 2, few - FEW * microbatch

    action, iteration = stopwatch.measure({"actions": {"run": run}})["actions"]["run"]
    few, many, layers = (sum(timer.host_seconds) for timer in (few_timer, many_timer, layers_timer))
    return max(0.0, action), max(0.0, iteration), max(0.0, ((many - few) / (MANY - FEW) - layers) / 2)


def _forward_step(packs: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    pack = next(packs)
    return model(pack), partial(token_loss, "token", pack)
