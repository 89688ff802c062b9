"""The verdict on a CUDA machine, in five minutes and without data: does it start, is it right, how fast, how large.

    python benchmarks/gpu.py [--minutes 5] [--parts training against ...]

Parts run in one process, the most valuable first; after each the result is written, so that a loan that ends early
leaves what was found. What needs no GPU (the CPU's answers, packs) is made beside it meanwhile; two parts need
processes of their own.

    start       Megatron starts, NCCL adds up over one rank; versions, and the kernels that were chosen
    answers     loss and gradients of a small chain in fp32 and bf16, against this machine's CPU in fp32
    layers      every kind of layer of the model at its packs, per recompute mode: milliseconds, TFLOP/s, the share of
                what a large matrix product reaches; bytes as the plan counts them, as allocated, and as reserved
    training    iterations of the trainer: the loss falls; useful tokens a second, TFLOP/s, MFU, bytes
    trace       seconds of the trainer's kernels by kind of layer, beside the least that the work takes; what is not
                explained; attention over tiles and masked samples two ways; what plans of cuDNN's take
    against     the profile beside the trainer: by part of the model, step, bytes
    text        the same model on packs of words alone: what share of its pace is left where there are images
    resume      a run that goes on from a save, against one that was not stopped: bit for bit
    host        milliseconds that the host takes to ask for a layer, beside the device's
    peers       the same samples in a plain loop of transformers: one at a time, padded, packs; ours over each
    lora        a 7B model with adapters on packs of 4,096 words: tokens a second
    pipeline    two ranks on one GPU, their messages by way of the host: is every schedule right (not: how fast)
    attention   every attention kernel that is there, by the width of heads, one segment and 300, against fp32
    waits       a layer of every kind in a mode in which a host that waits for its device is an error
    queues      does a kernel that waits keep back another stream's, with one hardware queue and with eight
    linear      flash-linear-attention's kernels, if it is there, against fp32; does the host wait for them

The result is benchmarks/results/GPU.json, which `omnibal profile --analytic GPU` then prefers to its own
estimates, and beside it what documents show of this card and model (`benchmarks/gpu_cards.py`). Exit code 2 without
CUDA, 1 where a part fails or a figure is out of its limit; the last line says which. torch and megatron-core are all
that it needs; what else is missing is said. `--short` has small models, for trying it.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import (
    bare,
    gpu_answers,
    gpu_cards,
    gpu_layers,
    gpu_packs,
    gpu_peers,
    gpu_probes,
    gpu_trace,
    gpu_training,
    gpu_ways,
)
from benchmarks.gpu_parts import EXPECTED, PACKS
from megatron.vlm import platform
from omnibal_ext import console
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import RECOMPUTABLE_KINDS
from omnibal_ext.costs.analytic import DEVICES
from omnibal_ext.costs.operations import RESULTS, device_key
from omnibal_ext.costs.profile import Profile
from omnibal_ext.costs.works import layer_works
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.files.records import read_record, write_record
from omnibal_ext.units import GIB
from tests.programs import free_port, result_of

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "sum of one rank": 0.0, "fp32 chain": 1e-4, "bf16 chain": 0.1, "bytes": 0.1, "loss": 0.0, "parts of a step": 0.05,
    "step": 0.05, "bytes of a run": 0.04, "resume": 0.0, "pipeline": 1e-4, "attention": 0.05, "waits": 0.0,
    "linear": 0.05, "linear waits": 0.0,
}  # fmt: skip
"""Largest differences: of gradients and losses relative to the largest, of bytes and seconds relative to those that
were measured; of the loss, by how much it may rise. A card's clock after a minute of training is some percent below
that of the seconds of a profile: 3 to 4.5% were seen."""
MODES = ("recompute", "recompute_cheap")
LARGE = 0.05
"""Share of a step from which on a part of it is judged."""
MOST_COUNTING = 300.0
"""Seconds in which the launches of an iteration are counted, before the trace."""
LARGEST = 4
"""Groups that are named of what is not explained."""
LEAST = 5.0
"""Seconds without which no further part begins."""


@dataclass(frozen=True)
class Size:
    """Which models, how many packs: of the verdict, or of a trial of it."""

    model: str = "internvl3.5-2b"
    budgets: tuple[int, int] = (33, 11840)
    iterations: int = 8
    packs: int = 8
    """Of an iteration."""
    adapted: str = "qwen2.5-vl-7b"
    adapted_tokens: int = 4096
    waits: tuple[str, ...] = (
        "internvl-chat-1.5",
        "qwen2.5-vl-7b",
        "gemma-3-4b",
        "qwen3-vl-30b-a3b",
        "qwen2.5-omni-3b",
        "qwen3-omni-30b-a3b",
    )
    host: tuple[str, ...] = ("internvl3.5-8b",)
    linear: str = "qwen3.5-9b"
    attended: int = 2400
    """Tokens of the pack that kernels attend over."""
    steps: int = 5
    """Of each layer that is measured, after two to warm up."""


SHORT = Size("tiny", (6, 96), 4, 2, "tiny", 64, ("tiny",), ("tiny",), "tiny", 320, 1)
SMALL_MEMORY, SMALL_BUDGETS = 100 * GIB, (16, 5760)
"""With less than so many bytes on a device."""


@dataclass
class Verdict:
    """What was asked, until when, and what was found so far."""

    size: Size
    until: float
    folder: Path
    found: dict[str, Any] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    aside: dict[str, Future[Any]] = field(default_factory=dict)
    """What is made beside it."""
    run: gpu_training.Run | None = None
    before: dict[str, Any] = field(default_factory=dict)
    """The record of an earlier run, where this one has some parts only."""

    @property
    def record(self) -> dict[str, Any]:
        """Of both runs; this one's figures where both have them."""
        new = {**self.found, "differences": self.differences}
        both = {name: {**self.before.get(name, {}), **new.get(name, {})} for name in ("differences", "seconds")}
        return {**self.before, **new, **both}

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def packs(self) -> gpu_packs.Packs:
        """Those of an iteration, over and over."""
        self.aside["packs"].result()
        return gpu_packs.read_packs(self.folder / PACKS)[: self.size.packs]


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
    found = gpu_probes.start()
    verdict.differences["sum of one rank"] = abs(found["sum"] - 6.0)
    verdict.found |= {"missing": list(bare.MISSING), "start": found}
    verdict.found["kernels"] = {f"heads of {width}": names for width, names in gpu_probes.kernels().items()}
    rows = [*verdict.found["versions"].items(), *verdict.found["kernels"].items()]
    rows += [("not here, and not needed", ", ".join(bare.MISSING))] if bare.MISSING else []
    console.print_table(verdict.found["device"], ("what", "version or kernel"), rows)


def answers(verdict: Verdict) -> None:
    """In fp32 and bf16."""
    verdict.aside["expected"].result()
    known = gpu_answers.Answers.load(verdict.folder / EXPECTED)
    for name, flags in (("fp32 chain", []), ("bf16 chain", ["--bf16"])):
        found = gpu_answers.answers(flags, known.weights)
        verdict.differences[name] = gpu_answers.difference(found.gradients, known.gradients)


def efficiencies(key: str, reached: Mapping[str, float]) -> dict[str, float]:
    """Return fractions of a device's published peaks; `reached`: operations and bytes a second measured."""
    device = DEVICES[key]
    return {
        "matrix_efficiency": reached["matrix_flops"] / device.flops,
        "attention_efficiency": reached["attention_flops"] / device.flops,
        "bandwidth_efficiency": reached["memory_bytes_a_second"] / device.memory_bandwidth,
    }


def layers(verdict: Verdict) -> None:
    """Its peaks become the efficiencies that analytic profiles take."""
    found = gpu_layers.layers(verdict.size.model, verdict.size.budgets, verdict.size.steps, bf16=True)
    verdict.differences["bytes"] = byte_difference(found)
    if key := device_key(verdict.found["device"]):
        verdict.found["efficiencies"] = efficiencies(key, found["reached"])
    profile = Profile.from_record(found["profile"])
    verdict.found |= {
        "reached": found["reached"], "profile": found["profile"],
        "layers": layer_figures(found, verdict.size.model), "overhead_bytes": profile.overhead_bytes,
        "reserved_bytes": found["reserved_bytes"],
    }  # fmt: skip
    show_layers(verdict.found)


def training(verdict: Verdict) -> None:
    """All of a run but data and saves."""
    size = verdict.size
    run = gpu_training.run_trainer(
        size.model, verdict.packs(), size.packs, size.iterations, verdict.folder / "training"
    )
    verdict.run = run
    losses = [interval["loss"] for interval in run.intervals]
    verdict.differences["loss"] = losses[-1] - losses[0]
    found = verdict.found["training"] = figures_of(run) | {"first loss": losses[0], "last loss": losses[-1]}
    show(f"{size.model}, {size.iterations} iterations of {size.packs} packs of {size.budgets}", found)


def figures_of(run: gpu_training.Run) -> dict[str, float]:
    """Of a run, once functions are compiled."""
    return {
        "milliseconds an iteration": run.seconds * 1e3, "useful tokens a second": run.tokens_per_second,
        "TFLOP/s": run.mean("model_tflops"), "MFU": run.mean("mfu") if "mfu" in run.settled[0] else 0.0,
        "peak GiB": run.peak_bytes / GIB, "seconds to the first iteration's end": run.seconds_to_first,
    }  # fmt: skip


def against(verdict: Verdict) -> None:
    """The profile of `layers` beside the run of `training`."""
    assert verdict.run is not None, "needs layers and training"
    profile = Profile.from_record(verdict.found["profile"])
    parts = gpu_training.by_part(verdict.run, profile)
    of_step = gpu_training.planned_step(profile, verdict.packs())
    seen = {"step ms": verdict.run.seconds * 1e3, "GiB": verdict.run.peak_bytes / GIB}
    planned = {"step ms": of_step.seconds * 1e3, "GiB": of_step.bytes / GIB}
    rows = [(name, one["profile"], one["trained"]) for name, one in parts.items()]
    rows += [(name, planned[name], seen[name]) for name in planned]
    table = [(name, f"{a:.3f}", f"{b:.3f}", f"{a / b:.3f}" if b else "-") for name, a, b in rows]
    console.print_table("planned and trained, ms a pack", ("what", "planned", "trained", "ratio"), table)
    verdict.found["against"] = {"parts": parts, "planned": planned, "trained": seen}
    whole = sum(one["trained"] for one in parts.values())
    large = [one for one in parts.values() if one["trained"] > LARGE * whole]
    verdict.differences["parts of a step"] = max(abs(one["profile"] / one["trained"] - 1) for one in large)
    verdict.differences["step"] = abs(planned["step ms"] / seen["step ms"] - 1)
    if seen["GiB"]:
        verdict.differences["bytes of a run"] = abs(planned["GiB"] / seen["GiB"] - 1)


def trace(verdict: Verdict) -> None:
    """What the card does in a pack's milliseconds."""
    size, packs = verdict.size, verdict.packs()
    seconds = min(verdict.left / 4, MOST_COUNTING)  # beforehand: beside the trace it would take the host's time
    asked = gpu_trace.counted(size.model, verdict.folder / PACKS, len(packs), seconds)
    seen = gpu_trace.traced(size.model, packs, size.packs, verdict.folder / "trace")
    peak = verdict.record.get("reached", {}).get("peak_flops")
    reach = gpu_trace.Reach.of(verdict.found["device"], seen.attention, peak)
    rows = gpu_trace.rows(seen.trace, asked, len(packs), reach)
    pack, untraced = seen.trace.seconds / seen.trace.packs * 1e3, seen.untraced / size.packs * 1e3
    columns = ("layer and pass", "kernels", "launches", "counted", "ms", "least", "not explained")
    title = f"{size.model}, {pack:.1f} ms a pack, {untraced:.1f} when it is not traced"
    console.print_table(title, columns, gpu_trace.shown(rows))
    print(reach.source if reach else "nothing is known of what this card reaches")
    beyond = gpu_trace.not_explained(rows)
    largest = ", ".join(f"{name} {ms:.1f}" for name, ms in list(beyond.items())[:LARGEST])
    print(f"not explained: {sum(beyond.values()):.1f} of {pack:.1f} ms a pack, most of it {largest}")
    verdict.found["trace"] = {
        "milliseconds a pack": pack, "not traced": untraced, "not explained": sum(beyond.values()), "rows": rows,
    }  # fmt: skip
    ways = gpu_trace.of_ways(gpu_ways.ways(size.model, size.budgets[0]), seen.trace.shapes)
    console.print_table("attention two ways, a layer's ms", columns, gpu_trace.shown(ways))
    rows += ways


def text(verdict: Verdict) -> None:
    """Packs that fill the language budget."""
    size = verdict.size
    packs = gpu_packs.words_alone(size.budgets, size.packs)
    run = gpu_training.run_trainer(size.model, packs, size.packs, size.iterations - 2, verdict.folder / "text")
    found = verdict.found["text"] = figures_of(run)
    if verdict.run is not None:
        found["share of its TFLOP/s with images"] = verdict.run.mean("model_tflops") / run.mean("model_tflops")
    show("packs of words alone", found)


def resume(verdict: Verdict) -> None:
    """Of the small chain, in bf16."""
    gpu_answers.make_known()
    packs = [*gpu_packs.words_alone((0, 64), 1), [(2, 40), (1, 24)], [(3, 64)], [(0, 30), (1, 34)]]
    found = verdict.found["resume"] = gpu_training.resume(gpu_answers.CHECKED.name, packs, verdict.folder / "resume")
    verdict.differences["resume"] = max(found.values())


def host(verdict: Verdict) -> None:
    """The slower of the two sets the pace."""
    found = verdict.found["host"] = gpu_probes.host(list(verdict.size.host))
    columns = ("host_forward", "device_forward", "host_backward", "device_backward")
    rows = [(layer, *(f"{ms[column]:.3f}" for column in columns)) for layer, ms in found.items()]
    console.print_table("milliseconds a layer", ("layer", *(c.replace("_", " ") for c in columns)), rows)


def peers(verdict: Verdict) -> None:
    """Of the samples that an iteration of ours has."""
    found = gpu_peers.peers(preset(verdict.size.model), verdict.packs())
    ours = verdict.run.tokens_per_second if verdict.run else 0.0
    verdict.found["peers"] = {"useful tokens a second": found, "ours": ours}
    rows = [
        (way, f"{pace:,.0f}", f"{ours / pace:.2f}x") if pace else (way, "out of memory", "-")
        for way, pace in found.items()
    ]
    console.print_table("transformers", ("way", "useful tokens a second", "ours over it"), rows)


def lora(verdict: Verdict) -> None:
    """Of the language layers, rank 8."""
    size = verdict.size
    packs = gpu_packs.words_alone((0, size.adapted_tokens), size.packs)
    run = gpu_training.run_trainer(
        size.adapted, packs, size.packs, size.iterations - 2, verdict.folder / "lora", "--lora-rank", "8"
    )
    found = verdict.found["lora"] = figures_of(run)
    show(f"{size.adapted} with adapters, packs of {size.adapted_tokens} words", found)


def pipeline(verdict: Verdict) -> None:
    """Of all schedules."""
    verdict.aside["expected"].result()
    found = verdict.found["pipeline"] = run_part(2, "pipeline", str(verdict.folder), seconds=verdict.left)
    verdict.differences["pipeline"] = max(found.values())


def attention(verdict: Verdict) -> None:
    """A kernel may refuse a width, unless it is the one that is chosen for it."""
    found = gpu_probes.attention(verdict.size.attended)
    verdict.found["attention"] = found
    console.print_table("attention against fp32", ("kernel and width", "difference"), list(found.items()))
    verdict.differences["attention"] = worst_attention(found, verdict.found["kernels"])


def worst_attention(found: dict[str, Any], chosen: dict[str, str]) -> float:
    """Of what a kernel computes; infinite where one that is chosen for a width refuses it."""
    needed = {f"{kernel} {words.split()[-1]}" for words, names in chosen.items() for kernel in names.split(", ")}
    refused = [kernel for kernel, value in found.items() if isinstance(value, str) and kernel in needed]
    return float("inf") if refused else max((v for v in found.values() if not isinstance(v, str)), default=0.0)


def waits(verdict: Verdict) -> None:
    """None is right; models for which no time is left are named."""
    found: dict[str, str] = {}
    untold = []
    for name in verdict.size.waits:
        if verdict.left > 2 * LEAST:
            found |= gpu_probes.waits(name)
        else:
            untold.append(name)
    verdict.found["waits"], verdict.found["waits untold"] = found, untold
    verdict.differences["waits"] = float(len(found))
    rows = [*found.items(), *((name, "not looked at: no time was left") for name in untold)]
    console.print_table("the host waits for its device", ("layer", "where"), rows)


def queues(verdict: Verdict) -> None:
    """One, as under tensor parallelism, and eight."""
    found = {
        number: run_part(1, "queues", seconds=verdict.left, CUDA_DEVICE_MAX_CONNECTIONS=number) for number in ("1", "8")
    }
    verdict.found["queues"] = {number: one["milliseconds"] for number, one in found.items()}
    rows = [(number, f"{milliseconds:.2f}") for number, milliseconds in verdict.found["queues"].items()]
    console.print_table("a kernel beside one that waits", ("hardware queues", "ms until it is done"), rows)


def linear(verdict: Verdict) -> None:
    """Their first calls try out settings for minutes."""
    found = verdict.found["linear"] = gpu_probes.linear_attention(verdict.size.attended)
    console.print_table("linear attention against fp32", ("kernel", "difference"), list(found.items()))
    verdict.differences["linear"] = max(found.values(), default=0.0)
    verdict.found["linear waits"] = waiting = gpu_probes.waits(verdict.size.linear)
    verdict.differences["linear waits"] = float(len(waiting))


PARTS: dict[str, Callable[[Verdict], None]] = {
    part.__name__: part
    for part in (start, answers, layers, training, against, trace, text, resume, host, peers, lora, pipeline,
                 attention, waits, queues, linear)
}  # fmt: skip
"""In this order."""


def main() -> None:
    """Run all parts, write and judge after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="for all parts together (default %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="(default: all)")
    parser.add_argument("--short", action="store_true", help="small models, to try the parts")
    asked = parser.parse_args()
    if not platform.HAS_CUDA:
        raise UserError(
            "torch sees no CUDA device here; run this on a machine with a GPU (and a torch built for its driver)"
        )
    platform.take_device()
    platform.multiply_exactly()
    name, until = platform.device_name(), time.monotonic() + 60 * asked.minutes
    small = {} if platform.device_memory() > SMALL_MEMORY else {"budgets": SMALL_BUDGETS}
    size = SHORT if asked.short else Size(**small)
    path = RESULTS / f"{device_key(name) or name.replace(' ', '-').lower()}.json"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        known = {
            "device": name,
            "model": size.model,
            "budgets": size.budgets,
            "packs": size.packs,
            "adapted": size.adapted,
        }
        verdict = Verdict(size, until, Path(folder), {**known, "versions": installed()})
        if len(asked.parts) < len(PARTS):
            verdict.before = earlier(path, known)
        words = (size.model, *map(str, size.budgets), str(size.packs), folder)
        for part in (("expected", folder), ("packs", *words)):
            verdict.aside[part[0]] = pool.submit(run_part, 1, *part, hide_gpu=True, seconds=verdict.left)
        failed = list(run_all(verdict, path, asked.parts))
    wrong = [*failed, *out_of_limits(verdict.differences)]
    print(f"{path}: {'; '.join(wrong) if wrong else 'all within their limits'}")
    sys.exit(bool(wrong))


def run_all(verdict: Verdict, path: Path, names: Iterator[str] | tuple[str, ...] = tuple(PARTS)) -> Iterator[str]:
    """Run the parts; what has gone wrong, in words."""
    for name in names:
        began = time.monotonic()
        if verdict.until - began < LEAST:
            yield f"{name} did not run: no time was left"
            continue
        before = set(verdict.differences)
        gpu_training.give_back()
        try:
            PARTS[name](verdict)
        except subprocess.TimeoutExpired:
            yield f"{name} took longer than there was time"
        except ModuleNotFoundError as error:
            yield f"{name} did not run: {error.name} is not installed here"
        except Exception:  # whatever a library raises: the other parts run all the same
            traceback.print_exc()
            gpu_training.leave_megatron()
            yield f"{name} failed"
        verdict.found.setdefault("seconds", {})[name] = time.monotonic() - began
        write(verdict, path)
        new = [f"{what} {verdict.differences[what]:.2g}" for what in verdict.differences if what not in before]
        print(f"{name}: {', '.join([*new, f'{time.monotonic() - began:.0f} s'])}", flush=True)


def earlier(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """What was found before of the same card, model and packs; {} where nothing was."""
    found: dict[str, Any] = read_record(path, "result", "benchmarks/gpu.py", dict) if path.exists() else {}
    return found if all(found.get(name) == value for name, value in json.loads(json.dumps(known)).items()) else {}


def write(verdict: Verdict, path: Path) -> None:
    """What was found so far; beside it the card's record, once something was trained, or its trace, if there is
    one."""
    path.parent.mkdir(exist_ok=True)
    write_record(path, verdict.record)
    of_card, command = path.with_name(f"{path.stem}-{verdict.size.model}.json"), " ".join(["python", *sys.argv])
    if "training" in verdict.found:
        write_record(of_card, gpu_cards.card(verdict.found, command))
    elif "trace" in verdict.found and of_card.exists():
        old = read_record(of_card, "card", "benchmarks/gpu.py", dict)
        write_record(of_card, gpu_cards.with_trace(old, verdict.found, command))


def show(title: str, figures: dict[str, float]) -> None:
    """Print figures as a table."""
    console.print_table(title, ("what", "figure"), [(what, f"{value:,.4g}") for what, value in figures.items()])


def installed() -> dict[str, str]:
    """Versions of what decides which kernels run."""
    found = {"cuda": str(torch.version.cuda)}
    for package in ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-linear-attention", "apex"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def layer_figures(found: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """Of every kind and recompute mode: milliseconds of forward and backward, TFLOP/s of the two, share of the peak.

    What is computed again counts as time, not as work.
    """
    profile = Profile.from_record(found["profile"])
    works = layer_works(preset(model), profile.budgets, 1)
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
    layers = Profile.from_record(found["profile"]).layers
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
