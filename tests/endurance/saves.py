"""What lies in a save's folder is changed: every change is refused in a line, passed over for an older save, or none.

python -m tests.endurance.saves FOLDER [--changes 300] [--seed 0]

FOLDER is that of `tests.endurance.kills`. Files, folders, links and pipes are put into the newest save of a run, in the
place of its files or beside them; its files are moved, exchanged, cut and removed. Then a run looks which save it goes
on from, and where it takes the newest, that must hold what was written and nothing else.
"""

import argparse
import io
import json
import os
import pickle
import random
import shutil
import signal
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.endurance.kills import prepare, undisturbed

LONGEST = 120
"""Seconds in which a run has looked at its saves; one that takes longer waits for something."""
NAMES = (
    "common.pt", ".hidden", "__9_0.distcp", "model_optim_rng.pt", "integrity.json~", "two\nlines", "\udcff", "é", "x",
)  # fmt: skip
"""Of what is put beside the files of a save."""


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--changes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.folder)
    undisturbed(arguments.folder, 8)
    print(dict(sorted(change_all(arguments.folder, arguments.changes, arguments.seed).items())))


def change_all(folder: Path, changes: int, seed: int) -> Counter[str]:
    """What became of each change; AssertionError for one that is loaded unseen, TimeoutError for one that hangs."""
    import torch

    from megatron.vlm.checkpoint.folder import Checkpoints

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    checkpoints = Checkpoints(folder / "alone/checkpoints")
    newest, aside, draws, found = checkpoints.newest(), folder / "aside", random.Random(seed), Counter[str]()
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(newest.path, aside)
    written = {path.name: path.read_bytes() for path in aside.iterdir()}
    try:
        for _ in range(changes):
            kind = draws.choice(sorted(CHANGES))
            CHANGES[kind](newest.path, draws)
            try:
                with no_longer_than(LONGEST):
                    said = verdict(folder, written)
            except Exception as error:
                error.add_note(f"after {kind}")
                raise
            assert not (folder / "ran").exists(), f"{kind}: code was run"
            found[f"{kind}: {said}"] += 1
            shutil.rmtree(newest.path)
            shutil.copytree(aside, newest.path)
            checkpoints.track(newest)
    finally:
        torch.distributed.destroy_process_group()
    return found


def verdict(folder: Path, written: dict[str, bytes]) -> str:
    from megatron.vlm.checkpoint.folder import Checkpoints
    from megatron.vlm.checkpoint.guard import select_save
    from omnibal_ext.errors import UserError

    load = folder / "alone/checkpoints"
    try:
        select_save(Namespace(load=str(load), pretrained_checkpoint=None, trust=False, ckpt_step=None))
    except UserError as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    taken = Checkpoints(load).newest()
    if taken.iteration < 8:
        return "passed over for an older save"
    there = {path.name: path.read_bytes() for path in taken.path.iterdir()}
    lists = [json.loads(files.pop("integrity.json")) for files in (there, dict(written))]
    assert there == {name: written[name] for name in written if name != "integrity.json"}, "a change is loaded, unseen"
    assert lists[0] == lists[1], "a list with another meaning is believed"
    return "holds what was written"


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Raise TimeoutError where a block takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def a_file(save: Path, draws: random.Random) -> Path:
    return draws.choice(sorted(save.iterdir()))


def beside(make: Callable[[Path, random.Random], object]) -> Callable[[Path, random.Random], None]:

    def change(save: Path, draws: random.Random) -> None:
        make(save / draws.choice(NAMES), draws)

    return change


def instead(make: Callable[[Path, random.Random], object]) -> Callable[[Path, random.Random], None]:

    def change(save: Path, draws: random.Random) -> None:
        path = a_file(save, draws)
        path.unlink()
        make(path, draws)

    return change


def edit(how: Callable[[bytes, random.Random], bytes]) -> Callable[[Path, random.Random], None]:
    """Change the bytes of one of its files."""

    def change(save: Path, draws: random.Random) -> None:
        path = a_file(save, draws)
        path.write_bytes(how(path.read_bytes(), draws))

    return change


def exchange(save: Path, draws: random.Random) -> None:
    one, other = draws.sample(sorted(save.iterdir()), 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def from_another(save: Path, draws: random.Random) -> None:
    """A file of the save before takes the place of its own."""
    path = a_file(save, draws)
    shutil.copy(save.with_name("iter_0000004") / path.name, path)


def the_save_before(save: Path, _: random.Random) -> None:
    shutil.rmtree(save)
    shutil.copytree(save.with_name("iter_0000004"), save)


def rename(save: Path, draws: random.Random) -> None:
    path = a_file(save, draws)
    path.rename(save / draws.choice(NAMES))


def torch_file(path: Path, value: object) -> None:
    import torch

    content = io.BytesIO()
    torch.save(value, content)
    path.write_bytes(content.getvalue())


def flip(content: bytes, draws: random.Random) -> bytes:
    flipped = bytearray(content)
    flipped[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    return bytes(flipped)


def ran(path: Path) -> Path:
    """What code makes that a save has run."""
    return path.parents[3] / "ran"


CHANGES: dict[str, Callable[[Path, random.Random], object]] = {
    "an empty file beside": beside(lambda path, _: path.write_bytes(b"")),
    "an empty state beside": beside(lambda path, _: torch_file(path, {})),
    "a state that goes back beside": beside(lambda path, _: torch_file(path, {"iteration": 4})),
    "a state that runs code beside": beside(lambda path, _: torch_file(path, Evil(ran(path)))),
    "a pickle that runs code beside": beside(lambda path, _: path.write_bytes(pickle.dumps(Evil(ran(path))))),
    "a copy beside": beside(lambda path, draws: shutil.copy(a_file(path.parent, draws), path)),
    "a folder beside": beside(lambda path, _: path.mkdir()),
    "a save in the save": beside(lambda path, _: shutil.copytree(path.parent.with_name("iter_0000004"), path)),
    "a link beside": beside(lambda path, draws: path.symlink_to(a_file(path.parent, draws))),
    "a link to itself beside": beside(lambda path, _: path.symlink_to(path)),
    "a hard link beside": beside(lambda path, draws: path.hardlink_to(a_file(path.parent, draws))),
    "a pipe beside": beside(lambda path, _: os.mkfifo(path)),
    "nothing instead": instead(lambda path, _: None),
    "an empty file instead": instead(lambda path, _: path.write_bytes(b"")),
    "a folder instead": instead(lambda path, _: path.mkdir()),
    "a pipe instead": instead(lambda path, _: os.mkfifo(path)),
    "a link to nothing instead": instead(lambda path, _: path.symlink_to("nowhere")),
    "a link to itself instead": instead(lambda path, _: path.symlink_to(path)),
    "a link to another file instead": instead(lambda path, draws: path.symlink_to(a_file(path.parent, draws))),
    "a link to the save before instead": instead(lambda path, _: path.symlink_to(f"../iter_0000004/{path.name}")),
    "a link to a copy instead": instead(lambda path, _: path.symlink_to(path.parents[3] / "aside" / path.name)),
    "a state that runs code instead": instead(lambda path, _: torch_file(path, Evil(ran(path)))),
    "a bit flipped": edit(flip),
    "cut": edit(lambda content, draws: content[: draws.randrange(len(content))]),
    "longer": edit(lambda content, draws: content + draws.randbytes(draws.randint(1, 99))),
    "zeros": edit(lambda content, _: bytes(len(content))), "two exchanged": exchange,
    "one of the save before": from_another, "all of the save before": the_save_before, "renamed": rename,
}  # fmt: skip

if __name__ == "__main__":
    main()
