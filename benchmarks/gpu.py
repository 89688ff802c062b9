"""The verdict on a CUDA machine, in minutes and without data: is it right, how fast is every layer, does memory agree.

    python benchmarks/gpu.py [--model internvl-chat-1.5] [--vit-budget 9] [--llm-budget 4096]

1. Versions, and the kernels that were chosen.
2. Loss and gradients of a small chain on the GPU, in fp32 and bf16, against those of this machine's CPU in fp32.
3. Two pipeline ranks on one GPU, their messages by way of the host: is every schedule right (not: how fast).
4. Every kind of layer of the model at its packs, forward and backward, per recompute mode: milliseconds, TFLOP/s, and
   the share of what a large matrix product reaches; bytes kept, counted as the plan counts them and as allocated.

The result is written to benchmarks/results/GPU.json, which `tools/profile_layers.py --analytic GPU` then prefers to its
own estimates. Exit code 2 without CUDA, 1 where a figure is out of its limit; the last line says which.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_parts
from megatron.vlm import platform
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import RECOMPUTABLE_KINDS
from omnibal_ext.console import print_table
from omnibal_ext.costs.measured import RESULTS, device_key, efficiencies
from omnibal_ext.costs.works import cost_works
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.records import write_record
from tests.programs import free_port

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"fp32 chain": 1e-4, "bf16 chain": 0.1, "pipeline": 1e-4, "bytes": 0.1}
"""Largest differences: of gradients and losses relative to the largest, of bytes relative to those of the plan."""
LONGEST = 900.0
"""Seconds that a part has."""
MODES = ("recompute", "recompute_attention", "recompute_mlp", "recompute_cheap")


def main() -> None:
    """Run all parts, print, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="internvl-chat-1.5", help="a preset, or a Hugging Face folder")
    parser.add_argument("--vit-budget", type=int, default=9)
    parser.add_argument("--llm-budget", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5, help="measured, after two to warm up (default %(default)s)")
    arguments = parser.parse_args()
    if not platform.HAS_CUDA:
        raise UserError(
            "torch sees no CUDA device here; run this on a machine with a GPU (and a torch built for its driver)"
        )
    name = platform.device_name()
    found: dict[str, Any] = {"device": name, "versions": installed(), "model": arguments.model}
    with tempfile.TemporaryDirectory() as folder:
        found["differences"] = correctness(Path(folder))
    budgets = (str(arguments.vit_budget), str(arguments.llm_budget))
    found |= part(1, "layers", arguments.model, *budgets, str(arguments.steps), "--bf16")
    found["layers"] = layer_figures(found, arguments.model)
    found["differences"]["bytes"] = byte_difference(found)
    if key := device_key(name):
        found["efficiencies"] = efficiencies(key, found["reached"])
    show(found)
    path = RESULTS / f"{key or name.replace(' ', '-').lower()}.json"
    path.parent.mkdir(exist_ok=True)
    write_record(path, found)
    wrong = out_of_limits(found["differences"])
    print(f"{path}: {'out of their limits: ' + '; '.join(wrong) if wrong else 'all within their limits'}")
    sys.exit(bool(wrong))


def installed() -> dict[str, str]:
    """Versions of what decides which kernels run."""
    found = {"cuda": str(torch.version.cuda)}
    for package in ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def part(ranks: int, *arguments: str, hide_gpu: bool = False) -> Any:
    """What a part of `gpu_parts` found, on ranks that share the first GPU, or have none."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if hide_gpu else {}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_parts", *arguments]

    def run(rank: int) -> str:
        environment = {**os.environ, **shared, **hidden, "RANK": str(rank)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}, rank {rank}: {done.stderr[-8000:]}")
        return done.stdout

    with ThreadPoolExecutor(ranks) as pool:
        lines = "".join(pool.map(run, range(ranks))).splitlines()
    return json.loads(next(line for line in lines if line.startswith("RESULT ")).removeprefix("RESULT "))


def correctness(folder: Path) -> dict[str, float]:
    """The largest differences from one process on the CPU in fp32."""
    expected, single, half = (str(folder / name) for name in ("expected.pt", "fp32.pt", "bf16.pt"))
    part(1, "answers", expected, hide_gpu=True)
    part(1, "answers", single, "--weights", expected)
    part(1, "answers", half, "--bf16", "--weights", expected)
    known, fp32, bf16 = map(gpu_parts.Answers.load, (expected, single, half))
    return {
        "fp32 chain": gpu_parts.difference(fp32.gradients, known.gradients),
        "bf16 chain": gpu_parts.difference(bf16.gradients, known.gradients),
        "pipeline": max(part(2, "pipeline", expected).values()),
    }


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


def show(found: dict[str, Any]) -> None:
    """Print all tables."""
    pairs = [*found["versions"].items(), *((f"{what} from", kernel) for what, kernel in found["kernels"].items())]
    print_table(found["device"], ("what", "version or kernel"), pairs, right=False)
    limits = [(what, f"{value:.2g}", f"{LIMITS[what]:g}") for what, value in found["differences"].items()]
    print_table("against the CPU in fp32; bytes against the plan", ("part", "difference", "limit"), limits)
    rows = [
        (row["kind"], row["mode"], f"{row['forward_ms']:.3f}", f"{row['backward_ms']:.3f}", f"{row['tflops']:.1f}",
         f"{row['share']:.0%}") for row in found["layers"]
    ]  # fmt: skip
    columns = ("layer", "recomputed", "forward ms", "backward ms", "TFLOP/s", "of the peak")
    print_table(f"{found['model']}, peak {found['reached']['peak_flops'] / 1e12:.0f} TFLOP/s", columns, rows)


if __name__ == "__main__":
    run_tool(main)
