"""`--input`: makes a dataset and packs from files of conversations, in the folder of the run.

    --input chat.jsonl   1. omnibal preprocess -> RUN/data
                         2. omnibal pack       -> RUN/packs-by-size, and RUN/packs-held-out

They are kept if made from the same inputs and flags; otherwise they are made again, unless a run was started on them.
Megatron's flags have the defaults of a usual fine-tuning, `USUAL_FLAGS`.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import check_exists, refuse_no_images
from omnibal_ext.files.records import sha256_of, write_record
from omnibal_ext.flags import FURTHER_BUDGETS, add_further_budgets, as_flags, flag_name
from omnibal_ext.launch.flags import flags_in
from omnibal_ext.launch.folder import is_made, refuse_other, remove_unused
from omnibal_ext.launch.planning import run_our_tool
from omnibal_ext.launch.processes import run_python
from omnibal_ext.output import say
from omnibal_ext.packing.costs import are_patches
from omnibal_ext.packing.packers.budgets import read_budget
from omnibal_ext.packing.widths import check_widths, read_widths
from omnibal_ext.reading.document import decode
from omnibal_ext.sizes import Sizes

DATA, PACKS, HELD_OUT = "data", "packs-by-size", "packs-held-out"
LIMITS = ("max_tiles", "max_pixels", "max_tokens")
"""Attributes of the flags that limit samples in preprocessing."""
READING_FLAGS = {"image_root": None, "workers": 1, "max_rejects": None}
"""Flags that have no effect on an existing dataset, with their defaults."""
MICRO_BATCHES = 4
"""Default microbatches per pipeline rank."""
ONE_RANK, AUTO = "1", "auto"
"""Values of --widths: the default, and as wide as samples need within a node."""
USUAL_FLAGS: dict[str, tuple[str, ...]] = {
    "--bf16": (),
    "--use-distributed-optimizer": (),
    "--lr": ("1e-5",),
    "--min-lr": ("0",),
    "--lr-decay-style": ("cosine",),
    "--weight-decay": ("0.05",),
    "--clip-grad": ("1.0",),
    "--log-interval": ("10",),
}
"""Defaults of Megatron's flags: InternVL's fine-tuning (arXiv 2412.05271)."""
USUAL_FOR_ADAPTERS = {"--lr": ("4e-5",)}
"""Other defaults for adapters, which start at zero and take larger steps."""


def widths(text: str) -> str:
    """Check `1,2,4`, or "auto". Raises ValueError."""
    read_widths(text)
    return text


def add_conversation_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run from conversations."""
    add = parser.add_argument_group("conversations, instead of --data and --packs").add_argument
    add("--input", nargs="+", metavar="FILE", help="files of conversations, see omnibal preprocess")
    add("--image-root", metavar="FOLDER", help="where image paths start from (default: at each file)")
    add("--chat-template", help="if the model's folder has none")
    add("--max-tiles", type=int, help="of a conversation; at native resolution patches of an image")
    add("--max-pixels", type=int, help="most pixels of an image, for models at native resolution")
    add("--max-tokens", type=int, help="most tokens of a sample; longer ones are left out, or shortened")
    add("--shorten", nargs="+", default=[], metavar="WAY", help="to --max-tokens: fewer-tiles, truncate")
    add("--vit-budget", type=read_budget, metavar="TILES", help="most tiles of a pack (default: auto)")
    add("--llm-budget", type=read_budget, metavar="TOKENS", help="most tokens of a pack (default: auto)")
    add_further_budgets(add, "most {units} of a pack (default: auto)")
    add(
        "--widths", type=widths, default=ONE_RANK, metavar="W,W...",
        help="ranks that may run a pack together, see omnibal pack; needs --llm-budget, of one rank",
    )  # fmt: skip
    add("--held-out", type=float, metavar="SHARE", help="evaluate on these samples, train on the rest")
    add("--workers", type=int, default=1, help="processes that preprocess")
    add("--max-rejects", type=int, help="conversations that may be left out (default: 1%%, at least 10)")
    add("--micro-batches", type=int, help=f"packs per rank and iteration (default: {MICRO_BATCHES} per pipeline rank)")


def say_unused(arguments: argparse.Namespace) -> None:
    """Print which of `READING_FLAGS` have no effect because --input is not given."""
    unused = [flag_name(name) for name, usual in READING_FLAGS.items() if getattr(arguments, name) != usual]
    if unused and not arguments.input and not arguments.json:
        say(f"{', '.join(unused)}: not used, as the dataset {arguments.data} exists already")


def check_conversation_flags(arguments: argparse.Namespace) -> None:
    """Set paths and defaults of a run from conversations.

    Raises UserError unless either --input or both --data and --packs are given, or budgets alone for a plan.
    """
    if arguments.dry_run and arguments.analytic and not (arguments.input or arguments.data or arguments.packs):
        if arguments.vit_budget is None or arguments.llm_budget is None:
            raise UserError("--dry-run without data plans for full packs: give --vit-budget and --llm-budget")
        _add_usual_flags(arguments)
        return
    if not arguments.input:
        for flag in ("data", "packs"):
            if not getattr(arguments, flag):
                raise UserError(f"--{flag} is missing; name dataset and packs, or --input, files of conversations")
        return
    if arguments.data or arguments.packs:
        raise UserError("--input makes dataset and packs in the run's folder; leave --data and --packs out")
    run_dir = Path(arguments.run_dir)
    arguments.data, arguments.packs = str(run_dir / DATA), str(run_dir / PACKS)
    if arguments.held_out:
        arguments.eval_data, arguments.eval_packs = arguments.data, str(run_dir / HELD_OUT)
    _add_usual_flags(arguments)


def _add_usual_flags(arguments: argparse.Namespace) -> None:
    given = flags_in(arguments.megatron)
    usual = USUAL_FLAGS | (USUAL_FOR_ADAPTERS if "--lora-rank" in given else {})
    for flag, values in usual.items():
        if flag not in given and not (flag == "--bf16" and "--fp16" in given):
            arguments.megatron += [flag, *values]
    if arguments.epochs is None and "--train-iters" not in given:
        arguments.epochs = 1.0


def check_paths(arguments: argparse.Namespace) -> None:
    """Raise UserError if files of --input or the folder of --image-root do not exist, or --run-dir is a file."""
    if Path(arguments.run_dir).exists() and not Path(arguments.run_dir).is_dir():
        raise UserError(f"--run-dir {arguments.run_dir}: is a file; name a folder, new or of the run so far")
    for path in arguments.input or ():
        check_exists(Path(path))
    if arguments.input and arguments.image_root:
        refuse_no_images(Path(arguments.image_root))


def make_packs(arguments: argparse.Namespace, tools: Path, data_parallel: int) -> None:
    """Make the dataset and the packs if they are missing or were made from other inputs; print every step."""
    _preprocess(arguments, tools)
    _pack(arguments, tools, data_parallel)


def are_made(arguments: argparse.Namespace, data_parallel: int) -> bool:
    """Whether dataset and packs exist and were made with these flags; input files may have changed since.

    Raises UserError for --widths that these ranks cannot have, and if a run was begun on a dataset of other limits.
    """
    if asked := read_widths(arguments.widths):
        check_widths(asked, data_parallel)
    data, manifest = _asked_of_data(arguments), Path(arguments.data) / "manifest.json"
    refuse_other(Path(arguments.run_dir), _note(arguments, "data"), data)
    return is_made(_note(arguments, "data"), data, manifest) and _are_packed(arguments, data_parallel)


def micro_batches(arguments: argparse.Namespace) -> int:
    """Return the packs per rank and iteration."""
    return int(arguments.micro_batches or MICRO_BATCHES * arguments.pipeline_model_parallel_size)


def check_conversations(arguments: argparse.Namespace, tools: Path) -> dict[str, str]:
    """Return the result of `preprocess_data.py --check`, which reads the first lines of files and writes nothing."""
    switches = ["--check", "--json", "--input", *arguments.input, *_shorten(arguments)]
    words = [word for flag in _data_flags(arguments).items() for word in flag]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = run_python(tools / "preprocess_data.py", *words, *switches, **both)
    if done.returncode == 0:
        detail, state = decode(done.stdout.encode())["detail"], "ok"
    elif done.returncode == 2:
        detail, state = done.stderr.rstrip().rpartition("\n")[2].removeprefix("error: "), "refused"
    else:
        sys.stderr.write(done.stderr)
        sys.exit(done.returncode)
    return {"check": "conversations", "state": state, "detail": detail}


def _note(arguments: argparse.Namespace, what: str) -> Path:
    """Return the file that records the flags by which the run's `what` ("data" or "packs") was made."""
    return Path(arguments.run_dir) / f"{what}.inputs.json"


def _asked_of_data(arguments: argparse.Namespace) -> dict[str, Any]:
    return {flag_name(name): getattr(arguments, name) for name in (*LIMITS, "shorten")}


def _shorten(arguments: argparse.Namespace) -> list[str]:
    return ["--shorten", *arguments.shorten] if arguments.shorten else []


def _data_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    return {**as_flags(arguments, ("model", "chat_template", *READING_FLAGS, *LIMITS)), "--output-dir": arguments.data}


def _preprocess(arguments: argparse.Namespace, tools: Path) -> None:
    """Run the tool, which keeps a dataset of the same inputs; one with other limits is removed first."""
    asked, note = _asked_of_data(arguments), _note(arguments, "data")
    _say(arguments, f"conversations -> {arguments.data}")
    if note.exists() and not is_made(note, asked):
        remove_unused(Path(arguments.run_dir), Path(arguments.data))
    words = ["--input", *arguments.input, *_shorten(arguments)]
    run_our_tool(tools / "preprocess_data.py", _data_flags(arguments), arguments.json, words)
    write_record(note, asked)


def _pack_flags(arguments: argparse.Namespace, data_parallel: int) -> dict[str, Any]:
    """Return the flags of omnibal pack, but for the folders that it reads and writes."""
    flags: dict[str, Any] = {
        "--data-parallel-size": data_parallel,
        "--micro-batches": micro_batches(arguments),
        "--pipeline-model-parallel-size": arguments.pipeline_model_parallel_size,
        "--last-iteration": "empty",  # so that an epoch has every sample once
    }
    flags |= as_flags(arguments, ("vit_budget", "llm_budget", *FURTHER_BUDGETS.split(), "held_out"))
    if arguments.widths != ONE_RANK:
        flags["--widths"] = arguments.widths
    if arguments.widths == AUTO:
        groups, rest = divmod(arguments.nproc_per_node, arguments.tensor_model_parallel_size)
        flags["--node-ranks"] = 1 if rest else groups  # data-parallel ranks of a node; 1: tensor groups span nodes
    return flags


def _asked_of_packs(arguments: argparse.Namespace, data_parallel: int) -> dict[str, Any]:
    dataset = sha256_of(Path(arguments.data) / "manifest.json")
    return {**_pack_flags(arguments, data_parallel), "dataset": dataset}


def _are_packed(arguments: argparse.Namespace, data_parallel: int) -> bool:
    folders = [arguments.packs, *([arguments.eval_packs] if arguments.held_out else [])]
    manifests = (Path(made) / "manifest.json" for made in folders)
    return is_made(_note(arguments, "packs"), _asked_of_packs(arguments, data_parallel), *manifests)


def _pack(arguments: argparse.Namespace, tools: Path, data_parallel: int) -> None:
    if _are_packed(arguments, data_parallel):
        _say(arguments, f"dataset -> {arguments.packs}: there, made from the same")
        return
    data = {"--data": arguments.data}
    sizes = Path(arguments.data) / "sizes.npz"
    priced = {"--model": arguments.model} if sizes.exists() and are_patches(Sizes.load(sizes)) else {}
    flags = {**data, **_pack_flags(arguments, data_parallel), **priced, "--output-dir": arguments.packs}
    held_out = {**data, "--held-out-of": arguments.packs, "--output-dir": arguments.eval_packs}
    for named in (flags, held_out) if arguments.held_out else (flags,):
        made = Path(named["--output-dir"])
        _say(arguments, f"dataset -> {made}")
        remove_unused(Path(arguments.run_dir), made)
        run_our_tool(tools / "pack_data.py", named, arguments.json)
    write_record(_note(arguments, "packs"), _asked_of_packs(arguments, data_parallel))


def _say(arguments: argparse.Namespace, step: str) -> None:
    if not arguments.json:
        say(f"== {step} ==")
