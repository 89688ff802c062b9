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
    """As it left them before."""
    (path / "iter_0000010/mp_rank_00").mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("10")
    (path / "iter_0000010/mp_rank_00/model_optim_rng.pt").write_bytes(b"PK")


def _dataset(path: Path) -> None:
    demo_dataset(path.parent / "demo", path, 12, seed=0, max_tiles=4)


def _packs(path: Path) -> None:
    demo_packs(ChatDataset(path.parent / "a dataset"), path, PackOptions(vit_budget=8, llm_budget=256))


KINDS: Mapping[str, Callable[[Path], object]] = {
    "nowhere": lambda _: None,
    "empty": Path.mkdir,
    "a file": lambda path: path.write_text("no folder\n"),
    "weights alone": lambda path: (path.mkdir(), _weights(path)),
    "no JSON": _model('{"model_type": '),
    "a list": _model("[]"),
    "no model type": _model("{}"),
    "a number for a type": _model('{"model_type": 7}'),
    "unsupported type": _model('{"model_type": "kimi_vl"}'),
    "a language model": _model('{"model_type": "qwen3", "hidden_size": 8}'),
    "no weights": _with("config.json", '{"model_type": "internvl"}'),
    "adapters": _adapters,
    "megatron": _megatron,
    "old megatron": _old_megatron,
    "a dataset": _dataset,
    "packs": _packs,
}


PACKED = "--data DATA --packs PACKS --plan PLAN --run-dir OUT --check"
RANDOM = "--model tiny --from-scratch"
LAUNCHED = "-- --lr 1e-3 --train-iters 1"
HALVES = "--pipeline-model-parallel-size 2 --num-microbatches 2"
BARE = ("no weights",)
"""A model too, where nobody asks for weights."""
USUAL = {"nowhere", "empty", "a file", "no JSON", "old megatron", "owner/model"}
NO_MODELS = tuple(KINDS.keys() - USUAL)
"""Left out where the launcher takes no model: each try takes its time."""
CHAT = "--input CHAT --image-root DEMO"
COMMANDS: list[tuple[str, str, tuple[str, ...]]] = [
    ("convert_checkpoint", "--from-hf X --output-dir OUT", ()),
    ("convert_checkpoint", "--from-hf X --output-dir OUT --check", ()),
    ("convert_checkpoint", "--from-hf X --output-dir OUT --check --data DATA --json", ()),
    ("convert_checkpoint", "--from-hf X --adapters X --output-dir OUT --check", ()),
    ("convert_checkpoint", "--to-hf X --output-dir OUT", ()),
    ("convert_checkpoint", "--to-hf X --output-dir OUT --check", ()),
    ("convert_checkpoint", "--to-hf X --output-dir OUT --like X", ()),
    ("convert_checkpoint", "--to-peft X --output-dir OUT", ()),
    ("convert_checkpoint", "--to-peft X --output-dir OUT --like X", ()),
    ("examples.demo.evaluate", "--model X --load X --data DATA --tokenizer-model TOKENIZER", ()),
    ("examples.demo.evaluate", "--model tiny --load X --data DATA --tokenizer-model TOKENIZER", ()),
    ("examples.demo.evaluate", "--model tiny --load X --data X --tokenizer-model X", ()),
    ("level_packs", "X --data-parallel-size 2", ()),
    ("report", "--run X --output OUT", ()),
    ("report", "--run X --trace OUT --json", ()),
    ("report", "--plan X --output OUT", ()),
    ("report", "--plan PLAN --profile X --output OUT", ()),
    ("report", "--plan PLAN --profile PROFILE --packs X --output OUT", ("packs",)),
    ("profile_layers", "--model X --vit-budget 4 --llm-budget 64 --analytic h100 --output OUT", BARE),
    ("profile_layers", "--model X --vit-budget 4 --llm-budget 64 --output OUT", BARE),
    ("plan_layout", f"--analytic h100 --model X --budgets 4x64 --tensor-sizes 1 {HALVES} --output OUT", BARE),
    ("plan_layout", f"--profile PROFILE --packs X {HALVES} --output OUT", ("packs",)),
    ("plan_layout", f"--profile X {HALVES} --output OUT", ()),
    (
        "plan_layout",
        "--sweep --gpus 2 --global-batch-samples 8 --sizes X --analytic h100 --model tiny --output OUT",
        (),
    ),
    ("pack_data", "--data X --output-dir OUT", ("a dataset",)),
    ("pack_data", "--sizes X --output-dir OUT", ()),
    ("pack_data", "--data DATA --held-out-of X --output-dir OUT", ()),
    ("pack_data", "--data DATA --like X --output-dir OUT", ("packs",)),
    ("pack_data", "--data DATA --costs X --output-dir OUT", ()),
    ("pack_data", "--data DATA --analytic h100 --model X --output-dir OUT", BARE),
    ("preprocess_data", f"{CHAT} --model X --output-dir OUT", ()),
    ("preprocess_data", f"{CHAT} --tokenizer-model X --chat-template internlm2-chat --output-dir OUT", ()),
    ("preprocess_data", "--input X --tokenizer-model TOKENIZER --chat-template internlm2-chat --output-dir OUT", ()),
    ("launch", f"--model X {PACKED} {LAUNCHED}", ()),
    ("launch", f"--model X {CHAT} --run-dir OUT --check {LAUNCHED}", ()),
    ("launch", f"--model tiny --from X {PACKED} {LAUNCHED}", ()),
    ("launch", f"--model tiny {PACKED} {LAUNCHED} --load X", NO_MODELS),
    ("launch", f"{RANDOM} --data X --packs PACKS --plan PLAN --run-dir OUT --check {LAUNCHED}", NO_MODELS),
    ("launch", f"{RANDOM} --data DATA --packs X --plan PLAN --run-dir OUT --check {LAUNCHED}", NO_MODELS),
    ("launch", f"{RANDOM} --data DATA --packs PACKS --plan X --run-dir OUT --check {LAUNCHED}", NO_MODELS),
    ("launch", f"{RANDOM} --data DATA --packs PACKS --profile X --run-dir OUT --check {LAUNCHED}", NO_MODELS),
    ("launch", f"{RANDOM} --eval-data X --eval-packs PACKS {PACKED} {LAUNCHED}", NO_MODELS),
    ("launch", f"{RANDOM} --eval-data DATA --eval-packs X {PACKED} {LAUNCHED}", NO_MODELS),
]
"""A tool, what it is told (X is the folder), and the kinds that are right there, or left out."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for kind, make in KINDS.items():
        make(root / kind)
    tiny = preset("tiny")
    Plan.from_cuts(tiny.chain, (), model="tiny", model_hash=tiny.hash).save(root / "plan.json")
    analytic_profile(tiny, "h100", 8, 256).save(root / "profile.json")
    return root


def check_here(*command: str, **_: Any) -> SimpleNamespace:
    """In place of the process in which the launcher checks a run: the same here."""
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


@pytest.mark.parametrize(("tool", "words", "right"), COMMANDS)
def test_any_wrong_folder_is_refused_in_a_line(
    tool: str,
    words: str,
    right: tuple[str, ...],
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    known = {
        "DATA": folders / "a dataset", "PACKS": folders / "packs", "PLAN": folders / "plan.json",
        "PROFILE": folders / "profile.json", "DEMO": folders / "demo", "CHAT": folders / "demo/train.jsonl",
        "TOKENIZER": folders / "demo/tokenizer.model",
    }  # fmt: skip
    answers = {}
    for number, kind in enumerate([*KINDS, "owner/model"]):
        if kind in right:
            continue
        given = {**known, "X": kind if kind == "owner/model" else folders / kind, "OUT": tmp_path / f"out {number}"}
        told = [str(given.get(word, word)) for word in words.split()]
        answers[kind] = answer(tool, told, monkeypatch, capsys)
    assert not {kind: line for kind, line in answers.items() if line.startswith("wrong") or "\n" in line}
