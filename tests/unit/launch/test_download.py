"""A model of the hub is fetched once, after its size is said, and no more of it than is needed."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.launch.weights import downloaded

hub = pytest.importorskip("huggingface_hub")

FILES = {"config.json": b'{"model_type": "internvl"}', "model.safetensors": b"x" * 5000, "pytorch_model.bin": b"y"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = "import sys; from omnibal_ext.launch.weights import downloaded; print(downloaded(sys.argv[1], quiet=False))"


def test_a_model_is_fetched_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The hub's own function, with its arguments, answers from here."""
    there: dict[str, int] = {"config.json": 2, "model.safetensors": 7_000_000_000, "pytorch_model.bin": 9}
    fetched: list[str] = []

    def answer(name: str, allow_patterns: list[str], dry_run: bool = False) -> Any:
        if name != "owner/small":
            raise OSError("404\nnot found")
        wanted = [*hub.utils.filter_repo_objects(there, allow_patterns=allow_patterns)]
        if not dry_run:
            assert capsys.readouterr().out.count("owner/small: 7.00 GB are downloaded") == (not fetched)
            fetched.extend(set(wanted) - {*fetched})
            return "/cache/small"
        return [SimpleNamespace(file_size=there[one], will_download=one not in fetched) for one in wanted]

    monkeypatch.setattr(hub, "snapshot_download", create_autospec(hub.snapshot_download, side_effect=answer))
    for _ in range(2):
        assert downloaded("owner/small", quiet=False) == "/cache/small"
    assert sorted(fetched) == ["config.json", "model.safetensors"]
    with pytest.raises(UserError, match=r"owner/other: not to be had from the hub \(404 not found\)"):
        downloaded("owner/other", quiet=False)


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "None", "."])
def test_what_is_no_name_of_the_hub_is_not_fetched(name: str) -> None:
    with pytest.raises(UserError, match=r"--download fetches OWNER/MODEL"):
        downloaded(name, quiet=True)
