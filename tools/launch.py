"""From a dataset and its packs to a running job: profile and plan where missing or stale, then torchrun.

    python tools/launch.py --preset tiny --data D --packs P --run-dir RUN --nproc-per-node 2 \\
        --pipeline-model-parallel-size 2 --epochs 3 -- --lr 1e-3 --save RUN/checkpoints --save-interval 100

Everything after -- goes to Megatron as it is. `--dry-run` stops at the plan and the command that would start.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnibal_ext.architectures import Architecture, preset
from omnibal_ext.candidates import Trial, keep_fastest, layouts, measured_seconds, print_trials, trial_flags
from omnibal_ext.console import follow_metrics, print_json, track
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.packing.dispatch import PackStream
from omnibal_ext.packing.index import PackedIndex, sha256_of
from omnibal_ext.plan import Plan
from omnibal_ext.profile_data import Profile
from omnibal_ext.records import read_record

TOOLS = Path(__file__).parent


def main() -> None:
    """Parse, check, profile, plan, start."""
    arguments = _parser().parse_args()
    architecture = preset(arguments.preset)
    index = _checked_index(arguments.data, arguments.packs)
    if arguments.eval_packs:
        _checked_index(arguments.eval_data, arguments.eval_packs)
    data_parallel = _data_parallel_size(arguments)
    micro_batches = _micro_batches(index, data_parallel)
    run_dir = Path(arguments.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    plan_path = Path(arguments.plan) if arguments.plan else run_dir / "plan.json"
    if not arguments.plan:
        profile_path = Path(arguments.profile) if arguments.profile else run_dir / "profile.json"
        _ensure_profile(arguments, architecture, index, data_parallel, profile_path)
        if arguments.repack:
            index = _packed_again(arguments, data_parallel, micro_batches, profile_path, run_dir / "packs")
        _ensure_plan(arguments, architecture, index, micro_batches, profile_path, plan_path)
    plan = Plan.load(plan_path)
    plan.check_model(architecture.name, architecture.hash)
    plan.check_frozen(_megatron_flags(arguments).freeze)
    if arguments.measure_top_k and not plan.trials and not arguments.dry_run:
        plan = _measured_best(arguments, plan, index, run_dir / "trials")
        plan.save(plan_path)
    command = _torchrun(arguments, plan_path, index, run_dir / "metrics.jsonl")
    if arguments.json:
        print_json({"plan": plan.to_record(), "command": command, "started": not arguments.dry_run})
    else:
        print("torchrun " + shlex.join(command), flush=True)
    if not arguments.dry_run:
        sys.exit(_start_with_progress(run_dir) if arguments.progress else _start(command))


def _checked_index(data: str | None, packs: str) -> PackedIndex:
    """The packed index; UserError naming what differs unless it was made from this dataset and is undamaged."""
    if data is None:
        raise UserError(f"{packs}: give the dataset folder of these packs too")
    index = PackedIndex.open(packs)
    manifest = read_record(Path(data) / "manifest.json", "dataset", "tools/preprocess_data.py", lambda record: record)
    index.check({"built_from.data.manifest": manifest})
    index.verify()
    return index


def _data_parallel_size(arguments: argparse.Namespace) -> int:
    ranks = arguments.nnodes * arguments.nproc_per_node
    model = arguments.tensor_model_parallel_size * arguments.pipeline_model_parallel_size
    if ranks % model:
        raise UserError(
            f"{ranks} processes do not divide into tensor {arguments.tensor_model_parallel_size} x pipeline "
            f"{arguments.pipeline_model_parallel_size}; change --nproc-per-node or the parallel sizes"
        )
    return ranks // model


def _micro_batches(index: PackedIndex, data_parallel: int) -> int:
    if index.global_batch % data_parallel:
        raise UserError(
            f"{index.folder}: packed for a global batch of {index.global_batch} packs, which {data_parallel} "
            "data-parallel ranks do not divide; pack with another --micro-batches"
        )
    return index.global_batch // data_parallel


def _megatron_flags(arguments: argparse.Namespace) -> argparse.Namespace:
    """Those of Megatron's flags and the trainer's that costs depend on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--freeze", nargs="+", default=[])
    return parser.parse_known_args([word for word in arguments.megatron if word != "--"])[0]


def _ensure_profile(
    arguments: argparse.Namespace, architecture: Architecture, index: PackedIndex, data_parallel: int, path: Path
) -> None:
    """Profile as the run will be; the profiler knows what it has measured before. A profile given is only checked."""
    job = _megatron_flags(arguments)
    if arguments.profile:
        wanted = {
            "model_hash": architecture.hash,
            "vit_budget": index.vit_budget,
            "llm_budget": index.llm_budget,
            "tensor_model_parallel_size": arguments.tensor_model_parallel_size,
        }
        profile = Profile.load(path)
        found = {name: getattr(profile, name) for name in wanted}
        if found != wanted or set(profile.frozen) != set(job.freeze):
            wanted["frozen"], found["frozen"] = job.freeze, list(profile.frozen)
            raise UserError(f"profile {path}: is of {found}, not of {wanted}; leave --profile out to have one measured")
        return
    flags: dict[str, Any] = {
        "--model": arguments.preset,
        "--vit-budget": index.vit_budget,
        "--llm-budget": index.llm_budget,
        "--tensor-model-parallel-size": arguments.tensor_model_parallel_size,
        "--data-parallel-size": data_parallel,
        "--output": path,
    }
    if arguments.analytic:
        flags["--analytic"] = arguments.analytic
    switches = [f"--{name.replace('_', '-')}" for name in ("bf16", "use_distributed_optimizer") if getattr(job, name)]
    _tool("profile_layers.py", flags, arguments.json, [*switches, *(["--freeze", *job.freeze] if job.freeze else [])])


def _packed_again(
    arguments: argparse.Namespace, data_parallel: int, micro_batches: int, profile: Path, folder: Path
) -> PackedIndex:
    """Pack as before, but level the seconds that were profiled; the run uses these packs."""
    flags = {
        "--data": arguments.data,
        "--like": arguments.packs,
        "--costs": profile,
        "--data-parallel-size": data_parallel,
        "--micro-batches": micro_batches,
        "--pipeline-model-parallel-size": arguments.pipeline_model_parallel_size,
        "--output-dir": folder,
    }
    _tool("pack_data.py", flags, arguments.json)
    arguments.packs = str(folder)
    return _checked_index(arguments.data, arguments.packs)


def _ensure_plan(
    arguments: argparse.Namespace,
    architecture: Architecture,
    index: PackedIndex,
    micro_batches: int,
    profile_path: Path,
    path: Path,
) -> None:
    """Plan on the packs that will run, unless `path` holds a plan from this profile and these choices."""
    wanted = {
        "model_hash": architecture.hash,
        "profile_hash": Profile.load(profile_path).hash,
        "num_microbatches": micro_batches,
        "pipeline_model_parallel_size": arguments.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": arguments.virtual_pipeline_model_parallel_size,
        "method": arguments.method,
        "schedule": arguments.schedule,
        "memory_gib": arguments.memory_gib,
    }
    record = path.with_name("plan.inputs.json")
    asked = {**wanted, "recompute": arguments.recompute, "packs": sha256_of(index.folder / "manifest.json")}
    asked["measure_top_k"] = arguments.measure_top_k
    if path.exists() and record.exists() and json.loads(record.read_text()) == asked:
        return
    flags = {
        "--profile": profile_path,
        "--pipeline-model-parallel-size": arguments.pipeline_model_parallel_size,
        "--virtual-pipeline-model-parallel-size": arguments.virtual_pipeline_model_parallel_size,
        "--num-microbatches": micro_batches,
        "--packs": index.folder,
        "--method": arguments.method,
        "--recompute": arguments.recompute,
        "--schedule": arguments.schedule,
        "--output": path,
    }
    if arguments.memory_gib is not None:
        flags["--memory-gib"] = arguments.memory_gib
    _tool("plan_layout.py", flags, arguments.json)
    record.write_text(json.dumps(asked))


def _measured_best(arguments: argparse.Namespace, plan: Plan, index: PackedIndex, folder: Path) -> Plan:
    """Run the plan's best layouts for a few steps each, on these packs, and keep the fastest."""
    trials = []
    candidates = layouts(plan, arguments.measure_top_k)
    for number, candidate in enumerate(track(candidates, "measuring layouts", len(candidates))):
        here = folder / str(number)
        candidate.save(here / "plan.json")
        metrics = here / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        command = _torchrun(arguments, here / "plan.json", index, metrics)
        command = trial_flags([sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *command])
        with (here / "log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=log, check=False)
        trials.append(Trial(candidate, measured_seconds(metrics)))
    best = keep_fastest(trials)
    if not arguments.json:
        print_trials(best)
    return best


def _tool(name: str, flags: dict[str, Any], quiet: bool, switches: Sequence[str] = ()) -> None:
    """Run one of our tools as a user would; its failure is ours, with its exit code."""
    words = [*(str(word) for flag in flags.items() for word in flag), *switches]
    output = subprocess.DEVNULL if quiet else None
    done = subprocess.run([sys.executable, "-W", "ignore", str(TOOLS / name), *words], stdout=output, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def _torchrun(arguments: argparse.Namespace, plan: Path, index: PackedIndex, metrics: Path) -> list[str]:
    """The arguments of torchrun."""
    if arguments.nnodes > 1:
        where = [f"--nnodes={arguments.nnodes}", f"--rdzv-id={arguments.rdzv_id}", "--rdzv-backend=c10d"]
        where.append(f"--rdzv-endpoint={arguments.rdzv_endpoint}")
    else:
        where = ["--standalone"]
    words = [*where, f"--nproc-per-node={arguments.nproc_per_node}", "-m", "megatron.vlm.pretrain"]
    flags = {
        "--preset": arguments.preset,
        "--plan": plan,
        "--data": arguments.data,
        "--packs": arguments.packs,
        "--tensor-model-parallel-size": arguments.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": arguments.pipeline_model_parallel_size,
        "--global-batch-size": index.global_batch,
        "--metrics-file": metrics,
        "--tensorboard-dir": Path(arguments.run_dir) / "tensorboard",
    }
    if arguments.eval_packs:
        flags |= {"--eval-data": arguments.eval_data, "--eval-packs": arguments.eval_packs}
    if arguments.epochs:
        flags["--train-iters"] = PackStream(index, index.global_batch, 1).first_iteration(arguments.epochs)
    words += [str(word) for flag in flags.items() for word in flag]
    return words + [word for word in arguments.megatron if word != "--"]


def _start(command: list[str]) -> int:
    """Run torchrun in this process; a rank that stopped for the user's input (exit code 2) makes ours 2."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(command)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return 2 if failure.exitcode == 2 else 1
    return 0


def _start_with_progress(run_dir: Path) -> int:
    """Run this launch again, its output going to a file, and show the iterations as they end."""
    log, metrics = run_dir / "train.log", run_dir / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    words = [word for word in sys.argv[1:] if word != "--progress"]
    with log.open("w") as output:
        job = subprocess.Popen([sys.executable, "-W", "ignore", __file__, *words], stdout=output, stderr=output)
        follow_metrics(metrics, is_running=lambda: job.poll() is None)
    if job.returncode:
        errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error:")]
        print(*dict.fromkeys(errors), f"training stopped; see {log}", sep="\n", file=sys.stderr)
    return job.returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--data", required=True, help="dataset folder of tools/preprocess_data.py")
    parser.add_argument("--packs", required=True, help="packed index of tools/pack_data.py")
    parser.add_argument("--eval-data", help="held-out dataset folder")
    parser.add_argument("--eval-packs", help="packed index over it")
    parser.add_argument("--run-dir", required=True, help="profile, plan, metrics and TensorBoard go here")
    parser.add_argument("--epochs", type=float, help="instead of --train-iters")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--nproc-per-node", type=int, default=1)
    machine.add_argument("--nnodes", type=int, default=1)
    machine.add_argument("--rdzv-endpoint", default="localhost:29500", help="HOST:PORT of the first node")
    machine.add_argument("--rdzv-id", default="omnibal")
    machine.add_argument("--tensor-model-parallel-size", type=int, default=1)
    machine.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    plan = parser.add_argument_group("plan")
    plan.add_argument("--profile", help="use this profile.json")
    plan.add_argument("--analytic", help="estimate the profile for a100, h100 or h200 instead of measuring")
    plan.add_argument("--repack", action="store_true", help="pack again, levelling the profile's seconds")
    plan.add_argument("--plan", help="use this plan.json, whatever its profile")
    plan.add_argument("--virtual-pipeline-model-parallel-size", type=int, default=1)
    plan.add_argument("--method", default="joint", help="see tools/plan_layout.py")
    plan.add_argument("--schedule", default="1f1b")
    plan.add_argument("--recompute", default="fewest", choices=("fewest", "full"))
    plan.add_argument(
        "--measure-top-k", type=int, default=0, help="run the K best layouts for 3 steps, keep the fastest"
    )
    plan.add_argument("--memory-gib", type=float, help="of one device; no limit unless given")
    parser.add_argument("--dry-run", action="store_true", help="plan and print the command, start nothing")
    parser.add_argument("--progress", action="store_true", help="show progress; the output goes to RUN/train.log")
    parser.add_argument("--json", action="store_true", help="print plan and command as one JSON object")
    parser.add_argument("megatron", nargs=argparse.REMAINDER, help="-- and then any flag of Megatron's")
    return parser


if __name__ == "__main__":
    run_tool(main)
