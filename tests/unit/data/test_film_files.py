"""Films have the frames, seconds and turn that their packets and edit lists say, as torchcodec reads them."""

import ctypes.util
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.media.videos import read_frames, video_facts
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.reading.document import sealed
from tests.long import short
from tests.unit.data.films_made import FILMS, MadeFilm, even, passing, write_film
from tests.unit.data.test_videos import RULES, SHOWN, assert_film_shown, film_of, made, oracle, theirs, written
from tests.unit.data.torchcodec_reading import chosen
from tests.unit.preprocessing.test_processors import written_tokenizer

av = pytest.importorskip("av")

__all__ = ["oracle"]
ANY = 10**9
RECORDED = MadeFilm("recorded.mkv", times=even(60, 10), says=1000)
"""As browsers record: a frame lasts a millisecond, says the header."""
BOTH = MadeFilm("both.mp4", turned=90, bframes=3, edits=((2950, 333),))
UNEVEN = MadeFilm("uneven.mkv", times=tuple(int(time) for time in np.cumsum([0, *[40] * 20, *[400] * 19])))


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("films")
    assert len({film.name for film in FILMS}) == len(FILMS) >= 60
    return {film.name: write_film(folder, film) for film in FILMS}


def same(seen: np.ndarray, picture: np.ndarray, pictures: np.ndarray) -> bool:
    """Whether what is seen is nearer to this picture than to all others."""
    far = np.abs(pictures.astype(int) - seen).mean(axis=(1, 2, 3))
    return bool(np.abs(picture.astype(int) - seen).mean() == far.min())


def of_pyav(folder: Path) -> str:
    """Where to find the FFmpeg that PyAV brings, under the names that others know."""
    libraries = Path(av.__file__).parent.parent / "av.libs"
    for file in libraries.glob("lib*"):
        if named := re.fullmatch(r"(lib(?:av|sw)\w+)-\w+\.so\.(\d+)[.\d]*", file.name):
            (folder / f"{named[1]}.so.{named[2]}").symlink_to(file)
    if not list(folder.iterdir()):
        pytest.skip("this PyAV brings no libraries of FFmpeg")
    return f"{folder}:{libraries}"


def of_the_machine(_: Path) -> str:
    if not ctypes.util.find_library("avcodec"):
        pytest.skip("no libraries of FFmpeg on this machine: apt-get install ffmpeg")
    return ""


@pytest.mark.starts
@pytest.mark.parametrize("libraries", short([of_pyav, of_the_machine], [of_pyav]))
def test_films_are_what_torchcodec_reads(libraries: Any, films: dict[str, Path], tmp_path: Path) -> None:
    """Another FFmpeg says otherwise how long the last frame of an edit list is, which films with B-frames have, or of a
    piece.
    """
    if importlib.util.find_spec("torchcodec") is None:
        pytest.skip("torchcodec is not installed")
    (tmp_path / "libraries").mkdir()
    alike, places = libraries is of_pyav, libraries(tmp_path / "libraries")
    program = [sys.executable, "-m", "tests.unit.data.torchcodec_reading", str(tmp_path / "out.npz")]
    environment = os.environ | ({"LD_LIBRARY_PATH": places} if places else {})
    program += map(str, films.values())
    run = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    if "libtorchcodec" in run.stderr:
        pytest.skip(f"torchcodec does not start here: {run.stderr.strip().splitlines()[-1]}")
    assert not run.returncode, run.stderr
    compared = 0
    with np.load(tmp_path / "out.npz") as found:
        for film in FILMS:
            path = films[film.name]
            facts, told = video_facts(path, (), ANY), found[f"{path} told"].tolist()
            if alike or not (film.edits or film.shift or film.mux or film.bframes):
                assert [facts.frames, facts.seconds, facts.rate] == told, film.name
            assert facts.frames == told[0], film.name
            assert facts.seconds == pytest.approx(told[1], abs=0.2), film.name
            if f"{path} pixels" in found:
                seen = np.stack(list(read_frames(path, (), chosen(facts.frames))))
                np.testing.assert_allclose(seen.astype(int), found[f"{path} pixels"], atol=1, err_msg=film.name)
                compared += 1
    assert compared >= 60


@pytest.mark.parametrize("markup", RULES)
@pytest.mark.parametrize("film", [RECORDED, UNEVEN, BOTH], ids=lambda film: film.name)
def test_words_and_pixels_are_the_processor_s(film: MadeFilm, markup: str, oracle: Any, tmp_path: Path) -> None:
    """It is told what torchcodec says of the film, and chooses among its frames."""
    processor = oracle(markup, written_tokenizer(tmp_path / "tokenizer.json"), RULES[markup])
    path = write_film(tmp_path, film)
    with av.open(path) as container:
        shown = [packet for packet in container.demux(video=0) if packet.size and not packet.is_discard]
        begin = float(min(packet.pts for packet in shown) * shown[0].time_base)
        seconds = float(max(packet.pts + packet.duration for packet in shown) * shown[0].time_base) - begin
    clip = np.stack(list(read_frames(path, (), range(len(shown))))), len(shown) / seconds
    expected = theirs(processor, written(SHOWN[markup]["video"] + "\nWhat happens?"), [clip], [])
    assert_film_shown(made(tmp_path, markup, [film_of(film.name)]).sample(0), expected, markup)


def test_what_is_lost_of_a_film_is_seen_behind_an_edit_list_as_well(tmp_path: Path) -> None:
    for film in (film for film in FILMS if film.mux.get("movflags") == "faststart"):
        path = write_film(tmp_path, film)
        content = path.read_bytes()
        for share in (0.3, 0.6, 0.9):
            path.write_bytes(content[: int(len(content) * share)])
            with pytest.raises(Rejected, match="truncated_video"):
                video_facts(path, (), ANY)


def test_a_film_without_times_or_a_picture_is_refused_by_name(tmp_path: Path) -> None:
    film = write_film(tmp_path, MadeFilm("one.webm", "libvpx", times=(0,), without=("rate", "length")))
    with pytest.raises(Rejected, match=r"not_a_video.*nothing says when"):
        video_facts(film, (), ANY)
    film = write_film(tmp_path, MadeFilm("bare.h264"))
    with pytest.raises(Rejected, match=r"not_a_video.*of a container that is not read; read are MP4"):
        video_facts(film, (), ANY)
    with av.open(tmp_path / "sound.mkv", "w") as container:
        stream: Any = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        sound.rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(Rejected, match=r"not_a_video.*no pictures"):
        video_facts(tmp_path / "sound.mkv", (), ANY)


def test_a_film_that_begins_between_key_frames_shows_the_first_that_can_be_seen(tmp_path: Path) -> None:
    """Packets that cannot be decoded count, in torchcodec as well: the frame behind them stands for each."""
    whole, late = write_film(tmp_path, MadeFilm("whole.mkv", bframes=2)), tmp_path / "late.mkv"
    with av.open(whole) as read, av.open(late, "w") as kept:
        source = read.streams.video[0]
        stream = kept.add_stream_from_template(source)
        for number, packet in enumerate(read.demux(source)):
            if number >= 5 and packet.dts is not None:
                packet.stream = stream
                kept.mux(packet)
    facts, pictures = video_facts(late, (), ANY), passing(40, 96, 64)
    assert facts.frames == 35
    seen = zip(read_frames(late, (), [0, 3, 20, 34]), pictures[[12, 12, 25, 39]], strict=True)
    assert all(same(frame, picture, pictures) for frame, picture in seen)


def test_a_dataset_whose_frames_were_counted_otherwise_is_refused(tmp_path: Path) -> None:
    write_film(tmp_path, RECORDED)
    film = [film_of(RECORDED.name)]
    manifest = made(tmp_path, "qwen-vl", film).manifest
    path = tmp_path / "dataset/manifest.json"
    old = {name: value for name, value in manifest.items() if name not in ("video_reading", "manifest_sha256")}
    path.write_text(json.dumps(sealed(old)))
    with pytest.raises(UserError, match=r"chosen by another way.*preprocess again"):
        ChatDataset(path.parent)
    with pytest.raises(UserError, match="made otherwise"):
        made(tmp_path, "qwen-vl", film)
    path.write_text(json.dumps(sealed({**old, "video_files": 0})))  # images alone are what they were
    assert len(ChatDataset(path.parent)) == 1
