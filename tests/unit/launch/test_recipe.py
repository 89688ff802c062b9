"""Flags of a run in a file: what the file says is what the command line would, which itself comes before the file."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.recipes import RECIPES, predicted
from megatron.vlm.flags.lists import ALLOWED
from omnibal_ext.errors import UserError
from omnibal_ext.launch.conversations import check_conversation_flags
from omnibal_ext.launch.recipe import BY_HAND, OF_THE_RUN, recipe_of, with_recipe
from tests.flag_page import megatron_actions
from tests.long import short
from tools import launch

NAMES = st.text("abcdefgh-", min_size=1, max_size=8).filter(lambda name: not name.startswith("-"))
VALUES = st.text("xyz019./-", min_size=1, max_size=6).filter(lambda value: not value.startswith("--"))


def grouped(words: list[str]) -> tuple[list[list[str]], list[str]]:
    """The flags of a command line with their values, in any order, and the words after --."""
    end = words.index("--") if "--" in words else len(words)
    flags: list[list[str]] = []
    for word in words[:end]:
        if word.startswith("--"):
            flags.append([word])
        else:
            flags[-1].append(word)
    return sorted(flags), words[end + 1 :]


def recipe(folder: Path, content: object) -> str:
    (folder / "recipe.json").write_text(json.dumps(content))
    return str(folder / "recipe.json")


@given(flags=st.dictionaries(NAMES, st.lists(VALUES, max_size=3)), megatron=st.lists(VALUES, max_size=2))
def test_what_a_run_notes_is_given_back_by_config(
    flags: dict[str, list[str]], megatron: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = [word for name, values in flags.items() for word in (f"--{name}", *values)]
    words += ["--", *megatron] if megatron else []
    path = recipe(tmp_path_factory.mktemp("recipe"), recipe_of(words))
    assert grouped(with_recipe(["--config", path])) == grouped(words)


def test_recipes_of_the_project_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = with_recipe(["--config", "internvl3.5-8b-32xh100"])
    assert found == with_recipe(["--config", str(RECIPES / "internvl3.5-8b-32xh100.json")])
    assert found == with_recipe(["--config", "internvl3.5-8b-32xh100.json"])
    (tmp_path / "internvl3.5-8b-32xh100.json").write_text(json.dumps({"flags": {"lr": 1}}))
    assert with_recipe(["--config", "internvl3.5-8b-32xh100.json"]) == ["--lr", "1"]
    with pytest.raises(UserError, match="internvl4: cannot be read"):
        with_recipe(["--config", "internvl4"])


def test_the_command_line_comes_before_the_file_and_says_where_the_run_is(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"flags": {"lr": 1e-5, "model": "a", "run-dir": "old"}, "megatron": ["--adam-eps", "1"]})
    words = with_recipe([f"--config={path}", "--lr=2e-5", "--run-dir", "new", "--dry-run", "--", "--seed", "3"])
    wanted = [["--dry-run"], ["--lr", "2e-5"], ["--model", "a"], ["--run-dir", "new"]]
    assert grouped(words) == (wanted, ["--adam-eps", "1", "--seed", "3"])
    assert recipe_of(["--model", "a", "--run-dir", "new", "--dry-run"]) == {"flags": {"model": "a"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(({"flags": {"freeze": value}}, r"flags\.freeze must be text, a number")
          for value in (False, None, {}, [], [["a"]], [True])),
        *((content, ".*give a JSON object") for content in ([], {}, {"flags": 3}, {"flags": {}, "megatron": [1]})),
    ],
)  # fmt: skip
def test_what_is_no_recipe_or_no_value_of_a_flag_is_named(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(UserError, match=rf"recipe\.json: {message}"):
        with_recipe(["--config", recipe(tmp_path, content)])


READ = {
    *("model", "preset", "from", "load", "data", "packs", "eval-data", "eval-packs", "profile", "plan", "input"),
    *("image-root", "chat-template", "rdzv-id", "analytic", "shorten", "method", "recompute", "freeze"),
    *("lora-targets", "loss-reduction", "lr-decay-style"),
    *("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"),
}
"""Flags of text that say what is read, or choose among words: a file may give them."""


def test_every_flag_that_takes_text_is_known_to_be_harmless_or_is_given_by_hand() -> None:
    """A new one would be let through by files until somebody has said what it does."""
    theirs = [action for action in megatron_actions() if action.dest in ALLOWED]
    takes_text = [
        action
        for action in (*launch._parser()._actions, *theirs)
        if action.nargs != 0 and action.type in (None, str) and not (action.choices and action in theirs)
    ]
    names = {option.removeprefix("--") for action in takes_text for option in action.option_strings}
    assert sorted(names - READ - BY_HAND - {*OF_THE_RUN}) == []
    known = {option[2:] for action in (*launch._parser()._actions, *theirs) for option in action.option_strings}
    assert sorted(BY_HAND - known) == []


@pytest.mark.parametrize("name", sorted(BY_HAND))
@pytest.mark.parametrize("half", ["flags", "megatron"])
def test_no_file_says_what_is_trusted_fetched_or_written(name: str, half: str, tmp_path: Path) -> None:
    content = {"flags": {"lr": 1, name: "hers"}} if half == "flags" else {
        "flags": {"lr": 1}, "megatron": ["--adam-eps", "1", f"--{name}=hers"]
    }  # fmt: skip
    path = recipe(tmp_path, content)
    with pytest.raises(UserError, match=rf"recipe\.json: has --{name}, which no file may give"):
        with_recipe(["--config", path])
    for words in (["--config", path, f"--{name}", "mine"], ["--config", path, "--", f"--{name}", "mine"]):
        found = with_recipe(words)
        assert "hers" not in " ".join(found)
        assert found[found.index(f"--{name}") + 1] == "mine"
    noted = recipe_of(["--lr", "1", f"--{name}", "mine", "--", f"--{name}", "mine", "--seed", "2"])
    assert noted == {"flags": {"lr": "1"}, "megatron": ["--seed", "2"]}


@pytest.mark.parametrize(
    "flags",
    [{"model": ["tiny", "--trust"]}, {"model": "--trust"}, {"trust=": True}, {"": "--trust"}, {"": True},
     {"model": "--"}, {"lr --trust": 1}, {"-trust": True}],
)  # fmt: skip
def test_no_name_and_no_value_passes_for_further_flags(flags: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.json: flags\."):
        with_recipe(["--config", recipe(tmp_path, {"flags": flags})])


FILES = sorted(RECIPES.glob("*.json"))


@pytest.mark.parametrize("path", short(FILES, FILES[:1]), ids=lambda path: path.stem)
@pytest.mark.slow
def test_the_planner_says_today_what_a_recipe_predicts(path: Path) -> None:
    """Without data or a GPU: `--config FILE --dry-run`, from its budgets alone."""
    content = json.loads(path.read_text())
    found = predicted(content["flags"], path.stem.rpartition("x")[2])
    assert found == pytest.approx(content["predicted"], rel=0.02)


def test_a_plan_without_data_needs_both_budgets() -> None:
    words = ["--model", "tiny", "--run-dir", "run", "--dry-run", "--analytic", "h100", "--llm-budget", "64"]
    with pytest.raises(UserError, match="give --vit-budget and --llm-budget"):
        check_conversation_flags(launch._parser().parse_args(words))
