"""Run under torchrun: with the tower beside the pipeline every case must yield the loss and gradients of one process.

beside.py answers ANSWERS               writes those of one process, for what launches of the short suite ask
beside.py "all answers" ANSWERS         for what all of them ask
beside.py LAUNCH ANSWERS [flag...]      compares the launch's cases with them
"""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain as joined
from math import prod

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron.vlm.media import Images, Media
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import Communicator
from megatron.vlm.pipeline.encoding import ToEncode
from megatron.vlm.pipeline.executor import Executor, image_edges, open_channels
from omnibal_ext.image_assignment import assign_pieces
from omnibal_ext.plan import Plan
from tests.distributed import beside_cases, harness, parity
from tests.media import seen


def main() -> None:
    name, path, *flags = sys.argv[1:]
    if name.endswith("answers"):
        harness.start(harness.SMALL, 1, 1, flags)
        launches = [one for one in beside_cases.LAUNCHES.values() if name.startswith("all") or not one.is_long]
        asked = {case.case.question for launch in launches for case in launch.cases()}
        harness.Answers.write(path, {question: parity.answer(question) for question in asked})
        print("RESULT " + json.dumps({"answers": len(asked)}))
    else:
        launch = beside_cases.LAUNCHES[name]
        harness.start(harness.SMALL, launch.tensor, launch.pipeline, flags)
        answers, communicator = harness.Answers(path), open_image_channels(launch.pipeline)
        harness.report({str(case): difference(case, answers, launch.pipeline, communicator) for case in launch.cases()})
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def open_image_channels(pipeline: int) -> Communicator:
    """Channels of all placements, and to both ranks where a first stage can be."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return open_channels(groups, harness.edges(pipeline), edges_of_images(pipeline))


def edges_of_images(pipeline: int) -> list[tuple[int, int]]:
    """Of pipeline ranks to both where a first stage can be."""
    return [edge for first in {0, pipeline - 1} for edge in image_edges(pipeline, first)]


def difference(
    case: beside_cases.Beside, answers: harness.Answers, pipeline: int,
    communicator: Communicator, executor_of: type[Executor] | partial[Executor] = Executor,
) -> float:  # fmt: skip
    """Largest relative difference of the loss and any gradient, in the second of two iterations."""
    args, question = get_args(), case.case.question
    args.sequence_parallel, args.overlap_grad_reduce = case.case.sequence_parallel, case.case.overlap
    chain = harness.chain_of(args, question)
    plan = case.plan(chain.kinds, pipeline, args.tensor_model_parallel_size)
    plan.validate()
    model = harness.build_model(chain, plan)
    packs = harness.sample_packs(
        question.packs, args.tensor_model_parallel_size if case.case.sequence_parallel else 1, question.model
    )
    executor = executor_of(plan.schedule, lists=plan.build_schedule(), tower=plan.tower)
    executor._communicator = communicator
    run = partial(run_iteration, model, plan, packs, executor, question.reduction)
    run()
    if case.case.overlap:
        get_model_config(model[0]).finalize_model_grads_func = harness.finalize_what_is_under_way
    loss = run()
    check_copies(executor, model)
    return harness.compare(model, answers[question], loss)


def run_iteration(
    model: list[torch.nn.Module], plan: Plan, packs: Sequence[Microbatch], executor: Executor, reduction: str,
    following: Sequence[Microbatch] | None = None, iteration: int = 0,
) -> float:  # fmt: skip
    """As the harness's, with the images that this rank encodes; `following` are the next iteration's packs."""
    assert plan.tower is not None
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine, coming = packs[rank::ranks], (following or packs)[rank::ranks]
    images = parts_of(plan, mine)
    if plan.tower.mode == "ahead":
        has_run = executor.encoding is not None and executor.encoding._next is not None
        images = joined(iter(()) if has_run else images, parts_of(plan, coming))
    return harness.run_iteration(model, plan, packs, partial(executor, images=ToEncode(images, iteration)), reduction)


def parts_of(plan: Plan, packs: Sequence[Microbatch]) -> Iterator[Microbatch]:
    """What this rank is handed of the packs' images."""
    for microbatch, pack in enumerate(packs):
        yield part_of(plan, pack, microbatch)


def part_of(plan: Plan, pack: Microbatch, microbatch: int) -> Microbatch:
    """This rank's part of a pack's images."""
    assert plan.tower is not None
    parts, sizes = plan.tower.encoding_ranks[microbatch % len(plan.tower.encoding_ranks)], plan.tower.rates
    size = next((one for one in sizes if one != "tiles"), "frames")
    more, images = pack.media_of(size), seen(pack)
    sounds = more.pieces if size in sizes else ()
    units = (tuple(map(prod, images.grids)) or (1,) * images.amount) if "tiles" in sizes else ()
    costs = (*units, *(sizes[size] * sum(sample) for sample in sounds))
    here, tensor = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    workers = assign_pieces(costs, microbatch, parts, parallel_state.get_tensor_model_parallel_world_size())
    worker = parts.index(here) * parallel_state.get_tensor_model_parallel_world_size() + tensor if here in parts else -1
    own, own_sounds = ([one == worker for one in some] for some in (workers[: len(units)], workers[len(units) :]))
    rows = torch.tensor([one for one, unit in zip(own, units, strict=True) for _ in range(unit)], dtype=torch.bool)
    assert images.values is not None
    frames = torch.tensor(
        [one for one, sample in zip(own_sounds, sounds, strict=True) for _ in range(sum(sample))], dtype=torch.bool
    )
    media: dict[str, Media] = {}
    if units:
        grids = tuple(grid for grid, one in zip(images.grids, own, strict=False) if one)
        media["tiles"] = Images(
            pieces=tuple((unit,) for unit in units), encodes=tuple(own), values=images.values[rows], grids=grids
        )
    if sounds:
        assert more.values is not None
        media[size] = Media(pieces=sounds, encodes=tuple(own_sounds), values=more.values[frames])
    return Microbatch(lengths=(), samples=pack.samples, useful_tokens=0, media=media, pack=pack.pack)


def check_copies(executor: Executor, model: list[torch.nn.Module]) -> None:
    """Copies are what their owners have, once they are made anew; sums are empty."""
    assert executor.encoding is not None
    tower = executor.encoding.tower
    tower.refresh()
    for piece in tower.pieces:
        for copy, owned in zip(piece.copies, piece.owned, strict=False):
            assert torch.equal(copy, owned), "a copy is not what its owner has"
        assert piece.sums is None or not piece.sums.any()


if __name__ == "__main__":
    main()
