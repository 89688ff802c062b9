"""axolotl trains on our packs: within both budgets, and they give what its own samples give one by one."""

from pathlib import Path

import pytest

from tests.unit.integrations.peers import needs
from tests.unit.integrations.trained import Run, assert_proved, assert_three_steps, assert_within, noted

needs("axolotl", "axolotl")
SEQUENCE_LEN, PROGRAM = 1200, "train_axolotl.py"
VIT_BUDGETS = {"llava": 2, "qwen": 64}


@pytest.fixture(scope="module", params=VIT_BUDGETS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, vit_budget = tmp_path_factory.mktemp("trained"), VIT_BUDGETS[request.param]
    return Run(folder / request.param, vit_budget, noted(PROGRAM, folder, request.param, str(vit_budget)))


def test_every_sample_is_in_one_pack_and_no_pack_is_beyond_a_budget(run: Run) -> None:
    packs = run.seen["packs"]
    assert sorted(sample for pack in packs for sample in pack) == list(range(len(run.seen["alone"])))
    assert_within(run.seen["joined"], run.vit_budget, SEQUENCE_LEN)
    assert len(packs) < len(run.seen["alone"]) / 2


def test_three_steps_are_run_on_them(run: Run) -> None:
    assert_three_steps(run.seen)


def test_packs_are_proved_equal_to_its_samples(run: Run) -> None:
    packs = [[{key: value for key, value in run.seen["alone"][sample].items() if key != "attention_mask"}
              for sample in pack] for pack in run.seen["packs"]]  # fmt: skip
    assert_proved(run.folder, packs, run.seen["joined"])


def test_an_epoch_is_as_many_steps_as_there_are_packs(tmp_path: Path) -> None:
    seen = noted(PROGRAM, tmp_path, "llava", "2", "max_steps: null", "warmup_ratio: 0.5")
    assert seen["steps"] == len(seen["batches"]) == len(seen["packs"])
    assert seen["warmup_steps"] == round(seen["steps"] / 2)
