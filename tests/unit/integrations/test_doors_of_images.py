"""The doors of LLaMA-Factory and axolotl without them: what they ask of a trainer's parts, and what they refuse."""

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnibal_ext.errors import UserError
from omnibal_ext.integrations import axolotl, llama_factory
from omnibal_ext.integrations.samples import Packer, tiles_of
from omnibal_ext.integrations.torch_loops import collate
from tests.unit.prove.folders import model_of, samples_of

pytest.importorskip("transformers")
CUTOFF, BLANK = 60, 20
Row = dict[str, Any]


class Plugin:
    """LLaMA-Factory's, of a LLaVA: an image is the tile that it gives."""

    image_token, audio_token = "<image>", None

    def get_mm_inputs(self, images: Sequence[Any], *_: Any) -> Row:
        return {"pixel_values": torch.stack([*images])} if images else {}


class Encoder:
    """LLaMA-Factory's processor of samples that are not packed: each as it is, cut at `cutoff_len`."""

    def __init__(self) -> None:
        self.template, self.tokenizer, self.processor = SimpleNamespace(mm_plugin=Plugin()), None, None

    def preprocess_dataset(self, examples: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        cut = {key: [one[:CUTOFF] for one in examples[key]] for key in llama_factory.TOKENS}
        return cut | {kind: list(examples[f"_{kind}"]) for kind in llama_factory.MEDIA}


@pytest.fixture(autouse=True)
def _blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-Factory's blank image, of so many tokens."""
    blank = {"input_ids": [127] * BLANK, "labels": [-100] * BLANK, "pixel_values": torch.full((1, 3, 16, 16), 0.5)}
    monkeypatch.setattr(llama_factory, "blank", lambda _: dict(blank))


def packed(lengths: Sequence[int], images: Sequence[int]) -> list[Row]:
    """The packs of samples, whose tokens are their numbers."""
    examples: Row = {"input_ids": [[number] * length for number, length in enumerate(lengths)]}
    examples["labels"] = examples["input_ids"]
    examples["_images"] = [[torch.zeros(3, 16, 16)] * count or None for count in images]
    examples |= {"_videos": [None] * len(lengths), "_audios": [None] * len(lengths)}
    columns = llama_factory.TwoBudgetProcessor(Encoder(), Packer(3, CUTOFF)).preprocess_dataset(examples)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_packs_of_llama_factory_are_within_both_budgets_and_bare_ones_have_room_for_a_blank() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 30, (60,), generator=draw).tolist()
    images = [1 if number < 4 else 0 for number in range(60)]
    packs = packed(lengths, images)
    assert sorted(number for pack in packs for number in set(pack["input_ids"])) == list(range(60))
    bare = [not any(pack["images"]) for pack in packs]
    assert set(bare) == {True, False}
    for pack, lacks in zip(packs, bare, strict=True):
        assert len(pack["input_ids"]) == sum(pack[llama_factory.LENGTHS]) <= CUTOFF - BLANK * lacks
        assert sum(map(len, pack["images"])) <= 3


def test_a_text_that_leaves_no_room_is_alone_and_a_cut_sample_with_images_is_left_out(capsys: Any) -> None:
    packs = packed([CUTOFF + 9, CUTOFF - 5, 4], [0, 0, 0])
    assert sorted(pack[llama_factory.LENGTHS] for pack in packs) == [[4], [CUTOFF - 5], [CUTOFF]]
    assert [pack[llama_factory.LENGTHS] for pack in packed([CUTOFF + 9, 9], [1, 1])] == [[9]]
    assert f"1 tiles and {CUTOFF + 1} tokens" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["llava", "qwen"])
@pytest.mark.parametrize("door", [llama_factory, axolotl])
def test_a_door_joins_a_pack_as_collate_does(kind: str, door: Any) -> None:
    model, samples = model_of(kind), samples_of(kind)
    found, wanted = door.proved(samples, model.config), collate(samples, model.config)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)) for key, value in wanted.items())


def test_a_pack_without_images_ends_with_a_blank_one_that_is_trained_on_nothing() -> None:
    (pack,) = packed([5, 6], [0, 0])
    join = llama_factory.PackCollator(Encoder().template, model_of("llava"), None, compute_dtype=torch.float16)
    batch = join([pack])
    assert (tiles_of(batch), batch["pixel_values"].dtype) == (1, torch.float16)
    assert batch["position_ids"][0, -BLANK:].tolist() == list(range(BLANK))
    assert (batch["labels"][0, -BLANK:] == -100).all()
    with pytest.raises(UserError, match="batches must be one pack of omnibal"):
        join([pack, pack])
    with pytest.raises(UserError, match="batches must be one pack of omnibal"):
        join([{"input_ids": [1], "labels": [1]}])


def test_attention_and_layers_that_do_not_keep_samples_apart_are_refused_by_llama_factorys_door() -> None:
    for kernel, kind in (("flex_attention", "llava"), ("sdpa", "qwen3_5")):
        text = SimpleNamespace(_attn_implementation=kernel)
        config = SimpleNamespace(model_type=kind, get_text_config=lambda text=text: text)
        with pytest.raises(UserError, match=f"packs of {kind} with {kernel}: flash_attn must be"):
            llama_factory.PackCollator(None, SimpleNamespace(config=config), None)


def test_arguments_of_llama_factory_under_which_a_batch_is_no_pack_are_refused() -> None:
    right: Row = {"packing": True, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 8, "do_eval": False}
    llama_factory.check(right)
    for name, value in (("packing", None), ("per_device_train_batch_size", 2), ("do_eval", True), ("use_unsloth", True),
                        ("shift_attn", True), ("use_kt", True), ("predict_with_generate", True)):  # fmt: skip
        with pytest.raises(UserError, match=r"must be (true|false|1) with omnibal's packs"):
            llama_factory.check({**right, name: value})


def test_llama_factory_gets_our_processor_for_sft_alone_and_installing_twice_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get_dataset(template: Any, data_args: Any, **_: Any) -> Any:
        return loader.PackedSupervisedDatasetProcessor(data_args=data_args, template=template, tokenizer=0, processor=0)

    own = object()
    loader: Any = SimpleNamespace(PackedSupervisedDatasetProcessor=own, SupervisedDatasetProcessor=SimpleNamespace)
    workflow = SimpleNamespace(get_dataset=get_dataset, SFTDataCollatorWith4DAttentionMask=None)
    modules = {
        "llamafactory.data": SimpleNamespace(loader=loader),
        "llamafactory.train.sft": SimpleNamespace(workflow=workflow),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(llama_factory, "warm_up", lambda: None)
    for vit_budget in (3, 5):
        llama_factory.install(vit_budget, seconds=0.0)
    arguments = SimpleNamespace(packing=True, per_device_train_batch_size=1, do_eval=False, cutoff_len=7)
    made = workflow.get_dataset("template", arguments, stage="sft")
    assert (made.packer, made.theirs.template) == (Packer(5, 7, seconds=0.0), "template")
    assert loader.PackedSupervisedDatasetProcessor is own
    assert workflow.SFTDataCollatorWith4DAttentionMask is llama_factory.PackCollator


class Settings(dict):
    """axolotl's configuration: what is not there is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __missing__(self, name: str) -> None:
        return None


def test_settings_of_axolotl_under_which_samples_would_not_be_kept_apart_are_refused() -> None:
    right: Row = {"omnibal_vit_budget": 12, "processor_type": "AutoProcessor", "micro_batch_size": 1}

    def check(**changed: Any) -> None:
        plugin, settings = axolotl.TwoBudgetPlugin(), Settings({**right, **changed})
        plugin.vit_budget = settings.omnibal_vit_budget
        plugin.pre_model_load(settings)

    check()
    check(attn_implementation="flash_attention_2", context_parallel_size=1)
    for said, changed in (
        ("omnibal_vit_budget: None", {"omnibal_vit_budget": None}),
        ("processor_type, micro_batch_size 1", {"processor_type": None}),
        ("processor_type, micro_batch_size 1", {"micro_batch_size": 2}),
        ("context_parallel_size", {"context_parallel_size": 2}),
        ("attn_implementation: flex_attention", {"attn_implementation": "flex_attention"}),
        *((f"{name}: True: must be left out", {name: True}) for name in axolotl.MUST_NOT_BE),
    ):
        with pytest.raises(UserError, match=said):
            check(**changed)
