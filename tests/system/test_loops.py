"""Packs of every family give what its samples give one by one, in plain DDP and in `Trainer`."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.options import PackOptions
from tests.long import short
from tests.programs import ROOT, free_port, result_of, run_ranks, tool
from tests.system.families import PACKED, WITH_KERNELS, build

pytest.importorskip("accelerate")
pyarrow = pytest.importorskip("pyarrow")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.starts
RANKS, MICRO_BATCHES, TOLERANCE = 2, 2, 1e-5
SAMPLES = 14
OFTEN = (
    "internvl3.5", "llava-1.5", "llava-1.6", "llava-onevision", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma-3",
    "gemma-4",
)  # fmt: skip
"""One of each way in which packs are told apart; positions and images are in tests/unit/hf/test_packs.py too."""
BY_TRL = [one for one in PACKED if not one.startswith(("gemma", "video-llava", *WITH_KERNELS))]
"""It adds up masks, of which Gemma's packs have two."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations about no picture, one and several; as a dataset that Hugging Face's library saved to a folder."""
    folder = tmp_path_factory.mktemp("loops")
    tool("make_demo_data.py", "--output-dir", folder, "--samples", SAMPLES, "--heldout-samples", 4)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for row in rows:
        names = row.pop("image", [])
        names = names if isinstance(names, list) else [names]
        row["images"] = [{"bytes": (folder / name).read_bytes(), "path": Path(name).name} for name in names]
    (folder / "saved").mkdir()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(folder / "saved/data-00000-of-00001.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("dataset_info.json", "state.json"):
        (folder / "saved" / name).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def folders(demo: Path, tmp_path_factory: pytest.TempPathFactory, is_long: bool) -> dict[str, Path]:
    """A model, a dataset and the packs of one step of every family: texts alone, pictures, films where it sees them."""
    root, families = tmp_path_factory.mktemp("families"), PACKED if is_long else OFTEN
    for family in families:
        folder = root / family
        folder.mkdir()
        build(family, demo, folder)
        inputs = (demo / "saved", *sorted(folder.glob("*s.jsonl")))
        tool("preprocess_data.py", "--model", folder / "model", "--input", *inputs, "--output-dir", folder / "data")
        pack(folder)
    return {family: root / family for family in families}


def pack(folder: Path) -> None:
    """As many packs as one step has, one of them of texts alone."""
    corpus = Corpus.of_dataset(folder / "data")
    with np.load(folder / "data/sizes.npz") as sizes:
        shown = corpus.sizes.tiles + sizes.get("stills", 0)
    corpus = replace(corpus, groups=(shown > 0).astype(np.int64))
    for share in range(20, 100, 5):
        shutil.rmtree(folder / "packs", ignore_errors=True)
        options = PackOptions(
            vit_budget=int(corpus.sizes.tiles.sum()), llm_budget=int(corpus.sizes.tokens.sum()) * share // 100,
            data_parallel_size=RANKS, micro_batches=MICRO_BATCHES,
        )  # fmt: skip
        _, summary = build_index(corpus, folder / "packs", options)
        if summary.packs == RANKS * MICRO_BATCHES:
            return
    raise AssertionError("no budget gives packs of one step")


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> dict[str, dict[str, float]]:
    result = result_of(run_ranks("tests.system.loops", RANKS, [str(folder) for folder in folders.values()]))
    return {family: result[str(folder)] for family, folder in folders.items()}


@pytest.mark.parametrize("family", short(PACKED, OFTEN))
def test_packs_give_what_samples_give_one_by_one(family: str, found: dict[str, dict[str, float]]) -> None:
    seen = found[family]
    assert seen["ddp"] == pytest.approx(seen["alone"], abs=TOLERANCE)
    assert seen["trainer"] == pytest.approx(seen["alone"], abs=TOLERANCE)
    assert seen["gradients"] < 1e-4
    assert seen["trainer's norm"] == pytest.approx(seen["norm"], rel=1e-4)
    assert seen["padded"] < TOLERANCE
    assert seen["packs without images"] == 1


@pytest.mark.skipif("TRL_PYTHON" not in os.environ, reason="TRL_PYTHON names no interpreter with trl")
@pytest.mark.parametrize("family", short(BY_TRL, set(BY_TRL) & set(OFTEN)))
def test_trl_trains_on_them_too(family: str, folders: dict[str, Path], found: dict[str, dict[str, float]]) -> None:
    """In an environment of its own: the libraries that it brings start threads, and the tests' processes are forks."""
    folder = folders[family]
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", RANKS, "--master-port", free_port())
    flags = ("--data", folder / "data", "--packs", folder / "packs", "--model", folder / "model", "--steps", 1)
    command = [os.environ["TRL_PYTHON"], *ranks, ROOT / "examples/train_trl.py", *flags]
    alone = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*map(str, command)], env=alone, capture_output=True, text=True, check=False)
    said = re.search(r"^step 0: loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert said, done.stderr[-2000:]
    assert float(said[1]) == pytest.approx(found[family]["alone"], abs=TOLERANCE)


def configuration(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder / "model", attn_implementation="sdpa")


def test_a_family_that_is_not_known_is_refused_by_name(folders: dict[str, Path]) -> None:
    data = ChatDataset(folders["llava-1.5"] / "data")
    with pytest.raises(UserError, match=r"models of type 'blip-2' are not known; known: internvl, llava, "):
        JoinPack(data, transformers.Blip2Config())


@pytest.mark.parametrize(
    ("family", "field", "value", "said"),
    [
        ("llava-1.5", "layer_types", ["full_attention", "linear_attention"], "llava: its layers of linear_attention"),
        ("internvl3.5", "rope_parameters", {"rope_type": "dynamic"}, r"has \d+ tokens, more than 30; .*tokens 30"),
    ],
)
def test_layers_that_would_see_beyond_a_sample_are_refused(
    family: str, field: str, value: Any, said: str, folders: dict[str, Path]
) -> None:
    config = configuration(folders[family])
    setattr(config.text_config, field, value)
    config.text_config.max_position_embeddings = 30
    with pytest.raises(UserError, match=said):
        JoinPack(ChatDataset(folders[family] / "data"), config)


def test_a_rotation_that_no_sample_of_the_data_stretches_is_none(folders: dict[str, Path]) -> None:
    data, config = ChatDataset(folders["internvl3.5"] / "data"), configuration(folders["internvl3.5"])
    config.text_config.rope_parameters = {"rope_type": "dynamic"}
    config.text_config.max_position_embeddings = int(data.sizes.tokens.max())
    JoinPack(data, config)


@pytest.mark.parametrize(
    ("family", "other", "said"),
    [
        ("llava-1.5", "gemma-3", r"tiling gemma, not pad, image token \d+, not \d+"),
        ("qwen2.5-vl", "qwen3-vl", None),
        ("internvl3.5", "llava-1.5", r"tile size 16, not 32"),
        ("llava-onevision", "llava-1.6", r"tiling anyres, not anyres_max_9, .*grids \(rows, columns\) \[\(1, 1\)"),
    ],
)
def test_a_dataset_of_another_model_is_refused_with_all_that_differs(
    family: str, other: str, said: str | None, folders: dict[str, Path]
) -> None:
    data, config = ChatDataset(folders[other] / "data"), configuration(folders[family])
    if said is None:  # the words differ, which models learn
        JoinPack(data, config)
        return
    with pytest.raises(UserError, match=said):
        JoinPack(data, config)


def test_grids_that_the_model_would_not_have_taken_are_refused(folders: dict[str, Path]) -> None:
    """It takes them from sizes, whatever the limit was."""
    data, config = ChatDataset(folders["llava-1.6"] / "data"), configuration(folders["llava-1.6"])
    JoinPack(data, config)
    data.manifest["tiling"]["max_tiles"] = 3
    grids = r"grids \(rows, columns\) \[\(1, 2\), \(2, 1\), \(3, 1\), \(1, 3\)\], not .*; .* without --max-tiles"
    with pytest.raises(UserError, match=grids):
        JoinPack(data, config)
