"""The checks of a run's inputs, made by `omnibal launch` and by every rank of the trainer."""

import os
from argparse import Namespace
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.vlm.arguments import TrainingInputs
from megatron.vlm.checkpoint.run import check_resumable
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.loader import first_iteration
from megatron.vlm.hf.export import check_like
from megatron.vlm.models.chain import configs_of
from megatron.vlm.models.configs import language_config
from megatron.vlm.preflight.dataset import check_dataset, check_lengths, longest_positions
from megatron.vlm.preflight.findings import Check, Finding, Note, run_checks
from megatron.vlm.preflight.machine import check_devices
from megatron.vlm.preflight.saving import check_saving
from megatron.vlm.weights import Weights, check_weights, starting_weights
from omnibal_ext.adapters import Adapters, adapter_parameters
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import budget_fields
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan


@dataclass
class Run:
    """A run to be checked."""

    inputs: TrainingInputs
    converts: bool = False
    """The launcher converts Hugging Face weights first."""
    is_planned: bool = True
    """False: the plan is a provisional even cut, for these checks only."""
    is_packed: bool = True
    """False: dataset and packs do not exist yet, and the run's length may be unknown."""
    endpoint: str | None = None
    """HOST:PORT at which several nodes meet."""
    memory_gib: float | None = None
    run_dir: str | None = None
    """The run's folder; the launcher moves away what an earlier run left in it."""

    @cached_property
    def weights(self) -> Weights:
        """The run's initial weights or checkpoint. Raises UserError if there is none."""
        return starting_weights(self.inputs.args)

    @cached_property
    def model_folder(self) -> Path | None:
        """The folder with the weights' config.json and tokenizer; None for random weights."""
        args = self.inputs.args
        try:
            weights = self.weights
        except UserError:
            return None
        first = Weights("given", Path(args.first_weights)) if args.first_weights else weights
        return weights.model_folder or first.model_folder


def check_run(run: Run) -> list[Finding]:
    """Return all findings about a run's inputs, on a rank or in the launcher. Reads neither weights nor images."""
    if run.is_packed:
        return run_checks(CHECKS, run)
    args = run.inputs.args
    names = [*PACK_CHECKS, *(HELD_OUT_CHECKS if args.eval_packs else ())]
    later = [Finding(name, "later", "dataset and packs are not made yet; --dry-run makes them") for name in names]
    checks = [(name, check) for name, check in CHECKS if name not in (*PACK_CHECKS, *HELD_OUT_CHECKS)]
    return [*run_checks(checks, run), *later]


def _check_model(run: Run) -> str:
    """Raise UserError for sizes that do not divide by the tensor-parallel size; core's configurations check most."""
    args, architecture = run.inputs.args, run.inputs.architecture
    try:
        configs_of(language_config(args, architecture), architecture)
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split()) or "core's configuration refuses these flags"
        raise UserError(f"model {architecture.name!r}: {reason}") from error
    tensor, language = args.tensor_model_parallel_size, architecture.language
    for what, size in (
        ("width of the MLP", language.usual.ffn_hidden_size),
        ("width of the ViT's MLP", architecture.vision.ffn_hidden_size),
        *((f"width of the {one.modality.name} encoder's MLP", one.ffn_hidden_size) for one in architecture.further),
        ("numbers of each layer's own input", language.layer_inputs.width if language.layer_inputs else 0),
    ):
        if size % tensor:
            raise UserError(
                f"model {architecture.name!r}: {what} {size} do not divide by --tensor-model-parallel-size {tensor}"
            )
    shape = (tensor, args.pipeline_model_parallel_size, args.data_parallel_size)
    return f"{architecture.name}, tensor x pipeline x data parallel = {' x '.join(map(str, shape))}"


def _check_dataset(run: Run) -> str:
    folder = run.inputs.args.data
    if folder is None:
        raise UserError("--data is missing; give the dataset folder of omnibal preprocess")
    return _dataset_fits(run, folder)


def _check_packs(run: Run) -> str:
    args = run.inputs.args
    if args.packs is None:
        raise UserError("--packs is missing; give the packed index of omnibal pack")
    found = _packs_fit(run, args.data, args.packs, "--packs")
    index, ranks = PackedIndex.open(args.packs), args.data_parallel_size
    _refuse_another_global_batch(args, index)
    if index.wide is not None or PackStream(index, ranks, index.global_batch // ranks).is_balanced:
        return found
    before = index.manifest["data_parallel_size"]
    return Note(f"{found}; ordered for {before} data-parallel ranks: omnibal level orders them for {ranks}")


def _refuse_another_global_batch(args: Namespace, index: PackedIndex) -> None:
    """Raise UserError if the packed index has another global batch size than the run."""
    asked, ranks = args.global_batch_size, args.data_parallel_size
    if asked == index.global_batch:
        return
    remedy = f"--micro-batches {asked // ranks}" if asked % ranks == 0 else f"a multiple of {ranks} packs an iteration"
    raise UserError(
        f"--global-batch-size {asked}: {index.folder} is packed for iterations of {index.global_batch} packs; give "
        f"--global-batch-size {index.global_batch}, or pack again with omnibal pack {remedy}"
    )


def _dataset_fits(run: Run, folder: str) -> str:
    data = ChatDataset(folder)
    data.sources.refuse_foreign()
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one process per node reads all files
        data.verify()
    return check_dataset(data.folder, data.manifest, run.inputs.architecture, run.model_folder)


def _packs_fit(run: Run, folder: str | None, packs: str, flag: str) -> str:
    index = PackedIndex.open(packs)
    index.verify()
    _check_teams(run, index, flag)
    try:
        data = ChatDataset(folder or "")
    except UserError:
        return Note(f"{index.num_packs} packs, not compared: the dataset cannot be read")
    index.check({"built_from.data.manifest": data.manifest})
    index.check_samples(len(data))
    limit = longest_positions(run.inputs.architecture, run.model_folder, index.pad)
    return f"{index.num_packs} packs of its samples; longest: {check_lengths(index, data.sizes, limit)}"


def _check_teams(run: Run, index: PackedIndex, flag: str) -> None:
    """Raise UserError if the run cannot run packs that several ranks share."""
    widest, ranks = index.widths[-1], run.inputs.args.data_parallel_size
    if ranks % widest:
        raise UserError(
            f"{flag} {index.folder}: packs of {widest} ranks, which do not divide the {ranks} data-parallel ranks; "
            "use other ranks, or pack again with other --widths"
        )
    if widest > 1 and run.inputs.plan.tower is not None:
        raise UserError(
            f"{flag} {index.folder}: packs wider than a rank need a vision tower cut into stages; plan with "
            "--tower cut, or pack without --widths"
        )


def _check_weights(run: Run) -> str:
    args, weights = run.inputs.args, run.weights
    checkpoint = check_weights(weights, run.inputs.architecture, args.trust, args.ckpt_step, Adapters.of(args))
    if not run.converts:
        weights.refuse_unconverted()
    if weights.kind == "own" and checkpoint:
        return _check_resumes(run, checkpoint.run)
    return weights.describe()


def _check_resumes(run: Run, saved: dict[str, Any]) -> str:
    """Check that the run may resume from a save; one without facts of its run (--trust) passes."""
    args, found = run.inputs.args, run.weights.describe()
    if not run.is_packed:
        return Note(f"{found}; compared with the run so far when its dataset and packs are made")
    if saved:
        first_iteration(saved["consumed_packs"], args.global_batch_size)
        if differ := check_resumable(saved, args, run.inputs.architecture, run.inputs.plan, run.is_planned):
            found = Note(f"{found}; unlike the run so far: {', '.join(differ)}")
    if run.weights.ends(args.train_iters):
        return Note(f"{found}, the end of --train-iters {args.train_iters}: nothing is left to train")
    return found


def _check_adapters(run: Run) -> str | None:
    """Return how many adapter parameters are trained, and which layers have none; None without adapters."""
    adapters, model = Adapters.of(run.inputs.args), run.inputs.architecture
    if not adapters.rank:
        return None
    each = adapter_parameters(model, adapters)
    numbers = sum(int(each.get(kind, 0)) for kind in model.cost_kinds)
    found = f"rank {adapters.rank} in {' '.join(adapters.targets)}: {numbers:,} numbers are trained, nothing else"
    none = "; experts and their routers have none" * (model.language.experts is not None and "llm" in adapters.targets)
    return found + none


def _check_plan(run: Run) -> str:
    """Return a line about the plan. Raises UserError if it is for other parallel sizes, budgets or microbatches.

    A plan written by hand, which names no profile, is not compared.
    """
    args, plan = run.inputs.args, run.inputs.plan
    if plan.profile_hash:
        index = PackedIndex.open(args.packs)
        wanted = {
            "tensor_model_parallel_size": args.tensor_model_parallel_size,
            "expert_model_parallel_size": args.expert_model_parallel_size,
            **budget_fields(run.inputs.architecture.profiled(index.budgets)),
            "num_microbatches": index.global_batch // args.data_parallel_size,
        }
        budgets = budget_fields(plan.budgets)
        made = {**vars(plan), **budgets}
        pairs = {name: (made.get(name, 0), wanted.get(name, 0)) for name in (*wanted, *budgets)}
        if unlike := [f"{name} {one}, not {other}" for name, (one, other) in pairs.items() if one != other]:
            raise UserError(f"plan {args.plan}: made for {'; '.join(unlike)}; plan again with omnibal plan")
    return f"{len(plan.stages)} stages of {len(plan.chain)} layers, {plan.schedule}"


DROPOUTS = ("hidden_dropout", "attention_dropout")


def check_replicated_tower(args: Namespace, plan: Plan) -> str | None:
    """Return which ranks encode, for the table of checks; None if the tower is cut into stages.

    Raises UserError for dropout if several ranks encode one microbatch: their masks would differ from one rank's. (Drop
    path is drawn for the entire pack on every rank.)
    """
    tower = plan.tower
    if tower is None:
        return None
    ranks = [len(encoders) * args.tensor_model_parallel_size for encoders in tower.encoding_ranks]
    for name in DROPOUTS:
        if vars(args)[name] and max(ranks) > 1:
            raise UserError(
                f"--{name.replace('_', '-')} {vars(args)[name]:g}: {max(ranks)} ranks encode microbatch "
                f"{ranks.index(max(ranks))} together, and their dropout masks would differ from those of one "
                "rank; plan with --tower cut, or leave dropout out"
            )
    return f"{tower.layers} layers, {tower.mode}; at most {max(ranks)} ranks encode a microbatch"


def _check_saving(run: Run) -> str:
    try:
        iteration = run.weights.iteration
    except UserError:
        iteration = 0
    return check_saving(run.inputs.args, run.inputs.architecture, iteration, run.is_packed)


CHECKS: tuple[tuple[str, Check[Run]], ...] = (
    ("devices", lambda _: check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))),
    ("model", _check_model),
    ("dataset", _check_dataset),
    ("packs", _check_packs),
    ("held-out dataset", lambda run: (folder := run.inputs.args.eval_data) and _dataset_fits(run, folder)),
    (
        "held-out packs",
        lambda run: (
            (args := run.inputs.args).eval_packs and _packs_fit(run, args.eval_data, args.eval_packs, "--eval-packs")
        ),
    ),
    ("weights", _check_weights),
    ("adapters", _check_adapters),
    ("plan", _check_plan),
    ("tower beside the pipeline", lambda run: check_replicated_tower(run.inputs.args, run.inputs.plan)),
    ("checkpoints", _check_saving),
    (
        "Hugging Face's weights",
        lambda run: f"as in {check_like(run.model_folder)}" if run.inputs.args.save_hf else None,
    ),
)
PACK_CHECKS, HELD_OUT_CHECKS = ("dataset", "packs"), ("held-out dataset", "held-out packs")
"""The checks that read a dataset and its packs."""
