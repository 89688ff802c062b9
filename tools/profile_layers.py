"""Measure (or estimate) what every kind of layer costs; write profile.json.

    omnibal profile --model tiny --vit-budget 40 --llm-budget 512 --output profile.json
    omnibal profile --model internvl-chat-1.5 --analytic h100 --vit-budget 9 --llm-budget 4096 \\
        --tensor-model-parallel-size 4 --output profile.json

It starts as many processes as it needs: all ranks over which experts are distributed, and if the machine has them twice
the tensor-parallel ranks, to measure transfers. Or start it by torchrun, for example on two nodes. A profile that was
measured with the same settings, hardware and software is not measured again.
"""

import argparse
import math
import os
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omnibal_ext.adapters import Adapters, check_adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.expert_ranks import check_expert_ranks
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import RECOMPUTABLE_KINDS, TOWER_KINDS, chain_kind
from omnibal_ext.console import print_json, print_table
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.operations import installed_attention, measured_device
from omnibal_ext.costs.profile import Profile
from omnibal_ext.costs.states import WeightBytes, state_words
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.modalities.modality import ALWAYS, LANGUAGE, MODALITIES, Budgets, budget_fields, budgets_in, in_words
from omnibal_ext.modalities.vision.works import IMAGE_PATCHES
from omnibal_ext.output import say
from omnibal_ext.profile_flags import profile_parser
from omnibal_ext.trained import ALL

KERNELS = ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex")
"""Packages that choose what runs on the device."""
PROFILER = 5
"""Version of the measurements; profiles of another one are measured again."""


def main() -> None:
    """Run omnibal profile: measure or estimate what each kind of layer costs, write profile.json, print it."""
    arguments = profile_parser(__doc__).parse_args()
    architecture = preset(arguments.model)
    ranks = arguments.tensor_model_parallel_size, arguments.data_parallel_size
    check_expert_ranks(architecture, arguments.expert_model_parallel_size, ranks)
    check_adapters(Adapters.of(arguments), architecture)
    architecture.check_budgets(budgets_in(vars(arguments)))
    profile = _analytic(arguments, architecture) if arguments.analytic else _measured(arguments, architecture)
    if profile is None:
        return
    if arguments.tower_profile or (arguments.replica_ranks and not arguments.analytic):
        profile = _with_tower(profile, arguments, architecture)
        profile.save(arguments.output)
    if (learnt := profile.with_supervised(arguments.supervised_share)) != profile:
        profile = learnt
        profile.save(arguments.output)
    if arguments.json:
        print_json(profile.fields)
    else:
        _show(profile, arguments.output)


def _budgets(arguments: argparse.Namespace, architecture: Architecture) -> Budgets:
    """Return the budgets of packs to measure layers on: those of flags, 1 for what the model also reads."""
    return architecture.profiled(budgets_in(vars(arguments)))


def _analytic(arguments: argparse.Namespace, architecture: Architecture) -> Profile:
    """Return a profile estimated from operation counts, and write it."""
    profile = analytic_profile(
        architecture,
        arguments.analytic,
        _budgets(arguments, architecture),
        arguments.tensor_model_parallel_size,
        arguments.data_parallel_size,
        arguments.use_distributed_optimizer,
        tuple(arguments.freeze),
        measured_device(arguments.analytic),
        arguments.expert_model_parallel_size,
        Adapters.of(arguments),
        arguments.replica_ranks,
        installed_attention(),
        WeightBytes.of(arguments),
    )
    profile.save(arguments.output)
    return profile


def _measured(arguments: argparse.Namespace, architecture: Architecture) -> Profile | None:
    """Return a profile measured here, and write it, or one measured before with the same settings; None on ranks other
    than the first. Starts this program again by torchrun where that takes several processes."""
    settings = _settings(arguments, architecture)
    known = _known(arguments.output, settings, architecture)
    if known and not arguments.force:
        if not arguments.json:
            say(f"{arguments.output}: measured before with the same settings; --force measures again")
        return known
    ranks = settings["processes"]
    if ranks > 1 and "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "omnibal_ext.launch.torchrun", "--standalone", f"--nproc-per-node={ranks}"]
        os.execve(
            sys.executable, [*torchrun, *sys.argv], {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
        )
    from megatron.vlm.profiling.profiler import ProfileJob, profile_on_this_machine

    job = ProfileJob(
        arguments.model,
        _budgets(arguments, architecture),
        tensor_parallel=arguments.tensor_model_parallel_size,
        sequence_parallel=arguments.sequence_parallel,
        data_parallel=arguments.data_parallel_size,
        distributed_optimizer=arguments.use_distributed_optimizer,
        bf16=arguments.bf16,
        frozen=tuple(arguments.freeze),
        steps=arguments.steps,
        expert_parallel=arguments.expert_model_parallel_size,
        adapters=Adapters.of(arguments),
        states=tuple(state_words(arguments)),
    )
    if not arguments.json and os.environ.get("RANK", "0") == "0":
        sizes = in_words(job.budgets).replace("tiles", "tiles or patches")
        say(
            f"measuring layers on packs of {sizes}: on a CPU large ones take minutes; --max-pixels makes them smaller, "
            "--analytic h100 measures nothing"
        )
    profile = profile_on_this_machine(job, settings)
    if profile is not None:
        profile.save(arguments.output)
    return profile


def _with_tower(profile: Profile, arguments: argparse.Namespace, architecture: Architecture) -> Profile:
    """Return the profile with what a replicated tower takes: tiles of an image, and costs of its unsharded layers from
    --tower-profile, if given. Raises UserError if that is of another model, budgets or weights."""
    image = float(IMAGE_PATCHES) if architecture.vision.native is not None else 0.0
    if not arguments.tower_profile:
        return replace(profile, image_tiles=image)
    unsharded = Profile.load(arguments.tower_profile)
    if not architecture.was_noted(unsharded.model, unsharded.model_hash):
        raise UserError(f"{arguments.tower_profile}: is of model {unsharded.model!r}; measure it for this one")
    names = (*(one.budget for one in MODALITIES if one is not LANGUAGE), *vars(ALL), "dtype")
    there, wanted = (vars(one) | budget_fields(one.budgets) | vars(one.trained) for one in (unsharded, profile))
    for name in names:
        if there.get(name, 0) != wanted.get(name, 0):
            raise UserError(
                f"{arguments.tower_profile}: {name} is {there.get(name, 0)}, not {wanted.get(name, 0)}; "
                "measure it for the same model, budgets and weights"
            )
    if (size := unsharded.tensor_model_parallel_size) != 1:
        raise UserError(f"{arguments.tower_profile}: is of tensor-parallel size {size}, not 1")
    layers = {kind: cost for kind, cost in unsharded.layers.items() if chain_kind(kind) in TOWER_KINDS}
    return replace(profile, whole_layers=layers, image_tiles=image)


def _settings(arguments: argparse.Namespace, architecture: Architecture) -> dict[str, Any]:
    """Return all that measurements depend on: hardware, software, model, parallel sizes, budgets, precision."""
    from megatron.vlm import platform

    experts = arguments.expert_model_parallel_size
    least = math.lcm(arguments.tensor_model_parallel_size, experts)
    twice = 2 * arguments.tensor_model_parallel_size
    processes = twice if twice % experts == 0 and platform.device_count() >= twice else least
    names = ("tensor_model_parallel_size", "data_parallel_size", "steps", "bf16")
    budgets = budget_fields(_budgets(arguments, architecture))
    kernels = platform.attention_kernels(max((one.head_dim for one in architecture.language.attentions), default=0))
    return {
        **({"expert_model_parallel_size": experts} if experts > 1 else {}),
        "device": platform.device_name(),
        "processes": int(os.environ.get("WORLD_SIZE", processes)),
        "threads": os.environ.get("OMP_NUM_THREADS", "1" if processes > 1 else ""),
        **{package: _version(package) for package in KERNELS},
        **({"attention": kernels} if kernels else {}),
        **({"compiled_layers": True} if platform.compiles_layers() else {}),
        "profiler": PROFILER,
        "model_hash": architecture.hash,
        "sequence_parallel": arguments.sequence_parallel and arguments.tensor_model_parallel_size > 1,
        "distributed_optimizer": arguments.use_distributed_optimizer,
        **({"states": words} if (words := state_words(arguments)) else {}),
        "freeze": sorted(arguments.freeze),
        **({"adapters": adapters} if (adapters := Adapters.of(arguments).to_record()) else {}),
        **{one.budget: budgets.pop(one.budget) for one in ALWAYS},
        **{name: getattr(arguments, name) for name in names},
        **budgets,
    }


def _version(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _known(path: str, settings: dict[str, Any], architecture: Architecture) -> Profile | None:
    """Return the profile at `path` if it was measured with these settings, under whatever model name; else None."""
    if not Path(path).exists():
        return None
    try:
        profile = Profile.load(path)
    except UserError:  # another version, or damaged
        return None
    measured = profile.measured_with
    if "model_hash" in measured and architecture.was_noted(profile.model, measured["model_hash"]):
        measured = {**measured, "model_hash": architecture.hash}
    return profile if measured == settings else None


def _show(profile: Profile, output: str) -> None:
    disturbed = profile.notes.get("disturbed", {})
    rows = [
        (
            kind,
            profile.cost_kinds.count(kind),
            f"{cost.forward_seconds * 1e3:.3f}",
            f"{cost.backward_seconds * 1e3:.3f}",
            f"{cost.extra_seconds * 1e3:.3f}" if chain_kind(kind) in RECOMPUTABLE_KINDS else "-",
            f"{cost.kept_bytes / 2**20:.2f}",
            f"{cost.weight_bytes / 2**20:.2f}",
            f"{cost.output_bytes / 2**20:.2f}",
        )
        for kind, cost in profile.layers.items()
    ]
    milliseconds, sizes = ("forward ms", "backward ms", "again ms"), ("kept MiB", "weights MiB", "output MiB")
    columns = ("layer", "layers", *milliseconds, *sizes)
    where = f"{profile.device} {profile.dtype}, {in_words(profile.budgets)}"
    print_table(f"{profile.model} on {where} -> {output}", columns, rows)
    special = [kind for kind in profile.layers if kind in disturbed or profile.mode(kind) != "trained"]
    if special:
        found = [(kind, profile.mode(kind), disturbed.get(kind, "-")) for kind in special]
        print_table("Not trained, or with runs that were disturbed", ("layer", "mode", "disturbed runs"), found)
    if slow := profile.bound_by_host:
        say(f"bound by the host, which takes longer to ask for it than the device to compute it: {', '.join(slow)}")
    if gains := profile.notes.get("float8"):
        found = [(kind, name, f"{ratio:.2f}") for kind, ratios in gains.items() for name, ratio in ratios.items()]
        print_table("--fp8-format would gain", ("layer", "of it", "times as fast"), found)
    each, latency = profile.transfer_seconds_per_byte, profile.transfer_latency_seconds * 1e6
    transfer = f"transfer {latency:.0f} us + {1e-9 / each:.2f} GB/s" if each else "no transfers measured"
    say(
        f"{transfer}; an iteration adds "
        f"{profile.iteration_seconds * 1e3:.2f} ms and the layers' optimizer steps, "
        f"{sum(profile.layers[kind].step_seconds for kind in profile.cost_kinds) * 1e3:.2f} ms over all stages"
    )


if __name__ == "__main__":
    run_tool(main)
