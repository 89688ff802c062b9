"""Measures a pipeline action's overhead besides its stage's layers: executor, DDP wrapper, loss, pack boundaries."""

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
from megatron.vlm.profiling.stage_pass import StagePass, wrapped_stage
from megatron.vlm.profiling.stopwatch import Stopwatch, Timer
from megatron.vlm.profiling.synthetic import synthetic_pack
from omnibal_ext.architectures.architecture import Architecture

FEW, MANY = (1, 2) if platform.HAS_CUDA else (2, 10)
"""Microbatches. Few on a GPU: a sleeping stream queues about a thousand kernels, then launching blocks."""


def measure_actions(args: Namespace, architecture: Architecture, stopwatch: Stopwatch) -> tuple[float, float, float]:
    """(seconds of an action, of an iteration, host seconds of an action), all without the layers' own seconds.

    1. Runs a chain with one layer of every kind, on this rank alone, with the smallest packs.
    2. Iterations of `FEW` and of `MANY` microbatches: the slope is a microbatch, the intercept an iteration.
    3. From a microbatch the same stage's seconds without executor are subtracted; half of the rest is an action.

    Differences are taken within a round of the stopwatch, so that a slower machine affects both runs.
    """
    audio, vision, language = (
        architecture.audio and replace(architecture.audio, layers=1),
        replace(architecture.vision, layers=min(1, architecture.vision.layers), feature_layers=(), side_by_side=()),
        replace(architecture.language, layers=1, shared_keys=None),
    )
    small = replace(architecture, audio=audio, vision=vision, language=language)
    chain = Chain.of(args, small)
    model = [wrapped_stage(chain, 0, len(chain.kinds))]
    tiles = small.least_tiles
    tokens = small.image_tokens(tiles) + 1
    tokens += -tokens % args.tensor_model_parallel_size
    pack = synthetic_pack(small, tiles, [tokens])
    executor = Executor()
    few_timer, many_timer, layers_timer = Timer(), Timer(), Timer()

    def iterate(count: int, timer: Timer) -> float:
        # Copies: a pack caches what it computes for all layers.
        packs = iter([replace(pack) for _ in range(count)])
        (seconds,) = timer(
            lambda: executor(forward_step_func=_forward_step, data_iterator=packs, model=model, num_microbatches=count)
        )
        return seconds

    def run() -> tuple[float, ...]:
        few, many, step = iterate(FEW, few_timer), iterate(MANY, many_timer), StagePass(chain, model[0], pack)
        microbatch = (many - few) / (MANY - FEW)
        return (microbatch - sum(layers_timer(step.forward, step.backward))) / 2, few - FEW * microbatch

    action, iteration = stopwatch.measure({"actions": {"run": run}})["actions"]["run"]
    few, many, layers = (sum(timer.host_seconds) for timer in (few_timer, many_timer, layers_timer))
    return max(0.0, action), max(0.0, iteration), max(0.0, ((many - few) / (MANY - FEW) - layers) / 2)


def _forward_step(packs: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    pack = next(packs)
    return model(pack), partial(token_loss, "token", pack)
