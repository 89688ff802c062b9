"""Every tool says in a line, with exit code 2, what is wrong with any kind of folder under any flag that takes one."""

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.preflight.__main__ import preflight
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.errors import UserError, from_os_error
from omnibal_ext.launch import check
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from tests.demo import demo_dataset, demo_packs


def _with(name: str, text: str, *more: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        (path / name).write_text(text)
        for other in more:
            (path / other).write_text("{}")

    return make


def _weights(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def _model(config: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(config)
        _weights(path)

    return make


def _adapters(path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    _with("adapter_config.json", json.dumps(config))(path)
    _weights(path)
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")


def _megatron(path: Path) -> None:
    """As Megatron-LM leaves them, without what we write beside."""
    (path / "iter_0000010").mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("10")
    (path / "iter_0000010/metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (path / "iter_0000010/.metadata").write_bytes(b"\x80\x04N.")
    (path / "iter_0000010/common.pt").write_bytes(b"PK")
    (path / "iter_0000010/__0_0.distcp").write_bytes(b"\0" * 64)


def _old_megatron(path: Path) -> None:
    (path / "iter_0000010/mp_rank_00").mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("10")
    (path / "iter_0000010/mp_rank_00/model_optim_rng.pt").write_bytes(b"PK")


def _dataset(path: Path) -> None:
    demo_dataset(path.parent / "demo", path, 12, seed=0, max_tiles=4)


def _packs(path: Path) -> None:
    demo_packs(ChatDataset(path.parent / "a dataset"), path, PackOptions(vit_budget=8, llm_budget=256))


KINDS: Mapping[str, Callable[[Path], object]] = {
    "nowhere": lambda _: None, "empty": Path.mkdir, "a file": lambda path: path.write_text("no folder\n"),
    "weights alone": lambda path: (path.mkdir(), _weights(path)), "no JSON": _model('{"model_type": '),
    "a list": _model("[]"), "no model type": _model("{}"), "a number for a type": _model('{"model_type": 7}'),
    "unsupported type": _model('{"model_type": "kimi_vl"}'),
    "a language model": _model('{"model_type": "qwen3", "hidden_size": 8}'),
    "no weights": _with("config.json", '{"model_type": "internvl"}'), "adapters": _adapters, "megatron": _megatron,
    "old megatron": _old_megatron, "a dataset": _dataset, "packs": _packs,
}  # fmt: skip


USUAL = {"nowhere", "empty", "a file", "no JSON", "old megatron", "owner/model"}
GROUPS = {"models": KINDS.keys() - USUAL}
"""Left out where the launcher takes no model: each try takes its time."""
COMMANDS = Path(__file__).with_name("wrong_folders.txt").read_text().splitlines()
"""A tool and what it is told (X is the folder); behind # the kinds that are right there, or left out."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for kind, make in KINDS.items():
        make(root / kind)
    tiny = preset("tiny")
    Plan.from_cuts(tiny.chain, (), model="tiny", model_hash=tiny.hash).save(root / "plan.json")
    analytic_profile(tiny, "h100", {"tiles": 8, "tokens": 256}).save(root / "profile.json")
    return root


def check_here(*command: str, **_: Any) -> SimpleNamespace:
    job, *words = command[command.index("megatron.vlm.preflight") + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["preflight", *words])
        for name, value in {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        report = preflight(json.loads(job))
    return SimpleNamespace(returncode=0, stdout=json.dumps(report), stderr="")


def answer(tool: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which a tool refuses, of the launcher's checks the first; or what else it does."""
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", *words])
    monkeypatch.setattr(check, "run_python", check_here)
    try:
        import_module(tool if "." in tool else f"tools.{tool}").main()
    except UserError as error:
        return str(error)
    except OSError as error:  # `run_tool` makes a line of it
        return str(from_os_error(error)) if error.filename else f"wrong: {error!r}"
    except SystemExit as end:
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return lines[0] if end.code == 2 and lines else f"wrong: exit code {end.code}"
    except Exception as error:
        return f"wrong: {error!r}"
    return "wrong: it is taken"


@pytest.mark.parametrize("command", COMMANDS)
def test_any_wrong_folder_is_refused_in_a_line(
    command: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told, _, right = command.partition("  # ")
    tool, *words = told.split()
    left_out = GROUPS.get(right, right.split(", "))
    known = {
        "DATA": folders / "a dataset", "PACKS": folders / "packs", "PLAN": folders / "plan.json",
        "PROFILE": folders / "profile.json", "DEMO": folders / "demo", "CHAT": folders / "demo/train.jsonl",
        "TOKENIZER": folders / "demo/tokenizer.model",
    }  # fmt: skip
    answers = {}
    for number, kind in enumerate([*KINDS, "owner/model"]):
        if kind in left_out:
            continue
        given = {**known, "X": kind if kind == "owner/model" else folders / kind, "OUT": tmp_path / f"out {number}"}
        answers[kind] = answer(tool, [str(given.get(word, word)) for word in words], monkeypatch, capsys)
    assert not {kind: line for kind, line in answers.items() if line.startswith("wrong") or "\n" in line}
