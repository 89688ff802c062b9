"""Weights of Hugging Face's are fetched once, converted, and compared with transformers where that can be done."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.launch.weights import convert, converted_folder, downloaded, pinned
from tools import launch

TOOL = """import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
folder.mkdir(exist_ok=True)
(folder / "words.json").write_text(json.dumps(sys.argv[1:]))
print(json.dumps({"weights": 3, "parameters": 12, "logit_difference": 2e-7 if "--check" in sys.argv else None}))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "internvl"}))
    header = json.dumps({"a": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def words(source: Path, data: Path | None, quiet: bool = False) -> list[str]:
    tool, target = source.parent / "tool.py", source.parent / f"converted-{len(list(source.parent.iterdir()))}"
    tool.write_text(TOOL)
    convert(tool, source, target, data, quiet)
    told: list[str] = json.loads((target / "words.json").read_text())
    return told


def test_logits_are_compared_on_the_data_unless_turned_off(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words(source, Path("data"))[-4:] == ["--check", "--data", "data", "--json"]
    assert "--check" not in words(source, None)
    compared, not_compared = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"converted to .*/converted-\d: 3 weights, 12 parameters; logits differ from transformers' by 2.0e-07", compared
    )
    assert not_compared.endswith("/converted-3: 3 weights, 12 parameters")


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        ("own code", "its code is in its repository"), ("no transformers", "transformers is not installed"),
        ("a tebibyte", "it takes up to 4096 GiB of memory, "),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_converted_and_said(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoilt: str, reason: str
) -> None:
    if spoilt == "own code":
        (source / "config.json").write_text(json.dumps({"model_type": "internvl_chat"}))
    if spoilt == "no transformers":
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    if spoilt == "a tebibyte":  # two files of 512 GiB, of each of which there are many weights; they take no room
        (source / "model.safetensors").unlink()
        names = [f"model-{number}.safetensors" for number in (0, 1)]
        for name in names:
            with (source / name).open("wb") as file:
                file.truncate(2**39)
        index = {"weight_map": {f"weight_{number}": names[number % 2] for number in range(9)}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "--check" not in words(source, Path("data"))
    assert f"converted without comparing logits with transformers': {reason}" in capsys.readouterr().out
    words(source, Path("data"), quiet=True)
    assert capsys.readouterr().out == ""


def test_nothing_is_put_into_the_cache_of_the_hub(source: Path, tmp_path: Path) -> None:
    """Its programs keep links to blobs there, and know nothing of a conversion."""
    hub, run = tmp_path / "hub", tmp_path / "run"
    cached, blob = hub / "models--Qwen--Qwen3-VL-4B/snapshots/0123abc", hub / "blob"
    assert converted_folder(source, run).parent == source.parent
    cached.mkdir(parents=True)
    (source / "config.json").rename(blob)
    (cached / "config.json").symlink_to(blob)
    for named in (cached, tmp_path / "link"):
        if named != cached:
            named.symlink_to(cached)
        found = converted_folder(named, run)
        assert found.parent == run
        assert found.name.startswith("Qwen3-VL-4B-converted-")


hub = pytest.importorskip("huggingface_hub")


def test_a_model_is_fetched_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The hub's own function, with its arguments, answers from here."""
    there: dict[str, int] = {"config.json": 2, "model.safetensors": 7_000_000_000, "pytorch_model.bin": 9}
    fetched: list[str] = []
    asked: list[str | None] = []

    def answer(name: str, *, revision: str | None, allow_patterns: list[str], dry_run: bool = False) -> Any:
        asked.append(revision)
        if name != "owner/small":
            raise OSError("404\nnot found")
        wanted = [*hub.utils.filter_repo_objects(there, allow_patterns=allow_patterns)]
        if not dry_run:
            assert capsys.readouterr().out.count("owner/small: 7.00 GB are downloaded") == (not fetched)
            fetched.extend(set(wanted) - {*fetched})
            return "/cache/small/snapshots/0123abc"
        return [SimpleNamespace(file_size=there[one], will_download=one not in fetched) for one in wanted]

    monkeypatch.setattr(hub, "snapshot_download", create_autospec(hub.snapshot_download, side_effect=answer))
    page = "https://huggingface.co/owner/small"
    revisions = {
        "owner/small": None, page: None, f"{page}/": None, f"{page}/discussions": None,
        "owner/small@v1.2": "v1.2", "owner/small@refs/pr/1": "refs/pr/1", f"{page}/tree/v1.2": "v1.2",
        f"{page}/tree/refs%2Fpr%2F1": "refs/pr/1", f"{page}/blob/0123abc/config.json?download=true": "0123abc",
    }  # fmt: skip
    for name, revision in revisions.items():
        asked.clear()
        folder = downloaded(name, quiet=False)
        assert folder == "/cache/small/snapshots/0123abc"
        assert asked == [revision, revision]
        assert pinned(name, folder) == "owner/small@0123abc"
    assert sorted(fetched) == ["config.json", "model.safetensors"]
    with pytest.raises(UserError, match=r"owner/other: not to be had from the hub \(404 not found\)"):
        downloaded("owner/other", quiet=False)


def test_a_run_notes_the_commit_that_was_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots/0123abc"
    monkeypatch.setattr(launch, "downloaded", lambda name, quiet: str(folder))
    words = ["--model", "owner/small@main", "--download", "--data", "d", "--packs", "p", "--run-dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["launch.py", *words])
    arguments = launch._parsed()
    assert arguments.model == str(folder)
    assert arguments.recipe["flags"] == {"model": "owner/small@0123abc", "data": "d", "packs": "p"}


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "None", "."])
def test_what_is_no_name_of_the_hub_is_not_fetched(name: str) -> None:
    with pytest.raises(UserError, match=r"--download fetches OWNER/MODEL"):
        downloaded(name, quiet=True)
