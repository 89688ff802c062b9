"""A pack of a processor's samples gives transformers' model what they give it one by one, whatever joins them: in loss,
logits and gradients."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.vlm.hf.pack_inputs import padded_sounds
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.errors import UserError
from omnibal_ext.integrations.energon import TwoBudgetPacking
from omnibal_ext.integrations.samples import join
from omnibal_ext.integrations.torch_loops import collate
from tests.long import short
from tests.unit.hf import models
from tests.unit.hf.models import IMAGE_TOKEN, VIDEO_TOKEN, Sample
from tests.unit.hf.test_packs import PACKED

pytest.importorskip("transformers")
SHORT = ("llava", "internvl", "qwen2.5-vl", "qwen3-vl", "gemma 3", "qwen2.5-omni", "glm-4.1v")
"""The families that people pack, and one whose films are given as images."""
TYPES = ("mm_token_type_ids", "token_type_ids")
Batch = dict[str, Any]


def samples_of(family: str, attention: str) -> tuple[Any, list[Sample]]:
    from omnibal_ext.architectures.huggingface import read_fields
    from tests.unit.hf.parity import packed  # which imports every family's classes

    model: Any = models.build(family, seed=1)
    model.set_attn_implementation(attention)
    _, samples = packed(read_fields(family, model.config.to_dict(), "config.json"))
    return model, samples[:3] if family == "qwen3-omni" else samples  # whose short sounds hear their padding


def processed(samples: list[Sample], config: Any) -> list[Batch]:
    """As the model's processor gives them, and every other one without a batch dimension."""
    from tests.unit.hf.parity import seen

    made = []
    for number, sample in enumerate(samples):
        ids = sample.ids
        if config.model_type.startswith("glm"):
            ids = ids.masked_fill(ids == VIDEO_TOKEN, IMAGE_TOKEN)
        row = {"input_ids": ids, "labels": sample.ids, "attention_mask": torch.ones_like(ids)}
        row = {name: value[None] for name, value in row.items()} | seen(sample, config) | padded_sounds(sample.sounds)
        made.append({name: value[0] if number % 2 and len(value) == 1 and value.numel() == len(ids) else value
                     for name, value in row.items()})  # fmt: skip
    for name in TYPES:
        if any(name in row for row in made):
            made = [{name: torch.zeros_like(row["input_ids"]), **row} for row in made]
    return made


def assert_equal(found: Batch, wanted: Batch) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            assert_equal(found[name], value)
        else:
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def gradients(model: Any) -> torch.Tensor:
    return torch.cat(
        [torch.zeros(one.numel()) if one.grad is None else one.grad.flatten() for one in model.parameters()]
    )


@pytest.mark.parametrize("family", short(PACKED, SHORT))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_pack_gives_what_its_samples_give_one_by_one(family: str, attention: str) -> None:
    from tests.unit.hf.parity import reference

    model, samples = samples_of(family, attention)
    given = processed(samples, model.config)
    batch = collate(given, model.config)
    without_masks = [{name: value for name, value in row.items() if name != "attention_mask"} for row in given]
    assert_equal(collate(without_masks, model.config), batch)
    assert_equal(JoinPack(None, model.config)(given), batch)
    logits, loss = reference(model, samples)
    wanted = gradients(model)
    model.zero_grad()
    found = model(**batch)
    found.loss.backward()
    assert logits.abs().max() > 1, "logits so small that any model would pass"
    assert (found.logits[0] - logits).abs().max() < 1e-5
    assert abs(found.loss.item() - loss) < 1e-6 * loss
    assert torch.cosine_similarity(gradients(model), wanted, dim=0) > 1 - 1e-6


@pytest.mark.parametrize("family", ["llava", "qwen2.5-vl", "qwen2.5-omni"])
def test_packs_of_megatrons_doors_hold_the_same(family: str) -> None:
    model, samples = samples_of(family, "sdpa")
    given, wanted = processed(samples, model.config), collate(processed(samples, model.config), model.config)
    encoder = TwoBudgetPacking()
    encoder.config = model.config
    for pack in (encoder.pack_selected_samples(given), join(given, model.config)):
        assert "attention_mask" not in pack
        for name in ("input_ids", "labels", *(key for key in wanted if key.startswith(("pixel", "image", "video")))):
            assert torch.equal(pack[name].reshape(wanted[name].shape), wanted[name]), name
        places = wanted["position_ids"][1:] if wanted["position_ids"].dim() == 3 else wanted["position_ids"]
        assert torch.equal(pack["position_ids"].reshape(places.shape), places)
        assert pack["cu_seqlens"].tolist() == np.cumsum([0, *(len(sample.ids) for sample in samples)]).tolist()


def test_images_of_a_model_that_is_not_told_stand_as_if_it_were() -> None:
    """M-RoPE's, whose processors say which tokens are images; films and sounds differ by model."""
    model, samples = samples_of("qwen2.5-vl", "sdpa")
    given = processed(samples, model.config)
    images = [row for row in given if "video_grid_thw" not in row]
    assert len(images) > 1
    assert_equal(collate(images), collate(images, model.config))
    with pytest.raises(UserError, match=r"steps of one have no words between them.*config=model.config"):
        collate(given)


IDS = {"input_ids": torch.arange(9), "labels": torch.arange(9)}
SHOWN = {"pixel_values": torch.ones(16, 12), "image_grid_thw": torch.tensor([[1, 4, 4]])}
OTHERS: Any = SimpleNamespace(model_type="mamba")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attention_mask": torch.arange(9)}, "sample 1 of the pack: attention_mask .9,. of 9 tokens hides"),
        ({"attention_mask": torch.ones(1, 1, 9, 9)}, "attention_mask .1, 1, 9, 9. of 9 tokens hides some"),
        ({"source": "coco"}, "sample 1 of the pack: source is 'coco', no numbers: leave it out"),
        ({"labels": None}, "sample 1 of the pack has no labels, and others have"),
        ({"labels": torch.arange(8)}, "labels .8,. of 9 tokens: must have a value for each"),
        ({"input_ids": None}, "sample 1 of the pack: has no input_ids, but labels"),
        ({"input_ids": torch.zeros(2, 9).long()}, "input_ids .2, 9.: must be those of one sample"),
        ({"position_ids": torch.arange(5, 14)}, "position_ids .9,. of 9 tokens: must count from 0"),
        ({"position_ids": torch.zeros(3, 9)}, "sample 0 of the pack has no position_ids, and others have"),
        (SHOWN, "config=model.config"),
        ({"token_type_ids": torch.ones(9)}, "sample 0 of the pack has no token_type_ids"),
        ({"pixel_values": torch.ones(2, 12)}, "pixel_values of a pack's samples: of .1, 3, 2, 2., .2, 12.$"),
    ],
)  # fmt: skip
def test_what_cannot_be_in_a_pack_is_refused_in_a_line(more: Batch, said: str) -> None:
    first = {**IDS, "pixel_values": torch.ones(1, 3, 2, 2) if "pixel_values" in more and more is not SHOWN else None}
    with pytest.raises(UserError, match=said) as caught:
        collate([first, {**IDS, **more}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("samples", "config", "said"),
    [
        ([], None, "a pack without samples"),
        ([IDS | {"token_type_ids": torch.ones(9)}], None, "token_type_ids: .*config=model.config"),
        ([IDS], OTHERS, "models of type 'mamba' are not known"),
    ],
)
def test_models_of_which_too_little_is_known_are_refused(samples: list[Batch], config: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        partial(collate, config=config)(samples)


def test_positions_of_several_axes_are_kept_and_told_apart_by_words() -> None:
    places = torch.arange(27).reshape(3, 9)
    batch = collate([{**IDS, "position_ids": places}] * 2)
    assert batch["position_ids"][:, 0].tolist() == [2 * row for row in ([*range(9)], *places.tolist())]
