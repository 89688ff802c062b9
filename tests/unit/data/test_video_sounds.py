"""Videos that are heard too: tokens are those of transformers' Omni processors, sounds those of the films' tracks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.sounds import SoundReader
from megatron.vlm.data.loader import Needs, PackDataset
from megatron.vlm.data.manifest import read_media
from megatron.vlm.data.media.sounds import load_sound
from megatron.vlm.preprocessing.command import choices_of, recipe_by
from megatron.vlm.preprocessing.model_recipe import resolve_settings
from omnibal_ext.errors import UserError
from omnibal_ext.families.media import SOUND_RULES
from omnibal_ext.modalities.modality import AUDIO
from omnibal_ext.modalities.vision.architecture import VideoClock
from omnibal_ext.preprocess_flags import preprocess_parser
from tests.media import heard, seen
from tests.unit.data.clips import OF_WORDS, TURNS, noise, write_frames, write_talkie, write_video
from tests.unit.data.noises import chirp, encoded, write_wav
from tests.unit.data.test_loader import pack_of
from tests.unit.data.test_sound_samples import HEARD
from tests.unit.data.test_videos import RULES, SHOWN, made, oracle, written

pytest.importorskip("soxr")
__all__ = ["oracle"]
CLOCKS = {"qwen2.5-omni": VideoClock(25, 2.0), "qwen3-omni": VideoClock(13)}
LONG, SHORT, SECONDS = 8, 2, 5
"""Seconds of the sound of two films, and of what is seen of them."""


def filmed(folder: Path, markup: str, records: list[dict[str, Any]], **more: Any) -> ChatDataset:
    flags = {"further": (HEARD[markup],), "clock": CLOCKS[markup], "use_audio_in_video": True, **more}
    return made(folder, markup, records, **flags)


def wave_of(seconds: float, seed: int) -> np.ndarray:
    """As 16 bits hold it."""
    return (np.round(chirp(int(seconds * 16000), seed=seed) * 2**15) / 2**15).astype(np.float32)


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """A film whose sound goes on behind it, one whose sound ends before it, a silent one, a sound and a picture."""
    for number, (name, seconds) in enumerate({"long.mkv": LONG, "short.mkv": SHORT}.items()):
        write_talkie(tmp_path / name, noise(4 * SECONDS, 64, 48, number), 4, wave_of(seconds, number))
    write_video(tmp_path / "silent.mkv", noise(4 * SECONDS, 64, 48, 2), 4, "ffv1")
    write_wav(tmp_path / "a.wav", wave_of(1, 5))
    Image.fromarray(noise(1, 56, 84)[0]).save(tmp_path / "p.png")
    return tmp_path


MIXED = {
    "videos": ["long.mkv", "silent.mkv", "short.mkv"], "audio": "a.wav", "image": "p.png",
    "conversations": [
        {"from": "human", "value": "<video>x<audio><image>"}, TURNS[1],
        {"from": "human", "value": "<video> and <video>?"}, TURNS[1],
    ],
}  # fmt: skip


@pytest.mark.parametrize("markup", CLOCKS)
def test_tokens_and_sizes_are_the_processor_s(markup: str, oracle: Any, films: Path) -> None:
    """Its tokens of a film that it finds no sound in are those of a film that is seen alone."""
    data = filmed(films, markup, [MIXED])
    processor = oracle(markup, films / "tokenizer.json", RULES[markup])
    clips = [noise(4 * SECONDS, 64, 48, number) for number in (0, 2, 1)]
    waves = [wave_of(LONG, 0)[0], wave_of(1, 5)[0], wave_of(SHORT, 1)[0]]
    shown = SHOWN[markup]
    heard = shown["video"].replace("VIDEO", "AUDIO").replace("video", "audio")
    begin, end = ("vision_bos", "vision_eos") if markup == "qwen2.5-omni" else ("vision_start", "vision_end")
    heard = heard.replace(begin, begin.replace("vision", "audio")).replace(end, end.replace("vision", "audio"))
    text = written(f"{shown['video']}x{heard}{shown['image']}")
    text += written(f"{shown['video']} and {shown['video']}?")
    told = processor(
        text=text, images=[str(films / "p.png")], videos=clips, audio=waves, audio_from_video_indices=[0, None, 2],
        load_audio_from_video=True, do_sample_frames=True, return_tensors="np",
        video_metadata=[{"total_num_frames": 4 * SECONDS, "fps": 4.0, "duration": float(SECONDS)}] * 3,
    )  # fmt: skip
    sample = data.sample(0)
    assert sample.text[0].tolist() == told["input_ids"][0].tolist()
    assert sample.length == len(told["input_ids"][0])
    assert sample.tiles == len(told["pixel_values"]) + len(told["pixel_values_videos"])
    assert [sound.frames for sound in sample.items(AUDIO)] == told["feature_attention_mask"].sum(axis=1).tolist()
    for one, theirs in zip(sample.items(AUDIO), told["input_features"], strict=True):
        np.testing.assert_allclose(
            SoundReader(sample.data).decode(sample, one)[:-2], theirs.T[: one.frames - 2], atol=1e-5
        )
    assert [(sound.path, sound.video) for sound in sample.items(AUDIO)] == [
        ("long.mkv", 0),
        ("a.wav", -1),
        ("short.mkv", 3),
    ]
    assert [bool(turns) for turns in sample.turns] == [True, False, False, True]
    assert sample.items(AUDIO)[0].crcs == sample.images[0].crcs != ()


@pytest.mark.parametrize("markup", CLOCKS)
def test_packs_know_the_turns_of_a_video_and_its_sound(markup: str, films: Path) -> None:
    turns = [{"from": "human", "value": "<video>?"}, TURNS[1]]
    records = [OF_WORDS, {"video": "long.mkv", "conversations": turns}, MIXED]
    data = filmed(films, markup, records)
    batch = PackDataset(data, pack_of(np.arange(3)), Needs(frozenset({"tiles", "frames"}), True, True))[0]
    assert batch.input_ids is not None
    assert heard(batch).positions is not None
    assert heard(batch).values is not None
    assert seen(batch).positions is not None
    assert [bool(one) for one in seen(batch).turns] == [True, True, False, False, True]
    films_tokens = [data.manifest[f"{kind}_token_id"] for kind in ("video", "audio")]
    for start, grid, by_turns in zip(seen(batch).starts, seen(batch).grids, seen(batch).turns, strict=True):
        if by_turns:
            both = batch.input_ids[start : start + sum(by_turns)].tolist()
            assert both == [films_tokens[turn % 2] for turn, count in enumerate(by_turns) for _ in range(count)]
            assert sum(by_turns[::2]) == np.prod(grid) // 4
    assert len(heard(batch).values) == heard(batch).amount == data.sizes.of("frames").sum()
    assert heard(batch).pieces[1] == (data.sample(1).items(AUDIO)[0].frames,)
    assert len(heard(batch).positions) == sum(sound.tokens for one in (1, 2) for sound in data.sample(one).items(AUDIO))
    assert len(seen(batch).positions) == seen(batch).amount // 4
    assert torch.equal(data[1]["input_features"], heard(batch).values[: heard(batch).pieces[1][0]])
    assert seen(PackDataset(data, pack_of(np.array([0])), Needs(frozenset({"tiles"}), True, True))[0]).turns == ()


def test_a_record_says_whether_its_videos_are_heard_else_the_flag(films: Path) -> None:
    plain = {"video": "long.mkv", "conversations": TURNS}
    said = [{**plain, "use_audio_in_video": True}, {**plain, "use_audio_in_video": False}, plain]
    for flag in (True, False):
        folder = films / str(flag)
        folder.mkdir()
        (folder / "long.mkv").symlink_to(films / "long.mkv")
        data = filmed(folder, "qwen3-omni", said, use_audio_in_video=flag)
        assert [bool(data.sample(number).items(AUDIO)) for number in range(3)] == [True, False, flag]
        assert data.sizes.of("frames").tolist() == [100 * LONG, 0, 100 * LONG * flag]


def test_frames_have_no_sound(films: Path) -> None:
    record = {"video": write_frames(films, "f", noise(4, 56, 56)), "fps": 2, "conversations": TURNS}
    data = filmed(films, "qwen2.5-omni", [record, {"video": "silent.mkv", "conversations": TURNS}])
    assert not data.sizes.of("frames").any()
    assert all(image.film for number in (0, 1) for image in data.sample(number).images)


def test_the_track_of_an_mp4_is_what_is_heard(films: Path) -> None:
    """As AAC, of 44,100 samples a second in two channels: as long as the file says, and nearly what was said."""
    import av

    wave = chirp(3 * 44100, 44100, 2, 7)
    (films / "said.m4a").write_bytes(encoded(wave, 44100, "aac", "mp4"))
    write_video(films / "seen.mp4", noise(12, 64, 48), 4)
    parts = [av.open(films / name) for name in ("seen.mp4", "said.m4a")]
    with av.open(films / "both.mp4", "w") as both:
        streams = [(part.streams[0], both.add_stream_from_template(part.streams[0])) for part in parts]
        for (source, stream), container in zip(streams, parts, strict=True):
            for packet in container.demux(source):
                if packet.dts is not None:
                    packet.stream = stream
                    both.mux(packet)
    record = {"video": "both.mp4", "conversations": TURNS}
    sample = filmed(films, "qwen3-omni", [record]).sample(0)
    (sound,) = sample.items(AUDIO)
    alone = load_sound(films / "said.m4a", (), 16000)
    assert abs(sound.samples - len(alone)) <= 1024
    assert np.abs(load_sound(films / "both.mp4", (), 16000)[4000:40000] - alone[4000:40000]).max() < 0.05


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "no yes or no": ({"video": "long.mkv", "use_audio_in_video": "yes"}, "malformed_line"),
    "a short sound": ({"video": "click.mkv"}, "too_short_audio"),
    "another container": ({"video": "said.ts"}, "not_audio"),
    "a cut sound": ({"video": "cut.mkv"}, "truncated_audio"),
    "cut": ({"video": "half.mkv"}, "truncated_video"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_cannot_be_heard_of_a_video_is_rejected_by_name(case: str, films: Path) -> None:
    import av

    write_talkie(films / "click.mkv", noise(8, 64, 48), 4, wave_of(0.01, 0))
    (films / "cut.mkv").write_bytes((films / "long.mkv").read_bytes()[:-20000])
    (films / "half.mkv").write_bytes((films / "long.mkv").read_bytes()[:100000])
    with av.open(films / "said.ts", "w", format="mpegts") as container:
        film: Any = container.add_stream("mpeg2video", rate=25)
        film.height, film.width, film.pix_fmt = 48, 64, "yuv420p"
        sound: Any = container.add_stream("mp2", rate=16000, layout="mono")
        for frame in noise(25, 64, 48):
            container.mux(film.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(film.encode())
        said = av.AudioFrame.from_ndarray(np.zeros((1, 1152), np.int16), format="s16", layout="mono")
        said.sample_rate = 16000
        container.mux(sound.encode(said))
        container.mux(sound.encode())
    fields, reason = REJECTED[case]
    usable = {"video": "long.mkv", "conversations": TURNS}
    data = filmed(films, "qwen3-omni", [usable, {**fields, "conversations": TURNS}], max_rejects=1)
    (rejected,) = map(json.loads, (data.folder / "rejected.jsonl").read_text().splitlines())
    assert (rejected["line"], rejected["reason"]) == (2, reason), rejected


def test_what_is_cut_off_takes_the_sound_of_its_video_along(films: Path) -> None:
    whole = filmed(films, "qwen3-omni", [MIXED])
    limit = int(whole.sizes.tokens[0]) - 1
    (films / "short").mkdir()
    for name in ("long.mkv", "silent.mkv", "short.mkv", "a.wav", "p.png"):
        (films / "short" / name).symlink_to(films / name)
    cut = filmed(films / "short", "qwen3-omni", [MIXED], max_tokens=limit, shorten=("truncate",)).sample(0)
    assert [sound.path for sound in cut.items(AUDIO)] == ["long.mkv", "a.wav"]
    assert len(cut.text[0]) == cut.length < limit


def test_only_models_that_see_and_hear_take_the_flag(films: Path) -> None:
    with pytest.raises(UserError, match="--use-audio-in-video is for models that see and hear videos"):
        made(films, "qwen-vl", [], use_audio_in_video=True)
    assert resolve_settings({"tokenizer-model": "x"}, "qwen3-omni-30b-a3b")["clock"].value == VideoClock(13)
    assert resolve_settings({"tokenizer-model": "x"}, "qwen2.5-omni-3b")["clock"].value == VideoClock(25, 2)
    assert "clock" not in resolve_settings({"tokenizer-model": "x"}, "qwen3-vl-4b")
    assert set(SOUND_RULES) == set(CLOCKS)
    words = ["--input", "x", "--output-dir", "y", "--model", "qwen3-omni-30b-a3b", "--tokenizer-model", "z"]
    for flag in (True, False):
        given = preprocess_parser(None).parse_args([*words, *["--use-audio-in-video"] * flag])
        recipe = recipe_by(given, choices_of(given))
        assert (recipe.use_audio_in_video, recipe.clock) == (flag, VideoClock(13))


def test_how_videos_are_heard_decides_a_dataset(films: Path) -> None:
    film = [{"video": "long.mkv", "conversations": TURNS}]
    filmed(films, "qwen3-omni", film)
    for other in ({"use_audio_in_video": False}, {"clock": VideoClock(25)}, {"clock": VideoClock(13, 2.0)}):
        with pytest.raises(UserError, match="holds a dataset made otherwise"):
            filmed(films, "qwen3-omni", film, **other)


def test_turns_of_other_tokens_are_damage(films: Path) -> None:
    data = filmed(films, "qwen3-omni", [{"video": "long.mkv", "conversations": TURNS}])
    (sound,) = data.sample(0).items(AUDIO)
    told = {"path": "long.mkv", "samples": 1, "frames": 1, "tokens": 3, "place": [], "crcs": []}
    assert read_media({"sounds": json.dumps([told]).encode()})[AUDIO][0].turns == ()  # of older datasets
    with pytest.raises(UserError, match="turns"):
        read_media({"sounds": json.dumps([{**told, "turns": [0]}]).encode()})
    sample = data.sample(0)
    column = json.dumps({"sounds": [{**told, "frames": sample.amounts[AUDIO], "turns": [2, 2]}]}).encode()
    data.columns["media"] = {0: np.frombuffer(column, np.uint8)}  # type: ignore[assignment]
    with pytest.raises(UserError, match="the turns of a sound have other tokens than the sound"):
        _ = sample.data.sample(0).items(AUDIO)
    assert sound.turns
