"""Videos that have an encoder of their own: which frames are seen, as which pixels, what datasets and packs have."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.films import FilmReader
from megatron.vlm.data.loader import Needs, PackDataset
from megatron.vlm.data.manifest import read_media
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.media.videos import read_frames
from megatron.vlm.media import Images
from megatron.vlm.pixels import normalise
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.film.architecture import FilmRule
from omnibal_ext.modalities.modality import FILM
from tests.demo import dataset_of, turns
from tests.unit.data.clips import noise, write_frames, write_picture, write_video
from tests.unit.data.test_loader import pack_of
from tests.unit.preprocessing.test_processors import CLIP_FEATURES, fast, of_transformers, written_tokenizer

pytest.importorskip("av")
SIDE, EACH = 28, 5
RULE = FilmRule(SIDE, EACH)
FRAMES = {"long.mp4": 21, "short.mp4": 3}
MIXED = "<image>What is it?<video> And <video>?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written_tokenizer(tmp_path / "tokenizer.json")
    for seed, (name, count) in enumerate(FRAMES.items()):
        write_video(tmp_path / name, noise(count, 64, 40, seed), 4)
    write_frames(tmp_path, "f", noise(10, 36, 60, 7))
    write_picture(tmp_path / "p.png", 50, 30)
    return tmp_path


def records() -> list[dict[str, Any]]:
    listed = {"video": [f"f{number}.png" for number in range(10)], "fps": 2}
    return [
        {"image": "p.png", "videos": ["long.mp4", listed], "conversations": turns(MIXED, "Cats.")},
        {"video": "short.mp4", "conversations": turns("<image>\nWhat?", "A dog.")},  # LLaVA's mark
        {"image": "p.png", "conversations": turns("<image>\nWhat?", "A cat.")},
        {"conversations": turns("What?", "Yes.")},
    ]


def made(folder: Path, lines: list[dict[str, Any]], name: str = "data", max_rejects: int = 0) -> ChatDataset:
    recipe = Recipe(
        folder, folder / "tokenizer.json", "vicuna", Tiling(SIDE, 1, 1, False, "crop"), tokens_per_tile=4,
        normalization="clip", markup="video-llava", further=(RULE,), system_message="",
    )  # fmt: skip
    return dataset_of(lines, recipe, folder / name, max_rejects)


@pytest.mark.parametrize("total", [1, 3, 7, 8, 9, 13, 100, 12345])
def test_frames_are_those_that_transformers_takes_and_a_short_videos_come_again(total: int) -> None:
    chosen = RULE.chosen(total)
    assert chosen == tuple((np.arange(8) * (total / 8)).astype(int))
    if total >= 8:
        assert chosen == tuple(torch.arange(0, total, total / 8).int().tolist())


def test_pixels_are_those_of_transformers_processor(folder: Path) -> None:
    data = made(folder, records())
    pictures = of_transformers("VideoLlavaImageProcessor", "video_llava", "image_processing")(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    read = {
        name: [*map(Image.fromarray, read_frames(folder / name, (), range(count)))] for name, count in FRAMES.items()
    }
    listed = [Image.open(folder / f"f{number}.png") for number in RULE.chosen(10)]
    wanted = [[read["long.mp4"][n] for n in RULE.chosen(21)], listed, [read["short.mp4"][n] for n in RULE.chosen(3)]]
    reader, found = FilmReader(data), list[torch.Tensor]()
    for number in (0, 1):
        sample = data.sample(number)
        found += [reader.values(sample, film) for film in sample.items(FILM)]
    for one, frames in zip(found, wanted, strict=True):
        theirs = pictures(frames, return_tensors="pt")["pixel_values_images"]
        assert torch.allclose(one, theirs.float(), atol=1e-5)


def test_a_frame_that_is_named_again_later_is_seen_later(folder: Path) -> None:
    named = {"video": ["f0.png", "f1.png", "f0.png"], "fps": 1, "conversations": turns("<video>", "A.")}
    data = made(folder, [named])
    reader, sample = FilmReader(data), data.sample(0)
    (film,) = sample.items(FILM)
    first, other = (reader.decode(sample, film)[number] for number in (0, 3))
    wanted = [other if number == 1 else first for number in RULE.chosen(3)]
    assert not np.array_equal(first, other)
    assert np.array_equal(reader.decode(sample, film), np.stack(wanted))


def test_tokens_are_those_of_transformers_processor(folder: Path) -> None:
    """As many of each kind, in the same order, with nothing around them."""
    data = made(folder, records())
    tokenizer = fast(folder / "tokenizer.json", ["<s>", "</s>", "<image>", "<video>"])
    processor = of_transformers("VideoLlavaProcessor", "video_llava")(None, None, tokenizer, **CLIP_FEATURES)
    image = processor.replace_image_token({"pixel_values": torch.zeros(1, 3, SIDE, SIDE)}, 0)
    film = processor.replace_video_token({"pixel_values_videos": torch.zeros(1, 8, 3, SIDE, SIDE)}, 0)
    ids, marks = data.sample(0).text[0], (data.manifest["image_token_id"], data.manifest["film_token_id"])
    assert marks == tuple(tokenizer.convert_tokens_to_ids(["<image>", "<video>"]))
    seen = ["<image>" if token == marks[0] else "<video>" for token in ids if token in marks]
    assert "".join(seen) == image + film + film


def test_a_pack_has_the_frames_of_its_samples(folder: Path) -> None:
    data = made(folder, records())
    needs = Needs(frozenset({"tiles", "stills"}), tokens=True, labels=True)
    batch = PackDataset(data, pack_of(np.array([1, 3, 0])), needs)[0]
    films = batch.media_of("stills")
    assert isinstance(films, Images)
    assert films.pieces == ((8,), (8,), (8,))
    assert films.values is not None
    assert films.statistics is not None
    wanted = torch.cat([data[number]["pixel_values_videos"].flatten(0, 1) for number in (1, 0)])
    assert torch.equal(normalise(films.values, films.statistics), wanted)
    assert batch.input_ids is not None
    assert films.positions is not None
    assert torch.equal(films.positions, (batch.input_ids == data.manifest["film_token_id"]).nonzero().squeeze(1))
    assert len(films.positions) == 3 * 8 * EACH
    assert data.sizes.of("stills").tolist() == [16, 8, 0, 0]
    assert data.manifest["video_files"] == 2
    assert not batch.broken


def test_what_cannot_be_read_is_black_and_named(folder: Path) -> None:
    data = made(folder, records())
    (folder / "short.mp4").write_bytes(b"none")
    batch = PackDataset(data, pack_of(np.array([1])), Needs(frozenset({"stills"}), True, True))[0]
    assert [number for number, _ in batch.broken] == [1]
    values = batch.media_of("stills").values
    assert values is not None
    assert values.shape == (8, SIDE, SIDE, 3)
    assert not values.any()
    meta = PackDataset(data, pack_of(np.array([1])), Needs(frozenset({"stills"}), True, True), decodes=False)[0]
    assert meta.media_of("stills").values.shape == values.shape  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"video": "none.mp4", "conversations": turns("<video>", "A.")}, "missing_video"),
        ({"video": "p.png", "conversations": turns("<video>", "A.")}, "not_a_video"),
        ({"video": ["f0.png"], "conversations": turns("<video>", "A.")}, "malformed_line"),
        ({"conversations": turns("<video>", "A.")}, "video_mark_mismatch"),
        ({"image": {"video": "long.mp4"}, "conversations": turns("<image>", "A.")}, "unsupported_field"),
        ({"audio": "a.wav", "conversations": turns("What?", "A.")}, "unsupported_media"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "<video>"}]},
                       {"role": "assistant", "content": "A."}]}, "reserved_words"),
    ],
)  # fmt: skip
def test_what_is_no_video_is_rejected_by_its_reason(folder: Path, record: dict[str, Any], reason: str) -> None:
    data = made(folder, [record, *records()], max_rejects=1)
    assert len(data) == len(records())
    assert json.loads((data.folder / "rejected.jsonl").read_text())["reason"] == reason


def test_a_list_that_was_changed_is_refused(folder: Path) -> None:
    (film,) = made(folder, records()).sample(1).items(FILM)
    said = json.loads(json.dumps(asdict(film)))
    assert read_media({"media": json.dumps({"videos": [said]}).encode()})[FILM] == [film]
    for change in ({"frames": [2, 1]}, {"files": ["a.png"]}, {"crcs": [1, 2]}, {"tokens": 0}, {"path": "../a.mp4"}):
        with pytest.raises(UserError):
            read_media({"media": json.dumps({"videos": [said | change]}).encode()})
