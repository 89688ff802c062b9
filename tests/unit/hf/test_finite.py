"""Weights that are no finite numbers do not come in without a word, nor go out so."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.vlm.hf.convert import from_hugging_face, to_hugging_face
from megatron.vlm.hf.finite import Broken
from omnibal_ext.errors import UserError
from tests.unit.hf import models

pytest.importorskip("transformers")
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", TYPES)
def test_one_number_of_many_is_seen(kind: torch.dtype, value: float) -> None:
    broken, draws = Broken(), torch.Generator().manual_seed(0)
    for place in (0, 1, 63, 64, 4_095, 4_096):
        tensor = torch.randn(4_097, generator=draws).to(kind)
        assert broken.seen(f"whole {place}", tensor) is tensor
        tensor[place] = value
        broken.seen(f"broken {place}", tensor.view(17, 241))
    assert broken.names == [f"broken {place}" for place in (0, 1, 63, 64, 4_095, 4_096)]
    largest = torch.full((9,), torch.finfo(kind).max, dtype=kind)
    for whole in (largest, -largest, torch.empty(0, dtype=kind), torch.ones(3, dtype=torch.int64)):
        broken.seen(f"{whole}", whole)
    broken.seen("a bound", torch.tensor(-math.inf, dtype=kind))
    assert len(broken.names) == 6
    broken.seen("no bound", torch.tensor(math.nan, dtype=kind))
    assert broken.names[6:] == ["no bound"]
    assert str(broken).startswith("broken 0, broken 1, broken 63 and 4 more: ")


def change(folder: Path, names: dict[str, Any]) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in names.keys() & tensors.keys():
            tensors[name].view(-1)[-1] = names[name]
        save_file(tensors, file, {"format": "pt"})


def test_a_model_whose_weights_are_no_numbers_is_refused_by_name(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    models.build("internvl", seed=1).save_pretrained(theirs)
    names = sorted(load_file(theirs / "model.safetensors"))
    change(theirs, {names[3]: math.nan, names[5]: math.inf})
    with pytest.raises(UserError) as refused:
        from_hugging_face(theirs, ours)
    message = str(refused.value)
    assert names[3] in message
    assert names[5] in message
    assert message.isprintable()
    assert "download it again" in message
    assert not list(ours.iterdir()), "nothing is left that could be taken for a checkpoint"
    change(theirs, {names[3]: 1.0, names[5]: 1.0})
    from_hugging_face(theirs, ours)


def test_what_a_run_made_of_its_weights_is_said_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that diverged may be looked at."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    models.build("internvl", seed=1).save_pretrained(theirs)
    from_hugging_face(theirs, ours)
    to_hugging_face(ours, tmp_path / "whole")
    assert "warning" not in capsys.readouterr().err
    name = sorted(load_file(theirs / "model.safetensors"))[3]
    change(theirs, {name: math.nan})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Broken, "names", [])
        from_hugging_face(theirs, tmp_path / "broken")
    to_hugging_face(tmp_path / "broken", tmp_path / "back")
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("warning: ") and name in line]
    assert load_file(tmp_path / "back/model.safetensors")[name].view(-1)[-1].isnan()
