"""The examples with transformers: packs give the loss of samples one by one, in every framework, and it falls."""

import importlib.util
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import pixels_of
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.sampler import PackBatchSampler
from tests.long import short
from tests.programs import ROOT, run_ranks, run_tool, tool
from tests.system.test_training import make_dataset

pytestmark = pytest.mark.starts
RANKS, MICRO_BATCHES, STEPS = 2, 2, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with pictures, packed for two ranks with two packs each a step."""
    folder = tmp_path_factory.mktemp("examples")
    make_dataset(folder, samples=90)
    budgets = ("--vit-budget", 30, "--llm-budget", 240)
    budgets = (*budgets, "--data-parallel-size", RANKS, "--micro-batches", MICRO_BATCHES)
    tool("pack_data.py", "--data", folder / "data", *budgets, "--output-dir", folder / "packs")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
        import transformers_packs

        return transformers_packs.load_model(ChatDataset(folder / "data"), Namespace(model=None, lora=None))


@pytest.fixture(scope="module")
def expected(folder: Path, model: Any) -> float:
    """The first step's loss: every sample alone, no pack; the mean over all counted tokens."""
    data, total, counted = ChatDataset(folder / "data"), 0.0, 0
    for rank in range(RANKS):
        for pack in islice(PackBatchSampler(PackedIndex.open(folder / "packs"), RANKS, rank), MICRO_BATCHES):
            for sample in map(data.__getitem__, pack):
                count = int((sample["labels"][1:] != IGNORED).sum())
                pixels = {"pixel_values": sample["pixel_values"]} if len(sample["pixel_values"]) else {}
                if count:
                    with torch.no_grad():
                        loss = model(input_ids=sample["input_ids"][None], labels=sample["labels"][None], **pixels).loss
                    total, counted = total + float(loss) * count, counted + count
    return total / counted


def run(name: str, folder: Path, *more: str) -> str:
    flags = ["--data", str(folder / "data"), "--packs", str(folder / "packs"), "--steps", str(STEPS), *more]
    return run_ranks("tests.system.example", RANKS, [name, *flags], time_limit=240)


@pytest.mark.parametrize(
    ("name", "more", "needs"),
    [
        ("train_accelerate.py", (), ("accelerate",)),
        ("train_trainer.py", ("--lora", "8", "--lr", "0.02"), ("accelerate", "peft")),
        ("train_deepspeed.py", (), ("deepspeed",)),
    ],
)
def test_a_framework_trains_on_packs_as_on_samples(
    name: str, more: tuple[str, ...], needs: tuple[str, ...], folder: Path, expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Adapters too, which begin as nothing."""
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", run(name, folder, *more))]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] - 0.05


def test_plain_ddp_trains_on_packs_and_says_what_they_save(folder: Path, expected: float) -> None:
    said = run("train_ddp.py", folder)
    found = re.search(r"^packs: loss ([\d.]+) to ([\d.]+), (\d+) samples", said, re.MULTILINE)
    assert found, said
    assert float(found[1]) == pytest.approx(expected, abs=1e-5)
    assert float(found[2]) < float(found[1]) - 0.05
    assert re.search(r"^random batches: loss", said, re.MULTILINE)
    last = said.strip().splitlines()[-1]
    number = r"([\d.]+)x"
    assert re.fullmatch(
        rf"packs / random batches samples per second: {number} \(single steps {number} to {number}\)", last
    )


@pytest.mark.parametrize(
    ("cuda", "there", "kind", "asked"),
    [
        (True, True, "internvl", [{"text_config": "flash_attention_2", "vision_config": "flash_attention_2"}]),
        (True, False, "internvl", []),
        (False, True, "internvl", []),
        (True, True, "gemma3", [{}]),  # whose images are seen in both directions
        (True, True, "qwen3_5", [{"text_config": "flash_attention_2"}]),
    ],
)
def test_flash_attention_is_taken_where_it_is_installed(
    cuda: bool, there: bool, kind: str, asked: list[dict[str, str]], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where there are GPUs, which alone run it."""
    import transformers_packs  # as `model` has found it

    found: list[dict[str, str]] = []
    made = torch.nn.Module()
    made.config, made.set_attn_implementation = Namespace(model_type=kind), found.append  # type: ignore[assignment]
    monkeypatch.setattr(transformers_packs, "HAS_CUDA", cuda)
    monkeypatch.setattr(transformers_packs, "is_flash_attn_2_available", lambda: there)
    monkeypatch.setattr(transformers_packs, "small_internvl", lambda _: made)
    transformers_packs.load_model(Namespace(manifest={}), Namespace(model=None, lora=None))
    assert found == asked


@pytest.fixture
def ddp(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import train_ddp

    return train_ddp


def test_the_step_that_warms_up_is_in_no_rate(ddp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [((9.0, 1, 100.0), (8.0, 1, 1.0)), ((2.0, 10, 1.0), (3.0, 10, 2.0)), ((1.0, 30, 2.0), (2.5, 10, 2.0))]
    ddp.report(("packs", "random batches"), turns)
    assert capsys.readouterr().out.splitlines() == [
        "packs: loss 9.000000 to 1.000000, 40 samples, 13.3 a second",
        "random batches: loss 8.000000 to 2.500000, 20 samples, 5.0 a second",
        "packs / random batches samples per second: 2.67x (single steps 2.00x to 3.00x)",
    ]


def test_reading_a_batch_is_in_the_time_of_its_step_and_a_turn_of_others_is_not(
    ddp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways alike: what is read before the clock starts makes a way look faster than it is."""
    now = [0.0]
    monkeypatch.setattr(ddp, "time", Namespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(ddp, "dist", Namespace(barrier=lambda: None, all_reduce=lambda _: None))
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda model, **_: model)
    monkeypatch.setattr(ddp, "backward", lambda *_: torch.tensor(1.0))

    def batches() -> Iterator[list[dict[str, torch.Tensor]]]:
        for _ in range(3):
            now[0] += 5.0
            yield [{"position_ids": torch.tensor([[0, 1, 0]])}]

    for _, samples, seconds in ddp.train(torch.nn.Linear(1, 1), batches(), 1e-3):
        assert (samples, seconds) == (2, 5.0)
        now[0] += 7.0


@pytest.mark.parametrize(
    "name",
    short(["train_ddp.py", "train_stream.py", "train_trainer.py", "train_deepspeed.py"],
          ["train_stream.py", "train_trainer.py"]),
)  # fmt: skip
def test_an_example_without_torchrun_says_so_in_a_line(name: str, folder: Path) -> None:
    if name == "train_deepspeed.py" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    flags = ["--data", folder / "data", *(["--packs", folder / "packs"] if name != "train_stream.py" else [])]
    done = run_tool("example.py", name, *flags, room="tests/system")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: start it with torchrun")
    assert done.stderr.count("\n") == 1


NEEDS = {
    "train_accelerate.py": "accelerate", "train_deepspeed.py": "deepspeed", "train_trl.py": "trl",
    "train_trainer.py": "accelerate", "train_ddp.py": "transformers",
}  # fmt: skip


@pytest.mark.parametrize("name", short(NEEDS, ("train_trl.py", "train_ddp.py")))
def test_an_example_without_its_package_says_so_in_a_line(name: str, tmp_path: Path) -> None:
    needs = NEEDS[name]
    if needs == "trl" and importlib.util.find_spec("datasets") is None:
        needs = "datasets"
    absent = f"import sys\nsys.modules['{needs}'] = None\n"  # as where it is not installed
    (tmp_path / "run.py").write_text(
        absent + f"sys.path.insert(0, '{ROOT}/examples')\nimport runpy\nsys.argv[0] = '{name}'\n"
        f"runpy.run_path('{ROOT}/examples/{name}', run_name='__main__')\n"
    )
    done = run_tool(str(tmp_path / "run.py"))
    assert (done.returncode, done.stdout) == (2, "")
    remedy = "'.[train]' in a clone of this project" if needs == "transformers" else needs
    assert done.stderr == f"error: this needs {needs}, which is not installed: pip install {remedy}\n"


def test_a_stream_that_nobody_packed_trains_alike_balanced(folder: Path) -> None:
    said = run_ranks("tests.system.example", RANKS, ["train_stream.py", "--data", str(folder / "data"), "--steps", "6"])
    came, balanced = re.findall(r"^(?:as they came|balanced): losses (.*)$", said, re.MULTILINE)
    assert len(came.split()) == STEPS
    assert balanced == came
    (line,) = re.findall(r"^balanced: .* share of what it was: (.*)$", said, re.MULTILINE)
    shares = re.findall(r"(?:vision|language) ([\d.]+) \(level as read: (\d)\)", line)
    assert len(shares) == 2
    assert all(0.4 < float(share) < 0.97 and int(left) < STEPS for share, left in shares)
    assert said.strip().splitlines()[-1].startswith("balanced / as they came, samples per second: ")


def test_a_stream_of_another_model_is_refused(folder: Path, model: Any) -> None:
    """Of one whose features are not those of tiles, and of sounds for which there is no small model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
        import train_stream
        import transformers_packs
    other = Namespace(config=Namespace(model_type="llava_next"))
    with pytest.raises(UserError, match=r"data and llava_next: features are sent apart of the images of an InternVL"):
        train_stream.steps_of(ChatDataset(folder / "data"), other, None)
    with pytest.raises(UserError, match=r"another model's: give --model"):
        transformers_packs.small_thinker({"audio": {"encoder": {"channels": 480}}})


@pytest.mark.parametrize(("reduction", "power"), [("token", 0.0), ("square", 0.5), ("sample", 1.0)])
def test_a_batch_is_its_samples_end_to_end(folder: Path, model: Any, reduction: str, power: float) -> None:
    data = ChatDataset(folder / "data")
    pack = next(iter(PackBatchSampler(PackedIndex.open(folder / "packs"), RANKS, 0)))
    batch = JoinPack(data, model.config, reduction)([data[sample] for sample in pack])
    edges = batch["cu_seq_lens_q"].tolist()
    assert edges[-1] == batch["input_ids"].shape[1]
    assert batch["max_length_q"] == max(b - a for a, b in pairwise(edges))
    for sample, (start, end) in zip(pack, pairwise(edges), strict=True):
        assert batch["input_ids"][0, start:end].tolist() == data.sample(sample).text[0].tolist()
        assert batch["position_ids"][0, start:end].tolist() == list(range(end - start))
        counts = data.sample(sample).text[1][1:].astype(bool)
        labels, weights = batch["labels"][0, start:end], batch["weights"][0, start:end]
        assert int(labels[0]) == IGNORED
        assert ((labels[1:] != IGNORED).numpy() == counts).all()
        assert labels[1:][labels[1:] != IGNORED].tolist() == data.sample(sample).text[0][1:][counts].tolist()
        wanted = max(1, counts.sum()) ** -power
        assert torch.allclose(weights[1:][torch.from_numpy(counts)], torch.tensor(wanted, dtype=torch.float32))
    pixels = torch.cat([pixels_of(data.sample(sample)) for sample in pack])
    assert torch.equal(batch["pixel_values"], pixels)
