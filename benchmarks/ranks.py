"""The ranks' side of `two_ranks`: real stages, executor, wrappers and optimizer, without logging."""

import json
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megatron.vlm  # noqa: F401 (readies the machine, before megatron.core is imported)

# isort: split
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from megatron.training.training import get_megatron_optimizer_config

from benchmarks.two_ranks import Shape
from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import Communicator
from megatron.vlm.pipeline.executor import Executor, image_edges
from megatron.vlm.pipeline.weight_gradients import Linear
from megatron.vlm.profiling.kept import KeptBytes
from megatron.vlm.profiling.profiler import ProfileJob, profile_on_this_machine
from megatron.vlm.profiling.stage_pass import synthetic_pack
from omnibal_ext.architectures import presets
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.image_assignment import assign_pieces
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.actions import Action
from tests.distributed import beside, harness, wide

WORDS = 64
"""What samples are written in."""


def measure(shape: Shape, order: dict[str, Any]) -> Any:
    """A profile's record, or what training each case took; the same on both ranks but for the profile."""
    torch.set_num_threads(1)
    presets.PRESETS[shape.name] = shape.architecture
    if "cases" in order:
        return _train_all(shape, order)
    job = ProfileJob(
        shape.name, {"tiles": shape.vit_budget, "tokens": shape.llm_budget}, steps=order["steps"],
        data_parallel=order["data_parallel"], frozen=tuple(order["frozen"]),
    )  # fmt: skip
    profile = profile_on_this_machine(job, {})
    return profile.to_record() if profile else None


def _train_all(shape: Shape, order: dict[str, Any]) -> list[dict[str, Any]]:
    cases, pipeline = order["cases"], order["pipeline"]
    harness.MODELS[shape.name] = shape.architecture
    args = harness.start(shape.architecture, 1, pipeline)
    chain = harness.build_chain(args, shape.architecture, tuple(order["frozen"]))
    images = image_edges(pipeline, 0) if any("tower" in case["plan"] for case in cases) else []
    group = parallel_state.get_pipeline_model_parallel_group()
    communicator = Communicator(group, harness.edges(pipeline), image_edges=images)
    models: dict[str, _Training] = {}
    jobs = []
    for case in cases:
        plan = Plan.from_record(case["plan"])
        packs = [synthetic_pack(shape.architecture, {"tiles": tiles}, lengths) for tiles, lengths in case["packs"]]
        if case["contents"]:
            packs = [written(shape, *both) for both in zip(packs, case["contents"], strict=True)]
        if case["widths"]:
            packs = _assigned(packs, case["widths"], shape.architecture)
        key = case["name"] + json.dumps(case["plan"])
        if key not in models:
            models[key] = _Training(args, harness.build_model(chain, plan), plan, communicator)
        jobs.append((models[key], packs, bool(case["widths"])))
    seconds: list[list[float]] = [[] for _ in jobs]
    work: list[list[float]] = [[] for _ in jobs]
    losses: list[list[float]] = [[] for _ in jobs]
    disturbed: list[list[float]] = [[] for _ in jobs]
    for number in range(order["rounds"]):
        for index in _turns([case["name"] for case in cases], random.Random(number)):
            job, packs, assigned = jobs[index]
            torch.distributed.barrier()
            started, worked = time.perf_counter(), time.process_time()
            losses[index].append(job.iterate(packs, assigned))
            seconds[index].append(time.perf_counter() - started)
            work[index].append(time.process_time() - worked)
            disturbed[index].append(job.disturbed)
    peaks = [job.peak_bytes(packs) for job, packs, _ in jobs] if order["count_bytes"] else [0.0] * len(jobs)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, list(zip(seconds, work, peaks, disturbed, strict=True)))
    torch.distributed.destroy_process_group()
    return [_found(of_ranks, mean) for of_ranks, mean in zip(zip(*everyone, strict=True), losses, strict=True)]


def _found(
    of_ranks: Sequence[tuple[list[float], list[float], float, list[float]]], losses: list[float]
) -> dict[str, Any]:
    """Of one case, from what each rank has of it."""
    seconds, work, peaks, disturbed = zip(*of_ranks, strict=True)
    slowest, least_calm = ([max(ranks) for ranks in zip(*one, strict=True)] for one in (seconds, disturbed))
    of_work = {"work": list(zip(*work, strict=True)), "disturbed": least_calm}
    return {"seconds": slowest, **of_work, "peak_bytes": peaks, "losses": losses}


def _turns(names: Sequence[str], generator: random.Random) -> Iterator[int]:
    """Every case once: of each name the first, then of each the second, ...

    All see their iterations in the same order; of the names another goes first each time, as what ran before leaves its
    traces in memory and caches.
    """
    seen: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        seen.setdefault(name, []).append(index)
    for turn in zip_longest(*seen.values()):
        yield from generator.sample([index for index in turn if index is not None], len(seen) - turn.count(None))


def written(shape: Shape, pack: Microbatch, samples: Sequence[Sequence[int]]) -> Microbatch:
    """The pack with its samples (number, tiles, tokens) in it: image, then words that each follow from the one before.

    A sample is the same in every pack, and its words are what is learned; padding is not.
    """
    ids, mask = torch.zeros(pack.tokens, dtype=torch.int64), torch.zeros(pack.tokens)
    shown = Images.of(pack)
    assert shown.values is not None
    pixels, images = [torch.zeros(0, *shown.values.shape[1:])], [torch.zeros(0, dtype=torch.int64)]
    begins = np.cumsum((0, *pack.lengths))
    for begin, (number, tiles, tokens) in zip(begins.tolist(), samples, strict=False):
        generator = torch.Generator().manual_seed(number)
        first, step = torch.randint(1, WORDS, (2,), generator=generator).tolist()
        image = shape.architecture.image_tokens(tiles)
        ids[begin + image : begin + tokens] = (first + step * torch.arange(tokens - image)) % WORDS
        mask[begin + image : begin + tokens - 1] = 1.0
        images.append(torch.arange(begin, begin + image))
        pixels.append(torch.randn(tiles, *shown.values.shape[1:], generator=generator))
    positions = torch.cat(images)
    seen = replace(shown, values=torch.cat(pixels), positions=positions, sources=torch.arange(len(positions)))
    return replace(pack, input_ids=ids, labels=ids.roll(-1), loss_mask=mask, media={**pack.media, "tiles": seen})


def _assigned(packs: Sequence[Microbatch], widths: Sequence[int], model: Architecture) -> list[Microbatch]:
    """What this data-parallel rank runs of packs, those of several ranks with images dealt as the loader does."""
    rank, slots, mine = parallel_state.get_data_parallel_rank(), 0, []
    for number, (pack, width) in enumerate(zip(packs, widths, strict=True)):
        if slots <= rank < slots + width:
            makers = np.array(assign_pieces([1] * Images.of(pack).amount, number, tuple(range(width)), 1), np.int64)
            mine.append(wide.teams().join(wide.part([pack], 0, rank - slots, width, 1, model, makers)))
        slots = (slots + width) % parallel_state.get_data_parallel_world_size()
    return mine


class _Training:
    """One plan, ready to iterate."""

    def __init__(self, args: Any, model: list[Any], plan: Plan, communicator: Communicator) -> None:
        self.model, self.plan = model, plan
        self.computed = self.had = 0.0
        """Seconds that actions took in this iteration, and those for which they had a processor."""
        self.executor = Executor(plan.schedule, lists=plan.build_schedule(), tower=plan.tower, watch=self._watched)
        # One for all plans: every gloo group has a thread of its own that keeps waking up.
        self.executor._communicator = communicator
        config, overrides = get_megatron_optimizer_config(args)
        self.optimizer = get_megatron_optimizer(
            config, model, overrides, use_gloo_process_groups=args.use_gloo_process_groups
        )

    def iterate(self, packs: Sequence[Microbatch], assigned: bool) -> float:
        """What Megatron's `train_step` does; the mean loss."""
        self.optimizer.zero_grad()
        self.computed = self.had = 0.0
        run = beside.run_iteration if self.plan.tower else partial(harness.run_iteration, dealt=assigned)
        loss = run(self.model, self.plan, packs, self.executor, "token")
        self.optimizer.step()
        return loss

    @property
    def disturbed(self) -> float:
        """Share of its actions' time in which the rank had no processor."""
        return 1 - self.had / self.computed if self.computed else 0.0

    @contextmanager
    def _watched(self, _: Action) -> Iterator[None]:
        began, had = time.perf_counter(), time.thread_time()
        yield
        self.computed += time.perf_counter() - began
        self.had += time.thread_time() - had

    def peak_bytes(self, packs: Sequence[Microbatch]) -> float:
        """Counted over one more iteration."""
        weights = [weight for chunk in self.model for weight in chunk.parameters()]
        gradients = self.executor.weight_gradients
        with KeptBytes(weights) as kept:
            gradients.keep = partial(_counted, kept, type(gradients).keep.__get__(gradients))
            harness.run_iteration(self.model, self.plan, packs, self.executor)
        state = [t for one in _optimizers(self.optimizer) for values in one.state.values() for t in values.values()]
        tensors = [*weights, *(weight.main_grad for weight in weights), *filter(torch.is_tensor, state)]
        return float(kept.peak + sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _counted(kept: KeptBytes, keep: Callable[[Linear], None], linear: Linear) -> None:
    """What B puts aside is held until W."""
    keep(linear)
    for storage in (tensor.untyped_storage() for tensor in linear.held):
        kept.hold(storage)
        weakref.finalize(linear, kept.release, storage)


def _optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield one.optimizer


def main() -> None:
    """What a rank of the torchrun does."""
    order, answer = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    found = measure(Shape.from_record(order["shape"]), order)
    if os.environ["RANK"] == "0":
        partial_answer = answer.with_suffix(".partial")
        partial_answer.write_text(json.dumps(found))
        partial_answer.replace(answer)


if __name__ == "__main__":
    main()
