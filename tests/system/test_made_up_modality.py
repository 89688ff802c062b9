"""A modality that is made up, tables of numbers, is new files (`tests/made_up`) and registries' lines: nothing else."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.vlm.data.templates import chat_template
from megatron.vlm.preprocessing.tokenizer import load_tokenizer
from tests.programs import FOLDERS, PLAIN, ROOT, tool
from tests.system.families import build

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")
LINES = {
    "omnibal_ext/modalities/modality.py": (
        "MODALITIES = (VISION, LANGUAGE, AUDIO, FILM)",
        'TABLE = Modality(\n    "table", "rows", ("table_embed", "table", "table_projector"), "rows", "table_budget", '
        '"tables", "<table>", "count", typical=8)\nMODALITIES = (VISION, LANGUAGE, AUDIO, FILM, TABLE)',
    ),
    "omnibal_ext/modalities/registry.py": (
        "    LANGUAGE: Counted(",
        "    TABLE: Counted(table.matrices, table.works, table.weights),\n    LANGUAGE: Counted(",
    ),
    "omnibal_ext/families/registry.py": ("    INTERNVL, LLAVA,", "    INTERNVL, LLAVA, TABULAR,"),
    "megatron/vlm/models/encoders.py": ("FILM: FilmLayers()}", "FILM: FilmLayers(), TABLE: TableLayers()}"),
    "megatron/vlm/data/inputs/registry.py": ("FILM: FilmReader}", "FILM: FilmReader, TABLE: TableReader}"),
    "megatron/vlm/data/schemas/registry.py": ("FILM: films.SCHEMA}", "FILM: films.SCHEMA, TABLE: tables.SCHEMA}"),
    "megatron/vlm/data/formats/kinds.py": (
        "MEDIA = (IMAGES, VIDEOS, SOUNDS, FILMS)",
        'TABLES = Kind(TABLE, TABLE.mark, "a table", "tables", ("table", "tables"), ("table",), (".csv",))\n'
        "MEDIA = (IMAGES, VIDEOS, SOUNDS, FILMS, TABLES)",
    ),
    "megatron/vlm/preprocessing/measures/registry.py": (
        "    FILMS: films.film,\n}",
        "    FILMS: films.film,\n    TABLES: tables.table,\n}",
    ),
}
"""What a registry has, and what with the new line."""
RULE = ("films.rule_in),\n}", "films.rule_in),\n    TABLE: RuleReader(tables.rule_of, tables.rule_in),\n}")
IMPORTS = {
    "omnibal_ext/modalities/registry.py": (
        "from omnibal_ext.modalities.modality import TABLE", "from omnibal_ext.modalities.table import counted as table"
    ),
    "omnibal_ext/families/registry.py": ("from omnibal_ext.families.tabular.family import FAMILY as TABULAR",),
    "megatron/vlm/models/encoders.py": (
        "from megatron.vlm.models.tables import TableLayers", "from omnibal_ext.modalities.modality import TABLE"
    ),
    "megatron/vlm/data/inputs/registry.py": (
        "from megatron.vlm.data.inputs.tables import TableReader", "from omnibal_ext.modalities.modality import TABLE"
    ),
    "megatron/vlm/data/schemas/registry.py": (
        "from megatron.vlm.data.schemas import tables", "from omnibal_ext.modalities.modality import TABLE"
    ),
    "megatron/vlm/data/formats/kinds.py": ("from omnibal_ext.modalities.modality import TABLE",),
    "megatron/vlm/preprocessing/measures/registry.py": (
        "from megatron.vlm.data.formats.kinds import TABLES", "from megatron.vlm.preprocessing.measures import tables",
        "from omnibal_ext.modalities.modality import TABLE",
    ),
}  # fmt: skip
SIZES = {"layers": 3, "hidden_size": 24, "heads": 2, "ffn_hidden_size": 40, "numbers": 6, "tokens_a_row": 2}
LENGTHS = (3, 11, 7, 5)
"""Rows of the tables."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product with the modality in it."""
    tree = tmp_path_factory.mktemp("tree")
    for room in ("omnibal_ext", "megatron", "tools"):
        # With what is compiled of it, but not what another process is writing.
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("*.pyc.*", "*.tmp.*"))
    shutil.copytree(ROOT / "tests/made_up", tree, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in LINES.items():
        text = (tree / name).read_text()
        assert text.count(old) == 1, name
        text = text.replace(old, new).replace(*RULE)
        first = text.index("\nfrom ") + 1
        imports = "".join(f"{line}\n" for line in IMPORTS.get(name, ()))
        (tree / name).write_text(text[:first] + imports + text[first:])
    return tree


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of LLaVA's with tables' weights and tokens, beside conversations about pictures and tables."""
    folder = tmp_path_factory.mktemp("tabular")
    demo = folder / "made"
    tool("make_demo_data.py", "--output-dir", demo, "--samples", 24, "--heldout-samples", 2)
    build("llava-1.5", demo, folder)
    loaded = load_tokenizer(folder / "model/tokenizer.model", (*chat_template("mistral").tokens, "<image>", "<cell>"))
    config = json.loads((folder / "model/config.json").read_text())
    config |= {"model_type": "tabular_llava", "table_config": SIZES, "table_token_id": loaded.token_id("<cell>")}
    (folder / "model/config.json").write_text(json.dumps({**config, "architectures": ["TabularLlava"]}))
    weights = safetensors.load_file(folder / "model/model.safetensors")
    safetensors.save_file(
        weights | made_weights(config["text_config"]["hidden_size"]), folder / "model/model.safetensors"
    )
    generator = np.random.default_rng(0)
    lines = []
    for number, rows in enumerate(LENGTHS):
        np.savetxt(folder / f"{number}.csv", generator.normal(size=(rows, 6)), delimiter=",")
    image = min(path.name for path in (demo / "images").iterdir())
    for number in range(16):
        asked = {"table": f"{number % 4}.csv", **({"image": f"demo/images/{image}"} if number % 2 else {})}
        words = "<image>" * (number % 2) + f"<table>What is in number {number}?"
        turns = [{"from": "human", "value": words}, {"from": "gpt", "value": "A sum of seven."}]
        lines.append(json.dumps({**asked, "conversations": turns}))
    (folder / "tables.jsonl").write_text("\n".join(lines))
    return folder


def made_weights(out: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    width, inner = SIZES["hidden_size"], SIZES["ffn_hidden_size"]
    linear = {"embed": (width, 6), "tokens": (2 * out, width)}
    for layer in range(SIZES["layers"]):
        shapes = {"qkv": (3 * width, width), "proj": (width, width), "fc1": (inner, width), "fc2": (width, inner)}
        linear |= {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}
    norms = ["norm", *(f"layers.{layer}.norm{number}" for layer in range(SIZES["layers"]) for number in (1, 2))]
    found = {f"table_tower.{name}.weight": torch.randn(shape) * 0.1 for name, shape in linear.items()}
    found |= {f"table_tower.{name}.bias": torch.randn(shape[0]) * 0.1 for name, shape in linear.items()}
    found |= {f"table_tower.{name}.weight": 1 + torch.randn(width) * 0.1 for name in norms}
    return found | {f"table_tower.{name}.bias": torch.randn(width) * 0.1 for name in norms}


def run(tree: Path, name: str, *words: object) -> None:
    """A tool of the tree, in a fork of a process that has imported the tree."""
    server = f"{PLAIN} with tables"
    FOLDERS[server] = (str(tree),)
    tool(name, *words, room=str(tree / "tools"), server=server)


@pytest.fixture(scope="module")
def packed(tree: Path, model: Path) -> Path:
    """The folder of the dataset and of its packs."""
    inputs = ("--input", model / "demo/train.jsonl", model / "tables.jsonl", "--model", model / "model")
    run(tree, "preprocess_data.py", *inputs, "--output-dir", model / "data")
    budgets = ("--vit-budget", 6, "--llm-budget", 400, "--table-budget", 32, "--micro-batches", 2)
    output = ("--output-dir", model / "packs", "--model", model / "model")
    run(tree, "pack_data.py", "--data", model / "data", *output, *budgets)
    return model


@pytest.fixture(scope="module")
def trained(tree: Path, packed: Path) -> dict[int, Path]:
    """What one process trained, and what two did, a pipeline."""
    found = {ranks: packed / f"run{ranks}" for ranks in (1, 2)}
    for ranks, folder in found.items():
        words = ("--data", packed / "data", "--packs", packed / "packs", "--run-dir", folder, "--epochs", 1)
        words = (*words, "--nproc-per-node", ranks, "--pipeline-model-parallel-size", ranks, "--analytic", "a100")
        run(tree, "launch.py", "--model", packed / "model", *words, "--lr", 1e-3, "--", "--log-interval", 1)
    return found


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_tables_are_preprocessed_and_packed_within_their_budget(packed: Path) -> None:
    manifest = json.loads((packed / "data/manifest.json").read_text())
    assert manifest["table"] == {"numbers": 6, "tokens_a_row": 2}
    with np.load(packed / "data/sizes.npz") as sizes:
        assert sorted(sizes["rows"][-16:]) == sorted(LENGTHS * 4)
    said = json.loads((packed / "packs/manifest.json").read_text())
    rows = np.load(packed / "packs/pack_loads.npy")[:, said["loads"].index("rows")]
    assert 0 < rows.max() <= said["budgets"]["rows"] == 32
    assert rows.sum() == 4 * sum(LENGTHS)


def test_a_pipeline_with_tables_equals_one_process(trained: dict[int, Path]) -> None:
    plan = json.loads(next(trained[2].glob("plan*.json")).read_text())
    assert {"table_embed", "table", "table_projector"} <= set(plan["chain"])
    found, wanted = losses(trained[2]), losses(trained[1])
    assert len(found) > 2
    assert found[-1] < found[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_trained_encoder_of_tables_is_exported(tree: Path, packed: Path, trained: dict[int, Path]) -> None:
    run(tree, "convert_checkpoint.py", "--to-hf", trained[2] / "checkpoints", "--output-dir", packed / "back")
    before, after = (safetensors.load_file(packed / name / "model.safetensors") for name in ("model", "back"))
    assert {name: value.shape for name, value in after.items()} == {name: value.shape for name, value in before.items()}
    changed = [name for name in made_weights(8) if not torch.equal(before[name], after[name].to(before[name]))]
    assert len(changed) > 20
