"""Are these packs isolated? A collator's packs against transformers' model on their samples alone.

    omnibal prove --model HF_FOLDER --samples mine:samples --collator mine:collate
    omnibal prove --model HF_FOLDER --samples mine:samples --trainer transformers

`mine.py` is a module of yours: samples as the model's processor makes them, with labels, and what makes a batch of some.

Loss, gradients and logits, which sample sees which, positions, labels, images and sounds, and by what the loss is
divided. Exit code 0: all equal, 1: some differ. docs/prove.md explains the table.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.vlm.prove.inputs import TRAINERS, collator_of, samples_of
from megatron.vlm.prove.isolation import CHECKS, Proof, prove
from megatron.vlm.prove.kernels import NAMES
from megatron.vlm.prove.subject import load
from omnibal_ext.console import print_json, print_table, say_wrapped
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import Interval, ToolParser

NUMBERS = (Interval("[1, 65536]", "pack packs"), Interval("[0, 4294967295]", "seed"))
SHOWN = 20
"""Faults that are printed; all are in --json."""


def main() -> None:
    """Make the packs, compare, print; exit code 1 where they differ."""
    arguments = _parser().parse_args()
    sys.path.insert(0, "")  # a collator of the user's folder
    model = load(arguments.model, arguments.seed)
    collator = collator_of(arguments.trainer, arguments.collator, model.config)
    samples = samples_of(arguments.samples, arguments.packs * arguments.pack)
    packs = [samples[first : first + arguments.pack] for first in range(0, len(samples), arguments.pack)]
    proofs = [prove(model, pack, collator, arguments.kernels) for pack in packs]
    if reasons := [reason for proof in proofs for reason in proof.not_run.values() if not proof.differences]:
        raise UserError(f"no kernel could be run: {reasons[0]}")
    differ = sum(bool(proof.findings) for proof in proofs)
    if arguments.json:
        print_json({"equal": not differ, "packs": [_record(proof) for proof in proofs]})
    else:
        _print(proofs, arguments.kernels)
        say_wrapped(f"{differ} of {len(proofs)} packs differ from their samples" if differ else "all packs are equal")
    sys.exit(1 if differ else 0)


def _record(proof: Proof) -> dict[str, object]:
    found = [{**finding._asdict(), "kernels": kernels} for finding, kernels in proof.findings.items()]
    return {**vars(proof), "findings": found}


def _print(proofs: Sequence[Proof], kernels: Sequence[str]) -> None:
    rows = [(check, *(_cell(proofs, check, kernel) for kernel in kernels)) for check in CHECKS]
    print_table(f"{len(proofs)} packs against their samples alone", ("", *kernels), rows)
    found = [(number, *one) for number, proof in enumerate(proofs) for one in proof.findings.items()]
    lines = [f"pack {number}, {one.check}: {one.says} ({', '.join(under)})" for number, one, under in found]
    more = [f"and {len(lines) - SHOWN} more: --json"] if len(lines) > SHOWN else []
    skipped = dict.fromkeys(f"{name} was not run: {why}" for proof in proofs for name, why in proof.not_run.items())
    say_wrapped(*lines[:SHOWN], *more, *skipped)


def _cell(proofs: Sequence[Proof], check: str, kernel: str) -> str:
    """What one check found under one kernel."""
    wrong = sum(
        any(one.check == check and kernel in under for one, under in proof.findings.items()) for proof in proofs
    )
    ran = [proof.differences[kernel] for proof in proofs if kernel in proof.differences]
    if wrong or not ran:
        return f"{wrong} differ" if wrong else "not run"
    return f"{max(one.get(check, 0.0) for one in ran):.0e}" if check in ran[0] else "equal"


def _kernels(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise UserError(f"--kernels {unknown[0]}: must be of {', '.join(NAMES)}")
    return names


def _parser() -> ToolParser:
    parser = ToolParser(numbers=NUMBERS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--model", type=Path, required=True, metavar="FOLDER", help="transformers' folder; without weights: random ones"
    )
    add("--samples", required=True, metavar="MODULE:NAME", help="features of samples, with labels")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--collator", metavar="MODULE:FUNCTION", help="what makes a batch of a list of features")
    who.add_argument("--trainer", choices=TRAINERS, help="or a trainer's")
    add("--pack", type=int, default=4, metavar="N", help="samples of a pack (default 4)")
    add("--packs", type=int, default=10, metavar="N", help="at most (default 10)")
    add("--kernels", type=_kernels, default=[*NAMES], metavar="K,...", help=f"of {', '.join(NAMES)} (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="of random weights (default 0)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


if __name__ == "__main__":
    run_tool(main)
