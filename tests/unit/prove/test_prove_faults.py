"""`prove` names each planted fault, in three kinds of models, and finds nothing in the packs they are planted in."""

from functools import partial
from typing import Any

import pytest

from megatron.vlm.prove.isolation import Proof, prove
from megatron.vlm.prove.models import ATTENTION
from omnibal_ext.integrations.torch_loops import collate
from tests.unit.prove.faults import FAULTS, hearing_collate, sounds_out_of_order
from tests.unit.prove.folders import KINDS, hearing, model_of, samples_of

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, model_of(request.param)


def checks(proof: Proof) -> set[str]:
    assert not ATTENTION.keys() & proof.not_run.keys()
    return {finding.check for finding in proof.findings}


def test_the_packs_in_which_faults_are_planted_are_right(folder: tuple[str, Any]) -> None:
    kind, model = folder
    proof = prove(model, samples_of(kind), partial(collate, config=model.config), ["eager", "sdpa"])
    assert checks(proof) == set()
    assert all(not others for sees in proof.sees.values() for others in sees)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, folder: tuple[str, Any]) -> None:
    (kind, model), (plant, check) = folder, FAULTS[fault]
    proof = prove(model, samples_of(kind), partial(plant, config=model.config), ["sdpa"])
    assert check in checks(proof), proof.findings


@pytest.mark.parametrize("kind", KINDS)
def test_sounds_out_of_order_are_named(kind: str) -> None:
    model, samples = hearing(kind)
    assert checks(prove(model, samples, partial(hearing_collate, config=model.config), ["sdpa"])) == set()
    proof = prove(model, samples, partial(sounds_out_of_order, config=model.config), ["sdpa"])
    assert "media" in checks(proof)
