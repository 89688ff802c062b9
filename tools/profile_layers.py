"""Measure (or estimate) what every kind of layer costs; write profile.json.

    python tools/profile_layers.py --model tiny --vit-budget 40 --llm-budget 512 --output profile.json
    python tools/profile_layers.py --model internvl-chat-1.5 --analytic h100 --vit-budget 9 --llm-budget 4096 \\
        --tensor-model-parallel-size 4 --output profile.json
"""

import argparse
import os
import sys
from dataclasses import asdict

from omnibal_ext.analytic import DEVICES, analytic_profile
from omnibal_ext.architectures import preset
from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.profile_data import Profile


def main() -> None:
    """Parse, measure, print, write."""
    arguments = _parser().parse_args()
    for name in ("vit_budget", "llm_budget", "tensor_model_parallel_size"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    architecture = preset(arguments.model)
    if arguments.analytic:
        profile = analytic_profile(
            architecture,
            arguments.analytic,
            arguments.vit_budget,
            arguments.llm_budget,
            arguments.tensor_model_parallel_size,
        )
    else:
        measured = _measure(arguments)
        if measured is None:
            return
        profile = measured
    profile.save(arguments.output)
    if arguments.json:
        print_json(asdict(profile))
    else:
        _show(profile, arguments.output)


def _measure(arguments: argparse.Namespace) -> Profile | None:
    """Measure on this machine; with tensor parallelism one process a rank, of which the first returns a profile."""
    ranks = arguments.tensor_model_parallel_size
    if ranks > 1 and "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        os.execv(sys.executable, [*torchrun, *sys.argv])
    from megatron.vlm.profiler import profile_on_this_machine

    flags = ["--bf16"] if arguments.bf16 else []
    return profile_on_this_machine(
        arguments.model, arguments.vit_budget, arguments.llm_budget, ranks, flags, arguments.steps
    )


def _show(profile: Profile, output: str) -> None:
    rows = [
        (
            kind,
            profile.chain.count(kind),
            f"{cost.forward_seconds * 1e3:.3f}",
            f"{cost.backward_seconds * 1e3:.3f}",
            f"{cost.kept_bytes / 2**20:.2f}",
            f"{cost.weight_bytes / 2**20:.2f}",
            f"{cost.output_bytes / 2**20:.2f}",
        )
        for kind, cost in profile.layers.items()
    ]
    columns = ("layer", "in the chain", "forward ms", "backward ms", "kept MiB", "weights MiB", "output MiB")
    where = f"{profile.device} {profile.dtype}, {profile.vit_budget} tiles, {profile.llm_budget} tokens"
    print_table(f"{profile.model} on {where} -> {output}", columns, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a preset")
    parser.add_argument("--vit-budget", type=int, required=True, help="tiles of a full pack")
    parser.add_argument("--llm-budget", type=int, required=True, help="tokens of a full pack")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="measure in bf16")
    parser.add_argument("--steps", type=int, default=5, help="steps measured, after two to warm up")
    parser.add_argument("--analytic", choices=sorted(DEVICES), help="from operation counts, no device needed")
    parser.add_argument("--output", required=True, help="profile.json to write")
    parser.add_argument("--json", action="store_true", help="print the profile as one JSON object")
    return parser


if __name__ == "__main__":
    run_tool(main)
