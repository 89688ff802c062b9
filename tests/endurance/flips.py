"""Bits that flip on disk, files cut short, stretches that change places: each is refused in a line, passed over for an
older save, made again, or means nothing.

python -m tests.endurance.flips FOLDER [--flips 300] [--seed 0]

FOLDER is that of `tests.endurance.kills`. One file at a time is damaged, of dataset, index, checkpoint, plan or what a
run notes of itself, and what a run looks at before it trains looks at it. A save is loaded only if its bytes are those
that were written. (Logs, which no run goes by, are left out: metrics, timeline, TensorBoard's events, the report.)
"""

import argparse
import json
import random
import shutil
from argparse import Namespace
from collections import Counter
from pathlib import Path

from tests.endurance.kills import prepare, undisturbed

NOTES = ("plan.inputs.json", "inputs.json")
"""Of a run's folder: what the plan was made from, and what the run was started with."""


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
    """What became of each damage; AssertionError for one that changes what a run would read, unseen."""
    import torch

    from megatron.vlm.checkpoint.folder import TRACKER, Checkpoints

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    checkpoints = folder / "alone/checkpoints"
    newest = Checkpoints(checkpoints).newest()
    folders = {"dataset": folder / "data", "index": folder / "packs", "checkpoint": newest.path}
    rooms = {room: sorted(file for file in path.iterdir() if file.stat().st_size) for room, path in folders.items()}
    rooms["plan"] = [folder / "alone" / name for name in ("plan.json", "profile.json")]
    rooms["notes"] = [folder / "alone" / name for name in NOTES] + [checkpoints / TRACKER]
    shutil.copyfile(folder / "alone/plan.inputs.json", folder / "plan.inputs.whole")
    meaning, bits, found = read(folder), random.Random(seed), Counter[str]()
    try:
        for _ in range(flips):
            room = bits.choice(sorted(rooms))
            path = bits.choice(rooms[room])
            whole = path.read_bytes()
            path.write_bytes(bits.choice(DAMAGES)(whole, bits))
            try:
                found[f"{room}: {verdict(folder, meaning, newest.iteration)}"] += 1
            finally:
                path.write_bytes(whole)
                Checkpoints(checkpoints).track(newest)
    finally:
        torch.distributed.destroy_process_group()
    return found


def _flip(whole: bytes, bits: random.Random) -> bytes:
    flipped = bytearray(whole)
    flipped[bits.randrange(len(whole))] ^= 1 << bits.randrange(8)
    return bytes(flipped)


def _cut(whole: bytes, bits: random.Random) -> bytes:
    return whole[: bits.randrange(len(whole))]


def _swap(whole: bytes, bits: random.Random) -> bytes:
    """Two stretches of equal length change places."""
    length = bits.randint(1, max(1, len(whole) // 4))
    first = bits.randrange(len(whole) - length + 1)
    second = bits.randrange(len(whole) - length + 1)
    swapped = bytearray(whole)
    swapped[first : first + length], swapped[second : second + length] = (
        whole[second : second + length], whole[first : first + length],
    )  # fmt: skip
    return bytes(swapped)


DAMAGES = (_flip, _cut, _swap)


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
    assert now[:-2] == meaning[:-2], "damage changed what is read"
    if not now[-2]:
        return "made again"
    assert now[-1] < iteration, "damage changed what is loaded"
    return "passed over for an older save"


def read(folder: Path) -> tuple[object, ...]:
    """What a run reads: manifests, the plan, its notes, whether the plan is still that of its inputs, and the iteration
    that it goes on from. UserError where it refuses."""
    from megatron.vlm.checkpoint.folder import Checkpoints
    from megatron.vlm.checkpoint.guard import select_save
    from megatron.vlm.data.dataset import ChatDataset
    from omnibal_ext.costs.profile import Profile
    from omnibal_ext.launch.folder import is_made
    from omnibal_ext.packing.index.packed_index import PackedIndex
    from omnibal_ext.plan import Plan
    from omnibal_ext.run_metrics import noted_inputs

    data, index = ChatDataset(folder / "data"), PackedIndex.open(folder / "packs")
    data.verify()
    index.verify()
    load = folder / "alone/checkpoints"
    select_save(Namespace(load=str(load), pretrained_checkpoint=None, trust=False, ckpt_step=None))
    planned = Profile.load(folder / "alone/profile.json"), Plan.load(folder / "alone/plan.json")
    asked, run = json.loads((folder / "plan.inputs.whole").read_bytes()), folder / "alone"
    notes = noted_inputs(run), is_made(run / "plan.inputs.json", asked, run / "plan.json")
    return data.manifest, index.manifest, planned, *notes, Checkpoints(load).newest().iteration


if __name__ == "__main__":
    main()
