"""Films and sounds in a store are seen and heard as those of the folder that it serves."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.loader import Needs, PackDataset, microbatches
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.reading import objects, stores
from omnibal_ext.reading.stores import located
from tests import store
from tests.demo import written
from tests.media import heard, seen
from tests.unit.data.clips import TURNS, film_and_image, noise, tar_of, write_talkie, write_video
from tests.unit.data.noises import TURNS as HEARD_TURNS
from tests.unit.data.noises import chirp, write_wav
from tests.unit.data.test_loader import pack_of

store.required()
pytest.importorskip("av")
pytest.importorskip("soxr")
from tests.unit.data.test_sound_samples import HEARD  # noqa: E402
from tests.unit.data.test_stores import served, server  # noqa: E402
from tests.unit.data.test_video_sounds import CLOCKS  # noqa: E402
from tests.unit.data.test_videos import NORMALIZATION, PATCH, RULES, TILINGS, written_tokenizer  # noqa: E402

__all__ = ["served", "server"]
MARKUP = "qwen3-omni"
OF_FILM, OF_SOUND = {"video": "a.mkv", "conversations": TURNS}, {"audio": "b.wav", "conversations": HEARD_TURNS}


def files(folder: Path) -> Path:
    """A film that is heard too, a silent one, and a sound; each of more bytes than come with a header."""
    write_talkie(folder / "a.mkv", noise(20, 64, 48), 4, chirp(80000))
    write_video(folder / "c.mkv", noise(20, 64, 48, 2), 4, "ffv1")
    write_wav(folder / "b.wav", chirp(40000, seed=1))
    assert all((folder / name).stat().st_size > stores.FIRST for name in ("a.mkv", "b.wav", "c.mkv"))
    return written(folder / "chat.jsonl", OF_FILM, OF_SOUND, {**OF_FILM, "video": "c.mkv"})


def frames(folder: Path) -> Path:
    """A film of pictures, and a picture."""
    return written(folder / "chat.jsonl", *film_and_image(folder, 6))


def tar(folder: Path) -> Path:
    """Film and sound as members."""
    files(folder)
    said = [json.dumps({"conversations": one["conversations"]}).encode() for one in (OF_FILM, OF_SOUND)]
    media = [(folder / name).read_bytes() for name in ("a.mkv", "b.wav")]
    return tar_of(
        folder / "set.tar", ("0.json", said[0]), ("0.mkv", media[0]), ("1.json", said[1]), ("1.wav", media[1])
    )


def recipe_of(root: Path, words: Path) -> Recipe:
    if not (words / "tokenizer.json").exists():
        written_tokenizer(words / "tokenizer.json")
    return Recipe(
        root, words / "tokenizer.json", "hermes-2", Tiling(PATCH, 16, 120, False, TILINGS[MARKUP]), 0.25, markup=MARKUP,
        normalization=NORMALIZATION[MARKUP], system_message="", video=RULES[MARKUP], further=(HEARD[MARKUP],),
        clock=CLOCKS[MARKUP], use_audio_in_video=True,
    )  # fmt: skip


def pack_read(data: ChatDataset) -> Microbatch:
    """A pack of all, as training reads it."""
    packs = PackDataset(data, pack_of(np.arange(len(data))), Needs(frozenset({"tiles", "frames"}), True, True))
    return next(microbatches(packs, [0]))


@pytest.mark.parametrize("kind", [files, frames, tar])
def test_films_and_sounds_of_a_store_are_the_folders(
    served: store.Store, tmp_path: Path, kind: Callable[[Path], Path]
) -> None:
    folder = served.root / f"films-{kind.__name__}"
    folder.mkdir()
    file = kind(folder)
    recipe, far = recipe_of(folder, tmp_path), located(f"{served.url}/{folder.name}")
    for name, path in (("local", folder), ("far", far)):
        preprocess(open_job([path / file.name], replace(recipe, image_root=path), tmp_path / name), max_rejects=0)
    served.seen.clear()
    stores.head.cache_clear()
    here, there = (pack_read(ChatDataset(tmp_path / name)) for name in ("local", "far"))
    assert served.seen
    assert all("GET" in line for line in served.seen)
    assert not there.broken
    assert torch.equal(here.input_ids, there.input_ids)  # type: ignore[arg-type]
    assert torch.equal(seen(here).values, seen(there).values)  # type: ignore[arg-type]
    if kind is not frames:
        assert torch.equal(heard(here).values, heard(there).values)  # type: ignore[arg-type]
        assert heard(there).amount
    assert objects.in_flight() == 0
    changed = [file] if kind is tar else [path for path in sorted(folder.iterdir()) if path != file]
    for path in changed:
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    broken = pack_read(ChatDataset(tmp_path / "far")).broken
    assert {number for number, _ in broken} == {*range(len(ChatDataset(tmp_path / "far")))}
    assert all("is not what was preprocessed" in why for _, why in broken)
