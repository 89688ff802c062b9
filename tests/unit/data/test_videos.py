"""Videos are what transformers' own processors make of them; what cannot be shown is refused with its reason."""

import json
import shutil
import sys
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import pixels_of
from megatron.vlm.data.loader import Needs, PackDataset
from megatron.vlm.data.manifest import read_media
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.preprocessing.folder_files import FlagValue, video_rule
from megatron.vlm.preprocessing.model_recipe import with_video
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.glm_v.videos import ByLength, BySecond
from omnibal_ext.families.media import VIDEO_RULES
from omnibal_ext.families.qwen_omni.videos import Clocked
from omnibal_ext.families.qwen_vl.videos import Even, Spread
from omnibal_ext.families.registry import MARKUPS
from omnibal_ext.families.towers.video_rules import VideoRule, choose_frames, frame_grid
from omnibal_ext.joining.positions import text_and_image_positions
from omnibal_ext.modalities.vision.architecture import NativeResolution
from tests.demo import dataset_of, turns
from tests.media import seen, tiles_of
from tests.unit.data.clips import OF_IMAGE, OF_WORDS, TURNS, inside, noise, write_frames, write_picture, write_video
from tests.unit.data.test_loader import pack_of
from tests.unit.data.torchvision_stand_in import stand_in
from tests.unit.preprocessing.test_processors import (
    PATCH,
    fast,
    glm_pictures,
    of_transformers,
    omni_class,
    omni_roles,
    qwen_pictures,
    written_tokenizer,
)

pytest.importorskip("av")
transformers = pytest.importorskip("transformers")

_QWEN = {"image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>"}
_GLM = {kind: f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>" for kind in ("image", "video")}
_OMNI = {kind: f"<|vision_bos|><|{kind.upper()}|><|vision_eos|>" for kind in ("image", "video")}
SHOWN = {
    "qwen-vl": _QWEN, "qwen3-vl": _QWEN, "qwen2.5-omni": _OMNI, "qwen3-omni": _QWEN, "glm-4.1v": _GLM, "glm-4.6v": _GLM,
}  # fmt: skip
RULES = {
    "qwen-vl": Even(False, 16 * PATCH**2, 60 * PATCH**2, max_frames=9),
    "qwen3-vl": Spread(True, 64 * PATCH**2, 400 * PATCH**2, max_frames=9),
    "qwen2.5-omni": Clocked(False, 16 * PATCH**2, 60 * PATCH**2, max_frames=9),
    "qwen3-omni": Clocked(False, 16 * PATCH**2, 60 * PATCH**2, fps=1.0, max_frames=9),
    "glm-4.1v": BySecond(True, 64 * PATCH**2, 400 * PATCH**2),
    "glm-4.6v": ByLength(True, 64 * PATCH**2, 400 * PATCH**2),
}
CAPPED = ("qwen-vl", "qwen3-vl")
NORMALIZATION = dict.fromkeys(RULES, "clip") | {"qwen3-vl": "half", "qwen3-omni": "half"}
SECONDS = {"qwen-vl": "second_per_grid_ts"} | dict.fromkeys(("qwen2.5-omni", "qwen3-omni"), "video_second_per_grid")
"""What processors call the seconds between steps."""
TILINGS = {markup: "native_grown" if markup.startswith("glm") else "native" for markup in RULES}


def made(
    folder: Path, markup: str, records: list[dict[str, Any]] | Path, max_rejects: int = 0, **more: Any
) -> ChatDataset:
    if not (folder / "tokenizer.json").exists():
        written_tokenizer(folder / "tokenizer.json")
    flags = {"tokens_per_tile": 0.25, "normalization": NORMALIZATION[markup], "system_message": ""}
    flags |= {"tiling": Tiling(PATCH, 16, 120, False, TILINGS[markup]), "video": RULES[markup], **more}
    recipe = Recipe(folder, folder / "tokenizer.json", "hermes-2", markup=markup, **flags)
    return dataset_of(records, recipe, folder / "dataset", max_rejects)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds transformers' processor of a markup, with the limits of our rule."""
    stand_in(monkeypatch)

    def build(markup: str, tokenizer: Path, rule: VideoRule) -> Any:
        film, whole = {
            "qwen-vl": (("Qwen2VL", "qwen2_vl"), ("Qwen2_5_VL", "qwen2_5_vl")),
            "qwen3-vl": (("Qwen3VL", "qwen3_vl"),) * 2, "glm-4.1v": (("Glm4v", "glm4v"),) * 2,
            "glm-4.6v": (("Glm46V", "glm46v"),) * 2,
            **dict.fromkeys(("qwen2.5-omni", "qwen3-omni"), (("Qwen2VL", "qwen2_vl"),) * 2),
        }[markup]  # fmt: skip
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if NORMALIZATION[markup] == "half" else {}
        size = {"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
        how: dict[str, Any] = {"size": size, "fps": rule.fps, "patch_size": PATCH}
        if markup.startswith("glm"):
            pictures, how = glm_pictures(), how | {"max_duration": rule.max_seconds}
        else:
            pictures, how = qwen_pictures(**half), how | {"max_frames": rule.max_frames, **half}
            how |= {"cap_pixels_per_frame": rule.capped}
            how |= {"max_video_tokens": rule.max_tokens} if rule.capped else {}
        films = of_transformers(f"{film[0]}VideoProcessor", film[1], "video_processing")(**how)
        names = ["<|im_start|>", "<|im_end|>", *MARKUPS[markup].tokens]
        if markup.endswith("omni"):
            older = markup == "qwen2.5-omni"
            extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=300)
            processor = omni_class(older)(pictures, films, extractor, fast(tokenizer, names, **omni_roles(older)))
            processor.videos_kwargs = {"size": size, "fps": rule.fps}  # else its own, whatever its parts say
            return processor
        special = fast(tokenizer, names)
        return of_transformers(f"{whole[0]}Processor", whole[1])(pictures, special, films)

    return build


def theirs(processor: Any, text: str, videos: list[tuple[np.ndarray, float]], images: list[str]) -> Any:
    told = [{"total_num_frames": len(frames), "fps": rate, "duration": len(frames) / rate} for frames, rate in videos]
    frames = {"videos": [frames for frames, _ in videos], "video_metadata": told, "do_sample_frames": True}
    return processor(text=text, images=images or None, **frames, return_tensors="np")


def assert_shown(sample: Any, told: Any, pixels: np.ndarray) -> None:
    """The processor's tokens and pixels."""
    assert sample.text[0].tolist() == told["input_ids"][0].tolist()
    np.testing.assert_allclose(pixels_of(sample).numpy(), pixels, atol=1e-5)


def assert_film_shown(sample: Any, told: Any, markup: str) -> None:
    assert_shown(sample, told, told["pixel_values_videos"].reshape(-1, 3, 2, PATCH, PATCH))
    (video,) = sample.images
    assert (video.steps, video.rows, video.columns) == tuple(told["video_grid_thw"][0])
    if markup in SECONDS:
        assert video.film.seconds == told[SECONDS[markup]][0]


def written(words: str, answer: str = "A cat jumps.") -> str:
    return f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


CLIPS = [
    (12, 60, 44, 6.0), (7, 33, 90, 29.97), (3, 150, 20, 1.0), (40, 56, 56, 3.0), (2, 9, 13, 2.0), (9, 300, 200, 2.5),
]  # fmt: skip
"""Frames, width, height, frames a second."""


@pytest.mark.parametrize(
    ("markup", "capped"), [*((markup, False) for markup in RULES), *((markup, True) for markup in CAPPED)]
)
def test_frames_are_what_the_processor_makes_of_them(markup: str, capped: bool, oracle: Any, tmp_path: Path) -> None:
    rule = replace(RULES[markup], capped=capped, max_tokens={"qwen-vl": 60}.get(markup, 5))
    processor = oracle(markup, written_tokenizer(tmp_path / "tokenizer.json"), rule)
    clips = [(noise(frames, *size, seed), rate) for seed, (frames, *size, rate) in enumerate(CLIPS)]
    records = [
        {"video": write_frames(tmp_path, f"c{number}_", frames), "fps": rate, "conversations": TURNS}
        for number, (frames, rate) in enumerate(clips)
    ]
    data = made(tmp_path, markup, records, video=rule)
    for sample, clip in enumerate(clips):
        told = theirs(processor, written(SHOWN[markup]["video"] + "\nWhat happens?"), [clip], [])
        assert_film_shown(data.sample(sample), told, markup)
        assert data.sizes.tiles[sample] == len(pixels_of(data.sample(sample)))


@pytest.mark.parametrize("markup", RULES)
def test_files_are_read_as_transformers_reads_them(markup: str, oracle: Any, tmp_path: Path) -> None:
    """Two files and an image in a conversation, in the order of their marks; and the same as parts of messages."""
    from transformers.video_utils import read_video_pyav

    processor = oracle(markup, written_tokenizer(tmp_path / "tokenizer.json"), RULES[markup])
    write_video(tmp_path / "a.mp4", noise(25, 64, 48), 10)
    write_video(tmp_path / "b.mkv", noise(11, 80, 32), 5, "ffv1")
    write_picture(tmp_path / "c.png", 50, 70)
    words = "<video>First<image>then<video>what?"
    parts = [
        {"type": "video", "video": "a.mp4"}, {"type": "text", "text": "First"},
        {"type": "image", "image": "c.png"}, {"type": "text", "text": "then"},
        {"type": "video_url", "video_url": {"url": f"file://{tmp_path}/b.mkv"}}, {"type": "text", "text": "what?"},
    ]  # fmt: skip
    records = [
        {"videos": ["a.mp4", {"video": "b.mkv"}], "image": "c.png", "conversations": turns(words, "A cat jumps.")},
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat jumps."}]},
    ]
    data = made(tmp_path, markup, records)
    clips = []
    for name, rate in (("a.mp4", 10.0), ("b.mkv", 5.0)):
        every = lambda metadata: np.arange(metadata.total_num_frames or 11)  # noqa: E731
        frames, told = read_video_pyav(str(tmp_path / name), every)
        assert told.fps == rate
        clips.append((frames, rate))
    text = written(words.replace("<video>", SHOWN[markup]["video"]).replace("<image>", SHOWN[markup]["image"]))
    expected = theirs(processor, text, clips, [str(tmp_path / "c.png")])
    films = expected["pixel_values_videos"].reshape(-1, 3, 2, PATCH, PATCH)
    first = int(expected["video_grid_thw"][0].prod())
    pixels = np.concatenate([films[:first], expected["pixel_values"].reshape(-1, 3, 2, PATCH, PATCH), films[first:]])
    for sample in (0, 1):
        assert_shown(data.sample(sample), expected, pixels)
    assert data.manifest["video_files"] == 4


@pytest.mark.parametrize("markup", RULES)
@pytest.mark.parametrize("rate", [1.0, 2.0, 7.3, 23.976, 30.0, 59.94])
def test_frames_are_chosen_as_the_processor_chooses(markup: str, rate: float, oracle: Any, tmp_path: Path) -> None:
    rule = replace(RULES[markup], max_frames=96)
    films = oracle(markup, written_tokenizer(tmp_path / "tokenizer.json"), rule).video_processor
    glm = markup.startswith("glm")
    for total in (*range(2, 120), 299, 1801, 7200):
        metadata = transformers.video_utils.VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
        chosen = films.sample_frames(metadata).tolist()
        times = [frame / rate for frame in range(total)]
        if not chosen:  # less than a sixth of a second, of which GLM-4.6V sees nothing
            with pytest.raises(Rejected, match="too short"):
                choose_frames(rule, times, rate)
            continue
        film = choose_frames(rule, times, rate)
        seen = sorted(set(chosen)) if glm else [frame for frame in chosen if frame < total]
        assert list(film.frames) == seen, total
        assert len(chosen) - len(film.frames) in (0, 1)  # it may count one frame too far, or one twice
        size = (37 + 7 * total % 400, 60 + 11 * total % 300)
        columns, rows = frame_grid(rule, len(film.frames), size, PATCH)
        count = films.get_num_of_video_patches(len(chosen) if glm else len(film.frames), size[1], size[0], {})
        assert len(film.times) * columns * rows == count, total


def test_times_of_frames_are_the_words_of_qwen3(tmp_path: Path) -> None:
    """Frames at times of their own: a step stands behind the time in the middle of its two."""
    names = write_frames(tmp_path, "f", noise(5, 56, 56))
    record = {"video": {"frames": names, "times": [0.5, 1.0, 4.0, 10.25, 12.0]}, "conversations": TURNS}
    data = made(tmp_path, "qwen3-vl", [record])
    assert data.sample(0).images[0].film.times == (0.75, 7.125, 12.0)
    tokens = data.sample(0).text[0].tolist()
    ids = data.manifest["special_tokens"]
    places = [place for place, token in enumerate(tokens) if token == ids["<|vision_start|>"]]
    assert len(places) == 4  # one around all, one around each step
    assert [tokens[place + 1] == ids["<|video_pad|>"] for place in places] == [False, True, True, True]


def test_a_folder_says_how_its_videos_are_shown(oracle: Any, tmp_path: Path) -> None:
    vision = preset("qwen3-vl-4b").vision
    default = VIDEO_RULES["qwen3-vl"]
    assert video_rule(tmp_path, default, vision).value == default
    said = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 1, "max_frames": 16, "patch_size": 16}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 1}}))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(said))
    choice = video_rule(tmp_path, default, vision)
    assert choice.origin == "video_preprocessor_config.json"
    assert choice.value == replace(default, min_pixels=4096, max_pixels=25165824, fps=1, max_frames=16)
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": {**said, "fps": 4}}))
    assert video_rule(tmp_path, default, vision).value.fps == 4
    wrong = {"num_frames": 8, "resample": 2, "image_mean": [0.1] * 3, "patch_size": 14, "fps": "x"}
    for field, value in wrong.items():
        (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": {**said, field: value}}))
        assert field in video_rule(tmp_path, default, vision).value.refused
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "video_preprocessor_config.json").unlink()
    old = {"min_pixels": 3136, "max_pixels": 12845056, "size": {"shortest_edge": 1, "longest_edge": 2}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    earlier = video_rule(tmp_path, VIDEO_RULES["qwen-vl"], preset("qwen2.5-vl-3b").vision).value
    assert (earlier.min_pixels, earlier.max_pixels) == (3136, 12845056)
    processor = oracle("qwen3-vl", written_tokenizer(tmp_path / "tokenizer.json"), RULES["qwen3-vl"])
    processor.video_processor.to_json_file(tmp_path / "video_preprocessor_config.json")
    saved = video_rule(tmp_path, default, replace(vision, patch_size=PATCH, image_size=PATCH)).value
    assert saved == replace(RULES["qwen3-vl"], max_tokens=768)


@pytest.mark.parametrize(
    ("markup", "model"), [("qwen2.5-omni", "qwen2.5-omni-3b"), ("qwen3-omni", "qwen3-omni-30b-a3b")]
)
def test_a_thinker_s_processor_has_sizes_of_its_own(markup: str, model: str, oracle: Any, tmp_path: Path) -> None:
    """It asks its part for them in every call, whatever the part's file says."""
    default = VIDEO_RULES[markup]
    said = {"size": {"shortest_edge": 4096, "longest_edge": 8192}, "min_pixels": 3136, "max_pixels": 9999, "fps": 4}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    assert video_rule(tmp_path, default, preset(model).vision).value == replace(default, fps=4)
    processor = type(oracle(markup, written_tokenizer(tmp_path / "tokenizer.json"), RULES[markup]))
    wanted = {"shortest_edge": default.min_pixels, "longest_edge": default.max_pixels}
    assert processor.videos_kwargs["size"] == wanted


def rejected(tmp_path: Path, records: list[dict[str, Any]], **more: Any) -> list[tuple[int, str, str]]:
    made(tmp_path, "qwen-vl", [OF_WORDS, *records], max_rejects=len(records), **more)
    found = [json.loads(line) for line in (tmp_path / "dataset/rejected.jsonl").read_text().splitlines()]
    return [(row["line"], row["reason"], row["detail"]) for row in found]


def film_of(name: str | list[str]) -> dict[str, Any]:
    return {"video": name, "conversations": TURNS}


def test_what_is_no_whole_video_is_rejected_with_file_row_and_reason(tmp_path: Path) -> None:
    write_video(tmp_path / "one.mp4", noise(1, 64, 48), 10)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "words.mp4").write_text("no video")
    for name, left in (("cut.mp4", -200), ("cut.avi", None), ("cut.mkv", None)):
        write_video(tmp_path / name, noise(30, 64, 48), 10)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: left or len(content) // 2])
    files = {
        "gone.mp4": "missing_video", "empty.mp4": "empty_video", "words.mp4": "not_a_video", "cut.mp4": "not_a_video",
        "cut.avi": "truncated_video", "cut.mkv": "truncated_video", "one.mp4": "too_few_frames",
        "../out.mp4": "path_outside_root", "http://x.y/a.mp4": "remote_video",
    }  # fmt: skip
    names = write_frames(tmp_path, "f", noise(4, 56, 56))
    write_picture(tmp_path / "f2.png", 40, 56)
    frames = [{**film_of(of), "fps": 2} for of in (names, ["gone.png", *names[:2]])]
    found = rejected(tmp_path, [*map(film_of, files), *frames])
    wanted = [*files.values(), "frames_differ", "missing_image"]
    assert [(line, reason) for line, reason, _ in found] == list(enumerate(wanted, start=2))
    for name, (_, _, detail) in zip(files, found, strict=False):
        assert name.rpartition("/")[2] in detail or "one" in name


def test_decoding_at_once_finds_what_headers_do_not_say(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", noise(20, 64, 48), 10)
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    content[len(content) // 4 : len(content) // 4 + 400] = bytes(range(200)) * 2
    (tmp_path / "a.mp4").write_bytes(content)
    assert len(made(tmp_path, "qwen-vl", [film_of("a.mp4")])) == 1
    shutil.rmtree(tmp_path / "dataset")
    ((_, reason, detail),) = rejected(tmp_path, [film_of("a.mp4")], decode_images=True)
    assert reason == "truncated_video"
    assert "a.mp4" in detail


def test_a_rule_that_is_not_honoured_refuses_videos_by_name_and_images_pass(tmp_path: Path) -> None:
    write_picture(tmp_path / "b.png", 56, 56)
    rule = replace(RULES["qwen-vl"], refused="x.json: num_frames is 8; supported for videos: None")
    data = made(tmp_path, "qwen-vl", [OF_IMAGE, film_of("a.mp4")], max_rejects=1, video=rule)
    assert len(data) == 1
    assert "num_frames is 8" in (tmp_path / "dataset/rejected.jsonl").read_text()


def test_without_a_decoder_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames as files need none."""
    write_video(tmp_path / "a.mp4", noise(8, 56, 56), 4)
    made(tmp_path, "qwen-vl", [film_of("a.mp4")])
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"pip install '\.\[video\]' in a clone"):
        ChatDataset(tmp_path / "dataset")
    shutil.rmtree(tmp_path / "dataset")
    with pytest.raises(UserError, match=r"pip install '\.\[video\]' in a clone"):
        made(tmp_path, "qwen-vl", [film_of("a.mp4")])
    (tmp_path / "other").mkdir()
    film = {"video": write_frames(tmp_path / "other", "f", noise(4, 56, 56)), "fps": 2, "conversations": TURNS}
    assert made(tmp_path / "other", "qwen-vl", [film]).manifest["video_files"] == 0


@pytest.mark.parametrize("markup", RULES)
def test_packs_know_where_steps_are_and_stand_in_for_what_vanished(markup: str, tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", noise(20, 84, 56), 4)
    write_picture(tmp_path / "b.png", 56, 112)
    data = made(tmp_path, markup, [OF_IMAGE, film_of("a.mp4"), OF_WORDS])
    index = pack_of(np.arange(3))
    pack = PackDataset(data, index, Needs(frozenset({"tiles"}), True, True))[0]
    apart = markup not in SECONDS
    video = data.sample(1).images[0]
    steps, grid = video.steps, (video.rows, video.columns)
    assert seen(pack).grids == ((1, 8, 4), *([(1, *grid)] * steps if apart else [(steps, *grid)]))
    assert tuple(seen(pack).values.shape) == (seen(pack).amount, 2, PATCH, PATCH, 3)
    tokens = [grid[0] * grid[1] * grid[2] // 4 for grid in seen(pack).grids]
    shown = [start + place for start, count in zip(seen(pack).starts, tokens, strict=True) for place in range(count)]
    assert seen(pack).positions.tolist() == shown
    assert seen(pack).seconds == (1.0, *[video.film.seconds] * (len(seen(pack).grids) - 1))
    assert markup in ("glm-4.1v", "qwen2.5-omni") or video.film.seconds != 1.0  # which sees two frames a second
    positions = text_and_image_positions(pack.lengths, seen(pack).grids, seen(pack).starts, NativeResolution())
    assert positions.shape == (3, sum(pack.lengths))
    other = PackDataset(data, index, Needs(frozenset({"tiles"}), True, True), decodes=False)[0]
    assert seen(other).values.is_meta
    assert seen(other).values.shape == seen(pack).values.shape
    (tmp_path / "a.mp4").unlink()
    broken = PackDataset(data, index, Needs(frozenset({"tiles"}), True, True))[0]
    assert [sample for sample, _ in broken.broken] == [1]
    assert "a.mp4" in broken.broken[0][1]
    assert seen(broken).values.shape == seen(pack).values.shape
    assert torch.equal(seen(broken).values[:32], seen(pack).values[:32])
    assert not seen(broken).values[32:].any()


@pytest.mark.parametrize("kind", ["tar", "parquet", "base64"])
def test_a_video_inside_the_input_is_read_where_it_is(kind: str, tmp_path: Path) -> None:
    write_video(tmp_path / "0.mp4", noise(12, 64, 48), 4)
    beside = made(tmp_path, "qwen-vl", [film_of("0.mp4")])
    pixels, tiles = pixels_of(beside.sample(0)), beside.sample(0).images[0].tiles
    shutil.rmtree(tmp_path / "dataset")
    found = made(tmp_path, "qwen-vl", inside(kind, tmp_path, "video", [(tmp_path / "0.mp4").read_bytes()], TURNS))
    assert found.sample(0).images[0].tiles == tiles
    assert found.sample(0).images[0].place
    (tmp_path / "0.mp4").unlink()
    assert torch.equal(pixels_of(found.sample(0)), pixels)


def test_flags_override_the_model_s_rule() -> None:
    choices = {"video": FlagValue(RULES["qwen-vl"], "config.json")}
    changed = with_video(choices, {"fps": 0.5, "max_frames": 3})["video"]
    assert changed.value == replace(RULES["qwen-vl"], fps=0.5, max_frames=3, min_frames=3)
    assert "flags" in changed.origin
    assert with_video({}, {}) == {}
    for given, flags in (({}, {"fps": 1.0}), (choices, {"max_frames": 1})):
        with pytest.raises(UserError, match="--video-max-frames"):
            with_video(given, flags)


def test_a_conversation_made_shorter_keeps_the_videos_of_what_is_left(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", noise(12, 64, 48), 4)
    write_picture(tmp_path / "b.png", 56, 56)
    write_video(tmp_path / "c.mp4", noise(24, 90, 90), 4)
    said = [*turns("<image>and<video>?", "A cat jumps."), *TURNS]
    record = {"videos": ["a.mp4", "c.mp4"], "image": "b.png", "conversations": said}
    whole = made(tmp_path, "qwen-vl", [record])
    shutil.rmtree(tmp_path / "dataset")
    limit = int(whole.sizes.tokens[0]) - 1
    cut = made(tmp_path, "qwen-vl", [record], max_tokens=limit, shorten=("truncate",))
    assert [image.path for image in cut.sample(0).images] == ["b.png", "a.mp4"]
    assert len(cut.sample(0).text[0]) == cut.sizes.tokens[0] < limit


def test_too_narrow_a_video_is_rejected() -> None:
    with pytest.raises(Rejected) as verdict:
        frame_grid(RULES["qwen-vl"], 4, (4000, 10), PATCH)
    assert verdict.value.reason == "too_narrow"


def test_films_are_held_to_the_crcs_of_all_their_files(tmp_path: Path) -> None:
    """Of a video file its own; of frames each one's. Only frames that are seen are kept, and looked at."""
    write_video(tmp_path / "a.avi", noise(8, 56, 56), 2, "mjpeg")
    names = write_frames(tmp_path, "f", noise(4, 56, 56, seed=1))
    data = made(tmp_path, "qwen3-vl", [film_of("a.avi"), {**film_of(names), "fps": 2}])
    crcs = {name: zlib.crc32((tmp_path / name).read_bytes()) for name in ("a.avi", *names)}
    assert [image.crcs for sample in (0, 1) for image in data.sample(sample).images] == [
        (crcs.pop("a.avi"),), tuple(crcs.values())
    ]  # fmt: skip
    before = [tiles_of(data.sample(sample)) for sample in (0, 1)]
    write_video(tmp_path / "a.avi", noise(8, 56, 56, seed=2), 2, "mjpeg")
    write_frames(tmp_path, "other", noise(4, 56, 56, seed=3))
    (tmp_path / "other2.png").replace(tmp_path / names[2])
    with pytest.raises(UserError, match=r"a\.avi: is not what was preprocessed: .*; sample 0 of"):
        tiles_of(data.sample(0))
    with pytest.raises(UserError, match=r"f2\.png: is not what was preprocessed: .*; sample 1 of"):
        tiles_of(data.sample(1))
    unchecked = ChatDataset(data.folder, checks_images=False)
    for sample in (0, 1):
        assert tiles_of(unchecked.sample(sample)).shape == before[sample].shape
        assert (tiles_of(unchecked.sample(sample)) != before[sample]).any()
    crowded = [{**asdict(data.sample(1).images[0]), "crcs": [1, 2, 3]}]
    with pytest.raises(UserError, match="3 CRCs of 4 files"):
        read_media({"images": json.dumps(crowded).encode()})
