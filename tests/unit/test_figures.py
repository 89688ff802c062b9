"""Every figure that a run writes has a test, which is there; what is drawn is among what is written."""

import re

from megatron.vlm.monitoring.journal import RATES
from tests.figures import EVALUATION, ONLY_ON_GPUS, TRAINING
from tests.programs import ROOT


def test_the_tests_of_figures_are_there() -> None:
    for test in {*TRAINING.values(), *EVALUATION.values()}:
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test


def test_curves_are_figures_of_the_metrics() -> None:
    assert set(RATES) <= set(TRAINING)
    assert set(TRAINING) >= ONLY_ON_GPUS
