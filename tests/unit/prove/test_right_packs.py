"""`prove` finds nothing in right packs, of all families and however they are made; what it cannot run it names."""

from functools import partial
from typing import Any

import pytest
import torch

from megatron.vlm.prove.isolation import prove
from megatron.vlm.prove.models import ready
from omnibal_ext.integrations.torch_loops import collate
from tests.long import short
from tests.unit.hf.test_packs import PACKED
from tests.unit.integrations.test_isolation import processed
from tests.unit.integrations.test_isolation import samples_of as samples_of_family
from tests.unit.prove.folders import model_of, samples_of
from tests.unit.prove.right import EVERYWHERE, RIGHT, boundaries, masked, of_text, of_text_with_boundaries, one_sample

pytest.importorskip("transformers")
SHORT = ("internvl", "llava-next mistral", "qwen3-vl", "gemma 4", "idefics 3", "glm-4.1v", "qwen2.5-omni")
"""One of each way in which media are laid out or samples told apart."""


@pytest.fixture(scope="module")
def llava() -> Any:
    return model_of("llava")


@pytest.mark.parametrize("way", RIGHT, ids=lambda way: way.__name__)
def test_nothing_is_found_in_a_right_batch(way: Any, llava: Any) -> None:
    samples = samples_of("llava")
    if way in (of_text, of_text_with_boundaries):
        samples = [{**one, "input_ids": one["input_ids"] % 100} for one in samples]
        samples = [{name: one[name] for name in ("input_ids", "labels")} for one in samples]
    proof = prove(llava, samples[2:3] if way is one_sample else samples, way, RIGHT[way])
    assert not proof.not_run
    assert not proof.findings
    assert set(proof.sees) == set(RIGHT[way])


@pytest.mark.parametrize("family", short(PACKED, SHORT))
def test_nothing_is_found_in_our_packs(family: str) -> None:
    model, samples = samples_of_family(family, "sdpa")
    given = processed(samples, model.config)
    proof = prove(ready(model), given, partial(collate, config=model.config), EVERYWHERE)
    assert not proof.findings
    assert {*proof.sees, *proof.not_run} == set(EVERYWHERE)
    assert set(proof.not_run) <= ({"flash"} if family.startswith(("gemma", "glm-4.5v")) else set())


def test_a_kernel_that_does_not_read_the_batch_is_named_and_not_judged(llava: Any) -> None:
    proof = prove(llava, samples_of("llava"), masked, ["flash"])
    assert "masks of tokens by tokens" in proof.not_run["flash"]
    assert (proof.findings, proof.sees, proof.differences) == ({}, {}, {})


def test_layers_that_would_carry_on_without_their_kernels_are_named_and_not_judged() -> None:
    model, samples = samples_of_family("qwen3.5", "sdpa")
    given = processed(samples, model.config)
    proof = prove(ready(model), given, lambda features: collate(features, None), ["sdpa"])
    assert "linear attention" in proof.not_run["sdpa"]
    assert not proof.findings


def test_boundaries_that_reach_the_encoder_are_found_where_a_kernel_reads_them(llava: Any) -> None:
    """Transformers hands them on to a LLaVA's ViT, where they cut images apart (docs/loops.md)."""
    proof = prove(llava, samples_of("llava"), boundaries, EVERYWHERE)
    assert {kernel for kernels in proof.findings.values() for kernel in kernels} == {"flash"}
    assert [{*others} for others in proof.sees["eager"]] == [set()] * 4
    assert any(proof.sees["flash"])


def test_what_was_not_compared_is_not_called_equal(llava: Any) -> None:
    """A pack without labels has no loss, one that the model fails on has no logits."""
    unlabelled = prove(llava, samples_of("llava"), lambda rows: collate(rows) | {"labels": None}, ["sdpa"])
    assert unlabelled.not_run.keys() == {"normaliser under sdpa", "loss under sdpa", "gradients under sdpa"}
    assert {one.check for one in unlabelled.findings} == {"labels"}
    failing = prove(llava, samples_of("llava"), lambda rows: collate(rows) | {"pixel_values": torch.ones(2)}, ["sdpa"])
    assert "sdpa" not in failing.sees
    assert {"isolation under sdpa", "logits under sdpa"} <= failing.not_run.keys()


def test_logits_that_are_no_numbers_are_other_logits(llava: Any) -> None:
    def broken(rows: list[Any]) -> Any:
        batch = collate(rows)
        return batch | {"pixel_values": batch["pixel_values"] * float("nan")}

    found = {one.check for one in prove(llava, samples_of("llava"), broken, ["sdpa"]).findings}
    assert {"logits", "loss", "gradients"} & found
