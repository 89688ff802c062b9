"""tools/launch.py as a command: it plans for the run it starts, tries layouts out, and refuses what cannot run."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from omnibal_ext.chain import PARTS
from omnibal_ext.costs.profile import Profile
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import training_intervals
from omnibal_ext.trained import Trained
from tests.programs import run_ranks, tool
from tests.system.test_training import complete, make_dataset, pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 48 conversations, packed for iterations of four packs."""
    folder = tmp_path_factory.mktemp("launch")
    make_dataset(folder, samples=48)
    pack(folder, 4, "packs", 8, 128)
    return folder


def launch(folder: Path, run: str, *flags: object) -> subprocess.CompletedProcess[str]:
    files = ("--data", folder / "data", "--packs", folder / "packs", "--run-dir", folder / run)
    shape = ("--nproc-per-node", 2, "--pipeline-model-parallel-size", 2)
    ours, megatron = complete(flags)
    return tool("launch.py", "--preset", "tiny", "--from-scratch", *files, *shape, *ours, "--", *megatron)


def test_the_fastest_of_the_measured_layouts_runs_and_all_figures_are_recorded(folder: Path) -> None:
    done = launch(folder, "top", "--measure-top-k", 2, "--", "--train-iters", 6, "--lr", "1e-3",
                  "--log-interval", 1, "--save", folder / "top/checkpoints", "--save-interval", 6)  # fmt: skip
    plan = Plan.load(folder / "top/plan.json")
    assert len(plan.trials) == 2
    (kept,) = [trial for trial in plan.trials if trial["kept"]]
    assert kept["measured_step_seconds"] == min(trial["measured_step_seconds"] for trial in plan.trials)
    assert [stage.to_record() for stage in plan.stages] == kept["stages"]
    assert all(trial["predicted_step_seconds"] > 0 for trial in plan.trials)
    assert "layouts measured" in done.stdout
    assert len(training_intervals(folder / "top/metrics.jsonl")) == 6  # the run itself, from its first step
    assert "compared with the profile" in done.stdout  # how far the parts of a step are from the plan
    assert not list((folder / "top/trials").rglob("checkpoints"))
    check_report(folder / "top", plan)


def check_report(run: Path, plan: Plan) -> None:
    """A run leaves a report of itself: the recorded iterations are the plan's schedule on every rank."""
    lines = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [4, 6]
    wanted = [[(a.kind, a.microbatch, a.chunk) for a in actions] for actions in plan.build_schedule()]
    for line in lines:
        assert [[tuple(action[:3]) for action in lane["actions"]] for lane in line["lanes"]] == wanted
        (first, second) = line["lanes"]
        sent = {action[1]: action[4] for action in first["actions"] if action[0] == "F"}
        taken = {action[1]: action[3] for action in second["actions"] if action[0] == "F"}
        assert all(taken[m] >= sent[m] for m in sent), "one clock for both ranks"
    page = (run / "report.html").read_text()
    assert page.count("class='span'") == 2 * sum(map(len, wanted))  # predicted and measured
    assert "measured, iteration" in page


def test_a_late_loader_is_what_a_report_says_first(folder: Path, tmp_path: Path) -> None:
    """The run's own command on two ranks, its first pack 200 ms late in every iteration."""
    files = ("--analytic", "a100", "--dry-run", "--json", "--", "--train-iters", 6, "--lr", "1e-3")
    shown = json.loads(launch(folder, "late", *files).stdout)
    words = shown["command"]
    assert words[:3] == ["--standalone", "--nproc-per-node=2", "-m"]
    assert not shown["started"]
    run_ranks("tests.system.late", 2, words[words.index("megatron.vlm.pretrain") + 1 :])
    record = json.loads((folder / "late/timeline.jsonl").read_text().splitlines()[-1])
    first, second = ([end - start for start, end in lane["reads"]] for lane in record["lanes"])
    assert [len(first), len(second)] == [4, 4]
    # On a busy machine anything may be later still, by what the record says.
    assert first[0] == max(first + second) >= 0.2
    done = tool("report.py", "--run", folder / "late", "--output", tmp_path / "report.html", "--json")
    whole, shares = (json.loads(done.stdout)[key] for key in ("step_seconds", "shares"))
    (measured,) = (name for name in whole if "measured" in name)
    late = shares[measured]["late data or host"] * whole[measured]
    assert 0.19 < late < sum(first) + sum(second) + 0.1
    lost = {cause: share for cause, share in shares[measured].items() if cause != "needed"}
    if max(lost, key=lost.__getitem__) != "late data or host":  # a busy machine
        return
    said = re.search(r'class="verdict">Of ([\d,]+) ms per iteration, ([\d,]+) ms are waits for data or host: ',
                     (tmp_path / "report.html").read_text())  # fmt: skip
    assert said
    assert float(said[2].replace(",", "")) == pytest.approx(1e3 * late, abs=1)


def test_it_profiles_for_the_precision_and_the_frozen_parts_of_the_run(folder: Path) -> None:
    launch(folder, "frozen", "--analytic", "a100", "--dry-run", "--", "--freeze", "vit", "--lr", "1e-3")
    assert Profile.load(folder / "frozen/profile.json").trained.frozen == ("vit",)
    assert Plan.load(folder / "frozen/plan.json").trained.frozen == ("vit",)
    words = ("--", "--lora-rank", 4, "--lora-targets", "llm", "vit", "--lr", "1e-3")
    launch(folder, "frozen", "--analytic", "a100", "--dry-run", *words)
    for found in (Profile.load(folder / "frozen/profile.json"), Plan.load(folder / "frozen/plan.json")):
        assert found.trained == Trained(tuple(PARTS), 4, ("vit", "llm"))


def test_packed_again_ranks_wait_for_the_seconds_of_the_profile(folder: Path) -> None:
    """The same samples at the same budgets in the run's own folder; the second time nothing is made again."""
    flags = ("--analytic", "a100", "--repack", "--dry-run")
    done = launch(folder, "again", *flags)
    given, made = (PackedIndex.open(path) for path in (folder / "packs", folder / "again/packs"))
    assert sorted(made.sample_ids) == sorted(given.sample_ids)
    assert made.manifest["costs"] == PackCosts.of_profile(Profile.load(folder / "again/profile.json")).to_record()
    assert made.manifest["costs"] != given.manifest["costs"]
    for name in ("vit_budget", "llm_budget", "method", "global_batch", "seed"):
        assert made.manifest[name] == given.manifest[name]
    assert str(folder / "again/packs") in done.stdout  # what the ranks will read
    files = ("packs/manifest.json", "plan.json")
    before = [(folder / "again" / name).stat().st_mtime_ns for name in files]
    launch(folder, "again", *flags)
    assert [(folder / "again" / name).stat().st_mtime_ns for name in files] == before


def test_what_was_measured_with_the_same_settings_is_not_measured_again(folder: Path) -> None:
    words = ("--model", "tiny", "--vit-budget", 4, "--llm-budget", 32, "--steps", 1, "--output", folder / "p.json")
    tool("profile_layers.py", *words)
    first = json.loads((folder / "p.json").read_text())
    assert first["measured_with"]["processes"] >= 1
    again = tool("profile_layers.py", *words, check=False)
    assert "measured before with the same settings" in again.stdout
    assert json.loads((folder / "p.json").read_text()) == first
    tool("profile_layers.py", *words, "--freeze", "vit")
    frozen = Profile.load(folder / "p.json")
    assert frozen.layers["vit"].backward_seconds == frozen.layers["vit"].kept_bytes == 0.0
    assert frozen.layers["vit"].weight_bytes == first["layers"]["vit"]["weight_bytes"] / 4  # fp32, without Adam's state
