"""From conversations to packs inside the folder of a run: for whoever names a model and files, and no dataset.

    --input chat.jsonl   1. tools/preprocess_data.py -> RUN/data
                         2. tools/pack_data.py       -> RUN/packs-by-size

What is there and made from the same inputs is not made again. Flags of Megatron's that nobody gives are those of a
usual fine-tuning: `USUAL_FLAGS`.
"""

import argparse
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.files.checksums import sha256_of
from omnibal_ext.files.records import write_record
from omnibal_ext.launch.flags import flags_in
from omnibal_ext.launch.folder import make_way
from omnibal_ext.launch.planning import run_our_tool
from omnibal_ext.output import say
from omnibal_ext.reading.checks import anything, mapping
from omnibal_ext.reading.document import read_json

DATA, PACKS = "data", "packs-by-size"
MICRO_BATCHES = 4
"""Packs of a rank and iteration, for each pipeline rank."""
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
"""As InternVL is fine-tuned (arXiv 2412.05271): each counts where the flag is not given."""


def add_conversation_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a run that begins with conversations."""
    group = parser.add_argument_group("conversations, instead of --data and --packs")
    group.add_argument(
        "--input", nargs="+", metavar="FILE", help="files of conversations, see tools/preprocess_data.py"
    )
    group.add_argument("--image-root", metavar="FOLDER", help="where image paths start from (default: at each file)")
    group.add_argument("--chat-template", help="where the model's folder does not say it")
    group.add_argument("--workers", type=int, default=1, help="processes that preprocess")
    group.add_argument("--max-rejects", type=int, help="conversations that may be left out (default: 1%%, at least 10)")
    group.add_argument(
        "--micro-batches", type=int, help=f"packs of a rank an iteration ({MICRO_BATCHES} a pipeline rank)"
    )


def check_conversation_flags(arguments: argparse.Namespace) -> None:
    """Either conversations or a dataset with packs; and what a run from conversations is not told is as usual.

    Raises UserError where both or neither are named.
    """
    if not arguments.input:
        for flag in ("data", "packs"):
            if not getattr(arguments, flag):
                raise UserError(f"--{flag} is missing; name dataset and packs, or --input, files of conversations")
        return
    if arguments.data or arguments.packs:
        raise UserError("--input makes dataset and packs in the run's folder; leave --data and --packs out")
    run_dir = Path(arguments.run_dir)
    arguments.data, arguments.packs = str(run_dir / DATA), str(run_dir / PACKS)
    given = flags_in(arguments.megatron)
    for flag, values in USUAL_FLAGS.items():
        if flag not in given and not (flag == "--bf16" and "--fp16" in given):
            arguments.megatron += [flag, *values]
    if arguments.epochs is None and "--train-iters" not in given:
        arguments.epochs = 1.0


def make_packs(arguments: argparse.Namespace, tools: Path, data_parallel: int) -> None:
    """Make the dataset and the packs that are missing or made from something else; every step is shown."""
    if not arguments.input:
        return
    if arguments.check and not (Path(arguments.packs) / "manifest.json").is_file():
        raise UserError(f"--check looks at packs, and {arguments.packs} is not made yet; --dry-run makes it")
    flags = {
        "--model": arguments.model,
        "--image-root": arguments.image_root,
        "--chat-template": arguments.chat_template,
        "--workers": arguments.workers,
        "--max-rejects": arguments.max_rejects,
        "--output-dir": arguments.data,
    }
    named = {flag: value for flag, value in flags.items() if value is not None}
    _say(arguments, f"conversations -> {arguments.data}")
    run_our_tool(tools / "preprocess_data.py", named, arguments.json, ["--input", *arguments.input])
    _pack(arguments, tools, data_parallel)


def _pack(arguments: argparse.Namespace, tools: Path, data_parallel: int) -> None:
    pipeline = arguments.pipeline_model_parallel_size
    flags: dict[str, Any] = {
        "--data": arguments.data,
        "--data-parallel-size": data_parallel,
        "--micro-batches": arguments.micro_batches or MICRO_BATCHES * pipeline,
        "--pipeline-model-parallel-size": pipeline,
        "--last-iteration": "empty",  # so that an epoch is one to the sample
        "--output-dir": arguments.packs,
    }
    inputs = Path(arguments.run_dir) / "packs.inputs.json"
    asked = {**flags, "dataset": sha256_of(Path(arguments.data) / "manifest.json")}
    if _made_from(inputs) == asked and (Path(arguments.packs) / "manifest.json").is_file():
        _say(arguments, f"dataset -> {arguments.packs}: there, made from the same")
        return
    _say(arguments, f"dataset -> {arguments.packs}")
    make_way(Path(arguments.run_dir), Path(arguments.packs))
    run_our_tool(tools / "pack_data.py", flags, arguments.json)
    write_record(inputs, asked)


def _made_from(path: Path) -> dict[str, Any] | None:
    """What is noted there; None if nothing is, or it is damaged: then they are made once more."""
    try:
        return read_json(path, mapping(anything), "pack again")
    except UserError:
        return None


def _say(arguments: argparse.Namespace, step: str) -> None:
    if not arguments.json:
        say(f"== {step} ==")
