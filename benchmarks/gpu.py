"""The verdict on a CUDA machine, in ten minutes and without data: does it start, is it right, how fast, how large.

    python benchmarks/gpu.py [--minutes 10] [--model internvl-chat-1.5] [--vit-budget 9] [--llm-budget 4096]

Parts run one after the other, the cheapest first, each in a process and time of its own; after each the result is
written, so that a loan that ends early leaves what was found.

    start       Megatron starts, NCCL adds up over one rank; versions, and the kernels that were chosen
    answers     loss and gradients of a small chain in fp32 and bf16, against this machine's CPU in fp32
    attention   every attention kernel that is there, by the width of heads, one segment and 300, against fp32
    waits       a layer of every kind in a mode in which a host that waits for its device is an error
    queues      does a kernel that waits keep back another stream's, with one hardware queue and with eight
    host        milliseconds that the host takes to ask for a layer, beside the device's
    pipeline    two ranks on one GPU, their messages by way of the host: is every schedule right (not: how fast)
    layers      every kind of layer of the model at its packs, per recompute mode: milliseconds, TFLOP/s, the share of
                what a large matrix product reaches; bytes as the plan counts them, as allocated, and as reserved
    training    20 iterations of a 2B model by the trainer: the loss falls; seconds and bytes beside planned ones

The result is benchmarks/results/GPU.json, which `tools/profile_layers.py --analytic GPU` then prefers to its own
estimates. Exit code 2 without CUDA, 1 where a part fails or a figure is out of its limit; the last line says which.
torch and megatron-core are all that it needs; what else is missing is said.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bare, gpu_parts
from megatron.vlm import platform
from omnibal_ext import console
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import RECOMPUTABLE_KINDS
from omnibal_ext.costs.measured import RESULTS, device_key, efficiencies
from omnibal_ext.costs.works import cost_works
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.files.records import write_record
from tests.programs import free_port, result_of

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"sum of one rank": 0.0, "fp32 chain": 1e-4, "bf16 chain": 0.1, "attention": 0.05, "waits": 0.0,
          "pipeline": 1e-4, "bytes": 0.1, "loss": 0.0}  # fmt: skip
"""Largest differences: of gradients and losses relative to the largest, of bytes relative to those of the plan; of the
loss, by how much it may rise."""
MODES = ("recompute", "recompute_attention", "recompute_mlp", "recompute_cheap")
WAITS_OF = ("internvl-chat-1.5", "internvl3.5-8b", "qwen2.5-vl-7b", "gemma-3-4b", "qwen3-vl-30b-a3b")
HOST_OF = ("internvl-chat-1.5", "internvl3.5-8b")
TRAINED, TRAINED_BUDGETS, ITERATIONS = "internvl3.5-2b", ("9", "4096"), "20"
ATTENDED = "2400"
"""Tokens of the pack that kernels attend over."""
LEAST = 5.0
"""Seconds without which no further part begins."""


@dataclass
class Verdict:
    """What was asked, until when, and what was found so far."""

    model: str
    budgets: tuple[str, str]
    steps: int
    until: float
    folder: Path
    found: dict[str, Any] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)

    def run(self, ranks: int, *words: str, hide_gpu: bool = False, **changes: str) -> Any:
        """What a part of `gpu_parts` found on ranks that share the first GPU or have none, in the time left."""
        left = self.until - time.monotonic()
        return run_part(ranks, *words, hide_gpu=hide_gpu, seconds=left, **changes)


def run_part(ranks: int, *words: str, hide_gpu: bool = False, seconds: float, **changes: str) -> Any:
    """The object in the RESULT line of a part. RuntimeError with its last words where it fails or takes longer."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if hide_gpu else {}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_parts", *words]

    def run(rank: int) -> str:
        environment = {**os.environ, **shared, **hidden, **changes, "RANK": str(rank)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}, rank {rank}: {done.stderr[-4000:]}")
        return done.stdout

    with ThreadPoolExecutor(ranks) as pool:
        return result_of("".join(pool.map(run, range(ranks))))


def start(verdict: Verdict) -> None:
    """Versions and kernels too."""
    found = verdict.run(1, "start")
    verdict.differences["sum of one rank"] = abs(found["sum"] - 6.0)
    verdict.found |= {"versions": installed(), "missing": list(bare.MISSING), "start": found}
    verdict.found["kernels"] = {f"heads of {width}": names for width, names in verdict.run(1, "kernels").items()}
    rows = [*verdict.found["versions"].items(), *verdict.found["kernels"].items()]
    rows += [("not here, and not needed", ", ".join(bare.MISSING))] if bare.MISSING else []
    console.print_table(verdict.found["device"], ("what", "version or kernel"), rows, right=False)


def answers(verdict: Verdict) -> None:
    """In fp32 and bf16."""
    expected, single, half = (str(verdict.folder / name) for name in ("expected.pt", "fp32.pt", "bf16.pt"))
    verdict.run(1, "answers", expected, hide_gpu=True)
    verdict.run(1, "answers", single, "--weights", expected)
    verdict.run(1, "answers", half, "--bf16", "--weights", expected)
    known, fp32, bf16 = map(gpu_parts.Answers.load, (expected, single, half))
    verdict.differences["fp32 chain"] = gpu_parts.difference(fp32.gradients, known.gradients)
    verdict.differences["bf16 chain"] = gpu_parts.difference(bf16.gradients, known.gradients)


def attention(verdict: Verdict) -> None:
    """A kernel may refuse a width, unless it is the one that is chosen for it."""
    found = verdict.found["attention"] = verdict.run(1, "attention", ATTENDED)
    console.print_table("attention against fp32", ("kernel and width", "difference"), list(found.items()), right=False)
    verdict.differences["attention"] = worst_attention(found, verdict.found["kernels"])


def worst_attention(found: dict[str, Any], chosen: dict[str, str]) -> float:
    """Of what a kernel computes; infinite where one that is chosen for a width refuses it."""
    needed = {f"{kernel} {words.split()[-1]}" for words, names in chosen.items() for kernel in names.split(", ")}
    refused = [kernel for kernel, value in found.items() if isinstance(value, str) and kernel in needed]
    return float("inf") if refused else max((v for v in found.values() if not isinstance(v, str)), default=0.0)


def waits(verdict: Verdict) -> None:
    """None is right."""
    found = verdict.found["waits"] = verdict.run(1, "waits", *WAITS_OF)
    verdict.differences["waits"] = float(len(found))
    console.print_table("the host waits for its device", ("layer", "where"), list(found.items()), right=False)


def queues(verdict: Verdict) -> None:
    """One, as under tensor parallelism, and eight."""
    found = {number: verdict.run(1, "queues", CUDA_DEVICE_MAX_CONNECTIONS=number) for number in ("1", "8")}
    verdict.found["queues"] = {number: one["milliseconds"] for number, one in found.items()}
    rows = [(number, f"{milliseconds:.2f}") for number, milliseconds in verdict.found["queues"].items()]
    console.print_table("a kernel beside one that waits", ("hardware queues", "ms until it is done"), rows)


def host(verdict: Verdict) -> None:
    """The slower of the two sets the pace."""
    found = verdict.found["host"] = verdict.run(1, "host", *HOST_OF)
    columns = ("host_forward", "device_forward", "host_backward", "device_backward")
    rows = [(layer, *(f"{ms[column]:.3f}" for column in columns)) for layer, ms in found.items()]
    console.print_table("milliseconds a layer", ("layer", *(c.replace("_", " ") for c in columns)), rows)


def pipeline(verdict: Verdict) -> None:
    """Of all schedules."""
    found = verdict.found["pipeline"] = verdict.run(2, "pipeline", str(verdict.folder / "expected.pt"))
    verdict.differences["pipeline"] = max(found.values())


def layers(verdict: Verdict) -> None:
    """Its peaks become the efficiencies that analytic profiles take."""
    found = verdict.run(1, "layers", verdict.model, *verdict.budgets, str(verdict.steps), "--bf16")
    verdict.differences["bytes"] = byte_difference(found)
    if key := device_key(verdict.found["device"]):
        verdict.found["efficiencies"] = efficiencies(key, found["reached"])
    figures = layer_figures(found, verdict.model)
    verdict.found |= {
        "model": verdict.model,
        "reached": found["reached"],
        "profile": found["profile"],
        "layers": figures,
    }
    verdict.found["overhead_bytes"] = gpu_parts.profile_of(found).overhead_bytes
    verdict.found["reserved_bytes"] = found["reserved_bytes"]
    show_layers(verdict.found)


def training(verdict: Verdict) -> None:
    """All of a run but data and saves."""
    found = verdict.found["training"] = verdict.run(1, "training", TRAINED, *TRAINED_BUDGETS, ITERATIONS)
    verdict.differences["loss"] = found["last loss"] - found["first loss"]
    rows = [(what, f"{value:.4g}") for what, value in found.items()]
    console.print_table(f"{TRAINED}, {ITERATIONS} iterations", ("what", "figure"), rows)


PARTS: dict[str, Callable[[Verdict], None]] = {
    part.__name__: part for part in (start, answers, attention, waits, queues, host, pipeline, layers, training)
}
"""In this order."""


def main() -> None:
    """Run all parts, write and judge after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together (default %(default)s)")
    parser.add_argument("--model", default="internvl-chat-1.5", help="a preset, or a Hugging Face folder")
    parser.add_argument("--vit-budget", type=int, default=9)
    parser.add_argument("--llm-budget", type=int, default=4096)
    parser.add_argument(
        "--steps", type=int, default=3, help="of each layer, after two to warm up (default %(default)s)"
    )
    asked = parser.parse_args()
    if not platform.HAS_CUDA:
        raise UserError(
            "torch sees no CUDA device here; run this on a machine with a GPU (and a torch built for its driver)"
        )
    name, until = platform.device_name(), time.monotonic() + 60 * asked.minutes
    known = device_key(name)
    path = RESULTS / f"{known or name.replace(' ', '-').lower()}.json"
    with tempfile.TemporaryDirectory() as folder:
        budgets = (str(asked.vit_budget), str(asked.llm_budget))
        verdict = Verdict(asked.model, budgets, asked.steps, until, Path(folder), {"device": name})
        failed = list(run_all(verdict, path))
    wrong = [*failed, *out_of_limits(verdict.differences)]
    print(f"{path}: {'; '.join(wrong) if wrong else 'all within their limits'}")
    sys.exit(bool(wrong))


def run_all(verdict: Verdict, path: Path) -> Iterator[str]:
    """Run the parts; what has gone wrong, in words."""
    for name, part in PARTS.items():
        began = time.monotonic()
        if verdict.until - began < LEAST:
            yield f"{name} did not run: no time was left"
            continue
        before = set(verdict.differences)
        try:
            part(verdict)
        except subprocess.TimeoutExpired:
            yield f"{name} took longer than there was time"
        except (RuntimeError, KeyError) as error:
            print(error, file=sys.stderr, flush=True)
            yield f"{name} failed"
        verdict.found.setdefault("seconds", {})[name] = time.monotonic() - began
        path.parent.mkdir(exist_ok=True)
        write_record(path, {**verdict.found, "differences": verdict.differences})
        new = [f"{what} {verdict.differences[what]:.2g}" for what in verdict.differences if what not in before]
        print(f"{name}: {', '.join([*new, f'{time.monotonic() - began:.0f} s'])}", flush=True)


def installed() -> dict[str, str]:
    """Versions of what decides which kernels run."""
    found = {"cuda": str(torch.version.cuda)}
    for package in ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def layer_figures(found: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """Of every kind and recompute mode: milliseconds of forward and backward, TFLOP/s of the two, share of the peak.

    What is computed again counts as time, not as work.
    """
    profile = gpu_parts.profile_of(found)
    works = cost_works(preset(model), profile.vit_budget, profile.llm_budget, 1)
    counts = {kind: 2 * work.tokens * work.matrix_weights + work.attention for kind, work in works.items()}
    figures = []
    for kind, cost in profile.layers.items():
        for mode in ("", *(MODES if kind in RECOMPUTABLE_KINDS else ())):
            again = (getattr(cost, f"{mode}_seconds") or 0.0) if mode else 0.0
            backward = cost.backward_seconds + again
            rate = 3 * counts[kind] / (cost.forward_seconds + backward)
            milliseconds = {"forward_ms": cost.forward_seconds * 1e3, "backward_ms": backward * 1e3}
            share = rate / found["reached"]["peak_flops"]
            figures.append({"kind": kind, "mode": mode or "-", **milliseconds, "tflops": rate / 1e12, "share": share})
    return figures


def byte_difference(found: dict[str, Any]) -> float:
    """Largest difference of what the allocator gave to a layer from what the plan counts, relative to that."""
    layers = gpu_parts.profile_of(found).layers
    given = found["allocated_bytes"]
    return max(abs(given[kind] / layers[kind].kept_bytes - 1) for kind in given)


def out_of_limits(differences: dict[str, float]) -> list[str]:
    """What is wrong, in words; a figure that is no number is."""
    wrong = {what: found for what, found in differences.items() if not found <= LIMITS[what]}
    return [f"{what} {found:.2g} (limit {LIMITS[what]:g})" for what, found in wrong.items()]


def show_layers(found: dict[str, Any]) -> None:
    """Print the table of layers."""
    rows = [
        (row["kind"], row["mode"], f"{row['forward_ms']:.3f}", f"{row['backward_ms']:.3f}", f"{row['tflops']:.1f}",
         f"{row['share']:.0%}") for row in found["layers"]
    ]  # fmt: skip
    columns = ("layer", "recomputed", "forward ms", "backward ms", "TFLOP/s", "of the peak")
    console.print_table(f"{found['model']}, peak {found['reached']['peak_flops'] / 1e12:.0f} TFLOP/s", columns, rows)


if __name__ == "__main__":
    run_tool(main)
