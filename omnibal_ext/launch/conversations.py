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
from omnibal_ext.flags import FURTHER_BUDGETS, ToolParser, flag_name, given_of, shown
from omnibal_ext.launch.flags import flags_in
from omnibal_ext.launch.folder import is_made, refuse_other, remove_unused
from omnibal_ext.launch.planning import run_our_tool
from omnibal_ext.launch.processes import run_fork, run_python
from omnibal_ext.output import say
from omnibal_ext.packing.command import pack_and_show, pack_parser
from omnibal_ext.packing.costs import are_patches
from omnibal_ext.packing.widths import check_widths
from omnibal_ext.preprocess_flags import preprocess_parser
from omnibal_ext.reading.document import decode
from omnibal_ext.reading.stores import named_stores
from omnibal_ext.sizes import Sizes

DATA, PACKS, HELD_OUT = "data", "packs-by-size", "packs-held-out"
READING = ("image_root", "workers", "max_rejects")
"""Settings of omnibal preprocess, taken for it, that have no effect on an existing dataset."""
LIMITS = ("max_tiles", "max_pixels", "max_tokens", "shorten")
"""Those that limit samples."""
PREPROCESSED = ("input", "chat_template", *READING, *LIMITS)
PACKED = ("vit_budget", "llm_budget", *FURTHER_BUDGETS.split(), "held_out", "widths")
"""Settings of omnibal pack that are taken for it."""
MICRO_BATCHES = 4
"""Default microbatches per pipeline rank."""
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


def add_conversation_flags(parser: ToolParser) -> None:
    """Add the flags of a run from conversations."""
    group = parser.add_argument_group("conversations, instead of --data and --packs")
    parser.borrow(group, preprocess_parser(), PREPROCESSED)
    parser.borrow(group, pack_parser(), PACKED, held_out={"help": "evaluate on these samples, train on the rest"})
    said = f"packs per rank and iteration (default: {MICRO_BATCHES} per pipeline rank)"
    group.add_argument("--micro-batches", type=int, help=said)


def say_unused(arguments: argparse.Namespace) -> None:
    """Print which of `READING` have no effect because --input is not given."""
    usual = preprocess_parser().defaults()
    unused = [flag_name(name) for name in READING if getattr(arguments, name) != usual[name]]
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
    """Raise UserError if files of --input or the folder of --image-root do not exist, or --run-dir is a file; name the
    trainer the stores of this command line."""
    if Path(arguments.run_dir).exists() and not Path(arguments.run_dir).is_dir():
        raise UserError(f"--run-dir {arguments.run_dir}: is a file; name a folder, new or of the run so far")
    for path in arguments.input or ():
        check_exists(path)
    if arguments.input and arguments.image_root:
        refuse_no_images(arguments.image_root)
    arguments.megatron += [f"--stores={store}" for store in sorted(named_stores())]


def make_packs(arguments: argparse.Namespace, tools: Path, data_parallel: int) -> None:
    """Make the dataset and the packs if they are missing or were made from other inputs; print every step."""
    _preprocess(arguments, tools)
    _pack(arguments, data_parallel)


def are_made(arguments: argparse.Namespace, data_parallel: int) -> bool:
    """Whether dataset and packs exist and were made with these flags; input files may have changed since.

    Raises UserError for --widths that these ranks cannot have, and if a run was begun on a dataset of other limits.
    """
    if arguments.widths:
        check_widths(arguments.widths, data_parallel)
    data, manifest = _asked_of_data(arguments), Path(arguments.data) / "manifest.json"
    refuse_other(Path(arguments.run_dir), _note(arguments, "data"), data)
    return is_made(_note(arguments, "data"), data, manifest) and _are_packed(arguments, data_parallel)


def micro_batches(arguments: argparse.Namespace) -> int:
    """Return the packs per rank and iteration."""
    return int(arguments.micro_batches or MICRO_BATCHES * arguments.pipeline_model_parallel_size)


def check_conversations(arguments: argparse.Namespace, tools: Path) -> dict[str, str]:
    """Return the result of `preprocess_data.py --check`, which reads the first lines of files and writes nothing."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = run_python(tools / "preprocess_data.py", *_preprocess_words(arguments, check=True, json=True), **both)
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
    return {flag_name(name): getattr(arguments, name) for name in LIMITS}


def _preprocess_words(arguments: argparse.Namespace, **switches: bool) -> list[str]:
    settings = given_of(arguments, ("model", *PREPROCESSED)) | switches
    return preprocess_parser().words(**settings, output_dir=arguments.data)


def _preprocess(arguments: argparse.Namespace, tools: Path) -> None:
    """Run the tool, which keeps a dataset of the same inputs; one with other limits is removed first."""
    asked, note = _asked_of_data(arguments), _note(arguments, "data")
    _say(arguments, f"conversations -> {arguments.data}")
    if note.exists() and not is_made(note, asked):
        remove_unused(Path(arguments.run_dir), Path(arguments.data))
    run_our_tool(tools / "preprocess_data.py", _preprocess_words(arguments), arguments.json)
    write_record(note, asked)


def _pack_settings(arguments: argparse.Namespace, data_parallel: int) -> dict[str, Any]:
    """Return the settings of omnibal pack, but for the folders that it reads and writes."""
    settings: dict[str, Any] = {
        "data_parallel_size": data_parallel,
        "micro_batches": micro_batches(arguments),
        "pipeline_model_parallel_size": arguments.pipeline_model_parallel_size,
        "last_iteration": "empty",  # so that an epoch has every sample once
    }
    settings |= given_of(arguments, PACKED) | {"widths": arguments.widths}
    if arguments.widths is None:
        groups, rest = divmod(arguments.nproc_per_node, arguments.tensor_model_parallel_size)
        settings["node_ranks"] = 1 if rest else groups  # data-parallel ranks of a node; 1: tensor groups span nodes
    return settings


def _asked_of_packs(arguments: argparse.Namespace, data_parallel: int) -> dict[str, Any]:
    dataset = sha256_of(Path(arguments.data) / "manifest.json")
    noted = {
        flag_name(name): shown(value) if name == "widths" else value
        for name, value in _pack_settings(arguments, data_parallel).items()
        if value != (1,)  # older notes name no usual widths
    }
    return {**noted, "dataset": dataset}


def _are_packed(arguments: argparse.Namespace, data_parallel: int) -> bool:
    folders = [arguments.packs, *([arguments.eval_packs] if arguments.held_out else [])]
    manifests = (Path(made) / "manifest.json" for made in folders)
    return is_made(_note(arguments, "packs"), _asked_of_packs(arguments, data_parallel), *manifests)


def _pack(arguments: argparse.Namespace, data_parallel: int) -> None:
    if _are_packed(arguments, data_parallel):
        _say(arguments, f"dataset -> {arguments.packs}: there, made from the same")
        return
    sizes = Path(arguments.data) / "sizes.npz"
    priced = {"model": arguments.model} if sizes.exists() and are_patches(Sizes.load(sizes)) else {}
    packing = {**_pack_settings(arguments, data_parallel), **priced, "output_dir": arguments.packs}
    held_out = {"held_out_of": arguments.packs, "output_dir": arguments.eval_packs}
    for settings in (packing, held_out) if arguments.held_out else (packing,):
        made = Path(settings["output_dir"])
        _say(arguments, f"dataset -> {made}")
        remove_unused(Path(arguments.run_dir), made)
        run_fork(pack_and_show, arguments.json, data=arguments.data, **settings)
    write_record(_note(arguments, "packs"), _asked_of_packs(arguments, data_parallel))


def _say(arguments: argparse.Namespace, step: str) -> None:
    if not arguments.json:
        say(f"== {step} ==")
