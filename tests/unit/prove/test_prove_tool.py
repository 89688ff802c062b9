"""`omnibal prove`: exit codes, table, JSON, what is refused; of a large folder the first layers; no megatron-core."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm.prove import models as tried
from megatron.vlm.prove.isolation import CHECKS, prove
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.integrations.torch_loops import collate
from tests.programs import ROOT
from tests.unit.hf import models
from tests.unit.prove.folders import model_of, samples_of
from tools import prove_packs

pytest.importorskip("transformers")
MODULE = """
import torch
from omnibal_ext.integrations.torch_loops import collate
samples = torch.load({path!r})
without_labels = [{{"input_ids": one["input_ids"]}} for one in samples]
empty = []
def joined(features, config):
    batch = collate(features, config)
    return batch | {{"attention_mask": torch.ones_like(batch["input_ids"])}}
sources = [{{**one, "source": "coco"}} for one in samples]
def embedded(features):
    return {{"inputs_embeds": features[0]["input_ids"]}}
def in_place(features, config):
    for one in features:
        one["labels"][-2:] = -100
    return collate(features, config)
def failing(features):
    raise KeyError("input_embeds")
def wrong_labels(features, config):
    return collate(features, config) | {{"labels": [1, 2]}}
def of_three(features, config):
    print("three")
    if len(features) < 3:
        raise ValueError("three")
    return joined(features, config)
def other_order(features, config):
    return collate(features[::-1], config)
pictured = next(one for one in samples if "pixel_values" in one)
alike = [{{**pictured, "pixel_values": pictured["pixel_values"] + k / 8}} for k in range(3)]
no_list = 7
class Needs:
    def __init__(self, tok): pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a LLaVA, with a module of samples and collators."""
    folder = tmp_path_factory.mktemp("proved")
    model_of("llava").save_pretrained(folder)
    torch.save(samples_of("llava"), folder / "samples.pt")
    (folder / "proved_samples.py").write_text(MODULE.format(path=str(folder / "samples.pt")))
    return folder


def exit_code(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delitem(sys.modules, "proved_samples", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    samples = [] if "--samples" in words else ["--samples", "proved_samples:samples"]
    monkeypatch.setattr(sys, "argv", ["prove", "--model", str(folder), *samples, *words])
    with pytest.raises(SystemExit) as ended:
        run_tool(prove_packs.main)
    return int(str(ended.value.code))


def test_right_packs_end_with_0_and_wrong_ones_with_1(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    assert exit_code(folder, monkeypatch, "--trainer", "omnibal") == 0
    right = capsys.readouterr().out
    assert exit_code(folder, monkeypatch, "--collator", "proved_samples:joined", "--pack", "3", "--packs", "1") == 1
    wrong = capsys.readouterr().out
    for said in (right, wrong):
        assert set(CHECKS) <= set(said.split())
        assert max(map(len, said.splitlines())) <= 80
    assert "differ" not in right
    assert "isolation: sample 1 sees sample 0 (eager, sdpa)" in wrong


def test_a_pack_that_cannot_be_run_hides_no_fault_of_another(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    assert exit_code(folder, monkeypatch, "--collator", "proved_samples:of_three", "--pack", "3", "--packs", "2",
                     "--kernels", "sdpa", "--json") == 1  # fmt: skip
    first, *others = json.loads(capsys.readouterr().out)["packs"]
    assert first["findings"]
    assert not others or "three" in others[0]["not_run"]["sdpa"]


def test_samples_of_the_same_words_are_told_apart_by_their_images(folder: Path, monkeypatch: Any) -> None:
    """A right pack in another order; the same with an image too many is not."""
    words = ("--samples", "proved_samples:alike", "--kernels", "sdpa")
    assert exit_code(folder, monkeypatch, *words, "--collator", "proved_samples:other_order") == 0
    assert exit_code(folder, monkeypatch, *words, "--collator", "proved_samples:joined") == 1


def test_json_has_what_the_table_has(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ("--collator", "proved_samples:joined", "--kernels", "sdpa", "--json")
    assert exit_code(folder, monkeypatch, *words) == 1
    found = json.loads(capsys.readouterr().out)
    (pack,) = found["packs"]
    assert not found["equal"]
    assert pack["sees"] == {"sdpa": [[], [0], [0, 1], [0, 1, 2]]}
    assert {"isolation", "logits", "loss", "gradients"} == {one["check"] for one in pack["findings"]}
    assert pack["differences"]["sdpa"].keys() == {"logits", "loss", "gradients"}


def test_a_collator_that_writes_into_its_samples_is_seen(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    assert exit_code(folder, monkeypatch, "--collator", "proved_samples:in_place", "--kernels", "sdpa") == 1
    assert "labels: sample 1: 2 lost, 0 others, from its token 5 on" in capsys.readouterr().out


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    page = (ROOT / "docs" / "prove.md").read_text()
    module, printed = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text"))
    assert module
    assert printed
    (tmp_path / "mine.py").write_text(module[1])
    model = ["--model", str(ROOT / "examples" / "small-model")]
    assert exit_code(tmp_path, monkeypatch, *model, "--samples", "mine:samples", "--collator", "mine:collate") == 1
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert unwrapped([line for line in said if line]) == unwrapped([line for line in printed[1].splitlines() if line])


def unwrapped(lines: list[str]) -> list[str]:
    """Without the name of a weight: which one has the largest difference is a matter of rounding."""
    return re.sub(r"most of \S+", "", " ".join(lines)).split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trainer", "trl"], "trl.trainer.sft_trainer.*pip install trl"),
        (["--collator", "proved_samples:nothing"], "proved_samples:nothing: .*give MODULE:FUNCTION"),
        (["--collator", "proved_samples:failing"], "no kernel could be run: the collator fails: KeyError: 'input_emb"),
        (["--collator", "proved_samples:embedded"], "the collator's batch has inputs_embeds: it needs input_ids"),
        (["--samples", "proved_samples:sources", "--trainer", "omnibal"], "a sample's fields: .*str"),
        (["--samples", "proved_samples:without_labels", "--trainer", "omnibal"], "a sample has input_ids: it needs"),
        (["--samples", "proved_samples:empty", "--trainer", "omnibal"], "proved_samples:empty: is empty"),
        (["--trainer", "omnibal", "--kernels", "sdpa,flush"], "--kernels flush: must be of eager, sdpa, flash"),
        (["--trainer", "omnibal", "--model", "nowhere"], "nowhere: no config.json of a model"),
        (["--collator", "proved_samples:wrong_labels"], "no kernel could be run: the batch cannot be compared: "),
        (["--collator", "proved_samples:Needs"], "proved_samples:Needs as it is: TypeError: .*'tok'"),
        (["--collator", "proved_samples:empty"], "proved_samples:empty: is no function"),
        (
            ["--samples", "proved_samples:no_list", "--trainer", "omnibal"],
            "--samples proved_samples:no_list: TypeError",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_input_is_a_line_and_ends_with_2(
    words: list[str], said: str, folder: Path, monkeypatch: Any, capsys: Any
) -> None:
    assert exit_code(folder, monkeypatch, *words) == 2
    line = capsys.readouterr().err
    assert line.count("error:") == 1
    with pytest.raises(UserError, match=said):
        raise UserError(line)


@pytest.mark.parametrize("family", ["gemma 3", "qwen2.5-vl", "qwen3-vl", "llava-onevision"])
def test_of_a_large_model_the_first_layer_of_each_kind_is_run(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    make_config, make_model = models.classes(family)
    config = make_config(**models.config_fields(family))
    config.architectures = [make_model.__name__]
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(tried, "WHOLE", 1000)
    text = tried.load(tmp_path, 0).config.get_text_config()
    kinds = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"]
    assert text.num_hidden_layers == len(set(kinds))
    assert tried.load(tmp_path, 0).state_dict().keys() < make_model(config).state_dict().keys()


def test_a_model_cut_to_its_first_layers_tells_faults_as_the_whole_one(tmp_path: Path, monkeypatch: Any) -> None:
    model_of("gemma").save_pretrained(tmp_path)
    monkeypatch.setattr(tried, "WHOLE", 1000)
    model = tried.load(tmp_path, 0)
    assert not prove(model, samples_of("gemma"), lambda rows: collate(rows, model.config), ["eager", "sdpa"]).findings
    joined = prove(
        model, samples_of("gemma"), lambda rows: collate(rows, model.config) | {"attention_mask": None}, ["sdpa"]
    )
    assert joined.findings


@pytest.mark.starts
def test_it_runs_without_megatron_core_and_takes_the_collator_before_ours(folder: Path) -> None:
    """What it imports gives torch a GPU's functions where there is none: trainers must not find these."""
    first = ["import sys", "from omnibal_ext.integrations.torch_loops import collate"]
    (folder / "first.py").write_text("\n".join([*first, "assert 'megatron.vlm' not in sys.modules"]))
    code = (
        "import sys; sys.modules['megatron.core'] = sys.modules['megatron.training'] = None; "
        f"sys.argv[1:] = ['--model', {str(folder)!r}, '--samples', 'proved_samples:samples']; "
        "sys.argv[1:] += ['--collator', 'first:collate', '--packs', '1']; "
        "from omnibal_ext.errors import run_tool; from tools.prove_packs import main; run_tool(main)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "all packs are equal" in ended.stdout
