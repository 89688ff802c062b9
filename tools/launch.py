"""Start a run, from files of conversations or from a dataset and packs: preprocess, pack, check, profile and plan where
results are missing or stale, and start torchrun.

    omnibal launch --model FOLDER --input chat.jsonl --image-root IMAGES --run-dir RUN --nproc-per-node 8

    omnibal launch --model tiny --from-scratch --data D --packs P --run-dir RUN --nproc-per-node 2 \\
        --pipeline-model-parallel-size 2 --epochs 3 --lr 1e-3 --save-interval 100

Megatron's flags that are not listed here follow --; `python -m megatron.vlm.pretrain --help` lists them. `--check`
stops after the checks, which always come first; without packs yet, they leave out what needs these. `--dry-run` stops
after planning, and prints the command. First weights are those in the folder of --model, or --from another one: Hugging
Face's, or a checkpoint. A run saves in RUN/checkpoints, unless --save names another folder, and resumes from its own
checkpoint if it has one. Only one run can use a folder at a time.
"""

import argparse
import contextlib
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path

from omnibal_ext.architectures.presets import MODEL_FLAGS, check_is_folder, preset
from omnibal_ext.console import follow_metrics, print_json
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.files.folders import refuse_within, refuse_without_manifest
from omnibal_ext.files.locks import only_job
from omnibal_ext.flags import ToolParser, refuse_unprintable
from omnibal_ext.launch.candidates import measured_best, print_trials, trial_flags
from omnibal_ext.launch.check import Report, check
from omnibal_ext.launch.conversations import (
    add_conversation_flags,
    are_made,
    check_conversation_flags,
    check_conversations,
    check_paths,
    make_packs,
    micro_batches,
    say_unused,
)
from omnibal_ext.launch.flags import (
    NEEDS,
    NUMBERS,
    flags_in,
    ranks_command,
    refuse_misplaced,
    save_in_run,
    torchrun_words,
    trainer_words,
)
from omnibal_ext.launch.folder import CHECKPOINTS, LOCK, LOG, METRICS, PLAN, number_old_files, refuse_used
from omnibal_ext.launch.longest import longest_sample
from omnibal_ext.launch.planning import COSTING, PLANNED, PROFILED, Planning, plan_of_budgets, provisional_plan
from omnibal_ext.launch.processes import GRACE_SECONDS, run_ranks, stoppable
from omnibal_ext.launch.recipe import FLAG, recipe_of, with_recipe
from omnibal_ext.launch.replanning import corrected_profile
from omnibal_ext.launch.reporting import note_inputs, write_report
from omnibal_ext.launch.weights import convert, converted_folder, downloaded, holds_weights, is_unconverted, pinned
from omnibal_ext.layout.command import plan_parser
from omnibal_ext.output import say
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.profile_flags import profile_parser
from omnibal_ext.trainer_flags import FORWARDED_FLAGS
from omnibal_ext.units import GIB

TOOLS = Path(__file__).parent
USAGE = "%(prog)s --model FOLDER --input FILE... --run-dir RUN [flags] [-- flags of Megatron's]"


def main() -> None:
    """Parse, check, profile, plan, start."""
    arguments = _parsed()
    with stoppable(), _locked(arguments):
        if arguments.fresh:
            refuse_used(Path(arguments.run_dir))
        data_parallel = _data_parallel_size(arguments)
        if not _has_packs(arguments, data_parallel):
            return
        say_unused(arguments)
        planning = _planning(arguments, data_parallel)
        report = _checked(arguments, planning)
        if arguments.check or _has_ended(arguments, report):
            return
        if report.weights and report.weights["kind"] == "unconverted":
            _convert(arguments)
        if arguments.repack and not arguments.plan:
            planning = planning.repacked()
            arguments.packs = str(planning.index.folder)
        if not arguments.json and not planning.is_planned():
            say(_longest_said(arguments, planning))
        plan = planning.ensure()
        _check_memory(plan, report)
        if arguments.measure_top_k and not plan.trials and not arguments.dry_run:
            trial = partial(_trial, arguments, planning.index)
            plan = measured_best(plan, arguments.measure_top_k, planning.run_dir / "trials", trial)
            plan.save(planning.plan_path)
            if not arguments.json:
                print_trials(plan)
        command = torchrun_words(arguments, planning.plan_path, planning.index, planning.run_dir / METRICS)
        if arguments.json:
            started = {"command": command, "started": not arguments.dry_run, "check": report.findings}
            print_json({"plan": plan.to_record(), **started})
        else:
            _say_end(arguments.epochs, planning.index)
            say(shlex.join(["python", "-m", "omnibal_ext.launch.torchrun", *command]))
        if not arguments.dry_run:
            note_inputs(planning, command, arguments.recipe)
            code = _start(arguments, command, planning.run_dir, report)
            if code == 0:
                write_report(TOOLS / "report.py", planning, arguments.json)
            sys.exit(code)


def _parsed() -> argparse.Namespace:
    """The flags, checked; --model and --from default to each other."""
    parser = _parser()
    words = with_recipe(sys.argv[1:])
    arguments = parser.parse_args(words)
    refuse_unprintable(sys.argv)
    arguments.recipe = recipe_of(words)
    refuse_misplaced(parser, arguments.megatron)
    _refuse_missing(parser, arguments)
    check_conversation_flags(arguments)
    check_paths(arguments)
    if arguments.download:
        name = str(arguments.model)
        arguments.model = downloaded(name, arguments.json)
        noted = arguments.recipe["flags"]
        noted |= {flag: pinned(name, arguments.model) for flag in ("model", "preset") if flag in noted}
    _name_weights(arguments)
    if arguments.input:
        check_is_folder(arguments.model, "--input needs")
    save_in_run(arguments)
    read = {"--data": arguments.data, "--packs": arguments.packs, "--eval-data": arguments.eval_data}
    refuse_within("--run-dir", Path(arguments.run_dir), {**read, "--eval-packs": arguments.eval_packs})
    return arguments


def _refuse_missing(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a line that names all that every run needs and that is not given."""
    missing = [] if arguments.model or arguments.first_weights else ["--model FOLDER (or a preset)"]
    missing += [] if arguments.input or arguments.data or arguments.packs or arguments.dry_run else ["--input FILE"]
    missing += [] if arguments.run_dir else ["--run-dir RUN"]
    if missing:
        parser.error(f"give {', '.join(missing)}")


def _locked(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """The lock of the run's folder, not taken for --check. Raises UserError if another run holds it."""
    if arguments.check:
        return contextlib.nullcontext()
    job = f"{arguments.rdzv_id} at {arguments.rdzv_endpoint}" if arguments.nnodes > 1 else None
    return only_job(Path(arguments.run_dir) / LOCK, f"--run-dir {arguments.run_dir}", job)


def _name_weights(arguments: argparse.Namespace) -> None:
    """Take first weights from the folder of --model if no other flag names them, and the model from --from."""
    named = arguments.from_scratch or flags_in(arguments.megatron) & {"--load", "--pretrained-checkpoint"}
    if arguments.model and not arguments.first_weights and not named and holds_weights(Path(arguments.model)):
        arguments.first_weights = arguments.model
    arguments.model = arguments.model or arguments.first_weights


def _longest_said(arguments: argparse.Namespace, planning: Planning) -> str:
    is_native, is_limited = planning.architecture.vision.native is not None, arguments.max_tiles or arguments.max_pixels
    return longest_sample(Path(arguments.data), planning.index, is_native, bool(is_limited))


def _convert(arguments: argparse.Namespace) -> None:
    """Convert the first weights from Hugging Face's format, unless that has been done."""
    source = Path(arguments.first_weights)
    arguments.first_weights = str(converted_folder(source, Path(arguments.run_dir)))
    data = None if arguments.no_logit_check else Path(arguments.data)
    convert(TOOLS / "convert_checkpoint.py", source, Path(arguments.first_weights), data, arguments.json)


def _planning(arguments: argparse.Namespace, data_parallel: int) -> Planning:
    """The inputs of the run's plan. Raises UserError for packs that the data-parallel ranks do not divide."""
    refuse_without_manifest(Path(arguments.data), "a dataset", "omnibal preprocess, or name files by --input")
    architecture, index, job = preset(arguments.model), PackedIndex.open(arguments.packs), _megatron_flags(arguments)
    count = _micro_batches(index, data_parallel)
    planning = Planning(arguments, job, architecture, index, data_parallel, count, TOOLS)
    if arguments.replan:
        arguments.profile = str(corrected_profile(planning))
    planning.check_profile()
    return planning


def _has_packs(arguments: argparse.Namespace, data_parallel: int) -> bool:
    """Make packs from conversations, after all other checks; False if there are none: --check makes none, and
    --dry-run without data prints the plan of packs that fill the budgets."""
    if not arguments.data:
        plan_of_budgets(arguments, _megatron_flags(arguments), data_parallel, micro_batches(arguments), TOOLS)
        return False
    if not arguments.input:
        return True
    if not are_made(arguments, data_parallel):
        _check_first(arguments, data_parallel)
        if arguments.check:
            return False
    make_packs(arguments, TOOLS, data_parallel)
    return True


def _check_first(arguments: argparse.Namespace, data_parallel: int) -> None:
    """Check, before preprocessing, all that does not depend on packs, and exit if anything is refused.

    With --check, also print the findings, which then include how the first conversations are read.
    """
    job, architecture, count = _megatron_flags(arguments), preset(arguments.model), micro_batches(arguments)
    plan = None if arguments.plan else provisional_plan(arguments, job, architecture, count)
    report = _report(arguments, plan, data_parallel * count, is_packed=False)
    if arguments.check:
        report.findings.append(check_conversations(arguments, TOOLS))
    if arguments.check or report.refusals:
        _print(report, arguments)


def _checked(arguments: argparse.Namespace, planning: Planning) -> Report:
    """Check the run and print the findings; exit with code 2 if it is refused."""
    is_planned = planning.is_planned()
    plan = None if is_planned else planning.provisional()
    report = _report(arguments, plan, planning.index, is_planned=is_planned)
    _print(report, arguments)
    return report


def _report(arguments: argparse.Namespace, plan: Plan | None, packs: PackedIndex | int, **job: bool) -> Report:
    """The findings for a run with this provisional plan or, if None, with the existing one."""
    run_dir = Path(arguments.run_dir)
    source = Path(arguments.first_weights) if arguments.first_weights else None
    if source and is_unconverted(source):
        converted = converted_folder(source, run_dir)
        arguments.first_weights = str(converted if converted.exists() else source)
    endpoint = arguments.rdzv_endpoint if arguments.nnodes > 1 else None
    known = {"endpoint": endpoint, "memory_gib": arguments.memory_gib, "run_dir": arguments.run_dir, **job}
    with tempfile.TemporaryDirectory() as folder:
        plan_path = Path(arguments.plan or run_dir / PLAN)
        if plan:
            plan_path = Path(folder) / "provisional-plan.json"
            plan.save(plan_path)
        words = trainer_words(arguments, plan_path, run_dir / METRICS, packs)
        return check(words, arguments.nnodes, arguments.nproc_per_node, known)


def _print(report: Report, arguments: argparse.Namespace) -> None:
    """Print the findings, and a line for each refusal; exit with code 2 if there is one."""
    if not arguments.json:
        report.print()
    elif report.refusals or arguments.check:
        print_json({"check": report.findings, "refused": len(report.refusals)})
    for refusal in report.refusals:
        say(f"error: {refusal}", error=True)
    if report.refusals:
        sys.exit(2)


def _check_memory(plan: Plan, report: Report) -> None:
    """Raise UserError if the plan predicts more memory than a device has."""
    needs = max(plan.predicted.get("stage_peak_bytes", [0])) / GIB
    if needs > report.device_gib:
        raise UserError(
            f"the plan predicts {needs:.1f} GiB on a rank, a device has {report.device_gib:.1f}; give --memory-gib "
            f"{report.device_gib * 0.9:.0f} to have layers recomputed, or raise the parallel sizes"
        )


def _has_ended(arguments: argparse.Namespace, report: Report) -> bool:
    """Whether the run has nothing left to do, such as training, evaluating or exporting; if so, say it."""
    if arguments.dry_run or arguments.save_hf or "--skip-train" in flags_in(arguments.megatron) or not report.has_ended:
        return False
    if arguments.json:
        print_json({"started": False, "check": report.findings})
    else:
        say(
            f"{arguments.run_dir}: nothing is left to train; for more epochs: --epochs N -- "
            "--override-opt-param-scheduler; to take the weights out: omnibal convert --to-hf "
            f"{Path(arguments.run_dir) / CHECKPOINTS} --output-dir tuned"
        )
    return True


def _say_end(epochs: float | None, index: PackedIndex) -> None:
    """Print by how many packs the last iteration exceeds --epochs, if it does."""
    stream = PackStream(index, index.global_batch, 1)
    if epochs and epochs == int(epochs) and (beyond := stream.beyond(int(epochs))):
        say(
            f"--epochs {epochs:g}: the last iteration is filled with {beyond} packs of the next epoch; packs made with "
            "--last-iteration empty end with it"
        )


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
    """The trainer's flags on which costs depend."""
    parser = ToolParser(add_help=False, allow_abbrev=False)
    parser.borrow(parser, profile_parser(), COSTING)
    return parser.parse_known_args(arguments.megatron)[0]


def _trial(arguments: argparse.Namespace, index: PackedIndex, plan: Path, metrics: Path) -> list[str]:
    """The command line of a trial of a layout."""
    return ranks_command(trial_flags(torchrun_words(arguments, plan, index, metrics)))


def _start(arguments: argparse.Namespace, command: list[str], run_dir: Path, report: Report) -> int:
    """Run the ranks and return their exit code; files of an earlier run, unless it is resumed, are renamed first."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not report.resumes:
        number_old_files(run_dir)
    # Ranks that save on a signal need as long as that takes.
    grace = None if "--exit-signal-handler" in arguments.megatron else GRACE_SECONDS
    if not arguments.progress:
        return run_ranks(ranks_command(command), grace=grace)
    metrics, log = run_dir / METRICS, run_dir / LOG
    start = metrics.stat().st_size if metrics.exists() else 0
    with log.open("a+", errors="replace") as output:
        before = output.tell()
        follow = partial(follow_metrics, metrics, start=start)
        code = run_ranks(ranks_command(command), output, grace, follow)
        if code:
            output.seek(before)
            errors = dict.fromkeys(line.rstrip() for line in output if line.startswith("error: "))
            say(*errors, f"training stopped; see {log}", error=True)
    return code


def _parser() -> ToolParser:
    parser = ToolParser(
        numbers=NUMBERS, needs=NEEDS, forwards_to="megatron", description=__doc__, usage=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add(FLAG, metavar="FILE", help="flags from a file, RUN/inputs.json or a recipe of the project by name")
    add(*MODEL_FLAGS, help="a folder with config.json and weights, or a preset (default: that of --from)")
    add("--download", action="store_true", help="fetch --model OWNER/MODEL[@REVISION] from the Hugging Face hub")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--from", dest="first_weights", metavar="FOLDER", help="first weights: Hugging Face's, converted, or a run's")
    add("--from-scratch", action="store_true", help="first weights are random")
    add = parser.add_argument
    add(
        "--no-logit-check", action="store_true", help="convert without comparing two samples' logits with transformers'"
    )
    add("--fresh", action="store_true", help="refuse a folder in which there has been a run")
    add("--data", help="dataset folder of omnibal preprocess")
    add("--packs", help="packed index of omnibal pack")
    add("--eval-data", help="held-out dataset folder")
    add("--eval-packs", help="packed index over it")
    add("--run-dir", help="of one run: profile, plan, metrics, TensorBoard")
    add("--epochs", type=float, help="instead of --train-iters")
    add("--save-hf", action="store_true", help="Hugging Face's weights next to every save")
    add("--no-save", action="store_true", help="keep no checkpoint (default: in RUN/checkpoints)")
    add_conversation_flags(parser)
    add = parser.add_argument_group("machine").add_argument
    add("--nproc-per-node", type=int, default=1)
    add("--nnodes", type=int, default=1)
    add("--rdzv-endpoint", help="HOST:PORT of the first node, where several meet")
    add("--rdzv-id", default="omnibal")
    group = parser.add_argument_group("profile and plan")
    add = group.add_argument
    add("--profile", help="use this profile.json")
    add("--replan", action="store_true", help="plan again from what the run in RUN measured, and go on with it")
    add("--repack", action="store_true", help="pack again, levelling the profile's seconds")
    add("--plan", help="use this plan.json, whatever its profile")
    parser.borrow(group, profile_parser(), PROFILED)
    one_rank, no_limit = {"default": 1}, {"default": None}
    parser.borrow(group, plan_parser(), PLANNED, pipeline_model_parallel_size=one_rank, memory_gib=no_limit)
    add("--measure-top-k", type=int, default=0, help="run the K best layouts for 3 steps, keep the fastest")
    for title, add_flags in FORWARDED_FLAGS.items():
        parser.add_forwarded(title, add_flags)
    parser.add_argument("--check", action="store_true", help="check everything, start nothing; exit code 2 if refused")
    parser.add_argument("--dry-run", action="store_true", help="plan and print the command, start nothing")
    parser.add_argument("--progress", action="store_true", help="show progress; the output goes to RUN/train.log")
    parser.add_argument("--json", action="store_true", help="print checks, plan and command as one JSON object")
    return parser


if __name__ == "__main__":
    run_tool(main)
