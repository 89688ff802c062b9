"""Are these packs isolated? Any collator's, against transformers' model on their samples alone.

    omnibal prove --model HF_FOLDER --samples mine:samples --collator mine:collate
    omnibal prove --model HF_FOLDER --samples mine:samples --trainer transformers

`mine.py` is a module of yours: a list of what the model's processor makes, with labels, and what joins some to a batch.
Exit code 0: packs are equal, 1: some differ. docs/prove.md explains the table.
"""

import argparse
import inspect
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnibal_ext.console import print_json, print_table, say_wrapped
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import Interval, ToolParser

if TYPE_CHECKING:
    from megatron.vlm.prove.isolation import Proof

TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "axolotl": ("omnibal_ext.integrations.axolotl:proved", {}),
    "llama-factory": ("omnibal_ext.integrations.llama_factory:proved", {}),
    "omnibal": ("omnibal_ext.integrations.torch_loops:collate", {}),
    "transformers": ("transformers:DataCollatorWithFlattening", {}),
    "trl": ("trl.trainer.sft_trainer:DataCollatorForLanguageModeling", {"pad_token_id": 0, "padding_free": True}),
}
"""Collator, and the arguments of its class; those of other trainers need their tokenizer or template."""
SHOWN = 20
"""Faults that are printed."""


def main() -> None:
    """Run omnibal prove: compare a collator's packs with their samples alone, print; exit code 1 if some differ."""
    arguments = _parser().parse_args()
    sys.path.insert(0, "")  # the user's modules
    where, options = TRAINERS.get(arguments.trainer, (arguments.collator, {}))
    # Before ours, which give torch what it lacks without a GPU: a trainer that asks for one would find it.
    join = _named(where, f"pip install {arguments.trainer}" if arguments.trainer else "give MODULE:FUNCTION")
    from megatron.vlm.prove.isolation import prove, tried
    from megatron.vlm.prove.models import ATTENTION, load

    model, size, kernels = load(arguments.model, arguments.seed), arguments.pack, arguments.kernels.split(",")
    if unknown := set(kernels) - ATTENTION.keys():
        raise UserError(f"--kernels {unknown.pop()}: must be of {', '.join(ATTENTION)}")
    join = tried(partial(join, **options), f"{where} as it is") if isinstance(join, type) else join
    if not callable(join):
        raise UserError(f"{where}: is no function; give MODULE:FUNCTION")
    join = partial(join, config=model.config) if "config" in inspect.signature(join).parameters else join
    named = _named(arguments.samples, "give MODULE:LIST")
    samples = tried(lambda: list(islice(named, size * arguments.packs)), f"--samples {arguments.samples}")
    if not samples:
        raise UserError(f"--samples {arguments.samples}: is empty")
    proofs = [prove(model, samples[at : at + size], join, kernels) for at in range(0, len(samples), size)]
    differ = sum(bool(proof.findings) for proof in proofs)
    nothing = [number for number, proof in enumerate(proofs) if set(kernels) <= proof.not_run.keys()]
    if nothing and not differ:
        why = next(iter(proofs[nothing[0]].not_run.values()))
        raise UserError(f"pack {nothing[0]}: no kernel could be run: {why}")
    if arguments.json:
        found = [[{**one._asdict(), "kernels": under} for one, under in proof.findings.items()] for proof in proofs]
        packs = [{**vars(proof), "findings": faults, "differences": _finite(proof.differences)}
                 for proof, faults in zip(proofs, found, strict=True)]  # fmt: skip
        print_json({"equal": not differ, "packs": packs})
    else:
        _print(proofs, kernels)
        say_wrapped(f"{differ} of {len(proofs)} packs differ from their samples" if differ else "all packs are equal")
    sys.exit(1 if differ else 0)


def _named(name: str, remedy: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever a user's module raises
        hint = f"; {remedy}" if isinstance(error, (ModuleNotFoundError, AttributeError)) else ""
        raise UserError(f"{name}: {type(error).__name__}: {error}{hint}") from error


def _finite(differences: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return the differences with None for infinite ones and NaN, which JSON does not have."""
    return {kernel: {check: value if isfinite(value) else None for check, value in found.items()}
            for kernel, found in differences.items()}  # fmt: skip


def _print(proofs: Sequence["Proof"], kernels: Sequence[str]) -> None:
    from megatron.vlm.prove.isolation import CHECKS

    titles = ("", *(f"{name} (stand-in)" if name == "flash" else name for name in kernels))
    rows = [(check, *(_cell(proofs, check, kernel) for kernel in kernels)) for check in CHECKS]
    print_table(f"{len(proofs)} packs against their samples alone", titles, rows)
    lines = [f"pack {number}, {one.check}: {one.says} ({', '.join(under)})" for number, proof in enumerate(proofs)
             for one, under in proof.findings.items()]  # fmt: skip
    whys = Counter(f"{name} was not run: {why}" for proof in proofs for name, why in proof.not_run.items())
    skipped = [f"{why} ({count} of {len(proofs)} packs)" if count < len(proofs) else why for why, count in whys.items()]
    say_wrapped(*lines[:SHOWN], *[f"and {len(lines) - SHOWN} more: --json"] * (len(lines) > SHOWN), *skipped)


def _cell(proofs: Sequence["Proof"], check: str, kernel: str) -> str:
    """Return a cell of the table in words: what one check found in all packs under one attention kernel."""
    found = [{one.check for one, under in proof.findings.items() if kernel in under} for proof in proofs]
    wrong = sum(check in checks for checks in found)
    ran = [proof for proof in proofs if not {kernel, f"{check} under {kernel}"} & proof.not_run.keys()]
    if wrong or not ran:
        return f"{wrong} differ" if wrong else "not run"
    apart = [one.differences[kernel][check] for one in ran if check in one.differences.get(kernel, ())]
    return f"{max(apart):.0e}" if apart else "equal"


def _parser() -> ToolParser:
    numbers = (Interval("[1, 65536]", "pack packs"), Interval("[0, 4294967295]", "seed"))
    parser = ToolParser(numbers=numbers, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="of transformers; without weights: random ones")
    add("--samples", required=True, metavar="MODULE:LIST", help="features with labels, a dict a sample")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--collator", metavar="MODULE:FUNCTION", help="what makes a batch of a list of features")
    who.add_argument("--trainer", choices=TRAINERS, help="or a trainer's")
    add("--pack", type=int, default=4, metavar="N", help="samples of a pack (default 4)")
    add("--packs", type=int, default=10, metavar="N", help="at most (default 10)")
    add("--kernels", default="eager,sdpa,flash", metavar="K,...", help="of attention (default: eager,sdpa,flash)")
    add("--seed", type=int, default=0, metavar="N", help="of random weights (default 0)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


if __name__ == "__main__":
    run_tool(main)
