"""Every benchmark has a short form, whose figures say nothing, and with --long runs to its last line, the ratio.

Commands in blocks of the documents are run by test_document_commands.py, examples by test_examples.py.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.programs import ROOT, fresh_python, tool
from tests.system.test_training import make_dataset

SMALL = ("--samples", 400, "--data-parallel-size", 2)
ONE_MODEL = ("--model", "internvl2.5-8b")
SHORT: dict[str, tuple[tuple[object, ...], str]] = {
    "beside.py": (
        ("--models", "qwen2.5-vl-7b", "--schedules", "1f1b:1", "--iterations", 1, "--seconds", 0.1),
        r"speed beside the pipeline over the cut, median: \S+x",
    ),
    "beside_measured.py": (
        ("--launches", 1, "--rounds", 1),
        r"speed beside the pipeline over the cut: trained \S+x \(predicted \S+x\), frozen \S+x \(predicted \S+x\)",
    ),
    "door_packs.py": (
        ("--samples", 400, "--corpora", "single tiles"),
        r"tokens run over those by our doors, median: LLaMA-Factory \S+x, axolotl \S+x",
    ),
    "end_to_end.py": (("--rounds", 1, "--samples", 16), r"data parallel: \S+ of the ideal, .* ours / unbalanced \S+x"),
    "level.py": (
        ("--samples", 400, "--corpus", "two points"),
        r"ratio of waiting at twice as many ranks, levelled again to not: \S+",
    ),
    "long_context.py": (("--share", 0.02, "--studies", 1), r"text, 8B, HBP's layout: ours over naive \S+x, HBP .*"),
    "loader.py": (
        ("--images", 6, "--repeats", 1, "--cached"),
        r"processor seconds of 3 epochs with cached tiles against without: \S+x",
    ),
    "loss_curve.py": (("--quickstart", "QUICKSTART", "--epochs", 16), r"ratio of the loss curve's spread, .*: \S+"),
    "model_families.py": (("--seconds", 0.05, "--models", 1), r"joint against the whole ViT in the first stage: .*"),
    "narrow_states.py": (("--steps", 2), r"loss with narrower states over fp32's: \S+"),
    "packing.py": (("--sizes", "SIZES", "--most-samples", 1000), r"ratio to ISF: packs \S+, waiting \S+, speed .*"),
    "packing_grid.py": ((*SMALL, *ONE_MODEL), r"ratio of waiting to a random order's: \S+"),
    "packing_limits.py": (("--corpus", "two points", *SMALL), r".*two points.*"),
    "paper_tables.py": (
        ("--seconds", 0.01, "--batches", 1, "--settings", 1, "--models", 1),
        r"over the paper's method: \S+ at 128 packs",
    ),
    "partition.py": (("--launches", 1, "--rounds", 1, "--models", 1), r"joint against the best other method: \S+x .*"),
    "peer_balancing.py": (
        ("--samples", 600, "--ranks", 4, "--corpora", "single tiles"),
        r"samples a second over packs as they come, median: LoongForge's levelling \S+%, ours \S+%",
    ),
    "peer_waiting.py": (
        ("--samples", 400, "--ranks", 2, "--corpora", "single tiles", "--picture", "PICTURE"),
        r"waiting at 2 ranks, the best of the others over ours, median: \S+x",
    ),
    "peers.py": (
        ("--tokens", 800, "--ranks", 2),
        r"ours / the best of the others \(.*\), useful tokens a second: \S+x",
    ),
    "preprocess.py": (("--copies", 1, "--repeats", 1), r"two workers against one: \S+x \(\S+ of linear\)"),
    "rebalance.py": (("--draws", 2, "--shapes", 2), r"seconds of steps, ours over as read: 0\.\d+"),
    "schedule.py": (("--rounds", 1), r"ours / megatron-core: \S+, losses equal"),
    "simulator.py": (("--rounds", 1), r"median error of the step: \S+; rank order \w+"),
    "spread_bound.py": (("--corpus", "two points", *SMALL), r".*two points.*"),
    "timeline.py": (("--output", "PICTURE"), r"after / before samples per second: \S+x"),
    "wide_packing.py": (
        ("--corpus", "films", "--samples", 3000, "--micro-batches", 4),
        r"ratio of waiting to HBP's as printed: 0\.0\d+",
    ),
    "wide_steps.py": (("--rounds", 1), r"predicted over measured: median \S+, .*; \d+ of 15 pairs ranked right"),
}  # fmt: skip
"""Of each its arguments, and its last line."""
NARROW = ("beside_measured.py", "end_to_end.py", "partition.py", "peers.py", "simulator.py", "wide_steps.py")
"""What trains models, here narrower ones."""
ELSEWHERE = {
    "host.py": "below", "gpu.py": "tests/unit/test_gpu_benchmark.py", "gpu_parts.py": "by gpu.py",
    "gpu_cards.py": "of what gpu.py has written", "peer_orders.py": "by peers.py", "ranks.py": "by two_ranks.py",
    "recipes.py": "tests/unit/launch/test_recipe.py",
}  # fmt: skip
"""What needs a GPU, is started by others, or has a test of its own."""


def started() -> set[str]:
    return {path.name for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()}


def test_every_benchmark_has_a_short_form() -> None:
    assert started() == set(SHORT) | set(ELSEWHERE)
    documents = "".join(path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    assert set(re.findall(r"`python benchmarks/(\w+\.py)", documents)) <= started()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("benchmarks")
    tiles = np.random.default_rng(0).integers(1, 6, 300)
    sizes = [{"vit_num": int(number), "token_num": int(256 * number + 90)} for number in tiles]
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return {"SIZES": folder / "sizes.json", "PICTURE": folder / "timeline.png", "QUICKSTART": folder / "quickstart"}


def make_quickstart(folder: Path) -> None:
    """What scripts/quickstart.sh leaves for others."""
    folder.mkdir()
    make_dataset(folder, samples=70)
    (folder / "data").rename(folder / "train")
    budgets = ("--vit-budget", 40, "--llm-budget", 320)
    replicas = folder / "replicas"
    tool("pack_data.py", "--data", folder / "train", *budgets, "--data-parallel-size", 2,
         "--output-dir", replicas / "packs-balanced")  # fmt: skip
    model = ("--model", "tiny", "--analytic", "a100")
    tool("profile_layers.py", *model, *budgets, "--output", folder / "profile.json")
    tool("plan_layout.py", "--profile", folder / "profile.json", "--pipeline-model-parallel-size", 1,
         "--num-microbatches", 1, "--output", replicas / "balanced/plan.json")  # fmt: skip


@pytest.mark.long
@pytest.mark.starts
@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_runs_to_its_ratio(name: str, places: dict[str, Path]) -> None:
    arguments, last = SHORT[name]
    if "QUICKSTART" in arguments:
        make_quickstart(places["QUICKSTART"])
    words = [places.get(str(word), word) for word in arguments]
    if name in NARROW:
        done = tool("narrow.py", name, *words, room="tests/system")
    else:
        done = tool(name, *words, room="benchmarks")
    assert re.fullmatch(last, done.stdout.strip().splitlines()[-1].strip()), done.stdout[-2000:]


@pytest.mark.long
@pytest.mark.starts
def test_every_set_of_widths_is_summed_in_seconds() -> None:
    words = ("--sets", "--corpus", "films", "--samples", 1500, "--micro-batches", 4)
    done = tool("wide_packing.py", *words, room="benchmarks")
    rows = re.findall(r"^ +([\d,]+) +\d\.\d{4}x *$", done.stdout, re.MULTILINE)
    assert rows == ["8", "1,8", "2,8", "4,8", "1,2,8", "1,4,8", "2,4,8", "1,2,4,8"]
    assert re.search(r"over those that samples need: [01]\.\d{4}x at most", done.stdout)


@pytest.mark.long
@pytest.mark.starts
def test_host_time_stands_beside_the_device_s() -> None:
    """In a Python of its own: the machine that it builds comes before anything of Megatron."""
    done = fresh_python("-W", "ignore", "benchmarks/host.py", "internvl3.5-8b", "--rounds", 5, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    for row in json.loads(done.stdout)["layers"]:
        assert row["share"] == pytest.approx(sum(row["host"]) / sum(row["device"]))
        assert 0 < min(row["host"]) < 0.1
