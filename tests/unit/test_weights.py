"""A run starts from its own checkpoint, else from what it is given, else from random weights that it asked for."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.vlm.checkpoint.folder import seal
from megatron.vlm.hf.checkpoint import OurCheckpoint, write_release
from megatron.vlm.weights import Weights, _sizes, apply_weights, check_weights, starting_weights
from omnibal_ext.adapters import NO_ADAPTERS, Adapters
from omnibal_ext.architectures.presets import PRESETS, preset
from omnibal_ext.errors import UserError
from tests.languages import altered, with_layers

TINY = preset("tiny")


def saved(folder: Path, tracker: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    if tracker.isdecimal():
        (folder / f"iter_{int(tracker):07d}").mkdir()
        seal(folder / f"iter_{int(tracker):07d}", {}, {})
    return folder


def flags(
    load: Path | None = None, save: Path | None = None, first: Path | None = None, scratch: bool = False, **more: object
) -> Namespace:
    names = {"load": load, "save": save, "first_weights": first}
    values = {"pretrained_checkpoint": None, "ckpt_step": None, "trust": False, "fresh": False, **more}
    return Namespace(**{name: path and str(path) for name, path in names.items()}, from_scratch=scratch, **values)


def hugging_face(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = b'{"a": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_a_run_with_a_checkpoint_of_its_own_goes_on(tmp_path: Path) -> None:
    save, given = saved(tmp_path / "save", "120"), saved(tmp_path / "given", "release")
    named = (flags(save=save), flags(save=save, first=given), flags(save=save, scratch=True), flags(load=save))
    for args in (*named, flags(load=given, save=save), flags(load=save, save=save), flags(load=tmp_path, save=save)):
        assert starting_weights(args) == Weights("own", save, 120)


def test_a_first_start_takes_what_it_is_given(tmp_path: Path) -> None:
    given, save, theirs = saved(tmp_path / "given", "release"), tmp_path / "save", hugging_face(tmp_path / "hf")
    for args in (flags(first=given), flags(save=save, first=given), flags(load=given, save=save),
                 flags(load=save, save=save, first=given), flags(load=given, first=given)):  # fmt: skip
        assert starting_weights(args) == Weights("given", given)
    assert starting_weights(flags(first=saved(tmp_path / "run", "40"))) == Weights("given", tmp_path / "run")
    assert starting_weights(flags(first=theirs)) == Weights("unconverted", theirs)
    assert starting_weights(flags(load=save, save=save, scratch=True)) == Weights("random")


def test_a_tracker_that_says_release_hides_no_saves_of_a_run(tmp_path: Path) -> None:
    """Where there are no converted weights, it is damaged."""
    save = saved(tmp_path / "save", "120")
    saved(tmp_path / "save", "release")
    assert starting_weights(flags(save=save)) == Weights("own", save, 120)
    assert starting_weights(flags(load=save)) == Weights("own", save, 120)


def test_nothing_starts_from_random_weights_unasked(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    own, other = saved(tmp_path / "own", "3"), saved(tmp_path / "other", "7")
    for args, words in (
        (flags(), "no weights to start from: --from FOLDER .* --from-scratch"),
        (flags(save=empty), "no weights to start from"),
        (flags(load=empty), f"no weights to start from; --load {empty} holds no checkpoint"),
        (flags(load=empty, save=empty), "no weights to start from"),
        (flags(load=tmp_path / "nowhere"), "nowhere: no such folder"),
        (flags(load=tmp_path / "nowhere", scratch=True), "nowhere: no such folder"),
        (flags(load=tmp_path / "nowhere", first=own), "nowhere: no such folder"),
        (flags(first=tmp_path / "nowhere"), "--from .*nowhere: no such folder"),
        (flags(first=empty), "neither a checkpoint .* nor a model"),
        (flags(first=own, scratch=True), "exclude each other"),
        (flags(load=own, save=other), "both hold a run's checkpoints"),
        (flags(load=saved(tmp_path / "release", "release"), first=own), "both name first weights"),
        (flags(load=saved(tmp_path / "broken", "metadata")), "no checkpoint here"),
        (flags(save=tmp_path / "release"), "--save .*release: holds converted weights, which are no run's own"),
        (flags(save=tmp_path / "release", first=tmp_path / "release"), "holds converted weights"),
        (flags(load=tmp_path / "release", save=tmp_path / "release"), "holds converted weights"),
        (flags(save=own, fresh=True), "--fresh: .*own holds a run's iter_0000003"),
    ):
        with pytest.raises(UserError, match=words):
            starting_weights(args)


def test_megatron_is_told_in_its_own_words(tmp_path: Path) -> None:
    for weights, load, pretrained in (
        (Weights("own", tmp_path, 3), str(tmp_path), None),
        (Weights("given", tmp_path), None, str(tmp_path)),
        (Weights("random"), None, None),
    ):
        args = flags(load=tmp_path / "what was asked for")
        apply_weights(args, weights)
        assert (args.load, args.pretrained_checkpoint) == (load, pretrained)
        assert args.exit_on_missing_checkpoint == (weights.kind == "own")
    with pytest.raises(UserError, match=r"omnibal convert --from-hf .* --from CONVERTED"):
        apply_weights(flags(), Weights("unconverted", tmp_path))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny preset, in names and widths: 4 ViT layers of 64, 3 of a language model of 128; rows are padded."""
    from megatron.vlm.hf.names import sources

    folder = tmp_path_factory.mktemp("converted") / "tiny"
    shapes = {name: torch.empty(1, device="meta") for name in sources(TINY, "internvl", "llama")}
    widths = {"vit_0.mlp.linear_fc1": (256, 64), "word_embed.embedding": (640, 128),
              "llm_0.mlp.linear_fc1": (704, 128), "llm_0.self_attention.linear_qkv": (256, 128)}  # fmt: skip
    shapes |= {f"links.{name}.weight": torch.empty(size, device="meta") for name, size in widths.items()}
    write_release(folder, shapes, lambda name: torch.zeros(shapes[name].shape))
    assert len(OurCheckpoint(folder).weights) == len(shapes)
    return folder


def test_weights_are_of_the_model_that_is_built(checkpoint: Path) -> None:
    given = Weights("given", checkpoint)
    check_weights(given, TINY)
    language, vision = TINY.language, TINY.vision
    for changed, words in (
        (replace(TINY, language=with_layers(language, 4)), "lacks .* of its weights, links.llm_3"),
        (replace(TINY, vision=replace(vision, layers=3)), "weights more, links.vit_3"),
        (replace(TINY, language=replace(language, vocab_size=641)), r"word_embed.* is \(640, 128\), wanted \(641"),
        (replace(TINY, language=altered(language, ffn_hidden_size=300)), "llm_0.mlp"),
        (replace(TINY, language=altered(language, kv_heads=4)), "linear_qkv"),
        (replace(TINY, vision=replace(vision, hidden_size=80)), "vit_0.mlp"),
    ):
        with pytest.raises(UserError, match=words):
            check_weights(given, changed)


@pytest.mark.parametrize("name", PRESETS)
def test_what_shows_a_models_widths_are_weights_of_its(name: str) -> None:
    from megatron.vlm.hf.names import sources

    model = PRESETS[name]
    assert _sizes(model).keys() <= sources(model, *model.types).keys()


def test_adapters_of_a_checkpoint_are_those_of_the_run(checkpoint: Path, tmp_path: Path) -> None:
    names = [*OurCheckpoint(checkpoint).weights, "links.llm_0.mlp.linear_fc2_adapter.a"]
    sizes = {name: tuple(entry.size) for name, entry in OurCheckpoint(checkpoint).weights.items()}
    shapes = {name: torch.empty(sizes.get(name, (4, 352)), device="meta") for name in names}
    adapters = Adapters(4, 8.0, ("llm",))
    run = {"adapters": adapters.to_record()}
    write_release(tmp_path, shapes, lambda name: torch.zeros(shapes[name].shape), run)
    check_weights(Weights("given", tmp_path), TINY, adapters=adapters)
    check_weights(Weights("own", tmp_path, 4), TINY, adapters=adapters)
    others = (Adapters(4, 9.0, ("llm",)), Adapters(8, 8.0, ("llm",)), Adapters(4, 8.0, ("vit", "llm")))
    for other in (NO_ADAPTERS, *others):
        with pytest.raises(UserError, match="has adapters; give --lora-rank 4 --lora-targets llm --lora-alpha 8, or"):
            check_weights(Weights("given", tmp_path), TINY, adapters=other)
    check_weights(Weights("given", checkpoint), TINY, adapters=adapters)  # new ones are added
    own = {name: shapes[name] for name in sizes}
    write_release(tmp_path / "own", own, lambda name: torch.zeros(own[name].shape), {"flags": {}})
    with pytest.raises(UserError, match="has trained no adapters so far; leave them out, or begin another run"):
        check_weights(Weights("own", tmp_path / "own", 4), TINY, adapters=adapters)


def test_a_folders_own_model_is_compared_beyond_its_shapes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = checkpoint / "huggingface"
    side.mkdir(exist_ok=True)
    (side / "config.json").write_text("{}")
    faster = replace(TINY, name="other", language=altered(TINY.language, theta=5e5, max_positions=9))
    monkeypatch.setattr("megatron.vlm.weights.preset", lambda _: faster)
    with pytest.raises(UserError, match=r"language.rope_theta 500000.0 \(not 10000.0\), unlike --model tiny"):
        check_weights(Weights("given", checkpoint), TINY)
    check_weights(Weights("given", checkpoint), replace(faster, name="another name"))
    (side / "config.json").unlink()


def test_of_given_weights_the_checks_take_the_save_that_is_tracked(tmp_path: Path) -> None:
    folder = saved(saved(tmp_path, "20"), "40")
    (folder / "iter_0000040/common.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"'common.pt' is none of the files .* iter_0000020 is whole: name it in"):
        check_weights(Weights("given", folder), TINY)
