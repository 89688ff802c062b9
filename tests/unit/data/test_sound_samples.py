"""Sounds in conversations: every way to name them, what the dataset keeps, and what a pack and a loop get of them."""

import base64
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.encoder_share import EncoderShares
from megatron.vlm.data.indexed_columns import ColumnWriter
from megatron.vlm.data.loader import Needs, PackDataset, microbatches
from megatron.vlm.data.manifest import read_media
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.media import Media
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.measures.sounds import rule_in
from megatron.vlm.preprocessing.model_recipe import check_tokenizer, resolve_settings
from megatron.vlm.preprocessing.model_recipe import recipe_of as recipe_of_choices
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import open_recipe
from omnibal_ext.errors import UserError
from omnibal_ext.families.media import SOUND_RULES
from omnibal_ext.files.records import checksums_of, write_record
from omnibal_ext.image_assignment import EncoderRank, assign_pieces
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.audio.sounds import SoundRule
from omnibal_ext.modalities.modality import AUDIO, VISION, Size
from omnibal_ext.reading.document import sealed
from tests.demo import dataset_of, turns
from tests.media import heard, mels_of, seen, tiles_of
from tests.unit.data.clips import noise, tar_of
from tests.unit.data.noises import TURNS, chirp, write_wav
from tests.unit.data.test_loader import pack_of
from tests.unit.data.test_videos import written
from tests.unit.preprocessing.test_processors import (
    PATCH,
    fast,
    omni_class,
    omni_roles,
    qwen_pictures,
    written_tokenizer,
)

pytest.importorskip("av")
pytest.importorskip("soxr")

ENCODER = AudioArchitecture(1, 8, 1, 8, chunk=100, channels=4, pooled=False)
HEARD = {"qwen3-omni": SoundRule(ENCODER), "qwen2.5-omni": SoundRule(AudioArchitecture(1, 8, 1, 8), longest=300)}
LENGTHS = {"a.wav": 16000, "b.wav": 5000, "c.wav": 33333}
ONE, TWO = {"audio": "a.wav", "conversations": TURNS}, turns("<audio> and <audio>?", "Cats.")
TEXT = {"conversations": turns("What?", "Yes.")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, (name, length) in enumerate(LENGTHS.items()):
        write_wav(tmp_path / name, chirp(length, seed=seed))
    return with_pictures(tmp_path)


def with_pictures(folder: Path) -> Path:
    written_tokenizer(folder / "tokenizer.json")
    for number, name in enumerate(("p.png", "q.png")):
        Image.fromarray(np.full((56, 84, 3), 100 + number, np.uint8)).save(folder / name)
    return folder


def recipe_of(folder: Path, markup: str = "qwen3-omni", **flags: Any) -> Recipe:
    rule = flags.pop("audio", HEARD.get(markup))
    flags = {"further": (rule,) if rule else (), "tiling": Tiling(PATCH, 16, 120, False, "native"), **flags}
    flags |= {"tokens_per_tile": 0.25, "normalization": "clip", "system_message": ""}
    return Recipe(folder, folder / "tokenizer.json", "hermes-2", markup=markup, **flags)


def made(folder: Path, records: Any, name: str = "dataset", max_rejects: int = 0, **flags: Any) -> ChatDataset:
    return dataset_of(records, recipe_of(folder, **flags), folder / name, max_rejects)


def parts(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}, {"role": "assistant", "content": "A cat."}]}


ASKED = {"type": "text", "text": "\nWhat is said?"}
FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "a path": lambda _: ONE,
    "a list": lambda _: {"audios": ["a.wav"], "conversations": TURNS},
    "LLaVA's field": lambda _: {"sound": "a.wav", "conversations": TURNS},
    "VILA's mark": lambda _: {"sound": "a.wav", "conversations": turns("<sound>\nWhat is said?", "A cat.")},
    "an object": lambda _: {"audio": {"path": "a.wav", "bytes": None}, "conversations": TURNS},
    "messages": lambda _: {"audios": ["a.wav"], "messages": [
        {"role": "user", "content": "<audio>\nWhat is said?"}, {"role": "assistant", "content": "A cat."}]},
    "a part": lambda _: parts({"type": "audio", "audio": "a.wav"}, ASKED),
    "a part's address": lambda _: parts({"type": "audio_url", "audio_url": {"url": "file://a.wav"}}, ASKED),
    "base64": lambda inside: parts({"type": "audio", "audio": f"data:audio/wav;base64,{inside}"}, ASKED),
    "OpenAI's part": lambda inside: parts(
        {"type": "input_audio", "input_audio": {"data": inside, "format": "wav"}}, ASKED),
}  # fmt: skip
"""Ways to name a sound; some have the file inside."""


@pytest.mark.parametrize("form", list(FORMS))
def test_every_way_to_name_a_sound_gives_the_same_sample(form: str, folder: Path) -> None:
    wanted = made(folder, [ONE], "wanted")[0]
    found = made(folder, [FORMS[form](base64.b64encode((folder / "a.wav").read_bytes()).decode())])[0]
    for name in ("input_ids", "labels", "input_features", "feature_lengths"):
        assert torch.equal(found[name], wanted[name]), name
    assert found["feature_lengths"].tolist() == [100]
    assert found["input_features"].shape == (100, 128)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "tar", "named.tar"])
def test_sounds_inside_files_are_heard_in_their_place(kind: str, folder: Path) -> None:
    wanted = made(folder, [{"audios": ["a.wav", "b.wav"], "conversations": TWO}], "wanted")[0]
    contents = [(folder / name).read_bytes() for name in ("a.wav", "b.wav")]
    path = folder / f"chat.{kind}"
    if kind.endswith("tar"):
        named = {"audios": ["1.a.wav", "b.wav"]} if kind.startswith("named") else {}
        said = json.dumps({"conversations": TWO, **named}).encode()
        tar_of(path, ("1.json", said), ("1.a.wav", contents[0]), ("1.b.wav", contents[1]))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [{"bytes": content, "path": None} for content in contents]
        table = pyarrow.table({"audios": [rows], "conversations": [TWO]})
        if kind == "parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
    data = made(folder, path)
    for name in ("input_ids", "input_features", "feature_lengths"):
        assert torch.equal(data[0][name], wanted[name]), name
    assert data.sample(0).items(AUDIO)[0].place


def test_a_cell_is_one_sound(folder: Path) -> None:
    """As `datasets.Audio` saves it; some have a path alone."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = [{"bytes": (folder / "a.wav").read_bytes(), "path": "x.wav"}, {"bytes": None, "path": "b.wav"}]
    parquet.write_table(pyarrow.table({"audio": cells, "conversations": [TURNS, TURNS]}), folder / "chat.parquet")
    data = made(folder, folder / "chat.parquet")
    assert [data[number]["feature_lengths"].tolist() for number in range(2)] == [[100], [31]]
    assert data.sample(0).items(AUDIO)[0].place
    assert not data.sample(1).items(AUDIO)[0].place


@pytest.mark.parametrize("markup", list(HEARD))
def test_tokens_and_frames_are_the_processors(markup: str, folder: Path) -> None:
    """Images and sounds among each other, as marked."""
    transformers = pytest.importorskip("transformers")
    older = markup == "qwen2.5-omni"
    said = turns("<audio><image> x <audio>", "A.", "<image> y <audio>?", "B.")
    record = {"image": ["p.png", "q.png"], "audio": ["c.wav", "a.wav", "b.wav"], "conversations": said}
    data = made(folder, [record], markup=markup)
    ids, roles = data.manifest["special_tokens"], omni_roles(older)
    tokenizer = fast(folder / "tokenizer.json", sorted(ids, key=ids.__getitem__), **roles)
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=300)
    whole = omni_class(older)(qwen_pictures(), None, extractor, tokenizer)
    image, sound = (
        roles[f"{around}_bos_token"] + roles[f"{kind}_token"] + roles[f"{around}_eos_token"]
        for around, kind in (("vision", "image"), ("audio", "audio"))
    )
    text = written(f"{sound}{image} x {sound}", "A.") + written(f"{image} y {sound}?", "B.")
    sample = data.sample(0)
    assert [one.path for one in sample.items(AUDIO)] == record["audio"]
    seeds = {name: (length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}
    waves = [chirp(seeds[name][0], seed=seeds[name][1])[0] for name in record["audio"]]
    waves = [(np.round(wave * 2**15) / 2**15).astype(np.float32) for wave in waves]
    alone = [whole(text=sound, audio=[wave], return_tensors="np")["feature_attention_mask"].sum() for wave in waves]
    assert [one.frames for one in sample.items(AUDIO)] == alone
    shown = [str(folder / name) for name in record["image"]]
    theirs = whole(text=text, images=shown, audio=waves, return_tensors="np")["input_ids"][0].tolist()
    ours, token, seen = sample.text[0].tolist(), data.manifest["audio_token_id"], data.manifest["image_token_id"]
    if older:  # of sounds in a batch Qwen3-Omni's extractor counts the frame of a rest, alone it does not
        assert ours == theirs
    assert ours.count(token) == sum(HEARD[markup].encoder.tokens(frames) for frames in alone)
    assert [one for one in ours if one != token] == [one for one in theirs if one != token]
    assert sample.length == len(ours)
    starts = [at for at, one in enumerate(ours) if one == seen and ours[at - 1] != seen]
    assert sample.image_starts == starts


def test_a_dataset_keeps_what_training_reads(folder: Path) -> None:
    both = {"image": "p.png", "audio": "c.wav", "conversations": turns("<image><audio>", "A cat.")}
    data = made(folder, [{"audios": ["a.wav", "b.wav"], "conversations": TWO}, TEXT, both])
    assert data.sizes.of("frames").tolist() == [131, 0, 208]
    assert data.further_rules[AUDIO] == HEARD["qwen3-omni"]
    assert [sound.samples for sound in data.sample(0).items(AUDIO)] == [16000, 5000]
    assert [sound.tokens for sound in data.sample(2).items(AUDIO)] == [ENCODER.tokens(208)]
    assert data[1]["input_features"].shape == (0, 128)
    assert data[2]["pixel_values"].shape[0] == data.sizes.tiles[2] > 0
    with np.load(folder / "dataset" / "sizes.npz") as sizes:
        assert sizes["frames"].tolist() == [131, 0, 208]
    told = json.loads((folder / "dataset" / "manifest.json").read_text())
    assert told["audio_token_id"] == told["special_tokens"]["<|audio_pad|>"]


def test_data_for_a_model_that_does_not_hear_is_as_before(folder: Path) -> None:
    """No array or field more; sounds are rejected as they were."""
    seen = {"image": "p.png", "conversations": turns("<image>\nWhat?", "A cat.")}
    records = [seen, ONE, {"conversations": TURNS}, parts({"type": "audio", "audio": "a.wav"}, ASKED)]
    data = made(folder, records, max_rejects=9, audio=None)
    names = {f"{one}.{kind}" for one in ("tokens", "loss_mask", "media") for kind in ("bin", "idx")}
    assert {path.name for path in data.folder.iterdir()} == names | {"sizes.npz", "manifest.json", "rejected.jsonl"}
    with np.load(folder / "dataset" / "sizes.npz") as sizes:
        assert sorted(sizes) == ["lines", "supervised", "tiles", "tokens"]
    manifest = json.loads((data.folder / "manifest.json").read_text())
    assert not [name for name in (*manifest, *manifest["made_from"]["recipe"]) if "audio" in name or "sound" in name]
    assert manifest["rejected_by_reason"] == {"unsupported_media": 3}
    assert sorted(data[0]) == ["images", "input_ids", "labels", "pixel_values"]


def test_hearing_decides_a_dataset(folder: Path) -> None:
    """Another rule makes another one."""
    made(folder, [ONE])
    for rule in (None, SoundRule(ENCODER, longest=30), SoundRule(replace(ENCODER, chunk=200))):
        job = open_job([folder / "dataset.jsonl"], recipe_of(folder, audio=rule), folder / "dataset")
        with pytest.raises(UserError, match="holds a dataset made otherwise"):
            job.finished()


REJECTED: list[tuple[str, dict[str, Any]]] = [
    ("audio_mark_mismatch", {**ONE, "conversations": TWO}),  # a mark too many
    ("audio_mark_mismatch", {**ONE, "conversations": turns("Sing.", "<audio>")}),
    ("image_mark_mismatch", {**parts({"type": "text", "text": "<audio>"}), "audio": "a.wav"}),
    ("malformed_line", {**ONE, "audios": ["a.wav"]}),
    ("malformed_line", {**ONE, "audio": 7}),
    ("malformed_line", parts({"type": "audio", "audio": "a.wav"}, {"type": "audio"})),
    ("missing_audio", {**ONE, "audio": "z.wav"}),
    ("path_outside_root", {**ONE, "audio": "../a.wav"}),
    ("remote_audio", {**ONE, "audio": "https://host/a.wav"}),
    ("not_audio", {**ONE, "audio": "p.png"}),
    ("too_short_audio", {**ONE, "audio": "short.wav"}),
    ("unsupported_media", {**ONE, "conversations": turns("<audio><|audio_pad|>", "A cat.")}),
    ("unsupported_media", {**ONE, "speech": "a.wav"}),
    ("unsupported_media", {**ONE, "conversations": turns("<audio><video>", "A cat.")}),
]


def test_what_cannot_be_heard_is_rejected_by_name(folder: Path) -> None:
    write_wav(folder / "short.wav", chirp(200))
    data = made(folder, [ONE, *(record for _, record in REJECTED)], max_rejects=len(REJECTED))
    rejected = [json.loads(line) for line in (data.folder / "rejected.jsonl").read_text().splitlines()]
    wanted = [(number, reason) for number, (reason, _) in enumerate(REJECTED, start=2)]
    assert [(one["line"], one["reason"]) for one in rejected] == wanted


def test_what_is_too_long_loses_answers_with_their_sounds(folder: Path) -> None:
    said = turns("<audio>\nWhat?", "A.", "<image><audio>\nAnd?", "B.")
    record = {"audio": ["b.wav", "c.wav"], "image": "p.png", "conversations": said}
    first = {"audio": "b.wav", "conversations": said[:2]}
    whole, wanted = made(folder, [record], "whole"), made(folder, [first], "wanted")
    data = made(folder, [record], max_tokens=whole.sample(0).length - 1, shorten=("truncate",))
    assert data.sample(0).text[0].tolist() == wanted.sample(0).text[0].tolist()
    assert data.sample(0).items(AUDIO) == wanted.sample(0).items(AUDIO)
    assert not data.sample(0).images


ALL = Needs(frozenset({"tiles", "frames"}), tokens=True, labels=True)


@pytest.fixture
def spoken(folder: Path) -> ChatDataset:
    mixed = {"audio": ["a.wav", "b.wav"], "image": "p.png", "conversations": turns("<audio><image> <audio>", "A cat.")}
    return made(folder, [mixed, TEXT, {"audio": "c.wav", "conversations": TURNS}])


@pytest.mark.parametrize("hears", [True, False])
def test_older_datasets_have_a_column_for_each_kind(hears: bool, folder: Path, tmp_path: Path) -> None:
    mixed = {"audio": ["a.wav", "b.wav"], "image": "p.png", "conversations": turns("<audio><image> <audio>", "A cat.")}
    shown = {"image": "p.png", "conversations": turns("<image>\nWhat?", "A cat.")}
    spoken = made(folder, [mixed, TEXT, shown]) if hears else made(folder, [shown, TEXT], audio=None)
    older, kinds = tmp_path / "older", (VISION, AUDIO) if hears else (VISION,)
    shutil.copytree(spoken.folder, older, ignore=shutil.ignore_patterns("media.*"))
    for one in kinds:
        texts = [json.dumps([*map(asdict, spoken.sample(n).items(one))]).encode() for n in range(len(spoken))]
        writer = ColumnWriter(older, one.inputs)
        writer.append(np.frombuffer(b"".join(texts), np.uint8), np.array([*map(len, texts)]))
        writer.close()
    files = sorted(path.name for path in older.iterdir() if path.name != "manifest.json")
    manifest = {**spoken.manifest, "checksums": checksums_of(older, files)}
    write_record(older / "manifest.json", sealed(manifest))
    read = ChatDataset(older)
    read.verify()
    for number in range(len(spoken)):
        one, other = read.sample(number), spoken.sample(number)
        assert (one.images, one.items(AUDIO)) == (other.images, other.items(AUDIO))
        assert np.array_equal(tiles_of(one), tiles_of(other))
        assert not hears or torch.equal(mels_of(one), mels_of(other))


def test_a_pack_has_the_sounds_of_its_samples(spoken: ChatDataset) -> None:
    batch = PackDataset(spoken, pack_of(np.array([2, 1, 0])), ALL)[0]
    assert heard(batch).pieces == ((208,), (), (100, 31))
    assert heard(batch).amount == 339
    assert heard(batch).values is not None
    assert heard(batch).positions is not None
    assert batch.input_ids is not None
    assert torch.equal(heard(batch).values, torch.cat([spoken[number]["input_features"] for number in (2, 1, 0)]))
    wanted = (batch.input_ids == spoken.manifest["audio_token_id"]).nonzero().squeeze(1)
    assert heard(batch).positions.tolist() == wanted.tolist()
    assert len(wanted) == sum(ENCODER.tokens(frames) for frames in (208, 100, 31))
    assert batch.labels is not None
    assert batch.loss_mask is not None
    assert not (batch.loss_mask * (batch.labels == spoken.manifest["audio_token_id"])).any()
    assert not batch.broken


def test_a_stage_gets_what_its_links_read(spoken: ChatDataset) -> None:
    language = type("Language", (), {"layer_inputs": None, "experts": None})()
    assert Needs.of(("audio_embed", "audio"), language).media == {"frames"}
    assert Needs.of(("patch_embed", "word_embed"), language).media == {"tiles"}
    samples = pack_of(np.array([0, 1]))
    middle = PackDataset(spoken, samples, Needs(frozenset(), False, False))
    assert heard(middle[0]) == Media(((100, 31), ()))
    assert not middle.reads_media
    ears = Needs(frozenset({"frames"}), False, False)
    assert PackDataset(spoken, samples, ears).reads_media
    other = PackDataset(spoken, samples, ears, decodes=False)
    assert not other.reads_media
    mels = heard(other[0]).values
    assert mels is not None
    assert mels.is_meta
    assert mels.shape == (131, 128)
    quiet = PackDataset(spoken, pack_of(np.array([1])), ALL)[0]
    assert (heard(quiet).pieces, heard(quiet).amount) == ((), 0)
    assert heard(quiet).values is not None
    assert heard(quiet).values.shape == (0, 128)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("damage", [Path.unlink, cut, lambda path: path.write_bytes(path.read_bytes()[::-1])])
def test_a_sound_that_is_gone_or_changed_is_a_bad_sample(damage: Callable[[Path], object], spoken: ChatDataset) -> None:
    damage(spoken.folder.parent / "b.wav")
    samples = pack_of(np.array([2, 0]))
    batch = PackDataset(spoken, samples, ALL)[0]
    assert [sample for sample, _ in batch.broken] == [0]
    assert "b.wav" in batch.broken[0][1]
    assert heard(batch).values is not None
    assert heard(batch).values.shape == (339, 128)
    assert not heard(batch).values[-31:].any()
    assert heard(batch).values[:-31].any(dim=1).all()
    with pytest.raises(UserError, match=r"b\.wav.*sample 0 of "):
        mels_of(spoken.sample(0))


@pytest.mark.parametrize("sizes", [("frames", "tiles"), ("frames",)])
def test_ranks_of_a_replicated_tower_hear_every_sample_once(sizes: tuple[Size, ...], spoken: ChatDataset) -> None:
    """Whole samples, each on the rank that its frames and the pack's patches say; a broken one is told by its rank."""
    (spoken.folder.parent / "b.wav").unlink()
    samples, frame = pack_of(np.array([2, 1, 0])), 0.5
    whole = PackDataset(spoken, samples, ALL)[0]
    rates = {size: frame if size == "frames" else 1.0 for size in sizes}
    parts = [EncoderShares(spoken, samples, EncoderRank(((0, 1),), r, 0, 1, rates))[0, 0] for r in (0, 1)]
    units = tuple(map(prod, seen(whole).grids)) if "tiles" in sizes else ()
    assert {seen(part).pieces for part in parts} == {tuple((unit,) for unit in units)}
    workers = assign_pieces((*units, 208 * frame, 0.0, 131 * frame), 0, (0, 1), 1)[len(units) :]
    assert heard(whole).values is not None
    mels = dict(zip((0, 2), heard(whole).values.split((208, 131)), strict=True))
    for rank, part in enumerate(parts):
        mine = [number for number in (0, 2) if workers[number] == rank]
        assert heard(part).pieces == heard(whole).pieces
        assert heard(part).kept == tuple(
            one for one, worker in zip(heard(whole).pieces, workers, strict=True) if worker == rank
        )
        assert (heard(part).values is None) == (not mine)
        assert not mine or torch.equal(heard(part).values, torch.cat([mels[number] for number in mine]))
        assert [sample for sample, _ in part.broken] == [0] * (2 in mine)
        assert (seen(part).values is None) == (seen(part).amount == 0)
    assert sum(seen(part).amount for part in parts) == sum(units)


def test_checksums_are_compared_unless_nobody_asks(spoken: ChatDataset) -> None:
    """Another sound of the same length is told from the preprocessed one by its checksum alone."""
    write_wav(spoken.folder.parent / "c.wav", chirp(LENGTHS["c.wav"], seed=9))
    with pytest.raises(UserError, match="is not what was preprocessed: CRC-32"):
        mels_of(spoken.sample(2))
    assert mels_of(ChatDataset(spoken.folder, checks_images=False).sample(2)).shape == (208, 128)
    write_wav(spoken.folder.parent / "c.wav", chirp(LENGTHS["c.wav"] - 1, seed=9))
    with pytest.raises(UserError, match="33332 samples where 33333 were preprocessed"):
        mels_of(ChatDataset(spoken.folder, checks_images=False).sample(2))


def test_a_look_at_all_sounds_finds_damage(spoken: ChatDataset) -> None:
    folder = spoken.folder.parent
    job = open_job([folder / "dataset.jsonl"], recipe_of(folder, decode_images=True), folder / "dataset")
    preprocess(job)
    cut(folder / "c.wav")
    with pytest.raises(UserError, match=r"1 of 3 samples have images or sounds that cannot be used.*c\.wav"):
        preprocess(job)


def test_packs_of_several_ranks_have_no_sounds_yet(spoken: ChatDataset) -> None:
    for sample, refused in ((0, True), (1, False)):
        wide: Any = pack_of(np.array([sample]))
        wide.wide, wide.folder = SimpleNamespace(pack_widths=np.array([2])), Path("packs")
        with pytest.raises(UserError, match="pack again without --widths") if refused else nullcontext():
            PackDataset(spoken, wide, ALL)


def test_workers_read_sounds(spoken: ChatDataset) -> None:
    packs = PackDataset(spoken, pack_of(np.array([0, 2])), ALL)
    (read,) = microbatches(packs, [0], num_workers=1)
    assert heard(read).values is not None
    assert torch.equal(heard(read).values, torch.cat([spoken[number]["input_features"] for number in (0, 2)]))


@pytest.mark.parametrize("package", ["av", "soxr"])
def test_what_is_not_installed_is_named(package: str, spoken: ChatDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install '\.\[audio\]' in a clone"):
        ChatDataset(spoken.folder)


def test_a_list_of_sounds_is_checked() -> None:
    good: dict[str, Any] = {"path": "a.wav", "samples": 1, "frames": 1, "tokens": 1, "place": [], "crcs": [1]}
    assert read_media({"sounds": json.dumps([good]).encode()})[AUDIO][0].crcs == (1,)
    wrong = {"path": "/a.wav", "samples": 0, "frames": -1, "tokens": "1", "place": ["x"], "crcs": [1, 2]}
    for field, value in wrong.items():
        with pytest.raises(UserError):
            read_media({"sounds": json.dumps([{**good, field: value}]).encode()})


def test_a_folder_says_how_sounds_are_heard(tmp_path: Path) -> None:
    """In a file of its own or in the processor's; what is not supported is named."""
    published = {"feature_size": 128, "chunk_length": 300, "dither": 0.0, "hop_length": 160, "n_fft": 400}
    rule, newer = (SOUND_RULES[markup](HEARD[markup].encoder) for markup in ("qwen2.5-omni", "qwen3-omni"))
    assert rule_in(tmp_path, rule)[0] == rule
    for name, inside in (("preprocessor_config.json", False), ("processor_config.json", True)):

        def write(name: str = name, inside: bool = inside, **changes: Any) -> None:
            fields = {**published, **changes}
            (tmp_path / name).write_text(json.dumps({"feature_extractor": fields} if inside else fields))

        write()
        assert rule_in(tmp_path, rule)[0] == rule
        assert rule_in(tmp_path, newer)[0] == newer
        write(chunk_length=30, hop_length=80)
        assert rule_in(tmp_path, rule)[0] == replace(rule, longest=30, hop=80)
        assert rule_in(tmp_path, newer)[0] == replace(newer, hop=80)
        wrong = {"feature_size": 80, "dither": 0.1, "do_normalize": True, "hop_length": 0, "n_fft": "4"}
        for field, value in wrong.items():
            write(**{field: value})
            with pytest.raises(UserError, match=name):
                rule_in(tmp_path, rule)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("whole", [False, True])
def test_a_models_folder_says_all_that_sounds_need(whole: bool, folder: Path) -> None:
    """Rule, encoder and tokens, of a thinker alone or in a whole model; another audio token is refused."""
    ids = open_recipe(recipe_of(folder, "qwen2.5-omni")).special_tokens
    config = {
        "model_type": "qwen2_5_omni_thinker",
        "image_token_index": ids["<|IMAGE|>"], "audio_token_index": ids["<|AUDIO|>"],
        "text_config": {"model_type": "qwen2_5_omni_text", "hidden_size": 512, "num_attention_heads": 4},
        "vision_config": {"out_hidden_size": 512, "patch_size": PATCH},
        "audio_config": {"output_dim": 512, "d_model": 32, "encoder_attention_heads": 2, "n_window": 50},
    }  # fmt: skip
    told = {"model_type": "qwen2_5_omni", "thinker_config": config} if whole else config
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 128, "chunk_length": 20}))
    recipe = recipe_of_choices(resolve_settings({"chat-template": "qwen-vl"}, str(folder)), image_root=folder)
    (rule,) = recipe.further
    assert (rule.longest, rule.encoder.chunk, rule.encoder.hidden_size) == (20, 100, 32)
    check_tokenizer(open_recipe(recipe), str(folder))
    data = dataset_of([{"audio": "c.wav", "conversations": TURNS}], recipe, folder / "dataset")
    assert data[0]["feature_lengths"].tolist() == [209]
    config["audio_token_index"] = ids["<|VIDEO|>"]
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match=rf"'<\|AUDIO\|>' is token .* has it at {ids['<|VIDEO|>']}"):
        check_tokenizer(open_recipe(recipe), str(folder))


def test_a_video_gives_its_own_sound(folder: Path) -> None:
    """Named as a sound, whatever else is in the file."""
    import av

    wave = chirp(16000)
    for name in ("m.mp4", "m.mkv"):
        with av.open(folder / name, "w") as file:
            film, sound = file.add_stream("mpeg4", rate=5), file.add_stream("aac", rate=16000, layout="mono")
            film.width, film.height, film.pix_fmt = 32, 32, "yuv420p"
            for picture in noise(5, 32, 32):
                file.mux(film.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            file.mux(film.encode(None))
            for start in range(0, 16000, 1024):
                part = av.AudioFrame.from_ndarray(np.ascontiguousarray(wave[:, start : start + 1024]), "fltp", "mono")
                part.sample_rate, part.pts = 16000, start
                file.mux(sound.encode(part))
            file.mux(sound.encode(None))
    data = made(folder, [{"audio": name, "conversations": TURNS} for name in ("m.mp4", "m.mkv")])
    for number in range(2):
        assert mels_of(data.sample(number)).shape[0] == data.sizes.of("frames")[number] > 98
