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

    def __init__(self, log_interval: int, iterations: int, metrics_file: str | None) -> None:
        self.log_interval, self.total_iterations = log_interval, iterations
        self.metrics_file = Path(metrics_file) if metrics_file else None
        self.iterations: list[list[float]] = []  # an iteration: the places of `interval_report`
        self.started = time.perf_counter()
        self.current = [0.0] * 6

    def count(self, batch: Microbatch) -> None:
        """Add a microbatch that was trained on."""
        for place, value in enumerate((batch.tiles, batch.tokens, batch.useful_tokens, batch.samples)):
            self.current[place] += value

    def end_iteration(self, iteration: int, records: list[dict[str, torch.Tensor]]) -> None:
        """Close an iteration (counted from 1) with its microbatches' losses; reports when it ends an interval."""
        total, tokens = torch.stack([record["lm loss"] for record in records]).sum(0).tolist()
        self.current[4:] = total, tokens
        self.iterations.append(self.current)
        self.current = [0.0] * 6
        if iteration % self.log_interval == 0 or iteration == self.total_iterations:
            self._report(iteration)
            self.iterations, self.started = [], time.perf_counter()

    def _report(self, iteration: int) -> None:
        mine = torch.tensor(self.iterations, dtype=torch.float64, device="cuda")
        group = parallel_state.get_data_parallel_group()
        ranks = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(ranks, mine, group=group)
        counts = torch.stack(ranks).cpu()  # [ranks, iterations, 6]
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
            line = {"iteration": iteration, "iterations": self.total_iterations, **report}
            with self.metrics_file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def interval_report(counts: torch.Tensor, seconds: float) -> dict[str, float]:
    """Rates, padding and DistRatios (OmniBal, section 3) of an interval.

    counts [ranks, iterations, 6]: tiles, tokens, useful tokens and samples that each rank ran in each iteration, the
    sum of its losses and the tokens they are of.
    """
    tiles, tokens, useful, samples, loss, supervised = counts.unbind(-1)
    return {
        "seconds": seconds,
        "loss": loss.sum().item() / max(1.0, supervised.sum().item()),
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
