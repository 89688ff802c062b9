"""Bits that flip on disk: every one is refused in a line, passed over for an older save, or means nothing.

python -m tests.endurance.flips FOLDER [--flips 300] [--seed 0]

FOLDER is that of `tests.endurance.kills`. One bit at a time is flipped, in a file of dataset, index, checkpoint or
plan, and what a run looks at before it trains looks at it. A save is loaded only if its bytes are those that were
written.
"""

import argparse
import random
from argparse import Namespace
from collections import Counter
from pathlib import Path

from tests.endurance.kills import prepare, undisturbed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.folder)
    undisturbed(arguments.folder, 8)
    print(dict(flip_all(arguments.folder, arguments.flips, arguments.seed)))


def flip_all(folder: Path, flips: int, seed: int) -> Counter[str]:
    """What became of each flip; AssertionError for one that changes what a run would read, unseen."""
    import torch

    from megatron.vlm.checkpoint.folder import Checkpoints

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    checkpoints = folder / "alone/checkpoints"
    newest = Checkpoints(checkpoints).newest()
    folders = {"dataset": folder / "data", "index": folder / "packs", "checkpoint": newest.path}
    rooms = {room: sorted(file for file in path.iterdir() if file.stat().st_size) for room, path in folders.items()}
    rooms["plan"] = [folder / "alone/plan.json", folder / "alone/profile.json"]
    meaning, bits, found = read(folder), random.Random(seed), Counter[str]()
    try:
        for _ in range(flips):
            room = bits.choice(sorted(rooms))
            path = bits.choice(rooms[room])
            whole = path.read_bytes()
            damaged = bytearray(whole)
            damaged[bits.randrange(len(whole))] ^= 1 << bits.randrange(8)
            path.write_bytes(damaged)
            try:
                found[f"{room}: {verdict(folder, meaning, newest.iteration)}"] += 1
            finally:
                path.write_bytes(whole)
                Checkpoints(checkpoints).track(newest)
    finally:
        torch.distributed.destroy_process_group()
    return found


def verdict(folder: Path, meaning: object, iteration: int) -> str:
    from omnibal_ext.errors import UserError

    try:
        now = read(folder)
    except UserError as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    if now == meaning:
        return "means the same"
    assert isinstance(now, tuple)
    assert isinstance(meaning, tuple)
    assert now[:-1] == meaning[:-1], "a flip changed what is read"
    assert now[-1] < iteration, "a flip changed what is loaded"
    return "passed over for an older save"


def read(folder: Path) -> tuple[object, ...]:
    """What a run reads: manifests, the plan, and the iteration that it goes on from. UserError where it refuses."""
    from megatron.vlm.checkpoint.folder import Checkpoints
    from megatron.vlm.checkpoint.guard import select_save
    from megatron.vlm.data.dataset import ChatDataset
    from omnibal_ext.costs.profile import Profile
    from omnibal_ext.packing.index.packed_index import PackedIndex
    from omnibal_ext.plan import Plan

    data, index = ChatDataset(folder / "data"), PackedIndex.open(folder / "packs")
    data.verify()
    index.verify()
    load = folder / "alone/checkpoints"
    select_save(Namespace(load=str(load), pretrained_checkpoint=None, trust=False, ckpt_step=None))
    planned = Profile.load(folder / "alone/profile.json"), Plan.load(folder / "alone/plan.json")
    return data.manifest, index.manifest, planned, Checkpoints(load).newest().iteration


if __name__ == "__main__":
    main()
