"""What Megatron does not log: samples and useful tokens a second, padding, and how level the iterations were."""

import json
import time
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.training import print_rank_last

from megatron.vlm.microbatch import Microbatch


class BalanceMeter:
    """Counts what every microbatch of an interval held and reports once an interval, over all data-parallel ranks.

    The counting is the last pipeline stage's (it sees every pack); the report is one line in the log and one in a file.
    """

    def __init__(self, log_interval: int, metrics_file: str | None) -> None:
        self.log_interval = log_interval
        self.metrics_file = Path(metrics_file) if metrics_file else None
        self.iterations: list[list[float]] = []  # per iteration: tiles, tokens, useful tokens, samples
        self.started = time.perf_counter()
        self.current = [0.0] * 4

    def count(self, batch: Microbatch) -> None:
        """Add a microbatch that was trained on."""
        for place, value in enumerate((batch.tiles, batch.tokens, batch.useful_tokens, batch.samples)):
            self.current[place] += value

    def end_iteration(self, iteration: int) -> None:
        """Close an iteration; `iteration` counts from 1. Reports when it ends an interval."""
        self.iterations.append(self.current)
        self.current = [0.0] * 4
        if iteration % self.log_interval == 0:
            self._report(iteration)
            self.iterations, self.started = [], time.perf_counter()

    def _report(self, iteration: int) -> None:
        mine = torch.tensor(self.iterations, dtype=torch.float64, device="cuda")
        group = parallel_state.get_data_parallel_group()
        ranks = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(ranks, mine, group=group)
        counts = torch.stack(ranks).cpu()  # [ranks, iterations, 4]
        seconds = time.perf_counter() - self.started
        report = interval_report(counts, seconds)
        print_rank_last(
            f" balance after iteration {iteration} | samples/s: {report['samples_per_second']:.1f} | "
            f"useful tokens/s: {report['useful_tokens_per_second']:.0f} | padding: {report['padding']:.1%} | "
            f"DistRatio ViT: {report['dist_ratio_vit']:.4f} LLM: {report['dist_ratio_llm']:.4f} |"
        )
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if self.metrics_file and last:
            self.metrics_file.parent.mkdir(parents=True, exist_ok=True)
            with self.metrics_file.open("a") as file:
                file.write(json.dumps({"iteration": iteration, **report}) + "\n")


def interval_report(counts: torch.Tensor, seconds: float) -> dict[str, float]:
    """Rates, padding and DistRatios (OmniBal, section 3) of an interval.

    counts [ranks, iterations, 4]: tiles, tokens, useful tokens and samples that each rank ran in each iteration.
    """
    tiles, tokens, useful, samples = counts.unbind(-1)
    return {
        "seconds": seconds,
        "samples": samples.sum().item(),
        "samples_per_second": samples.sum().item() / seconds,
        "useful_tokens_per_second": useful.sum().item() / seconds,
        "padding": 1 - useful.sum().item() / tokens.sum().item(),
        "dist_ratio_vit": _dist_ratio(tiles),
        "dist_ratio_llm": _dist_ratio(tokens),
    }


def _dist_ratio(work: torch.Tensor) -> float:
    """Mean over iterations of sum_i (T_max - T_i) / (T_max N); work [ranks, iterations]."""
    most = work.max(dim=0).values
    waiting = ((most - work) / most.clamp(min=1)).mean(dim=0)
    return waiting.mean().item()
