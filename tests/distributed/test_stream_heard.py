"""A model that hears, on a stream: three phases balanced over ranks give the loss and gradients of samples alone."""

from pathlib import Path

import pytest

from megatron.vlm.data.stream import AUDIO, LANGUAGE, VISION
from tests.distributed import stream_heard
from tests.distributed.conftest import run_program
from tests.unit.data.noises import chirp, write_wav
from tests.unit.data.test_sound_samples import made, with_pictures

pytest.importorskip("av")
pytest.importorskip("soxr")
pytest.importorskip("transformers")


def test_three_balanced_phases_give_what_samples_give_alone(tmp_path: Path) -> None:
    """Of sixteen samples half have sounds, between a few tokens and seconds, a third pictures, some neither."""
    with_pictures(tmp_path)
    records: list[dict[str, object]] = []
    for number in range(16):
        sounds = [f"{number}.wav"] * (number % 2)
        for name in sounds:
            write_wav(tmp_path / name, chirp(1000 + 3500 * (number % 9), seed=number))
        image = "pq"[number % 2] + ".png" if number % 3 == 0 else None
        marks = "<audio>" * len(sounds) + "<image>" * bool(image)
        answer = "A cat. " * (1 + 5 * (number % 4))
        turns = [{"from": "human", "value": f"{marks}What is in it?"}, {"from": "gpt", "value": answer}]
        records.append({"audio": sounds, "image": image, "conversations": turns})
    made(tmp_path, records, "data", markup="qwen2.5-omni")
    result = run_program("tests.distributed.stream_heard", 2, str(tmp_path / "data"))
    read, ours = result["read"], result["ours"]
    assert len(read) == len(ours) == stream_heard.STEPS
    for one in (*read, *ours):
        assert one["loss"] == pytest.approx(one["alone"], rel=1e-5)
        assert one["gradients"] < 1e-5
    for phase in (AUDIO, VISION, LANGUAGE):
        assert not all(one["placed"][phase][1] for one in ours), phase  # it moved samples
    for phase in (AUDIO, VISION):
        assert sum(max(one[phase]) for one in ours) < sum(max(one[phase]) for one in read)
