"""What a run shows of having obeyed its flags: told from the flags alone, by other formulas than those that ran."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import evaluations, training_intervals

MAY_CHANGE = """
    lr min-lr lr-decay-style lr-decay-iters lr-warmup-iters lr-warmup-fraction lr-warmup-init lr-wsd-decay-iters
    lr-wsd-decay-style weight-decay start-weight-decay end-weight-decay clip-grad weight-decay-incr-style adam-beta1
    adam-beta2 adam-eps sgd-momentum optimizer loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
    fp16 bf16 grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32 seed init-method-std embedding-init-method-std
    hidden-dropout attention-dropout make-vocab-size-divisible-by freeze lora-rank lora-alpha
    lora-targets lr-vit lr-projector weight-decay-vit weight-decay-projector loss-reduction cross-entropy-loss-fusion
    cross-entropy-fusion-impl no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion use-distributed-optimizer
    use-cpu-initialization disable-bf16-reduced-precision-matmul disable-jit-fuser tensor-model-parallel-size
    pipeline-model-parallel-size virtual-pipeline-model-parallel-size nproc-per-node sequence-parallel train-iters
    epochs repack schedule method recompute global-batch-size plan
    """
"""Flags under which losses may be others; under all others they are the same, bit for bit."""
CHANGES = {
    "--seed": 1, "--init-method-std": 1, "--embedding-init-method-std": 1, "--hidden-dropout": 1, "--bf16": 1,
    "--attention-dropout": 1, "--fp16": 1, "--adam-beta1": 3, "--adam-beta2": 3, "--adam-eps": 2, "--weight-decay": 2,
}  # fmt: skip
"""Flags under which they are others, from which iteration on; where another value is given than Megatron's own."""
OFTEN = {"--weight-decay": "0.01", "--hidden-dropout": "0", "--init-method-std": "0.02"}
TEXT = {"--log-params-norm": "params norm:", "--log-num-zeros-in-grad": "num zeros:"}
"""What stands in every line of the log."""
STEP = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*? learning rate: (\S+) \| global batch size:\s+(\d+) \|(.*)")


@dataclass
class Seen:
    given: dict[str, str]
    ours: dict[str, str]
    said: str
    here: Path
    packs: Path

    def judge(self, code: int, plain: "Seen") -> None:
        """AssertionError for what was not obeyed."""
        if {"--dry-run", "--check"} & self.ours.keys():
            assert code == 0, "it fails"
            assert not self.lines, "it trained"
            return
        if code == 2 and "steps in a row were not finite" in self.said:  # as --max-bad-steps says
            return
        assert code == 0, f"exit code {code}"
        for question in (self.iterations, self.rates, self.saves, self.evaluated, self.written, self.planned):
            question()
        self.losses(plain)

    def number(self, flag: str, otherwise: float) -> float:
        return float(self.given.get(flag) or otherwise)

    @cached_property
    def run_dir(self) -> Path:
        return Path(self.ours.get("--run-dir", "HERE").replace("HERE", str(self.here), 1))

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        return training_intervals(self.metrics)

    @property
    def metrics(self) -> Path:
        default = str((self.run_dir if self.ours else self.here) / "metrics.jsonl")
        return Path(self.given.get("--metrics-file", default).replace("HERE", str(self.here), 1))

    @cached_property
    def whole(self) -> int:
        if epochs := self.ours.get("--epochs"):
            index = PackedIndex.open(self.packs)
            return math.ceil(float(epochs) * index.num_packs / index.global_batch)
        return int(self.number("--train-iters", 0))

    @cached_property
    def end(self) -> int:
        if "--skip-train" in self.given:
            return 0
        every = int(self.number("--exit-interval", 0))
        return every if every and every < self.whole else self.whole

    def iterations(self) -> None:
        """It trained for so many, and told of those it should."""
        every = int(self.number("--log-interval", 1))
        wanted = [i for i in range(1, self.end + 1) if i % every == 0 or i == self.whole]
        assert [line["iteration"] for line in self.lines] == wanted, f"iterations {wanted} should be told of"

    def rates(self) -> None:
        """Learning rates along the schedule; a step that was left out moves none."""
        log = self.run_dir / "train.log"
        said = log.read_text(errors="replace") if "--progress" in self.ours else self.said
        steps = {int(i): (float(rate), rest) for i, rate, _, rest in STEP.findall(said)}
        every = int(self.number("--log-interval", 1))
        wanted = [i for i in range(1, self.end + 1) if i % every == 0 or i == 1]
        assert sorted(steps) == wanted, f"the log has lines of iterations {sorted(steps)}, not {wanted}"
        left_out = "--fp16" in self.given or "the step is left out" in said
        for iteration, (rate, rest) in steps.items():
            due = self.rate(iteration)
            assert left_out or math.isclose(rate, due, rel_tol=1e-5, abs_tol=1e-12), (
                f"iteration {iteration}: the learning rate is {rate}, not {due}"
            )
            if scale := self.number("--loss-scale", 0) if {"--fp16", "--bf16"} & self.given.keys() else 0:
                assert f"loss scale: {scale:.1f} |" in rest, "another loss scale"
            for flag, text in TEXT.items():
                assert (text in rest) == (flag in self.given), flag

    def rate(self, step: int) -> float:
        """The learning rate after so many steps (Megatron-LM, megatron/core/optimizer_param_scheduler.py)."""
        top, least = self.number("--lr", 0), self.number("--min-lr", 0)
        decay = self.number("--lr-decay-iters", self.whole)
        warm = self.number("--lr-warmup-iters", 0) or decay * self.number("--lr-warmup-fraction", 0)
        style = self.given.get("--lr-decay-style", "linear")
        if warm and step <= warm:
            first = self.number("--lr-warmup-init", 0)
            return first + (top - first) * step / warm
        if style == "constant":
            return top
        if step > decay:
            return least
        if style == "inverse-square-root":
            return max(least, top * math.sqrt(max(2 * warm, 1)) / math.sqrt(max(2 * step, 1)))
        along = (step - warm) / (decay - warm) if decay > warm else 1.0
        return least + (top - least) * self.share(style, along, step, decay)

    def share(self, style: str, along: float, step: int, decay: float) -> float:
        if style == "linear":
            return 1 - along
        if style == "cosine":
            return (1 + math.cos(math.pi * along)) / 2
        last = self.number("--lr-wsd-decay-iters", 0)
        along = max(0.0, (step - (decay - last)) / last)
        shapes = {"linear": 1 - along, "cosine": (1 + math.cos(math.pi * along)) / 2, "exponential": 2 * 0.5**along - 1,
                  "minus_sqrt": 1 - math.sqrt(along)}  # fmt: skip
        return shapes[self.given.get("--lr-wsd-decay-style", "exponential")]

    def saves(self) -> None:
        """A save at every interval and at the end; older ones as they are retained."""
        if not (folder := self.given.get("--save")) or "--skip-train" in self.given:
            return
        every, kept = int(self.number("--save-interval", 0)), int(self.number("--save-retain-interval", 0))
        wanted = [i for i in range(1, self.end + 1) if i % every == 0 or i == self.end]
        wanted = [i for i in wanted if not kept or i in wanted[-2:] or i % kept == 0]
        folders = Path(folder.replace("HERE", str(self.here), 1)).glob("iter_*/integrity.json")
        assert sorted(int(path.parent.name[5:]) for path in folders) == wanted, f"saves {wanted} should be there"

    def evaluated(self) -> None:
        """At every interval from the first on, ten in a run unless given, and at the end."""
        flags = {**self.ours, **self.given}
        every, first = int(self.number("--eval-interval", 0)), int(self.number("--start-eval-at-iter", 0))
        every = every or max(1, self.whole // 10)
        wanted = {i for i in range(1, self.end + 1) if i % every == 0 and i >= first}
        wanted |= {self.end} if self.end == self.whole or "--skip-train" in flags else set()
        found = set(evaluations(self.metrics))
        assert found == (wanted if "--eval-data" in flags else set()), f"evaluations after {found}, not {wanted}"

    def written(self) -> None:
        if board := self.given.get("--tensorboard-dir"):
            path = Path(board.replace("HERE", str(self.here), 1))
            assert any(path.glob("events.*")), "no curves"
        count = int(self.number("--timelines", 10 if self.ours else 0))
        there = self.metrics.with_name("timeline.jsonl").exists()
        assert there == bool(count and self.end >= min(4, self.whole)), "timelines"
        assert not (self.ours.keys() & {"--progress"}) or (self.run_dir / "train.log").exists(), "no log"

    def planned(self) -> None:
        if not self.ours:
            return
        plan = Plan.load(self.run_dir / "plan.json")
        ranks = int(self.ours.get("--pipeline-model-parallel-size", 1))
        chunks = int(self.ours.get("--virtual-pipeline-model-parallel-size", 1))
        assert (plan.pipeline_model_parallel_size, len(plan.stages)) == (ranks, ranks * chunks), "another plan"
        assert plan.schedule == self.ours.get("--schedule", plan.schedule), "another schedule"
        assert bool(plan.trials) == bool(int(self.ours.get("--measure-top-k", 0))), "trials"
        assert (self.run_dir / "packs").exists() == ("--repack" in self.ours), "packed again"

    def losses(self, plain: "Seen") -> None:
        """The same as without these flags, or others, as they say."""
        flags = {**self.ours, **self.given}
        if self.number("--log-interval", 1) != 1 or not self.lines:
            return
        mine, theirs = ({line["iteration"]: line["loss"] for line in run.lines} for run in (self, plain))
        both = sorted(mine.keys() & theirs.keys())
        changing = [flag for flag in changed(flags) if flag.removeprefix("--") in MAY_CHANGE.split()]
        if not changing:
            assert [mine[i] for i in both] == [theirs[i] for i in both], "losses are others, for no reason"
        for flag in changing:
            seen = [i for i in both if i >= CHANGES.get(flag, math.inf)]
            assert not seen or mine[seen[-1]] != theirs[seen[-1]], f"{flag} changes nothing"


def changed(flags: dict[str, str]) -> Iterator[str]:
    """Those that are not given as they are anyway."""
    base = {"--lr": "1e-3", "--train-iters": "3"}
    for flag, value in flags.items():
        usual = base.get(flag, OFTEN.get(flag))
        if usual is None or float(value) != float(usual):
            yield flag
