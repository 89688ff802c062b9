"""Images, sounds and tars as cameras, browsers, pipes and other programs write them, against their readers."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from megatron.vlm.data.formats import tar
from megatron.vlm.data.media.images import image_size, load_rgb
from omnibal_ext.errors import Rejected

av = pytest.importorskip("av")
soundfile = pytest.importorskip("soundfile")

from megatron.vlm.data.media.sounds import load_sound, sound_length  # noqa: E402

RATE = 16000
PNG = b"\x89PNG\r\n\x1a\n"


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (48, 64, 3), np.uint8))


def several(path: Path) -> None:
    picture().save(path, "MPO", save_all=True, append_images=[picture(1), picture(2)])


def moving(path: Path) -> None:
    """A phone's: a film behind the picture."""
    picture().save(path, "JPEG")
    with path.open("ab") as file:
        file.write(b"\0\0\0\x18ftypmp42" + bytes(3000))


IMAGES = {
    "several.jpg": several, "moving.jpg": moving,
    **({"a.avif": lambda path: picture().save(path)} if features.check("avif") else {}),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("decode", [False, True])
def test_of_several_pictures_the_first_is_seen_as_pillow_sees_it(tmp_path: Path, name: str, decode: bool) -> None:
    path = tmp_path / name
    IMAGES[name](path)
    assert image_size(path, decode=decode) == (64, 48)
    np.testing.assert_array_equal(load_rgb(path), Image.open(path).convert("RGB"))


def test_a_picture_that_is_cut_is_found_although_others_follow(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    several(path)
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(Rejected, match="truncated_image"):
        image_size(path)


def waves(seconds: float = 0.7) -> np.ndarray:
    return np.random.default_rng(1).integers(-3000, 3000, int(seconds * RATE), np.int16)


def wav(said: int | None, cut: int = 0) -> bytes:
    """A WAV file whose header says a length of its samples, and of the file, that it may not have."""
    buffer = io.BytesIO()
    soundfile.write(buffer, waves(), RATE, format="WAV", subtype="PCM_16")
    content = bytearray(buffer.getvalue())
    if said is not None:
        content[4:8] = min(said + 36, 2**32 - 1).to_bytes(4, "little")
        content[40:44] = said.to_bytes(4, "little")
    return bytes(content[: len(content) - cut])


@pytest.mark.parametrize("said", [None, 0x7FFFF024 - 36, 0x7FFFF000, 2_000_000_000, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("decode", [False, True])
def test_a_sound_from_a_pipe_is_what_is_there(tmp_path: Path, said: int | None, decode: bool) -> None:
    """SoX, FFmpeg and others write a length before they know it."""
    path = tmp_path / "a.wav"
    path.write_bytes(wav(said))
    wanted, _ = soundfile.read(path, dtype="float32")
    assert sound_length(path, (), RATE, decode) == len(wanted)
    np.testing.assert_array_equal(load_sound(path, (), RATE), wanted)


def test_a_sound_that_is_cut_is_refused_where_its_length_was_known(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav(None, cut=2000))
    with pytest.raises(Rejected, match="truncated_audio"):
        sound_length(path, (), RATE)


@pytest.mark.parametrize("codec", ["pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_f32le", "aac"])
@pytest.mark.parametrize("container", ["mov", "mp4", "matroska"])
def test_a_sound_in_a_film_s_container_is_whole(tmp_path: Path, container: str, codec: str) -> None:
    """In MOV each sample of uncompressed sound is a frame of its own. Against FFmpeg's packets, all decoded."""
    path = tmp_path / f"a.{container}"
    try:
        with av.open(str(path), "w", format=container) as file:
            stream = file.add_stream(codec, rate=RATE, layout="mono")
            frame = av.AudioFrame.from_ndarray(waves()[None], format="s16", layout="mono")
            frame.rate = RATE
            resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=RATE)
            for part in resampler.resample(frame):
                file.mux(stream.encode(part))
            file.mux(stream.encode(None))
    except (ValueError, OSError) as error:
        pytest.skip(f"{codec} in {container}: {error}")
    with av.open(str(path)) as file:
        decoded = np.concatenate([one.to_ndarray().ravel() for one in file.decode(audio=0)])
    assert abs(sound_length(path, (), RATE) - len(waves())) <= (0 if codec.startswith("pcm") else 2048)
    assert len(load_sound(path, (), RATE)) == sound_length(path, (), RATE) <= len(decoded)
    path.write_bytes(path.read_bytes()[:-4000])
    if container == "matroska":
        with pytest.raises(Rejected):
            sound_length(path, (), RATE)


@pytest.mark.parametrize(
    "record",
    [
        {"url": "https://host/a.png", "key": "000", "status": "success", "sha256": "0" * 64},
        {"url": "https://host/a.png", "source": "laion", "path": "where/it/was.png"},
    ],
)
def test_the_image_of_a_key_is_found_beside_facts_about_it(tmp_path: Path, record: dict[str, str]) -> None:
    """img2dataset writes the address from which it fetched an image."""
    chat = {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "It."}], **record}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (("000.png", PNG), ("000.json", json.dumps(chat).encode())):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    (row,) = [row for part in tar.cut(tmp_path / "a.tar", 5).parts for row in tar.rows(part)]
    assert isinstance(row.record, dict)
    assert row.record["images"] == ["000.png"]
    assert row.images["000.png"] == ("bytes", 512, len(PNG))
