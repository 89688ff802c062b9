"""A run with cached tiles reads what it reads without them, to the bit, whatever happens to their folder."""

import errno
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from PIL import Image

from examples.demo.data import make_demo_data
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.films import FilmReader
from megatron.vlm.data.inputs.images import ImageReader
from megatron.vlm.data.loader import Needs, PackDataset, microbatches
from megatron.vlm.data.media import tile_cache
from megatron.vlm.data.media.images import load_rgb
from megatron.vlm.data.media.tile_cache import TileCache, decoder
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.media.videos import cut_frames
from omnibal_ext.errors import UserError
from omnibal_ext.families.media import TILINGS
from omnibal_ext.files import writing
from omnibal_ext.modalities.modality import FILM
from omnibal_ext.modalities.vision.tiling import TilingRule
from omnibal_ext.packing.options import PackOptions
from tests.demo import dataset_of, demo_packs, demo_recipe, turns, written
from tests.media import seen, tiles_of
from tests.unit.data.clips import noise
from tests.unit.data.test_crc import encoded

COUNT = 6
SAID = turns("<image>\nabc?", "abc")
EVERYTHING = Needs(frozenset({"tiles"}), tokens=True, labels=True)
RULES = {
    "internvl": Tiling(32, max_tiles=6), "anyres": Tiling(32, max_tiles=4, rule="anyres"),
    "split": Tiling(32, max_tiles=9, rule="split"), "pad": Tiling(32, 1, 1, False, "pad"),
    "native": Tiling(16, 4, 64, False, "native"),
}  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    make_demo_data(folder, samples=1, heldout_samples=1, seed=0)
    return folder


def pictures(words: Path, folder: Path, tiling: Tiling = RULES["internvl"], seed: int = 0, **more: Any) -> ChatDataset:
    """A dataset of pictures of several sizes."""
    folder.mkdir(exist_ok=True)
    for number in range(COUNT):
        width, height = 40 + 30 * number, 150 - 20 * number
        Image.fromarray(noise(1, width, height, seed * COUNT + number)[0]).save(folder / f"{number}.png")
    said = ({"image": f"{number}.png", "conversations": SAID} for number in range(COUNT))
    recipe = replace(demo_recipe(words, **more), image_root=folder, tiling=tiling)
    return dataset_of(written(folder / "chat.jsonl", *said), recipe, folder / f"data-{astuple(tiling)}")


@pytest.fixture
def data(words: Path, tmp_path: Path) -> ChatDataset:
    return pictures(words, tmp_path / "pictures")


def with_cache(data: ChatDataset, folder: Path) -> ChatDataset:
    return ChatDataset(data.folder, tile_cache=TileCache(folder))


def read(data: ChatDataset) -> list[Any]:
    """The tiles of each sample, or why it has none."""
    found = list[Any]()
    for sample in map(data.sample, range(len(data))):
        try:
            found.append(tiles_of(sample).tolist())
        except UserError as error:
            found.append(str(error))
    return found


def failing(number: int) -> Any:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fails


def full(target: Path, before: Any = writing._new_file) -> tuple[Path, BinaryIO]:
    """A new file on a disk without room."""
    path, file = before(target)
    file.close()
    return path, Path("/dev/full").open("wb")


def entries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of all images and videos that are decoded."""
    names = list[str]()
    for reader in (ImageReader, FilmReader):

        def noted(self: Any, root: Path, path: Path, item: Any, before: Any = reader._decoded) -> Any:
            names.append(item.path)
            return before(self, root, path, item)

        monkeypatch.setattr(reader, "_decoded", noted)
    return names


@pytest.mark.parametrize("rule", RULES)
def test_each_image_is_decoded_once_and_its_tiles_are_the_same(
    words: Path, tmp_path: Path, decoded: list[str], rule: str
) -> None:
    data = pictures(words, tmp_path / "pictures", RULES[rule])
    due, images = read(data), sorted(decoded)
    decoded.clear()
    for epoch in range(3):
        kept = with_cache(data, tmp_path / "tiles")  # as a run that is resumed
        assert read(kept) == due, epoch
    assert sorted(decoded) == images
    assert len(entries(tmp_path / "tiles")) == COUNT


def test_videos_of_all_kinds_are_decoded_once(tmp_path: Path, decoded: list[str]) -> None:
    """Video files and lists of frames, with an encoder of their own and without."""
    pytest.importorskip("av")
    from tests.unit.data import test_films as films
    from tests.unit.data import test_videos as videos

    films.folder.__wrapped__(tmp_path)  # type: ignore[attr-defined]
    apart = films.made(tmp_path, films.records())
    names = videos.write_frames(tmp_path, "g", noise(4, 56, 56, seed=1))
    (tmp_path / "shown").mkdir()
    shown = videos.made(tmp_path, "qwen3-vl", [videos.film_of("long.mp4"), {**videos.film_of(names), "fps": 2}])
    due = [FilmReader(apart).decode_all(apart.sample(number)).tolist() for number in range(len(apart))]
    due_shown = read(shown)
    kept, kept_shown = (with_cache(data, tmp_path / "tiles") for data in (apart, shown))
    for _ in range(2):
        decoded.clear()
        assert [FilmReader(kept).decode_all(kept.sample(number)).tolist() for number in range(len(kept))] == due
        assert read(kept_shown) == due_shown
    assert not decoded
    films.write_frames(tmp_path, "g", noise(4, 56, 56, seed=2))
    assert ["is not what was preprocessed" in str(one) for one in read(kept_shown)] == [False, True]
    assert len(kept.sample(0).items(FILM)) == 2


def test_datasets_of_other_settings_share_a_folder(words: Path, tmp_path: Path) -> None:
    """The same pictures, by the same paths, cut in other ways."""
    usual = RULES["internvl"]
    ways = [usual, replace(usual, tile_size=16), replace(usual, max_tiles=2), replace(usual, thumbnail=False)]
    several = [pictures(words, tmp_path / "pictures", way) for way in [*ways, RULES["anyres"], RULES["pad"]]]
    due = [read(data) for data in several]
    for _ in range(2):
        assert [read(with_cache(data, tmp_path / "tiles")) for data in several] == due


def test_what_determines_tiles_is_in_their_name(data: ChatDataset, tmp_path: Path, monkeypatch: Any) -> None:
    """A change of any gives another name: of an image, where a checksum alone is that of several in a hundred
    thousand, of the rule, of packages and of our code."""
    cache, root = TileCache(tmp_path / "tiles"), Path("/root")
    reader = ImageReader(ChatDataset(data.folder, tile_cache=cache))
    (image,) = data.sample(COUNT - 1).images
    assert image.columns != image.rows
    assert image.thumbnail
    changes: list[dict[str, Any]] = [
        {}, {"path": "other.png"}, {"columns": image.rows, "rows": image.columns}, {"thumbnail": False},
        {"width": 5}, {"place": ("bytes", 0, 9)}, {"place": ("bytes", 1, 9)}, {"crcs": (7,)},
    ]  # fmt: skip

    def name(file: str, **change: Any) -> str:
        kept = reader._kept(root, root / file, replace(image, **change))
        assert kept
        return str(kept.path)

    names = [*(name("a", **change) for change in changes), name("b")]
    reader.data.manifest["tile_size"] = 16
    names.append(name("a"))
    reader.data.manifest["tiling"]["rule"] = "pad"
    names.append(name("a"))
    for owner, said in ((tile_cache.Image, "__version__"), (tile_cache, "_code"), (torch, "__version__")):
        monkeypatch.setattr(owner, said, (lambda: "other") if said == "_code" else "other")
        reader.data.tile_cache = TileCache(tmp_path / "tiles")
        names.append(name("a"))
    assert len({*names}) == len(names)
    assert cache.of("a", (1, 2, 3)).path != cache.of("a", (1, 3, 2)).path


def test_the_code_that_makes_tiles_is_in_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of all rules, and of what decodes."""
    read = set[Path]()
    before = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.add(path) or before(path))
    decoder()
    makers = [kind for rule in TILINGS.values() for kind in type(rule).__mro__ if issubclass(kind, TilingRule)]
    modules = {kind.__module__ for kind in makers} | {
        one.__module__ for one in (load_rgb, cut_frames, ImageReader, FilmReader)
    }
    assert {Path(str(sys.modules[name].__file__)) for name in modules} <= read


@pytest.mark.parametrize("seed", range(3))
def test_what_is_damaged_is_made_again(data: ChatDataset, tmp_path: Path, seed: int) -> None:
    """A bit, an end that is missing or too many, nothing at all, another entry, no file: never taken."""
    due, draw, folder = read(data), random.Random(seed), TileCache(tmp_path / "tiles").folder
    assert read(with_cache(data, folder.parent)) == due
    whole = entries(folder)
    for name, content in whole.items():
        at = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[at // 8] ^= 1 << at % 8
        damaged = [bytes(flipped), content[: draw.randrange(len(content))], content + b"0", b"", bytes(len(content))]
        damaged += [other for other in whole.values() if other != content and len(other) == len(content)]
        (folder / name).write_bytes(draw.choice(damaged))
    assert read(with_cache(data, folder.parent)) == due
    assert entries(folder) == whole
    for name in whole:
        (folder / name).unlink()
        (folder / name).mkdir()
    assert read(with_cache(data, folder.parent)) == due


@pytest.mark.parametrize("planted", ["rights", "a link", "a file", "another user"])
def test_a_folder_in_which_others_could_write_is_not_used(
    data: ChatDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], planted: str
) -> None:
    """DIR may be everybody's: no entry of another user is read, and nothing is written through a link."""
    due, kept, elsewhere = read(data), with_cache(data, tmp_path / "tiles"), tmp_path / "elsewhere"
    folder = kept.tile_cache.folder  # type: ignore[union-attr]
    read(kept)
    if planted == "rights":
        folder.chmod(0o777)
    elif planted == "another user":
        monkeypatch.setattr(tile_cache.os, "geteuid", lambda: os.getuid() + 1)
    else:
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere) if planted == "a link" else folder.write_bytes(b"")
    for path in tmp_path.rglob(f"{'[0-9a-f]' * tile_cache.KEY}"):
        path.write_bytes(path.read_bytes()[:-1])
    before = entries(tmp_path)
    assert read(kept) == due
    assert entries(tmp_path) == before
    assert capsys.readouterr().out.count("warning: ") == 1


def test_a_start_removes_nothing_that_the_cache_has_not_made(tmp_path: Path) -> None:
    """DIR may be a home."""
    (tmp_path / ".backup.0123456789abcdef").mkdir()
    (tmp_path / ".backup.0123456789abcdef/thesis").write_bytes(b"")
    (tmp_path / ".key.0123456789abcdef").write_bytes(b"")
    before = entries(tmp_path)
    TileCache(tmp_path)
    assert entries(tmp_path) == before


def test_another_entry_under_this_name_is_not_taken(tmp_path: Path) -> None:
    cache = TileCache(tmp_path)
    one, other = (np.full((1, 2, 2, 3), value, np.uint8) for value in (1, 2))
    cache.of("one", one.shape).tiles(list, lambda: one)
    cache.of("one", one.shape).path.rename(cache.of("other", one.shape).path)
    assert np.array_equal(cache.of("other", one.shape).tiles(list, lambda: other), other)


@pytest.mark.parametrize("written", [0.0, 0.5, 1.0])
def test_a_kill_while_an_entry_is_written_leaves_none(tmp_path: Path, written: float) -> None:
    """And what it leaves is removed by the next start, but not what is being written."""
    cache, tiles = TileCache(tmp_path), np.ones((4, 32, 32, 3), np.uint8)
    entry = cache.of("one", tiles.shape)

    def content(die: bool) -> Iterator[bytes]:
        yield tiles.tobytes()[: int(tiles.nbytes * written)]
        assert not entry.path.exists()
        assert len(entries(tmp_path)) == 1
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        TileCache(tmp_path)  # another run
        yield tiles.tobytes()[int(tiles.nbytes * written) :]

    if (child := os.fork()) == 0:
        try:
            cache.write(entry.path, content(die=True), tiles.nbytes)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not entry.path.exists()
    TileCache(tmp_path)
    assert not entries(tmp_path)
    cache.write(entry.path, content(die=False), tiles.nbytes)
    assert entries(tmp_path) == {entry.path.name: tiles.tobytes()}


def test_a_changed_image_weighs_nothing_though_its_tiles_are_kept(data: ChatDataset, tmp_path: Path) -> None:
    """Also one that is gone; one that is as it was again is taken; without checksums what is there is decoded."""
    folder, kept = Path(data.sample(0).file(data.sample(0).images[0])[0]), with_cache(data, tmp_path / "tiles")
    due = read(kept)
    before = (folder / "1.png").read_bytes()
    (folder / "1.png").write_bytes(encoded(99))
    (folder / "2.png").rename(folder / "away.png")
    found = read(kept)
    assert found == read(data)
    assert ["is not what was preprocessed" in str(one) for one in found] == [number == 1 for number in range(COUNT)]
    assert "2.png: cannot be" in found[2]
    (folder / "away.png").rename(folder / "2.png")
    unchecked = ChatDataset(data.folder, checks_images=False, tile_cache=kept.tile_cache)
    assert read(unchecked)[1] == read(ChatDataset(data.folder, checks_images=False))[1] != due[1]
    (folder / "1.png").write_bytes(before)
    assert read(kept) == due


def test_what_no_checksum_tells_is_not_kept(words: Path, data: ChatDataset, tmp_path: Path) -> None:
    """Nothing is noted of it, nobody compares it, or it is a copy of an object, of which only the length is noted."""
    bare = pictures(words, tmp_path / "bare", image_checksums=False)
    read(with_cache(bare, tmp_path / "tiles"))
    read(ChatDataset(data.folder, checks_images=False, tile_cache=TileCache(tmp_path / "tiles")))
    reader, (image,) = ImageReader(with_cache(data, tmp_path / "tiles")), data.sample(0).images
    assert reader._kept(Path("/"), Path("/a"), replace(image, crcs=("7-etag",))) is None
    assert not entries(tmp_path / "tiles")


@pytest.mark.parametrize("seed", range(3))
def test_anything_may_be_deleted_at_any_time(
    data: ChatDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Files and the folder, before and inside of any step of reading and writing."""
    due, draw, folder = read(data), random.Random(seed), tmp_path / "tiles"
    kept = with_cache(data, folder)

    def deleting(step: Any) -> Any:
        def stepped(*given: Any, **named: Any) -> Any:
            if draw.random() < 0.3:
                shutil.rmtree(folder, ignore_errors=True)
            for path in folder.rglob("*/*"):
                if draw.random() < 0.3:
                    path.unlink()
            return step(*given, **named)

        return stepped

    for owner, step in (
        (tile_cache, "open_regular"), (tile_cache, "size_of"), (tile_cache.os, "statvfs"), (tile_cache, "replacing"),
        (tile_cache.KeptTiles, "_checksum"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, step, deleting(getattr(owner, step)))
    for _ in range(10):
        assert read(kept) == due
    monkeypatch.undo()
    assert read(kept) == due
    assert len(entries(folder)) == COUNT, "its folder is made again"


@pytest.mark.parametrize("fault", ["full", "no space", "read-only", "no folder", "a file", "no name"])
def test_where_nothing_can_be_written_images_are_decoded_and_a_line_says_so_once(
    data: ChatDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    due, folder = read(data), tmp_path / "tiles"
    if fault == "a file":
        folder.write_bytes(b"mine")
    kept = with_cache(data, folder / {"a file": "deep", "no name": "n" * 256}.get(fault, ""))
    assert not kept.tile_cache.of("any", ()).are_there  # type: ignore[union-attr]
    if fault == "full":
        monkeypatch.setattr(tile_cache.os, "statvfs", lambda _: SimpleNamespace(f_bavail=99, f_blocks=1000, f_frsize=1))
    elif fault == "no folder":
        monkeypatch.setattr(Path, "mkdir", failing(errno.EACCES))
    elif fault in ("no space", "read-only"):
        monkeypatch.setattr(writing, "_new_file", failing(errno.EROFS) if fault == "read-only" else full)
    capsys.readouterr()
    for _ in range(2):
        assert read(kept) == due
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"warning: {folder}")
    assert lines[0].endswith("images are decoded, and their tiles not kept there")
    assert folder.read_bytes() == b"mine" if fault == "a file" else not folder.exists() or not entries(folder)
    if fault in ("full", "no space", "read-only"):
        monkeypatch.undo()
        assert read(kept) == due
        assert len(entries(folder)) == COUNT, "once there is room again"


@pytest.mark.parametrize(("free", "is_kept"), [(116, True), (115, False)])
def test_a_tenth_of_the_file_system_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_kept: bool
) -> None:
    monkeypatch.setattr(tile_cache.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_blocks=1000, f_frsize=1))
    entry = TileCache(tmp_path).of("one", (1, 2, 2, 3))
    entry.tiles(list, lambda: np.ones((1, 2, 2, 3), np.uint8))
    assert entry.path.exists() == is_kept


def test_packs_of_workers_of_several_ranks_are_the_same(data: ChatDataset, tmp_path: Path) -> None:
    """Two ranks with two workers each fill one folder at once; a run that is resumed takes what they have kept."""
    index = demo_packs(data, tmp_path / "packs", PackOptions(vit_budget=7, llm_budget=200))
    numbers = range(index.num_packs)
    due = [*map(PackDataset(data, index, EVERYTHING).__getitem__, numbers)]
    kept = PackDataset(with_cache(data, tmp_path / "tiles"), index, EVERYTHING)
    resumed = PackDataset(with_cache(data, tmp_path / "tiles"), index, EVERYTHING)
    ranks = [microbatches(kept, numbers, num_workers=2) for _ in range(2)]
    for found in (*ranks, map(resumed.__getitem__, numbers)):
        for batch, wanted in zip(found, due, strict=True):
            assert not batch.broken
            assert torch.equal(seen(batch).values, seen(wanted).values)  # type: ignore[arg-type]
    assert len(entries(tmp_path / "tiles")) == COUNT
