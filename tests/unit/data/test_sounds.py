"""Sound files are heard as transformers' own reader and feature extractor hear them, and damaged ones are named."""

import io
import wave as waves
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.vlm.data.media.mel import log_mels, mel_bands
from megatron.vlm.data.media.sounds import load_sound, sound_length
from megatron.vlm.data.rejects import REMEDIES
from omnibal_ext.errors import Rejected
from omnibal_ext.families.media import SOUND_RULES
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.audio.sounds import SoundRule
from tests.unit.data.clips import noise, write_video
from tests.unit.data.noises import chirp, encoded

av = pytest.importorskip("av")
pytest.importorskip("soxr")

RATE = 16000
ENCODERS = {
    "qwen2.5-omni": AudioArchitecture(1, 8, 1, 8),
    "qwen3-omni": AudioArchitecture(1, 8, 1, 8, chunk=100, channels=4, pooled=False),
}
FILES: dict[str, tuple[str, str, int, int, float]] = {
    "16 bits": ("pcm_s16le", "wav", 16000, 1, 0.0), "8 bits, 8 kHz": ("pcm_u8", "wav", 8000, 1, 0.0),
    "24 bits, 6 channels": ("pcm_s24le", "wav", 48000, 6, 0.0), "32 bits": ("pcm_s32le", "wav", 11025, 2, 0.0),
    "floats": ("pcm_f32le", "wav", 44100, 2, 0.0), "telephone": ("pcm_alaw", "wav", 8000, 1, 0.0),
    "AIFF": ("pcm_s16be", "aiff", 44100, 2, 0.0), "FLAC": ("flac", "flac", 44100, 2, 0.0),
    "FLAC in OGG": ("flac", "ogg", 22050, 1, 0.0), "MP3": ("libmp3lame", "mp3", 44100, 2, 1e-4),
    "MP3, 16 kHz": ("libmp3lame", "mp3", 16000, 1, 1e-4), "Opus": ("libopus", "ogg", 48000, 2, 1e-4),
    "Vorbis": ("vorbis", "ogg", 44100, 2, 1e-4), "AAC": ("aac", "ipod", 44100, 2, 0.0),
    "AAC, MP4": ("aac", "mp4", 16000, 1, 0.0), "ALAC": ("alac", "ipod", 44100, 2, 0.0),
    "FLAC in MKV": ("flac", "matroska", 44100, 2, 0.0), "Opus in WebM": ("libopus", "webm", 48000, 1, 0.0),
    "MP3 in MP4": ("libmp3lame", "mp4", 44100, 2, 0.0),
}  # fmt: skip
"""Codec, container, rate, channels; how far samples may be from those of another decoder."""
READ = [name for name, file in FILES.items() if file[1] in ("wav", "aiff", "flac", "mp3") or name in ("Opus", "Vorbis")]
"""What soundfile reads too."""


def made(name: str, seconds: float = 1.3, seed: int = 0, **how: Any) -> bytes:
    codec, container, rate, channels, _ = FILES[name]
    how["strict"] = "experimental"  # FFmpeg's own Vorbis
    return encoded(chirp(int(seconds * rate) + 7, rate, channels, seed), rate, codec, container, **how)


def decoded(content: bytes) -> tuple[int, int]:
    """Samples that FFmpeg decodes, and their rate."""
    with av.open(io.BytesIO(content)) as file:
        stream = file.streams.best("audio")
        return sum(frame.samples for frame in file.decode(stream)), stream.rate


@pytest.mark.parametrize("name", list(FILES))
def test_a_length_is_that_of_the_decoded_sound(name: str, tmp_path: Path) -> None:
    for seed, seconds in enumerate((0.05, 0.5, 1.3, 2.71)):
        (tmp_path / "sound").write_bytes(content := made(name, seconds, seed))
        samples, rate = decoded(content)
        length = sound_length(tmp_path / "sound", (), RATE)
        assert length == -(-samples * RATE // rate)
        assert length == len(load_sound(tmp_path / "sound", (), RATE))
        assert length == sound_length(tmp_path / "sound", (), RATE, decode=True)


@pytest.mark.parametrize("name", ["16 bits", "24 bits, 6 channels", "FLAC", "AIFF", "MP3", "MP3, 16 kHz"])
def test_what_says_its_length_is_not_decoded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sound").write_bytes(made(name))
    monkeypatch.setattr("megatron.vlm.data.media.sounds._waves", lambda *_: pytest.fail("decoded"))
    assert sound_length(tmp_path / "sound", (), RATE)


def test_an_mp3_without_a_header_is_decoded(tmp_path: Path) -> None:
    """Its bit rate gives a wrong length."""
    (tmp_path / "sound.mp3").write_bytes(content := made("MP3", 2.0, write_xing="0"))
    without = content[content.index(b"\xff\xfb", 10) :]
    samples, rate = decoded(without)
    (tmp_path / "sound.mp3").write_bytes(without)
    assert sound_length(tmp_path / "sound.mp3", (), RATE) == -(-samples * RATE // rate)


@pytest.mark.parametrize("name", READ)
def test_a_waveform_is_that_of_transformers_reader(name: str, tmp_path: Path) -> None:
    """Of lossless files bit for bit; other decoders round otherwise."""
    pytest.importorskip("soundfile")
    audio_utils = pytest.importorskip("transformers.audio_utils")
    path = tmp_path / f"sound.{FILES[name][1]}"
    path.write_bytes(made(name))
    theirs, ours = audio_utils.load_audio(str(path), RATE, backend="soundfile"), load_sound(path, (), RATE)
    assert ours.dtype == theirs.dtype == np.float32
    assert len(ours) == len(theirs)
    assert np.abs(ours - theirs).max() <= FILES[name][-1]


@pytest.mark.parametrize("markup", list(ENCODERS))
def test_frames_are_the_feature_extractors(markup: str) -> None:
    """Bit for bit, however long a sound is, silent in parts or cut by the longest that is heard."""
    transformers = pytest.importorskip("transformers")
    rule = SOUND_RULES[markup](ENCODERS[markup])
    if rule.longest is not None:
        assert rule.longest == 300
        rule = SoundRule(rule.encoder, longest=10)
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=rule.longest or 30)
    how: dict[str, Any] = {"padding": rule.longest is None or "max_length", "truncation": rule.longest is not None}
    generator = np.random.default_rng(0)
    lengths = [201, 319, 320, 321, 399, 400, 480, 481, 16000, 159999, 160000, 160001, 200000]
    for length in [*lengths, *generator.integers(400, 60000, 20).tolist()]:
        wave = chirp(length, seed=length)[0] * (generator.random(length) > 0.4).astype(np.float32)
        wave[: length // 3] *= generator.integers(0, 2)
        found = extractor([wave], sampling_rate=RATE, return_attention_mask=True, **how)
        frames = int(np.asarray(found["attention_mask"]).sum())
        assert rule.frames(length) == frames
        if rule.tokens(length):
            theirs = np.asarray(found["input_features"])[0, :, :frames].T
            np.testing.assert_array_equal(log_mels(rule, wave).numpy(), theirs)


def test_what_gives_no_token_is_too_short() -> None:
    """Qwen2.5-Omni hears the third frame; Qwen3-Omni what can be mirrored at its ends."""
    least = {"qwen2.5-omni": 321, "qwen3-omni": 201}
    for markup, encoder in ENCODERS.items():
        rule = SOUND_RULES[markup](encoder)
        assert rule.tokens(least[markup] - 1) == 0
        assert rule.tokens(least[markup]) == 1


@pytest.mark.parametrize("bands", [80, 128])
def test_bands_are_transformers(bands: int) -> None:
    utils = pytest.importorskip("transformers.audio_utils")
    theirs = utils.mel_filter_bank(201, bands, 0.0, 8000.0, RATE, norm="slaney", mel_scale="slaney")
    np.testing.assert_array_equal(mel_bands(bands, 400, RATE), theirs.astype(np.float32))


def verdict(path: Path, decode: bool = False) -> str:
    """The reason why a file is rejected; "" if it is heard."""
    try:
        sound_length(path, (), RATE, decode)
    except Rejected as error:
        return error.reason if error.reason in REMEDIES and "\n" not in error.detail else f"no verdict: {error}"
    return ""


def test_what_is_no_whole_sound_is_rejected_by_name(tmp_path: Path) -> None:
    whole = made("16 bits")
    cases: dict[str, tuple[bytes, str]] = {
        "empty.wav": (b"", "empty_audio"),
        "words.wav": (b"What is it?" * 100, "not_audio"),
        "no_samples.wav": (encoded(chirp(0), RATE, "pcm_s16le", "wav"), "empty_audio"),
        "cut.wav": (whole[:-100], "truncated_audio"),
        "cut_between_packets.wav": (whole[: 44 + 34 + 2048 * 4], "truncated_audio"),
        "cut.flac": (made("FLAC")[:-5], "truncated_audio"),
        "cut_far.flac": (made("FLAC")[:-60000], "truncated_audio"),
        "cut.mp3": (made("MP3")[:-2000], "truncated_audio"),
        "cut.ogg": (made("Opus")[:-5], "truncated_audio"),
        "cut.mkv": (made("FLAC in MKV")[:-20000], "truncated_audio"),
        "cut.m4a": (made("AAC")[:-2000], "not_audio"),
        "cut_fast.m4a": (made("AAC", faststart=True)[:-2000], "truncated_audio"),
        "numbers.wav": (encoded(chirp(999) * np.float32(np.nan), RATE, "pcm_f32le", "wav"), "not_audio"),
        "loud.wav": (encoded(chirp(999) * np.float32(1e20), RATE, "pcm_f32le", "wav"), "not_audio"),
        "other.aac": (encoded(chirp(9999), RATE, "aac", "adts"), "not_audio"),
        "slow.wav": (encoded(chirp(999), 400, "pcm_s16le", "wav"), "not_audio"),
    }
    for name, (content, reason) in cases.items():
        (tmp_path / name).write_bytes(content)
        assert verdict(tmp_path / name) == reason, name
    assert verdict(tmp_path / "nowhere.wav") == "missing_audio"
    assert verdict(tmp_path) == "unreadable_audio"
    write_video(tmp_path / "silent.mp4", noise(4, 32, 32), 2)
    assert verdict(tmp_path / "silent.mp4") == "no_audio"
    (tmp_path / "sound.jpg").write_bytes(made("FLAC"))  # what a file is called says nothing
    assert verdict(tmp_path / "sound.jpg") == ""


@pytest.mark.parametrize(
    ("rate", "samples", "reason"),
    [(999, 1998, "not_audio"), (1000, 2000, ""), (768000, 2 * 768000, ""), (768001, 2 * 768001, "not_audio"),
     (1000, 3600 * 1000, ""), (1000, 3600 * 1000 + 1, "too_long_audio")],
)  # fmt: skip
def test_rates_have_limits_and_an_hour_is_the_longest(rate: int, samples: int, reason: str, tmp_path: Path) -> None:
    with waves.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((1, 1, rate, samples, "NONE", ""))
        file.writeframes(bytes(samples))
    for decode in (False, True):
        assert verdict(tmp_path / "sound.wav", decode) == reason


def test_flipped_bits_are_found_by_decoding(tmp_path: Path) -> None:
    content = bytearray(made("FLAC in MKV"))
    content[len(content) // 2] ^= 1
    (tmp_path / "sound.mkv").write_bytes(content)
    assert verdict(tmp_path / "sound.mkv") == ""
    assert verdict(tmp_path / "sound.mkv", decode=True) == "truncated_audio"


def test_lengths_that_nobody_knew_are_no_damage(tmp_path: Path) -> None:
    """Programs that write to a pipe leave all ones, or nearly, in place of the length."""
    for length in (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f"):
        content = bytearray(made("16 bits"))
        content[4:8] = content[content.index(b"data") + 4 : content.index(b"data") + 8] = length
        (tmp_path / "piped.wav").write_bytes(content)
        assert sound_length(tmp_path / "piped.wav", (), RATE) == int(1.3 * RATE) + 7


def damaged(content: bytes, generator: np.random.Generator) -> bytes:
    """Truncated, bits flipped, bytes left out, or bytes put in."""
    kind, at = generator.integers(4), int(generator.integers(len(content)))
    if kind == 0:
        return content[:at]
    if kind == 1:
        broken = bytearray(content)
        for place in generator.integers(0, len(content), int(generator.integers(1, 20))):
            broken[place] ^= 1 << int(generator.integers(8))
        return bytes(broken)
    if kind == 2:
        return content[:at] + content[at + int(generator.integers(1, 3000)) :]
    return content[:at] + generator.bytes(int(generator.integers(1, 500))) + content[at:]


def test_damaged_files_are_heard_as_measured_or_named(tmp_path: Path) -> None:
    """200 of them: rejected with a reason; or decoded to as many samples as was said; or, where that fails only in
    training, with an error there. What is truncated never passes for a whole, shorter sound."""
    generator = np.random.default_rng(0)
    contents = [made(name, 0.6, faststart=bool(number % 2)) for number, name in enumerate(FILES)]
    names, outcomes = list(FILES), dict[str, int]()
    for number in range(200):
        content = contents[number % len(names)]
        broken = damaged(content, generator)
        (tmp_path / "broken").write_bytes(broken)
        reason = verdict(tmp_path / "broken")
        if not reason:
            length = sound_length(tmp_path / "broken", (), RATE)
            try:
                heard = len(load_sound(tmp_path / "broken", (), RATE))
                assert np.isfinite(load_sound(tmp_path / "broken", (), RATE)).all()
            except Exception:  # as training meets it: named, with placeholder
                heard = -1
            reason = "as measured" if heard == length else "unlike what was measured"
            if content.startswith(broken):
                whole = -(-decoded(content)[0] * RATE // decoded(content)[1])
                assert length == whole, (names[number % len(names)], len(content), len(broken))
        outcomes[reason] = outcomes.get(reason, 0) + 1
    assert outcomes["as measured"] > 20
    assert outcomes.get("unlike what was measured", 0) < 30
    assert sum(count for reason, count in outcomes.items() if reason in REMEDIES) > 80, outcomes
