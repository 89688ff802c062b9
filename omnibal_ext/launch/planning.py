"""Makes a run's profile and plan with our tools if they are missing or stale."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.console import print_json
from omnibal_ext.costs.profile import Profile
from omnibal_ext.costs.states import AWARE, DTYPES
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import sha256_of, write_record
from omnibal_ext.flags import flag_name, given_of
from omnibal_ext.launch.flags import is_own_plan
from omnibal_ext.launch.folder import PLAN, is_made, remove_unused
from omnibal_ext.launch.processes import run_fork, run_python
from omnibal_ext.layout.command import plan_and_show
from omnibal_ext.layout.partition import even_edges
from omnibal_ext.modalities.modality import Budgets, budget_fields, budgets_in
from omnibal_ext.packing.command import pack_and_show
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.profile_flags import profile_parser

PROFILED = ("tensor_model_parallel_size", "expert_model_parallel_size", "analytic")
"""Settings of omnibal profile that omnibal launch takes for it."""
PLANNED = (
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "method", "schedule", "tower", "memory_gib",
    "recompute",
)  # fmt: skip
"""Settings of omnibal plan that omnibal launch takes for it."""
COSTING = (
    "bf16", "use_distributed_optimizer", "sequence_parallel", AWARE, *DTYPES, "freeze", "lora_rank", "lora_targets"
)  # fmt: skip
"""Flags of the trainer on which costs depend; omnibal profile has the same."""


@dataclass(frozen=True)
class Planning:
    """Inputs of a run's plan: flags of omnibal launch, the model, the packs, and parallel sizes."""

    flags: argparse.Namespace
    job: argparse.Namespace
    """Flags of the trainer on which costs depend, `COSTING`."""
    architecture: Architecture
    index: PackedIndex
    data_parallel: int
    micro_batches: int
    tools: Path

    @property
    def adapters(self) -> Adapters:
        """The adapters that the run trains."""
        return Adapters.of(self.job)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parts of the model with frozen weights."""
        return self.adapters.frozen(self.job.freeze)

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.flags.run_dir)

    @property
    def profile_path(self) -> Path:
        """--profile, or profile.json in the run's folder."""
        return Path(self.flags.profile) if self.flags.profile else self.run_dir / "profile.json"

    @property
    def plan_path(self) -> Path:
        """--plan, or plan.json in the run's folder."""
        return Path(self.flags.plan) if self.flags.plan else self.run_dir / PLAN

    @property
    def inputs_path(self) -> Path:
        """A record of what the plan in the run's folder was made from."""
        return self.run_dir / "plan.inputs.json"

    def provisional(self) -> Plan:
        """The run's `provisional_plan`."""
        return provisional_plan(self.flags, self.job, self.architecture, self.micro_batches, self.index.budgets)

    def is_planned(self) -> bool:
        """Whether a valid plan exists: that of --plan, or one made from this profile and these flags."""
        if self.flags.plan:
            return True
        if not self.profile_path.exists():
            return False
        profile = Profile.load(self.profile_path)
        is_ours = self.architecture.was_noted(profile.model, profile.model_hash)
        return is_ours and is_made(self.inputs_path, self._asked(), self.plan_path)

    def check_profile(self) -> None:
        """Raise UserError if --profile is for another model, budgets, parallel sizes, frozen parts or adapters."""
        if not self.flags.profile:
            return
        profile = Profile.load(self.profile_path)
        wanted: dict[str, Any] = {
            "model_hash": self.architecture.hash,
            **budget_fields(self.architecture.profiled(self.index.budgets)),
            "tensor_model_parallel_size": self.flags.tensor_model_parallel_size,
            "expert_model_parallel_size": self.flags.expert_model_parallel_size,
            "lora_rank": self.adapters.rank,
            "lora_targets": self.adapters.targets,
        }
        said = vars(profile) | vars(profile.trained) | budget_fields(profile.budgets)
        found = {name: said.get(name) for name in wanted}
        if self.architecture.was_noted(profile.model, profile.model_hash):
            wanted["model_hash"] = profile.model_hash
        wanted["frozen"], found["frozen"] = sorted(self.frozen), sorted(profile.trained.frozen)
        if found != wanted:
            raise UserError(
                f"profile {self.profile_path}: is of {found}, not of {wanted}; leave --profile out to have one measured"
            )

    def repacked(self) -> "Planning":
        """--repack: return this with packs balanced by the profile's seconds; profile and packs are made if missing."""
        self._ensure_profile()
        folder, note = self.run_dir / "packs", self.run_dir / "repack.inputs.json"
        ranks = {
            "data_parallel_size": self.data_parallel,
            "micro_batches": self.micro_batches,
            "pipeline_model_parallel_size": self.flags.pipeline_model_parallel_size,
        }
        paths = {
            "data": self.flags.data, "like": self.index.folder, "costs": self.profile_path, "output_dir": folder
        }  # fmt: skip
        asked = {flag_name(name): str(value) for name, value in ranks.items()}
        asked |= {"packs": sha256_of(self.index.folder / "manifest.json"), "profile": self._profile_hash}
        if not is_made(note, asked, folder / "manifest.json"):
            remove_unused(self.run_dir, folder)
            run_fork(pack_and_show, self.flags.json, **ranks, **paths)
            write_record(note, asked)
        return replace(self, index=PackedIndex.open(folder))

    @property
    def _profile_hash(self) -> str:
        return Profile.load(self.profile_path).hash

    def ensure(self) -> Plan:
        """Return the run's plan; profile and plan are made first if missing or stale.

        Raises UserError if --plan names the run's own plan, and that was made from other flags, costs or packs.
        """
        own = is_own_plan(self.flags) and self.inputs_path.exists() and self.profile_path.exists()
        if own and not is_made(self.inputs_path, self._asked(), self.plan_path):
            raise UserError(
                f"plan {self.plan_path}: made from other flags, costs or packs: leave --plan out to have it made again"
            )
        if not self.flags.plan:
            self._ensure_profile()
            if not self.is_planned():
                self._plan()
        return Plan.load(self.plan_path)

    def _ensure_profile(self) -> None:
        """Run the profiler, which does not repeat measurements that are in the file."""
        if self.flags.profile:
            return
        settings = profile_settings(self.flags, self.job, self.index.budgets, self.data_parallel, self.profile_path)
        if (learnt := Corpus.of_dataset(self.flags.data).supervised_share) is not None:
            settings["supervised_share"] = round(learnt, 3)
        replicated = replica_settings(self.flags)
        if replicated and self.flags.tensor_model_parallel_size > 1 and not self.flags.analytic:
            replicated["tower_profile"] = self.run_dir / "tower_profile.json"
            unsharded = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}
            unsharded |= {"output": replicated["tower_profile"]}
            run_profile(self.tools, self.flags.json, **settings | unsharded)
        run_profile(self.tools, self.flags.json, **settings, **replicated)

    def _asked(self) -> dict[str, Any]:
        """Return all inputs on which the plan depends; the model's hash is that of its profile."""
        profile = Profile.load(self.profile_path)
        narrow = (AWARE, *DTYPES)  # not noted of usual states, which plans of older versions have
        noted = [name for name in vars(self.job) if name not in narrow or getattr(self.job, AWARE)]
        return {
            "model_hash": profile.model_hash,
            "profile_hash": profile.hash,
            "num_microbatches": self.micro_batches,
            "packs": sha256_of(self.index.folder / "manifest.json"),
            "data_parallel_size": self.data_parallel,
            **{name: getattr(self.flags, name) for name in (*PLANNED, *PROFILED, "measure_top_k")},
            **{name: value for name, value in vars(self.job).items() if name in noted},
        }

    def _plan(self) -> None:
        asked = {"profile": self.profile_path, "packs": self.index.folder, "output": self.plan_path}
        make_plan(self.flags, self.micro_batches, self.flags.json, **asked)
        write_record(self.inputs_path, self._asked())


def provisional_plan(
    flags: argparse.Namespace,
    job: argparse.Namespace,
    architecture: Architecture,
    micro_batches: int,
    budgets: Budgets | None = None,
) -> Plan:
    """Return a plan for checks only, cut evenly and without predictions. Raises UserError as `Plan.validate`, and for
    one microbatch on several pipeline ranks."""
    ranks, chunks = flags.pipeline_model_parallel_size, flags.virtual_pipeline_model_parallel_size
    adapters = Adapters.of(job)
    if micro_batches == 1 and ranks > 1:
        raise UserError(
            f"one microbatch keeps one of {ranks} pipeline ranks busy at a time: pack with more --micro-batches, "
            "or use --pipeline-model-parallel-size 1"
        )
    chain = architecture.chain
    return Plan.from_cuts(
        chain,
        even_edges([1.0] * len(chain), ranks * chunks)[1:-1],
        num_microbatches=micro_batches,
        virtual_pipeline_model_parallel_size=chunks,
        schedule=flags.schedule,
        model=architecture.name,
        model_hash=architecture.hash,
        trained=adapters.trained(job.freeze),
        budgets=budgets or {},
    )


def plan_of_budgets(
    flags: argparse.Namespace, job: argparse.Namespace, data_parallel: int, micro_batches: int, tools: Path
) -> None:
    """Print the plan of packs that fill --vit-budget and --llm-budget, at --analytic costs, without data."""
    with tempfile.TemporaryDirectory() as folder:
        profile, plan = Path(folder) / "profile.json", Path(folder) / PLAN
        settings = profile_settings(flags, job, budgets_in(vars(flags)), data_parallel, profile)
        run_profile(tools, True, **settings, **replica_settings(flags))
        make_plan(flags, micro_batches, flags.json, profile=profile, output=plan)
        if flags.json:
            print_json({"plan": Plan.load(plan).to_record(), "started": False})


def profile_settings(
    flags: argparse.Namespace, job: argparse.Namespace, budgets: Budgets, data_parallel: int, output: Path
) -> dict[str, Any]:
    """Settings of omnibal profile for a run with these budgets, except those of a replicated tower."""
    narrow = () if getattr(job, AWARE) else DTYPES
    return {
        "model": flags.model,
        **budget_fields(budgets),
        "data_parallel_size": data_parallel,
        "output": output,
        **given_of(flags, PROFILED),
        **{name: value for name, value in vars(job).items() if name not in narrow},
    }


def replica_settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Return {"replica_ranks": number of ranks (tensor x pipeline) that have a copy of the tower}, for the profiler.

    Empty if the tower is cut into stages (--tower cut), or there is one pipeline rank.
    """
    tensor, pipeline = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    return {} if flags.tower == "cut" or pipeline == 1 else {"replica_ranks": tensor * pipeline}


def make_plan(flags: argparse.Namespace, micro_batches: int, is_quiet: bool, **paths: Path) -> None:
    """Plan with the settings that the launcher takes for it."""
    run_fork(plan_and_show, is_quiet, num_microbatches=micro_batches, **paths, **given_of(flags, PLANNED))


def run_profile(tools: Path, is_quiet: bool, **settings: Any) -> None:
    """Run omnibal profile with these settings."""
    run_our_tool(tools / "profile_layers.py", profile_parser().words(**settings), is_quiet)


def run_our_tool(tool: Path, words: Sequence[str], is_quiet: bool) -> None:
    """Run a tool; if it fails, exit with its exit code. `is_quiet`: without its stdout."""
    done = run_python(tool, *words, stdout=subprocess.DEVNULL if is_quiet else None)
    if done.returncode:
        sys.exit(done.returncode)
