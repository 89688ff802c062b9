"""Long samples: packs wider than a rank as we make them, beside HBP as printed and packs of one length, simulated.

    python benchmarks/long_context.py [--share 1.0] [--studies 4]

The mix of HBP (arXiv 2503.07680, made up to its published shares), and chats with films, packed by every method and
played over a whole epoch on H100s at the planner's analytic costs: layers, recomputation that fits, exchange in teams,
the pipeline's bubble, update. First in HBP's own layout (one GPU a model, 16K tokens a rank, 28 of 32 layers
recomputed), then each method in the layout that is best for it.

    naive             packs of the longest length, all of whose tokens travel (Ulysses), in random order
    sorted            the same by attention; `cut only`: tokens of samples that are cut over ranks travel, and no others
    levels            two lengths, short samples fill long packs, random order; HBP as printed: the same by attention
    ours, one width   our packs and order, all as wide as the longest sample needs
    ours              packs as wide as their samples need, ranks level in seconds

`over naive` is tokens a second; ABR and CR are HBP's measures (attention, tokens that travel); `long` is the standard
deviation over iterations of the share of tokens in samples beyond 16K: 0 where all have as many. Every method trains
every sample; iterations of the others that fill no batch take as long as their work, without waiting or an update, ours
as long as any. Where ranks with long samples run fewer packs, so many more are dealt that a step has as many tokens.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import films, long_text
from benchmarks.hierarchical import hierarchical_epoch, hierarchical_iterations, naive_epoch
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.presets import preset
from omnibal_ext.arrays import Ints
from omnibal_ext.console import print_table
from omnibal_ext.costs.analytic import DEVICES, GPUS_A_NODE, analytic_profile
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.layout.workload import packs_of_loads
from omnibal_ext.packing.build import Packer
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.balance_ranks import assign_zigzag
from omnibal_ext.packing.ordering.metrics import rank_loads
from omnibal_ext.packing.pack_epoch import Epoch, pack_epoch
from omnibal_ext.packing.packs import ATTENTION, TILES, TOKENS
from omnibal_ext.packing.shard_loads import shard_loads, tokens_cut
from omnibal_ext.sizes import Sizes

K = 1024
LONGEST, BEYOND = 128 * K, 16 * K
RECOMPUTED = 28
FEWER = 1.15  # tokens of a step that is filled again
H100 = DEVICES["h100"]
FAR = round(H100.node_bandwidth / H100.network_bandwidth)
"""So many times as long takes what a team exchanges that leaves its node."""


@dataclass(frozen=True)
class Method:
    """How to pack, what travels, where images are encoded."""

    packer: Packer
    widths: str
    """"one" of the longest sample, "two" with that of a rank, or "all"."""
    cut_only: bool = False
    shuffled: bool = False
    every_vit: bool = False


METHODS = {
    "naive, ViT on every rank": Method(naive_epoch, "one", every_vit=True),
    "naive": Method(naive_epoch, "one"),
    "naive, cut only": Method(naive_epoch, "one", cut_only=True),
    "sorted": Method(hierarchical_epoch, "one"),
    "sorted, cut only": Method(hierarchical_epoch, "one", cut_only=True),
    "levels": Method(hierarchical_epoch, "two", shuffled=True),
    "HBP as printed": Method(hierarchical_epoch, "two"),
    "ours, one width": Method(pack_epoch, "one", cut_only=True),
    "ours": Method(pack_epoch, "all", cut_only=True),
}
VIT = "naive, ViT on every rank"


@dataclass(frozen=True)
class Setting:
    """A layout: tensor and pipeline ranks, tokens of a data-parallel rank; HBP's recomputes what it says."""

    tensor: int
    pipeline: int
    budget: int
    hbp: bool = False

    @property
    def widest(self) -> int:
        """Ranks that hold the longest sample."""
        return LONGEST // self.budget

    def __str__(self) -> str:
        return f"TP {self.tensor} PP {self.pipeline}, {self.budget // K}K a rank"


@dataclass(frozen=True)
class Study:
    """A model, its samples and GPUs, tokens of a step."""

    model: Architecture
    mix: Callable[[int], Sizes]
    samples: int
    gpus: int
    batch: int
    settings: tuple[Setting, ...]

    def ranks(self, setting: Setting) -> int:
        """Data-parallel ones."""
        return self.gpus // (setting.tensor * setting.pipeline)

    def micro_batches(self, setting: Setting) -> int:
        """Packs of a rank and step, by its budget."""
        return self.batch // (self.ranks(setting) * setting.budget)

    def tiles(self, setting: Setting) -> int:
        """That a rank's pack may have: four patches an image token, or none."""
        return 4 * setting.budget * (self.mix is films) or 1

    def runs(self, setting: Setting) -> bool:
        """Whether there are ranks for the longest sample, and packs for the pipeline."""
        return setting.widest <= self.ranks(setting) and self.micro_batches(setting) >= setting.pipeline


def text_model(name: str) -> Architecture:
    """The language model of a preset, behind one ViT layer that packs without images pass by."""
    model = preset("llava-1.6-llama3-8b")
    return replace(model, name=name, vision=replace(model.vision, layers=1), language=preset(name).language)


def grid(tensor: Sequence[int], pipeline: Sequence[int], budgets: Sequence[int]) -> tuple[Setting, ...]:
    """All settings of these."""
    return tuple(Setting(t, p, b * K) for t in tensor for p in pipeline for b in budgets)


SMALL, LARGE = "llava-1.6-llama3-8b", "internvl2-76b"
STUDIES = {
    "text, 8B, HBP's layout": Study(text_model(SMALL), long_text, 60_000, 32, 512 * K, (Setting(1, 1, 16 * K, True),)),
    "text, 8B, tuned": Study(text_model(SMALL), long_text, 60_000, 32, 512 * K, grid((1, 2, 4), (1, 2), (8, 16, 32))),
    "text, 70B, tuned": Study(text_model(LARGE), long_text, 60_000, 64, 512 * K, grid((8,), (1, 2), (16, 32, 64))),
    "films, 7B, tuned": Study(preset("qwen2.5-vl-7b"), films, 40_000, 32, 1024 * K, grid((1, 2), (1, 2), (16, 32))),
}


@dataclass(frozen=True)
class Found:
    """What a method gives in a setting."""

    rate: float
    """Tokens a second."""
    wait: float
    """Of ranks for the fullest one, by their work."""
    idle: float
    """Of all time that which is no work: waiting, the pipeline's bubble, the update."""
    attention: float
    travelling: float
    long: float
    step: float
    """Tokens of an iteration."""
    setting: Setting
    recomputed: int


@cache
def costs_of(study: str, setting: Setting) -> Profile:
    """A rank's."""
    budgets, ranks = {"tiles": STUDIES[study].tiles(setting), "tokens": setting.budget}, STUDIES[study].ranks(setting)
    return analytic_profile(STUDIES[study].model, "h100", budgets, setting.tensor, ranks)


def packed(study: str, setting: Setting, method: Method, sizes: Sizes, micro_batches: int) -> Epoch:
    """One epoch, with slots assigned."""
    widths = tuple(2**n for n in range(setting.widest.bit_length()))
    chosen = {"one": widths[-1:], "two": tuple(sorted({1, widths[-1]})), "all": widths}[method.widths]
    options = PackOptions(
        "balanced", STUDIES[study].tiles(setting), setting.budget,
        data_parallel_size=STUDIES[study].ranks(setting), micro_batches=micro_batches,
        pipeline_model_parallel_size=setting.pipeline, widths=chosen,
    )  # fmt: skip
    costs = PackCosts.of_profile(costs_of(study, setting))
    return method.packer(Corpus.of(sizes), np.zeros(len(sizes), np.int8), options, costs, 0)


def slots_of(epoch: Epoch, ranks: int, micro_batches: int, method: Method) -> tuple[Ints, Ints]:
    """Widths of packs, and who runs what: [P], [iterations, ranks, microbatches]."""
    if epoch.slots is None or epoch.widths is None:
        order = np.append(np.arange(len(epoch.packs)), [-1] * (-len(epoch.packs) % (ranks * micro_batches)))
        return np.ones(len(epoch.packs), np.int64), assign_zigzag(order.reshape(-1, ranks * micro_batches), ranks)
    if method.shuffled:
        random = np.random.default_rng(2).integers(0, 2**31, epoch.loads.shape)
        return epoch.widths, hierarchical_iterations(random, epoch.widths, ranks, micro_batches, 2)
    return epoch.widths, epoch.slots


def loads_of_ranks(epoch: Epoch, widths: Ints, sizes: Sizes, method: Method, setting: Setting) -> Ints:
    """Tiles, tokens, squares of a rank of each pack, and tokens that it sends: [P, 4]."""
    if method.cut_only:
        loads = shard_loads(epoch.packs, sizes, widths)
    else:  # an even share of every sample
        sent = epoch.loads[:, TOKENS] * (widths - 1) // widths**2
        loads = np.column_stack([-(-epoch.loads[:, :3] // widths[:, None]), sent])
    if method.every_vit:
        loads[:, TILES] = epoch.loads[:, TILES]
    loads[:, -1] *= np.where(widths * setting.tensor > GPUS_A_NODE, FAR, 1)
    return loads


def layout_of(problem: LayoutProblem, setting: Setting) -> Layout:
    """Cut even in seconds, as few layers recomputed as fit; or HBP's. Raises UserError where nothing fits."""
    if not setting.hbp:
        return find_layouts(replace(problem, packs=None), "profile")[0].layout
    chain = problem.profile.chain
    layers = [number for number, kind in enumerate(chain) if kind == "llm"][:RECOMPUTED]
    return Layout((0, len(chain)), (tuple(layers),))


def play(name: str, setting: Setting, method: Method, sizes: Sizes, more: float = 1.0) -> Found:
    """Pack an epoch, assign its slots and play it, of so many times the packs a step that budgets make it.

    Raises UserError where nothing fits.
    """
    study, profile = STUDIES[name], costs_of(name, setting)
    micro_batches = round(more * study.micro_batches(setting))
    problem = LayoutProblem(profile, setting.pipeline, micro_batches, memory_bytes=H100.memory_bytes)
    layout = layout_of(problem, setting)
    epoch = packed(name, setting, method, sizes, micro_batches)
    widths, slots = slots_of(epoch, study.ranks(setting), micro_batches, method)
    counted = (slots >= 0).all(axis=(1, 2)) | (method.packer is pack_epoch)
    loads = loads_of_ranks(epoch, widths, sizes, method, setting)
    problem = replace(problem, packs=packs_of_loads(loads[:, :3], slots, loads[:, 3], widths))
    work = work_of(problem, layout)
    seconds = np.where(counted, problem.iteration_seconds(layout), work.mean(axis=1))
    tokens = rank_loads(slots, epoch.loads[:, TOKENS] / widths).sum(axis=1)
    beyond = np.append(0, np.cumsum(np.where(sizes.tokens > BEYOND, sizes.tokens, 0)[epoch.packs.sample_ids]))
    beyond = np.diff(beyond[epoch.packs.pack_offsets])
    travel = tokens_cut(epoch.packs, sizes, widths) if method.cut_only else epoch.loads[:, TOKENS] * (widths > 1)
    step = float(tokens[counted].mean())
    if more == 1 and FEWER * step < study.batch:
        return play(name, setting, method, sizes, study.batch / step)
    attention, long = rank_loads(slots, loads[:, ATTENTION])[counted], rank_loads(slots, beyond / widths).sum(axis=1)
    busy, work = float(seconds[counted].sum()), work[counted]
    return Found(
        rate=float(tokens.sum() / seconds.sum()),
        wait=float(1 - work.mean(axis=1).sum() / work.max(axis=1).sum()),
        idle=float(1 - work.mean(axis=1).sum() / busy),
        attention=float(np.mean(1 - attention.mean(axis=1) / attention.max(axis=1))),
        travelling=float(rank_loads(slots, travel / widths).sum() / tokens.sum()),
        long=float(np.std((long / tokens)[counted])),
        step=step,
        setting=setting,
        recomputed=sum(map(len, (*layout.recompute, *layout.recompute_cheap))),
    )


def work_of(problem: LayoutProblem, layout: Layout) -> NDArray[np.float64]:
    """Seconds that every data-parallel rank works, the mean of its pipeline: [iterations, ranks]."""
    tables, (held, again) = problem.tables, problem.counts(layout)
    work = np.tensordot(held.sum(axis=0), tables.forward + tables.backward, 1)
    work += np.tensordot(again.sum(axis=0), tables.recompute, 1)
    return np.asarray(work.sum(axis=1).reshape(problem.cases) / problem.ranks)


def compare(name: str, share: float, methods: Sequence[str]) -> dict[str, Found]:
    """Print the table of a study: of every method the setting that is best for it."""
    study = STUDIES[name]
    sizes = study.mix(round(share * study.samples))
    results: dict[str, Found] = {}
    for label in methods:
        runs = [run for run in (_tried(name, each, METHODS[label], sizes) for each in study.settings) if run]
        results[label] = max(runs, key=lambda run: run.rate)
    naive = results["naive"].rate
    rows = [
        (
            label, f"{run.rate / naive:.2f}x", f"{run.rate / 1e3:.0f}", f"{run.wait:.3f}", f"{run.idle:.3f}",
            f"{run.attention:.3f}", f"{run.travelling:.3f}", f"{run.long:.3f}", f"{run.step / K:.0f}K",
            str(run.setting), run.recomputed,
        )
        for label, run in results.items()
    ]  # fmt: skip
    columns = (
        "", "over naive", "K tokens/s", "wait", "idle", "ABR", "CR", "long", "a step", "layout", "recomputed",
    )  # fmt: skip
    tokens = int(sizes.tokens.sum())
    title = f"{name}: {study.gpus} H100, {len(sizes):,} samples, {tokens / 1e6:.0f}M tokens, {study.batch // K}K a step"
    print_table(title, columns, rows)
    return results


def _tried(name: str, setting: Setting, method: Method, sizes: Sizes) -> Found | None:
    try:
        return play(name, setting, method, sizes) if STUDIES[name].runs(setting) else None
    except UserError:  # it fits no GPU
        return None


def main() -> None:
    """Compare, and end with the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the samples (default %(default)s)")
    parser.add_argument("--studies", type=int, default=len(STUDIES), help="the first ones alone (default: all)")
    arguments = parser.parse_args()
    share, ratios = arguments.share, []
    for name, study in [*STUDIES.items()][: arguments.studies]:
        methods = [label for label in METHODS if study.mix is films or label != VIT]
        results = compare(name, share, methods)
        ours, others = results["ours"].rate, {label: run.rate for label, run in results.items() if label != "ours"}
        best = max(others, key=others.__getitem__)
        over = [(label, ours / others[label]) for label in ("naive", VIT, "HBP as printed", best) if label in others]
        ratios.append(f"{name}: ours over " + ", ".join(f"{label} {ratio:.2f}x" for label, ratio in over))
    print("\n".join(ratios))


if __name__ == "__main__":
    run_tool(main)
