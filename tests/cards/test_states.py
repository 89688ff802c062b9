"""Optimizer states in the precisions that flags ask for, with the stand-in for Transformer Engine."""

from pathlib import Path

import pytest

from tests.cards.test_resumes import folder, train
from tests.programs import ENGINE_CARDS, result_of, run_ranks

__all__ = ["folder"]
pytestmark = pytest.mark.starts
NARROW = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16", "--main-grads-dtype", "bf16")
TEN = ("--bf16", "--use-distributed-optimizer", "--use-precision-aware-optimizer", *NARROW)


def test_states_are_kept_as_the_flags_say() -> None:
    """Bytes a weight are those that profiles, plans and checks count; the losses differ by the precision alone."""
    found = result_of(run_ranks("cards.run", 1, ["tests.cards.states"], server=ENGINE_CARDS))
    for name, case in found.items():
        assert case["bytes"] == pytest.approx(case["counted"], rel=1e-3), name
        assert case["losses"] == pytest.approx(found["none"]["losses"], rel=0.03), name
        assert case["losses"][-1] < 0.9 * case["losses"][0]
    assert found["all fp32"]["losses"] == pytest.approx(found["none"]["losses"], rel=1e-3)
    counted = {name: 2 + sum(case["counted"]) for name, case in found.items()}
    assert counted == {"none": 18, "all fp32": 16, "12": 12, "10": 10, "narrow": 11}
    assert found["10"]["precisions"] == ["torch.bfloat16", "torch.int16"]


def test_a_run_with_narrow_states_goes_on(folder: Path) -> None:
    """To the bit."""
    saves = ("--save", str(folder / "narrow"), "--save-interval", "2", *TEN)
    whole = train(folder, "whole narrow", ENGINE_CARDS, 4, "--from-scratch", *saves)
    (folder / "narrow" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(folder, "resumed narrow", ENGINE_CARDS, 4, "--load", str(folder / "narrow"), *TEN)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole[2:]]
