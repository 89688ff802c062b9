"""How fast packs are read: packs a second of one core, and the workers that a node of 8 GPUs needs.

    python benchmarks/loader.py [--images 160] [--device h100] [--store-ms 20] [--cached]

The images are JPEG photographs of many sizes, made up; they are cut, packed at the paper's budgets and read as training
reads them, one pack at a time in one process. What the GPUs ask for is analytic: a pipeline without a bubble takes as
many packs a second as its GPUs can compute. The baseline reads as loaders usually do: every tensor-parallel rank
decodes for itself, and normalises on the host. With --store-ms the same pictures are also read from an S3 server (of
this machine: it takes its share of the processor) so many milliseconds away, ahead of use, in turn with the folder.
With --cached three epochs are also read with cached tiles, in turn with three that decode.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.vlm  # noqa: F401 (readies the machine, before megatron.core is imported)
from examples.demo.data import make_demo_data
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.loader import Needs, PackDataset, microbatches
from megatron.vlm.data.media.tile_cache import TileCache
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.media import Images
from megatron.vlm.pixels import normalise
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.architectures.presets import preset
from omnibal_ext.console import print_table
from omnibal_ext.costs.analytic import DEVICES, GPUS_A_NODE, analytic_profile
from omnibal_ext.errors import run_tool
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.reading import objects
from omnibal_ext.reading.stores import located
from tests import store

VIT_BUDGET, LLM_BUDGET, TILE, TOKENS_PER_TILE = 9, 4096, 448, 256
MODELS = (
    ("internvit-6b+llama3-8b", 1, 4),
    ("internvit-6b+internlm2-20b", 2, 4),
    ("internvit-6b+internlm2-20b", 4, 2),
    ("internvit-6b+yi-34b", 4, 4),
    ("internvit-6b+llama3-70b", 4, 8),
    ("internvit-6b+qwen1.5-110b", 8, 8),
)
"""The paper's, with their tensor- and pipeline-parallel sizes; one for a single node."""
EPOCHS = 3
EVERYTHING = Needs(frozenset({"tiles"}), tokens=True, labels=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=160, help="a conversation each (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of each counts (default %(default)s)")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h100", help="that asks for packs")
    parser.add_argument("--store-ms", type=float, help="also from a store so far away")
    parser.add_argument("--cached", action="store_true", help=f"also {EPOCHS} epochs with --cache-tiles")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, index = photographs(folder / store.BUCKET, arguments.images)
        reader, other = (PackDataset(data, index, EVERYTHING, decodes=decodes) for decodes in (True, False))
        unchecked = PackDataset(ChatDataset(data.folder, checks_images=False), index, EVERYTHING)
        reads: dict[str, Callable[[int], object]] = {
            "the rank that decodes": reader.__getitem__,
            "the same, images not compared": unchecked.__getitem__,
            "another tensor-parallel rank": other.__getitem__,
            "decoding and normalising (baseline)": lambda pack: as_loaders_do(reader, pack),
        }
        packs = range(index.num_packs)
        seconds = {what: fastest(read, packs, arguments.repeats) for what, read in reads.items()}
        tiles = sum(reader[pack].media_of("tiles").amount for pack in packs) / len(packs)
        further = compared(folder, reader, arguments) if arguments.store_ms is not None else []
        further += cached(folder, reader, arguments.repeats) if arguments.cached else []
    rows = [(what, f"{taken * 1e3:.1f}", f"{1 / taken:,.1f}") for what, taken in seconds.items()]
    title = f"{len(packs)} packs of {VIT_BUDGET} tiles and {LLM_BUDGET} tokens at most ({tiles:.1f} tiles on average)"
    print_table(title, ("on one core", "ms a pack", "packs/s"), rows)
    decodes, unchecked_decodes, light, baseline = seconds.values()
    rows = [demand(*model, arguments.device, decodes) for model in MODELS]
    columns = ("model", "TP", "PP", "packs/s", "cores that decode", "--num-workers")
    print_table(f"{GPUS_A_NODE} x {arguments.device} (analytic, no bubble)", columns, rows)
    print(f"comparing images with what was preprocessed: {decodes / unchecked_decodes:.2f}x")
    tensor = 4
    print(
        f"core seconds of a pack at TP={tensor} against every rank decoding and normalising: "
        f"{(decodes + (tensor - 1) * light) / (tensor * baseline):.2f}x"
    )
    for line in further:
        print(line)


def compared(folder: Path, local: PackDataset, arguments: argparse.Namespace) -> list[str]:
    """What packs cost from a store and from the folder that it serves, pass by pass in turn."""
    with served(folder, arguments.store_ms / 1e3):
        root = located(f"s3://{store.BUCKET}")
        recipe = replace(recipe_of(folder / store.BUCKET), image_root=root)
        preprocess(open_job([root / "chat.jsonl"], recipe, folder / "stored"))
        options = PackOptions(vit_budget=VIT_BUDGET, llm_budget=LLM_BUDGET)
        data = ChatDataset(folder / "stored")
        built_from = {"data": {"manifest": data.manifest}}
        index, _ = build_index(Corpus.of_dataset(data.folder), folder / "stored-packs", options, built_from)
        far, most = PackDataset(data, index, EVERYTHING), 0
        passes: dict[str, list[tuple[float, float]]] = {"folder": [], "store": []}
        for _ in range(arguments.repeats):
            for name, dataset in (("folder", local), ("store", far)):
                started, before = time.perf_counter(), time.process_time()
                for batch in microbatches(dataset, range(index.num_packs)):
                    assert not batch.broken, batch.broken
                    most = max(most, objects.in_flight())
                passes[name].append((time.perf_counter() - started, time.process_time() - before))
    seconds, used = ({name: min(one[at] for one in passes[name]) for name in passes} for at in (0, 1))
    return [
        f"{arguments.store_ms:g} ms away, read ahead: at most {most / 2**20:.1f} MiB in flight; processor of a pack "
        f"{used['store'] / used['folder']:.2f}x that of the folder's",
        f"packs a second from the store against the folder: {seconds['folder'] / seconds['store']:.2f}x",
    ]


def cached(folder: Path, reader: PackDataset, repeats: int) -> list[str]:
    """What epochs cost the processor that keep tiles and take them, beside epochs that decode."""
    passes = []
    for number in range(repeats):
        tiles = folder / f"tiles-{number}"
        kept = PackDataset(ChatDataset(reader.data.folder, tile_cache=TileCache(tiles)), reader.index, EVERYTHING)
        passes.append([[processor_seconds(one) for one in (reader, kept)] for _ in range(EPOCHS)])
    decoding, keeping = np.min(passes, axis=0).T
    entries, images = (sum(file.stat().st_size for file in path.glob(names)) for path, names in
                       ((tiles, "*/*"), (folder / store.BUCKET, "*.jpg")))  # fmt: skip
    return [
        f"--cache-tiles: {entries / images:.1f}x the images' bytes; an epoch's processor against decoding: "
        f"{', '.join(f'{one:.2f}x' for one in keeping / decoding)}",
        f"processor seconds of {EPOCHS} epochs with cached tiles against without: "
        f"{keeping.sum() / decoding.sum():.2f}x",
    ]


def processor_seconds(dataset: PackDataset) -> float:
    """Of all packs."""
    before = time.process_time()
    for batch in microbatches(dataset, range(dataset.index.num_packs)):
        assert not batch.broken, batch.broken
    return time.process_time() - before


@contextmanager
def served(folder: Path, seconds: float) -> Iterator[None]:
    """Serve a folder as a store so far away, by another process."""
    command = [sys.executable, "-m", "tests.store", str(folder), str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=Path(__file__).parents[1], **pipes) as server:  # type: ignore[call-overload]
        assert server.stdin
        assert server.stdout
        os.environ.update(store.settings(int(server.stdout.readline())))
        yield
        server.stdin.close()


def recipe_of(folder: Path) -> Recipe:
    """How the pictures become tiles."""
    return Recipe(folder, folder / "demo/tokenizer.model", "internlm2-chat", Tiling(TILE, max_tiles=6), TOKENS_PER_TILE)


def photographs(folder: Path, images: int) -> tuple[ChatDataset, PackedIndex]:
    """A dataset of as many conversations, one picture each, packed at the budgets."""
    make_demo_data(folder / "demo", samples=1, heldout_samples=1, seed=0)
    generator = np.random.default_rng(0)
    lines = []
    for number in range(images):
        width, height = (int(256 * 8 ** generator.uniform()) for _ in range(2))
        picture(width, height, generator).save(folder / f"{number}.jpg", quality=90)
        text = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "abc" * int(generator.integers(4, 60))}]
        lines.append(json.dumps({"image": f"{number}.jpg", "conversations": text}))
    (folder / "chat.jsonl").write_text("\n".join(lines))
    manifest = preprocess(open_job([folder / "chat.jsonl"], recipe_of(folder), folder / "data"))
    options = PackOptions(vit_budget=VIT_BUDGET, llm_budget=LLM_BUDGET)
    built_from = {"data": {"manifest": manifest}}
    index, _ = build_index(Corpus.of_dataset(folder / "data"), folder / "packs", options, built_from)
    return ChatDataset(folder / "data"), index


def picture(width: int, height: int, generator: np.random.Generator) -> Image.Image:
    """Large soft shapes under fine grain: decoding it takes about what a photograph takes."""
    shapes = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    soft = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = generator.integers(-12, 13, (height, width, 1), dtype=np.int16)
    return Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8))


def as_loaders_do(reader: PackDataset, pack: int) -> object:
    """A pack as one rank reads it by itself."""
    batch = reader[pack]
    images = Images.of(batch)
    assert images.values is not None
    assert images.statistics is not None
    return normalise(images.values, images.statistics)


def fastest(read: Callable[[int], object], packs: range, repeats: int) -> float:
    """Seconds a pack, of the fastest of several passes over all packs."""
    passes = []
    for _ in range(repeats):
        started = time.perf_counter()
        for pack in packs:
            read(pack)
        passes.append((time.perf_counter() - started) / len(packs))
    return min(passes)


def demand(model: str, tensor: int, pipeline: int, device: str, seconds: float) -> tuple[object, ...]:
    """What 8 GPUs take, the cores that bring it, and the workers of each rank that decodes, one a pipeline."""
    profile = analytic_profile(preset(model), device, {"tiles": VIT_BUDGET, "tokens": LLM_BUDGET}, tensor)
    costs = [profile.layers[kind] for kind in profile.cost_kinds]
    pack = sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    rate = GPUS_A_NODE / tensor / pack
    cores = rate * seconds
    pipelines = GPUS_A_NODE / (tensor * pipeline)  # less than one: a pipeline of several nodes
    return model, tensor, pipeline, f"{rate:.2f}", f"{cores:.2f}", math.ceil(cores / pipelines)


if __name__ == "__main__":
    run_tool(main)
