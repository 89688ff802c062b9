"""`omnibal look`: the commands that it prints make what it shows, from sizes and from the files of three peers."""

import io
import json
import os
import resource
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.demo.data import train_tokenizer
from megatron.vlm.preprocessing import preprocess
from omnibal_ext.errors import UserError
from omnibal_ext.flags import ToolParser
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import mix
from tests.unit.preprocessing.test_model_recipe import LLAVA_CONFIG
from tools import look, pack_data, preprocess_data

TOOLS = {"pack": pack_data, "preprocess": preprocess_data}
Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a tool in a folder of its own; what it prints, or with --json the object."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ToolParser, "program", None)

    def started(tool: ModuleType, *words: object) -> Any:
        monkeypatch.setattr(sys, "argv", ["tool", *map(str, words)])
        tool.main()
        said = capsys.readouterr().out
        return json.loads(said) if "--json" in words else said

    return started


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    tiles, tokens = generator.integers(0, 6, 600), generator.integers(20, 300, 600)
    tokens[[5, 7]] = 5000
    Sizes.from_arrays(tiles, tokens).save(tmp_path / "sizes.npz")
    return tmp_path / "sizes.npz"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A LLaVA-1.5's folder without weights."""
    folder = tmp_path / "llava"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAVA_CONFIG, "image_token_index": 107}))
    (folder / "tokenizer.model").write_bytes(train_tokenizer())
    return folder


def picture(number: int) -> bytes:
    written = io.BytesIO()
    Image.fromarray(np.zeros((20 + number, 30, 3), np.uint8)).save(written, "PNG")
    return written.getvalue()


def chats(folder: Path, count: int = 40) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """(images, turns) of conversations; every third has two images, every fourth none."""
    (folder / "images").mkdir(exist_ok=True)
    found = []
    for number in range(count):
        names = [] if number % 4 == 0 else [f"{number}.{place}.png" for place in range(1 + (number % 3 == 0))]
        for name in names:
            (folder / "images" / name).write_bytes(picture(number))
        found.append((names, [("human", "<image>" * len(names) + "Read"), ("gpt", "a1" * (1 + 7 * number))]))
    return found


def swift(folder: Path) -> list[Path]:
    roles = {"human": "user", "gpt": "assistant"}
    rows = [
        {"messages": [{"role": roles[who], "content": words} for who, words in turns],
         "images": [str(folder / "images" / name) for name in names]}
        for names, turns in chats(folder)
    ]  # fmt: skip
    (folder / "swift.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [folder / "swift.jsonl"]


def llama_factory(folder: Path) -> list[Path]:
    rows = [
        {"conversations": [{"from": who, "value": words} for who, words in turns], "images": names}
        for names, turns in chats(folder)
    ]
    for name, part in (("one.json", rows[:25]), ("two.json", rows[25:])):
        (folder / name).write_text(json.dumps(part))
    return [folder / "one.json", folder / "two.json"]


def energon(folder: Path) -> list[Path]:
    """Energon's tar, as Megatron-LM's example writes it: the turns alone, beside the images."""
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for number, (names, turns) in enumerate(chats(folder)):
            said = json.dumps([{"from": who, "value": words} for who, words in turns]).encode()
            images = [(f"{place}.png", picture(number)) for place in range(len(names))]
            for name, content in [("json", said), *images]:
                member = tarfile.TarInfo(f"{number:04d}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return [folder / "shard.tar"]


def assert_same(shown: dict[str, Any], summary: dict[str, Any]) -> None:
    """Of balanced packs on the first number of ranks, and of an index."""
    way = shown["ways"][-1]
    on = next(iter(way["on_ranks"].values()))
    found = way["batches"], on["steps"], on["wait"], way["padding"], way["most_tiles"], way["most_tokens"]
    names = ("packs", "iterations", "wait", "pad_ratio", "longest_tiles", "longest_tokens")
    assert found == tuple(summary[name] for name in names)


def obeyed(run: Run, shown: dict[str, Any]) -> dict[str, Any]:
    for command in shown["commands"]:
        program, name, *words = shlex.split(command)
        assert program == "omnibal"
        summary = run(TOOLS[name], *words, "--json")
    return dict(summary)


@pytest.mark.parametrize(
    "words",
    ["--tokens 1000", "--tokens 1000 --tiles 9 --ranks 4 --micro-batches 3 --analytic a100 --seed 5", ""],
)
def test_the_printed_command_makes_the_index_of_these_figures(run: Run, sizes: Path, words: str) -> None:
    shown = run(look, sizes, *words.split(), "--json")
    summary = obeyed(run, shown)
    assert_same(shown, summary)
    assert (shown["samples"], shown["left_out"]) == (600, 2 * bool(words))
    assert summary["rejected"] == shown["left_out"]
    assert (shown["llm_budget"], shown["vit_budget"]) == (summary["llm_budget"], summary["vit_budget"])


def test_sizes_of_a_json_list_are_the_same(run: Run, sizes: Path) -> None:
    read = Sizes.load(sizes)
    rows = [{"vit_num": int(v), "token_num": int(t)} for v, t in zip(read.tiles, read.tokens, strict=True)]
    (sizes.parent / "sizes.json").write_text(json.dumps(rows))
    (sizes.parent / "corpus.json").write_text(json.dumps({"set": {"token_lengths": "sizes.json"}}))
    one, *others = [run(look, name, "--tokens", 1000, "--json") for name in ("sizes.npz", "sizes.json", "corpus.json")]
    assert [other["ways"] for other in others] == [one["ways"], one["ways"]]


def test_words_alone_have_no_tiles(run: Run, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(20, 300, 200)
    Sizes.from_arrays(np.zeros(200, np.int64), tokens).save(tmp_path / "words.npz")
    shown = run(look, "words.npz", "--tokens", 1000, "--json")
    assert_same(shown, obeyed(run, shown))
    assert {way["most_tiles"] for way in shown["ways"]} == {0}


def test_sounds_are_a_third_size_of_every_way(run: Run, tmp_path: Path) -> None:
    """Packs of the printed command are those of the table, whose seconds count what is heard."""
    sizes = mix(800)
    sizes.save(tmp_path / "heard.npz")
    Sizes(sizes.tiles, sizes.tokens).save(tmp_path / "seen.npz")
    shown, seen = [run(look, f"{name}.npz", "--tokens", 8192, "--model", "qwen2.5-omni-3b", "--json")
                   for name in ("heard", "seen")]  # fmt: skip
    summary = obeyed(run, shown)
    assert_same(shown, summary)
    assert summary["audio_budget"] > 0
    for heard, deaf in zip(shown["ways"][:-1], seen["ways"][:-1], strict=True):
        assert heard["on_ranks"]["8"]["seconds"] > 1.02 * deaf["on_ranks"]["8"]["seconds"], heard["name"]
    assert "mel frames" in run(look, "heard.npz", "--tokens", 8192).splitlines()[0]


@pytest.mark.long
def test_a_million_samples_take_a_minute_of_one_core_and_two_gigabytes(tmp_path: Path) -> None:
    generator, count = np.random.default_rng(0), 1_000_000
    tiles = generator.integers(0, 13, count)
    tokens = np.minimum(256 * tiles + generator.lognormal(5, 1, count).astype(np.int64) + 20, 8000)
    Sizes.from_arrays(tiles, tokens).save(tmp_path / "sizes.npz")
    command = [sys.executable, look.__file__, str(tmp_path / "sizes.npz"), "--json"]
    subprocess.run([*command, "--tokens", "8192"], check=True, stdout=subprocess.DEVNULL)  # compiles, once a machine
    between = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - between.ru_utime - between.ru_stime < 60
    assert after.ru_maxrss < 2e6


@pytest.mark.parametrize("written", [swift, llama_factory, energon], ids=lambda f: f.__name__)
def test_conversations_of_peers_have_the_sizes_and_the_index_of_their_dataset(
    run: Run, model: Path, tmp_path: Path, written: Callable[[Path], list[Path]]
) -> None:
    words = [*written(tmp_path), "--model", model, "--image-root", tmp_path / "images"]
    shown = run(look, *words, "--ranks", 2, "--save-sizes", "sizes.npz", "--json")
    assert not (tmp_path / "data").exists()
    assert_same(shown, obeyed(run, shown))
    assert shown["samples"] == 40
    measured, made = Sizes.load(tmp_path / "sizes.npz"), Sizes.load(tmp_path / "data/sizes.npz")
    for one, other in ((measured.tiles, made.tiles), (measured.tokens, made.tokens)):
        assert one.tolist() == other.tolist()
    assert sorted(set(made.tiles.tolist())) == [0, 1, 2]
    again = run(look, tmp_path / "sizes.npz", "--model", model, "--ranks", 2, "--json")
    of_folder = run(look, "data", "--model", model, "--ranks", 2, "--json")
    assert again["ways"] == of_folder["ways"] == shown["ways"]
    assert_same(shown, obeyed(run, {"commands": [of_folder["commands"][0].replace(" packs", " more")]}))


def test_conversations_are_measured_without_megatron_core(run: Run, model: Path, tmp_path: Path) -> None:
    """As in other trainers' environments."""
    words = [*swift(tmp_path), "--model", model, "--image-root", tmp_path / "images", "--ranks", 2, "--json"]
    hidden = "import sys; sys.modules |= dict.fromkeys(('megatron.core', 'megatron.training', 'triton'));"
    start = [sys.executable, "-c", f"{hidden} from tools.look import main; main()", *map(str, words)]
    said = subprocess.run(start, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert json.loads(said.stdout)["ways"] == run(look, *words)["ways"]


def test_images_that_are_not_found_are_no_corpus_of_texts(run: Run, model: Path, tmp_path: Path) -> None:
    """Without --image-root the samples of words alone are left, whose loss is another."""
    with pytest.raises(UserError, match=r"lines rejected, limit 10: \d+ missing_image.*--image-root"):
        run(look, *llama_factory(tmp_path), "--model", model, "--ranks", 2)


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_a_terminal(run: Run, sizes: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    said = run(look, sizes, "--tokens", 1000, "--ranks", "2,8,64")
    *lines, command = said.splitlines()
    assert command.startswith("omnibal pack ")
    assert max(map(len, lines)) <= width
    for way in ("4 of similar length, padded", "packs by tokens, tiles (ISF)"):
        assert len([line for line in lines if line.strip().startswith(way)]) == 4, "names are not broken"


def test_parts_that_end_in_another_order_change_nothing(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*llama_factory(tmp_path), "--model", model, "--image-root", tmp_path / "images", "--ranks", 2, "--json"]
    one = run(look, *words)
    monkeypatch.setattr(preprocess, "_each", lambda work, tasks, *_: [work(*task) for task in reversed(tasks)])
    assert run(look, *words)["ways"] == one["ways"]


def test_lines_that_cannot_be_used_are_counted_and_named(run: Run, model: Path, tmp_path: Path) -> None:
    (path,) = swift(tmp_path)
    path.write_text("nonsense\n" + path.read_text() + "\n{}")
    words = [path, "--model", model, "--image-root", tmp_path / "images", "--ranks", 2]
    shown = run(look, *words, "--json")
    assert shown["samples"] == 40
    assert shown["rejected"].startswith(f"2 malformed_line; {path} line 1: malformed_line, not JSON")
    said = " ".join(run(look, *words).split())
    assert f"lines that cannot be used: 2 malformed_line; {path} line 1" in said
    (tmp_path / "order.jsonl").write_text("[[0], [1]]\n")
    with pytest.raises(UserError, match=r"--order numbers all conversations from 0, but some cannot be used \(2 mal"):
        run(look, *words[:-2], "--order", "order.jsonl")
    path.write_text("nonsense\n" * 11 + path.read_text())
    few = r"13 of 53 lines rejected, limit 10: .* or allow them with --max-rejects 13$"
    with pytest.raises(UserError, match=few):
        run(look, *words)
    assert run(look, *words, "--max-rejects", 13, "--json")["samples"] == 40
    path.write_text("")
    with pytest.raises(UserError, match=r"no line of the input can be used: it has none$"):
        run(look, *words)
    path.write_text("nonsense")
    with pytest.raises(UserError, match=r"no line of the input can be used: 1 malformed_line; .* line 1"):
        run(look, *words)


def test_a_persons_table_has_their_order_beside_ours(run: Run, sizes: Path) -> None:
    steps = np.random.default_rng(1).permutation(600)[:576].reshape(-1, 4, 2, 3)
    Path("order.jsonl").write_text("".join(json.dumps(step.tolist()) + "\n" for step in steps))
    said = run(look, sizes, "--tokens", 1000, "--ranks", 16, "--order", "order.jsonl", "--report", "page.html")
    page = Path("page.html").read_text()
    for text in (
        "your order", "4 random, padded", "4 of similar length, padded", "packs by tokens", "balanced packs",
        "steps on 4", "steps on 16", "2 samples (0.3%) exceed these limits", "internvl-chat-1.5 on h100",
        "your order, on 4 ranks: ", "omnibal pack --sizes ", "--data-parallel-size 4 --micro-batches 2",
    ):  # fmt: skip
        assert text in said
        assert text in page
    batches, of_4, of_16 = [line.split()[2:] for line in said.splitlines() if line.lstrip().startswith("your order  ")]
    assert (batches[0], len(batches), of_4[0], len(of_4), of_16) == ("3.0", 4, "24", 3, [])
    packed = run(look, sizes, "--tokens", 1000, "--order", "order.jsonl", "--order-packed", "--json")["ways"][0]
    assert (packed["name"], packed["padding"], list(packed["on_ranks"])) == ("your order", 0.0, ["4"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chat.jsonl", r"chat.jsonl: is no file of sizes .*; conversations are read with --model FOLDER"),
        ("sizes.npz chat.jsonl --model llava", "chat.jsonl: is no file of sizes .*, and apart from sizes"),
        ("nowhere.jsonl", "nowhere.jsonl: no such file or folder"), ("nowhere.npz", "nowhere.npz"),
        ("sizes.npz --tokens 10", "no sample fits"),
        ("sizes.npz --order order.jsonl", r"order.jsonl: line 1: \[0\]\[0\] must be a whole number from 0 to 599"),
        ("sizes.npz --costs profile.json", "profile.json"), ("sizes.npz --model nobody", "nobody: no such folder"),
        ("sizes.npz --ranks 0", "--ranks must be at least 1 and at most 65536, got 0"),
        ("sizes.npz --batch 4,x", "--batch: invalid"),
        ("chat.jsonl --model llava --save-sizes sizes", "--save-sizes sizes needs a name that ends in .npz"),
        ("chat.jsonl --model llava --max-pixels 9", "--max-pixels 9: images become tiles"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(run: Run, sizes: Path, model: Path, words: str, message: str) -> None:
    Path("chat.jsonl").write_text("{}\n")
    Path("order.jsonl").write_text("[[600]]\n")
    with pytest.raises(UserError, match=message):
        run(look, *words.split())
