"""Every figure that a run writes has a test, which is there; what is drawn is among what is written."""

from megatron.vlm.monitoring.journal import RATES
from tests.figures import EVALUATION, ONLY_ON_GPUS, TRAINING
from tests.unit.test_mutations import is_there


def test_the_tests_of_figures_are_there() -> None:
    assert [test for test in {*TRAINING.values(), *EVALUATION.values()} if not is_there(test)] == []


def test_curves_are_figures_of_the_metrics() -> None:
    assert set(RATES) <= set(TRAINING)
    assert set(TRAINING) >= ONLY_ON_GPUS
