"""From Hugging Face to a training run on two pipeline ranks and back, as a user does it."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.vlm.hf import checkpoint
from megatron.vlm.hf.names import table_name
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import PARTS
from omnibal_ext.families.internvl.family import FAMILY
from omnibal_ext.plan import Plan
from omnibal_ext.trained import Trained
from tests.distributed import beside_cases, cases
from tests.endurance import kills
from tests.programs import result_of, tool
from tests.system.test_training import folder as folder  # the demo dataset  # noqa: PLC0414
from tests.unit.hf import models

transformers = pytest.importorskip("transformers")
INTERNVL = {**models.INTERN_VIT, "image_size": [32, 32], "patch_size": [8, 8]}
CASE = cases.Case(cases.Question("small", (), "all", "token"), "1f1b", 1, "none", False, False, seed=5)
BESIDE = beside_cases.Beside(CASE, "bubbles", "kept", True, 4)
TEXT = {**models.TEXT, "model_type": "llama", "vocab_size": 512, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An InternVL that fits the demo data: five heads, QK-norm."""
    path = tmp_path_factory.mktemp("hf") / "theirs"
    vision = {**INTERNVL, "use_qk_norm": True, "norm_type": "rms_norm"}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=TEXT, image_token_id=7, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    transformers.InternVLForConditionalGeneration(config).save_pretrained(path, max_shard_size="200KB")
    return path


def convert(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return tool("convert_checkpoint.py", *arguments, check=check)


@pytest.fixture(scope="module")
def ours(theirs: Path) -> Path:
    done = convert("--from-hf", theirs, "--output-dir", theirs.parent / "ours", "--check", "--json")
    assert json.loads(done.stdout)["logit_difference"] < 1e-4
    return theirs.parent / "ours"


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def train(
    folder: Path, run: str, ours: Path, rate: str, *flags: object, pipeline: int = 2, tensor: int = 1,
    load: Path | None = None, adapted: tuple[str, ...] = (), beside: bool = False,
) -> list[dict[str, float]]:  # fmt: skip
    model = preset(str(ours))
    trained = Trained(tuple(PARTS), 4, adapted) if adapted else Trained()
    cuts = (3,) if pipeline == 2 else ()
    plan = Plan.from_cuts(model.chain, cuts, model=model.name, model_hash=model.hash, trained=trained)
    if beside:
        plan = replace(BESIDE.plan(model.chain, pipeline, tensor), model=model.name, model_hash=model.hash)
    flags = (*flags, *(("--lora-rank", 4, "--lora-alpha", 6, "--lora-targets", *adapted) if adapted else ()))
    plan.save(folder / f"{run}.json")
    tool(
        "launch.py", "--preset", ours, "--data", folder / "data", "--packs", folder / "packs", "--run-dir",
        folder / run, "--plan", folder / f"{run}.json", "--nproc-per-node", 2, "--tensor-model-parallel-size", tensor,
        "--pipeline-model-parallel-size", pipeline, "--", "--lr", rate, "--lr-decay-iters", 4, "--log-interval", 1,
        "--load", load or ours, "--save", folder / run / "saved", "--save-interval", 2, *flags,
    )  # fmt: skip
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


def test_training_starts_from_the_weights_and_they_come_back(folder: Path, theirs: Path, ours: Path) -> None:
    """With a learning rate of zero what comes back is what went in, bit by bit; the run's --preset says how."""
    lines = train(folder, "still", ours, "0", "--train-iters", 2)
    assert [line["iteration"] for line in lines] == [1, 2]  # from the beginning: no iteration, no optimizer is loaded
    convert("--to-hf", folder / "still" / "saved", "--output-dir", folder / "back")
    before, after = weights(theirs), weights(folder / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def tuned(folder: Path, ours: Path) -> Path:
    """What two steps with the tower beside the pipeline make of it."""
    train(folder, "beside", ours, "1e-3", "--train-iters", 2, beside=True)
    done = convert("--to-hf", folder / "beside" / "saved", "--output-dir", folder / "tuned", "--check", "--json")
    assert json.loads(done.stdout)["logit_difference"] < 1e-4
    return folder / "tuned"


def test_a_tower_beside_the_pipeline_exports_what_a_cut_does(
    folder: Path, theirs: Path, ours: Path, tuned: Path
) -> None:
    """Trained beside, through a cut and back without learning: the same bits in all saves and exports."""
    still = ("--no-load-optim", "--override-opt-param-scheduler")
    train(folder, "as-cut", ours, "0", "--train-iters", 3, *still, load=folder / "beside/saved")
    train(folder, "as-beside", ours, "0", "--train-iters", 4, *still, load=folder / "as-cut/saved", beside=True)
    exports, saves = [], []
    for iteration, run in enumerate(("beside", "as-cut", "as-beside"), start=2):
        export = tuned if run == "beside" else folder / f"{run}-exported"
        if run != "beside":
            convert("--to-hf", folder / run / "saved", "--output-dir", export)
        exports.append(weights(export))
        saves.append(kills.tensors(folder / run / f"saved/iter_{iteration:07d}"))
    learned = [name for name, weight in weights(theirs).items() if not torch.equal(weight, exports[0][name])]
    assert any("vision_tower" in name for name in learned)
    assert "language_model.lm_head.weight" in learned
    for found, kept in zip(exports[1:], saves[1:], strict=True):
        assert found.keys() == exports[0].keys() == weights(theirs).keys()
        assert all(torch.equal(found[name], weight) for name, weight in exports[0].items())
        own = [name for name in saves[0] if name.startswith("links.")]
        assert len(own) > 20
        assert all(torch.equal(kept[name], saves[0][name]) for name in own)


def test_a_run_goes_on_at_another_tensor_parallel_size(folder: Path, ours: Path) -> None:
    """Five heads on one rank, then six on two: weights and optimizer state fit, the losses are the same."""
    whole = train(folder, "whole", ours, "1e-3", "--train-iters", 4, pipeline=1)
    saved = folder / "whole" / "saved"
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(folder, "resumed", ours, "1e-3", "--train-iters", 4, pipeline=1, tensor=2, load=saved)
    assert [line["iteration"] for line in resumed] == [3, 4]
    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in whole[2:]], rel=1e-5)


def difference(ours: Path, theirs: Path) -> float:
    program = "import sys, pathlib; from megatron.vlm.hf.check import compared\n"
    program += "print('RESULT', compared(*map(pathlib.Path, sys.argv[1:])).difference)"
    (ours.parent / "compared.py").write_text(program)
    return float(result_of(tool(str(ours.parent / "compared.py"), ours, theirs).stdout))


def test_the_check_sees_other_weights(ours: Path, tuned: Path) -> None:
    """Two steps of training are far beyond the limit."""
    assert difference(ours, tuned) > 1e-2


def test_weights_that_are_no_numbers_are_refused(theirs: Path, tmp_path: Path) -> None:
    """In a line, before any is compared: samples of words alone would not touch them."""
    broken = shutil.copytree(theirs, tmp_path / "broken")
    file = next(file for file in sorted(broken.glob("*.safetensors")) if "vision" in "".join(load_file(file)))
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if "vision" in name).fill_(float("nan"))
    save_file(tensors, file, {"format": "pt"})
    done = convert("--from-hf", broken, "--output-dir", tmp_path / "ours", "--check", check=False)
    assert done.returncode == 2
    assert "not all numbers are finite (NaN or infinity); download it again" in done.stderr
    assert not [*(tmp_path / "ours").glob("*")]


def test_adapters_are_trained_resumed_exactly_written_as_peft_does_and_merged(
    folder: Path, theirs: Path, ours: Path
) -> None:
    """On two pipeline ranks, from weights that have none; the base weights stay as they are, bit by bit."""
    parts = ("vit", "llm")
    lines = train(folder, "adapted", ours, "1e-2", "--train-iters", 4, adapted=parts)
    saved, again = folder / "adapted/saved", folder / "adapted-again/saved"
    shutil.copytree(saved / "iter_0000002", again / "iter_0000002")
    (again / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(folder, "adapted-again", ours, "1e-2", "--train-iters", 4, load=again, adapted=parts)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in lines[2:]]
    for run in ("adapted", "adapted-again"):
        convert("--to-peft", folder / run / "saved", "--output-dir", folder / f"{run}-peft")
    adapters = load_file(folder / "adapted-peft/adapter_model.safetensors")
    assert all(
        torch.equal(tensor, adapters[name])
        for name, tensor in load_file(folder / "adapted-again-peft/adapter_model.safetensors").items()
    )
    done = convert("--to-hf", saved, "--output-dir", folder / "merged", "--check", "--json")
    assert json.loads(done.stdout)["logit_difference"] < 1e-4
    before, after, touched = weights(theirs), weights(folder / "merged"), set()
    for name in adapters:
        layer = name.removesuffix(".lora_A.weight")
        if layer != name:
            touched.add(f"{layer.removeprefix('base_model.model.')}.weight")
            product = adapters[f"{layer}.lora_B.weight"] @ adapters[name]
            assert product.any(), name
            changed = f"{layer.removeprefix('base_model.model.')}.weight"
            stored = next(one for one in before if table_name(one, FAMILY) == table_name(changed, FAMILY))
            assert torch.allclose(after[stored], before[stored] + 6 / 4 * product, atol=1e-6), name
            del before[stored]
    assert len(touched) == 2 * (6 + 7)
    assert all(torch.equal(before[name], after[name]) for name in before), "the base has changed"
    refused = convert("--from-hf", theirs, "--adapters", folder, "--output-dir", folder / "no", check=False)
    assert refused.returncode == 2


def test_merged_weights_are_checked_as_they_are_written_and_their_rounding_is_said(
    theirs: Path, tmp_path: Path
) -> None:
    """In bf16 rounding alone is far beyond the limit, and so is a merged weight that is another."""
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForImageTextToText.from_pretrained(theirs, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj"]))
    generator = torch.Generator().manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    adapted.save_pretrained(tmp_path / "peft")
    convert("--from-hf", tmp_path / "base", "--adapters", tmp_path / "peft", "--output-dir", tmp_path / "ours")
    done = convert("--to-hf", tmp_path / "ours", "--output-dir", tmp_path / "merged", "--check", "--json")
    found = json.loads(done.stdout)
    assert found["logit_difference"] < 1e-5
    assert found["merge_rounding"] > 1e-3
    (file,) = (tmp_path / "merged").glob("*.safetensors")
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if "q_proj" in name and "language" in name).mul_(0.5)
    save_file(tensors, file, {"format": "pt"})
    assert difference(tmp_path / "ours", tmp_path / "merged") > 1e-3


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_the_check_of_an_export_runs_no_code_of_the_save(
    ours: Path, theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights convert; what is no tensor is loaded for the logits alone."""
    found, save = checkpoint.OurCheckpoint(ours), checkpoint.dcp.save

    def evil(state: dict[str, object], **named: object) -> object:
        return save({**state, checkpoint.COMMON: [Evil(tmp_path / "ran")]}, **named)

    monkeypatch.setattr(checkpoint.dcp, "save", evil)
    shapes = {name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
              for name, entry in found.weights.items()}  # fmt: skip
    checkpoint.write_release(tmp_path / "evil", shapes, found.tensor)
    words = ("--like", theirs, "--output-dir", tmp_path / "hf", "--check")
    done = convert("--to-hf", tmp_path / "evil", *words, check=False)
    assert done.returncode == 2
    assert "cannot be loaded safely" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists()
