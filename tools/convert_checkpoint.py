"""Hugging Face weights in and out, a weight at a time.

    omnibal convert --from-hf InternVL3-8B-hf --output-dir internvl3-8b --check
    torchrun ... -m megatron.vlm.pretrain --model internvl3-8b --from internvl3-8b --save run/checkpoints ...
    omnibal convert --to-hf run/checkpoints --output-dir InternVL3-8B-tuned --check

    omnibal convert --to-peft run/checkpoints --output-dir adapters

--to-hf merges adapters into the weights; --to-peft writes them to a folder of peft's, which --adapters reads.
Checkpoints do not depend on the layout: a run with another plan, or other tensor- or pipeline-parallel sizes, can load
them as they are.
"""

import argparse
import sys
from pathlib import Path

from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import Need, ToolParser
from omnibal_ext.output import say
from omnibal_ext.reading.stores import store_named


def main() -> None:
    """Run omnibal convert: weights from Hugging Face, to it, or to peft; compare logits if asked; print."""
    arguments = _parser().parse_args()
    from megatron.vlm.hf.check import TOLERANCE, check_possible, compared
    from megatron.vlm.hf.convert import from_hugging_face, to_hugging_face, to_peft

    output, like = Path(arguments.output_dir), Path(arguments.like) if arguments.like else None
    adapters = _existing(arguments.adapters) if arguments.adapters else None
    data = _existing(arguments.data) if arguments.data else None
    if arguments.from_hf:
        ours, theirs = output, _existing(arguments.from_hf)
        if arguments.check:
            check_possible(theirs, adapters is not None)
        keys = from_hugging_face(theirs, ours, adapters)
    elif arguments.to_hf:
        ours, theirs = _existing(arguments.to_hf), output
        keys = to_hugging_face(ours, theirs, like)
        if arguments.check:
            check_possible(theirs)
    else:
        keys = to_peft(_existing(arguments.to_peft), output, like)
    found = compared(ours, theirs, adapters, data) if arguments.check else None
    difference, rounding = (found.difference, found.rounding) if found else (None, None)
    result = {
        "model": keys.architecture.name,
        "weights": len(keys.sources),
        "parameters": sum(weight.numel() for weight in keys.shapes.values()),
        "unused_weights": len(keys.unused),
        "output": str(output),
        "logit_difference": difference,
        **({"merge_rounding": rounding} if rounding is not None else {}),
    }
    if arguments.json:
        print_json(result)
    else:
        result |= {name: f"{result[name]:.1e}" for name in FIGURES if result.get(name) is not None}
        rows = [(name.replace("_", " "), value) for name, value in result.items() if value is not None]
        print_table("checkpoint", ("what", "value"), rows)
    if adapters:
        _say_other_base(adapters, theirs)
    if difference is not None and not difference <= TOLERANCE:  # NaN fails too
        say(f"error: logits differ from Hugging Face's by {difference:.2e}, limit {TOLERANCE}", error=True)
        sys.exit(1)


def _say_other_base(adapters: Path, model: Path) -> None:
    """Print a note if adapters name another base model than `model`, which they were applied to."""
    from megatron.vlm.hf.peft_config import PeftConfig

    base = PeftConfig.read(adapters).fields.get("base_model_name_or_path")
    if isinstance(base, str) and base and Path(base).name.casefold() != model.resolve().name.casefold():
        say(f"note: {adapters} says that its adapters were trained on {base}, not on {model.name}", error=True)


def _existing(folder: str) -> Path:
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder; models are not downloaded")
    return Path(folder)


FIGURES = ("logit_difference", "merge_rounding")
NEEDS = (
    Need("adapters", "--from-hf: the model that they were trained on", lambda given: given.from_hf),
    Need("like", "--to-hf or --to-peft", lambda given: not given.from_hf),
    Need("data", "--check", lambda given: given.check),
    Need("stores", "--data", lambda given: given.data),
    Need("check", "--from-hf or --to-hf", lambda given: not given.to_peft),
)


def _parser() -> argparse.ArgumentParser:
    parser = ToolParser(needs=NEEDS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--from-hf", metavar="DIR", help="folder with config.json and safetensors weights")
    direction.add_argument("--to-hf", metavar="OURS", help="checkpoint folder of this tool or of a training run")
    direction.add_argument("--to-peft", metavar="OURS", help="checkpoint folder of a run that trained adapters")
    add = parser.add_argument
    add("--adapters", metavar="DIR", help="with --from-hf: a folder of peft's, whose adapters come along")
    add("--output-dir", required=True, help="where to write; must not exist or be empty")
    add("--like", metavar="DIR", help="the model it came from, if that is not found")
    add("--check", action="store_true", help="compare logits with Hugging Face's; fail past 1e-4")
    add("--data", metavar="DATASET", help="with --check: on two samples of it, not on random ones")
    add("--stores", type=store_named, action="append", metavar="STORE", help="with --data: where its images may lie")
    add("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    run_tool(main)
