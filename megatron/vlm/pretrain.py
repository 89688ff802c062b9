"""The trainer: passes our model, data and schedule to Megatron-LM's `pretrain`.

torchrun --nproc-per-node 2 -m megatron.vlm.pretrain --model tiny --plan plan.json --data D --packs P ...
"""

import atexit
import contextlib
import gc
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from torch import Tensor

from megatron.vlm import log_noise, platform, rates
from megatron.vlm.arguments import TrainingInputs, parse_arguments
from megatron.vlm.checkpoint import guard
from megatron.vlm.checkpoint.run import describe_run
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.loader import Needs, PackDataset, first_iteration
from megatron.vlm.data.media.tile_cache import TileCache
from megatron.vlm.ending import UnfinishedError, run_rank
from megatron.vlm.evaluation import HeldOutPass
from megatron.vlm.hf.export import SaveExporter, check_like
from megatron.vlm.loss import REDUCTIONS, token_weights, weigh_samples, weighted_loss
from megatron.vlm.microbatch import Microbatch, sequence_multiple
from megatron.vlm.models.chain import Chain
from megatron.vlm.monitoring.bad_samples import BadSamples, BadSteps, Hosts
from megatron.vlm.monitoring.journal import Journal, survive_write_errors
from megatron.vlm.monitoring.meters import EvaluationMeter, Tally, Throughput, TrainingMeter
from megatron.vlm.monitoring.recorder import Recorder, recorded_iterations
from megatron.vlm.monitoring.stage_meter import ProfileCheck, StageMeter
from megatron.vlm.pipeline.communicator import Teams
from megatron.vlm.pipeline.executor import Executor, install
from megatron.vlm.pipeline.rank_packs import RankPacks
from megatron.vlm.pipeline.stage import Stage, stage_number
from megatron.vlm.pipeline.tied import embedding_ranks
from megatron.vlm.pipeline.tower import owned_layers
from megatron.vlm.preflight.findings import refuse
from megatron.vlm.preflight.one_plan import one_plan
from megatron.vlm.preflight.run import Run, check_run
from megatron.vlm.weights import apply_weights
from omnibal_ext.adapters import Adapters
from omnibal_ext.costs.operations import ModelOperations, peak_operations
from omnibal_ext.errors import UserError
from omnibal_ext.files.locks import lock_of, only_job
from omnibal_ext.files.records import write_text
from omnibal_ext.output import say
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.run_metrics import TIMELINE
from omnibal_ext.schedules.actions import Action

Packs = Iterator[Microbatch]


class Trainer:
    """The model, data and step providers of Megatron's `pretrain`."""

    def __init__(self, inputs: TrainingInputs) -> None:
        """Open datasets and meters. Raises UserError if a dataset cannot be opened."""
        self.args, self.architecture, self.plan = inputs.args, inputs.architecture, inputs.plan
        args, journal = self.args, Journal(self.args.metrics_file)
        operations = ModelOperations.of(self.architecture, tuple(args.freeze), Adapters.of(args))
        pace = Throughput(operations, args.world_size, peak_operations(platform.device_name()))
        self.meter = TrainingMeter(self.sources(args.data), args.log_interval, journal, pace)
        self.evaluation = EvaluationMeter(self.sources(args.eval_data), args.eval_iters, journal)
        self.stages = StageMeter(self.plan)
        metrics, check = Path(args.metrics_file) if args.metrics_file else None, None
        if metrics and self.plan.profile_hash:
            check = ProfileCheck(self.plan, Path(args.plan), metrics, journal)
        timelines = metrics.with_name(TIMELINE) if metrics else None
        self.recorder = Recorder(timelines, recorded_iterations(args.train_iters, args.timelines), check)
        self.executor = Executor(self.plan.schedule, self._watch, self.plan.build_schedule(), self.plan.tower)
        self.bad_samples = {
            True: BadSamples(args.data, args.max_bad_samples), False: BadSamples(args.eval_data, args.max_bad_samples)
        }  # fmt: skip
        """Bad samples of the training data (True) and of the held-out data (False)."""
        self.tile_cache = TileCache(Path(args.cache_tiles)) if args.cache_tiles else None
        self.teams = Teams()
        self.hosts = Hosts()
        self.bad_steps = BadSteps(args.max_bad_steps, self.hosts)
        self.packs = {
            True: RankPacks(self.plan.tower, args.num_workers, self.recorder.reading),
            False: RankPacks(self.plan.tower, args.num_workers),
        }
        self.iteration = 0
        """Completed training iterations, including those before a resume."""

    @staticmethod
    def sources(data: str | None) -> tuple[str, ...]:
        """Return short names of a dataset's input files."""
        return ChatDataset(data).sources.names if data else ()

    def model(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> Stage:
        """Build the plan's stage for this rank and chunk."""
        chain = Chain.of(self.args, self.architecture, config)
        stage = self.plan.stages[stage_number(self.plan.placement, vp_stage)]
        owned = owned_layers(self.plan, vp_stage)
        return Stage(chain, *stage.layers, stage.recompute, stage.recompute_cheap, vp_stage, pg_collection, owned)

    def datasets(self, _: Any, vp_stage: int | None = None) -> tuple[Packs, Packs | None, None]:
        """Start the meter; return (this rank's training microbatches from the checkpoint on, held-out ones, None)."""
        args = self.args
        train = self._dataset(args.data, args.packs, vp_stage)
        microbatches = args.global_batch_size // args.data_parallel_size
        stream = PackStream(train.index, args.data_parallel_size, microbatches)
        self.iteration = first_iteration(args.consumed_train_samples, args.global_batch_size)
        samples_per_epoch = len(train.index.sample_ids) / len(train.index.manifest["epoch_packs"])
        self.meter.start(args.train_iters, stream.samples_before(self.iteration), samples_per_epoch)
        packs = self.packs[True].add(train, partial(stream.of_rank, train.rank, self.iteration), microbatches)
        if not args.eval_packs:
            return packs, None, None
        held_out = self._dataset(args.eval_data, args.eval_packs, vp_stage)
        run = HeldOutPass(held_out.index, args.data_parallel_size)
        order, microbatches = partial(run.of_rank, held_out.rank), run.global_batch // args.data_parallel_size
        return packs, self.packs[False].add(held_out, order, microbatches), None

    def close(self) -> None:
        """End the data workers."""
        for packs in self.packs.values():
            packs.close()

    def _dataset(self, data: str, packs: str, vp_stage: int | None) -> PackDataset:
        first, end = self.plan.stages[stage_number(self.plan.placement, vp_stage)].layers
        index, opened = PackedIndex.open(packs), ChatDataset(data, self.args.image_checksums, self.tile_cache)
        opened.sources.refuse_foreign()
        self.teams.open(index.widths)
        return PackDataset(
            opened,
            index,
            Needs.of(self.plan.chain[first:end], self.architecture.language),
            sequence_multiple(self.args),
            decodes=parallel_state.get_tensor_model_parallel_rank() == 0,
            rank=parallel_state.get_data_parallel_rank(),
        )

    def forward_step(self, data: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        """Run a microbatch through a stage; return its output and the function that makes a loss of it."""
        batch, bad_samples = self.teams.join(next(data)), self.bad_samples[model.training]
        self.recorder.add_pack(batch)
        bad_samples.note(batch)
        number = self.iteration + 1 if model.training else 0
        batch = replace(bad_samples.without_known(batch), iteration=number)
        tally = self.meter.tally if model.training else self.evaluation.tally
        return model(weigh_samples(self.args.loss_reduction, batch)), partial(self._loss, tally, batch)

    def _loss(self, tally: Tally, batch: Microbatch, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        weights = token_weights(batch, REDUCTIONS[self.args.loss_reduction])
        tally.add(batch, losses, weights)
        total, normaliser, record = weighted_loss(losses, weights)
        return total, self.bad_steps.note_loss(batch, total, normaliser), record

    def forward_backward(self, **arguments: Any) -> list[Any]:
        """Run and meter one iteration of training or evaluation, by the plan's schedule."""
        _freeze_garbage_collector()
        training = not arguments.get("forward_only")
        (self.meter if training else self.evaluation).begin_iteration()
        number = get_args().curr_iteration + 1 if training else 0
        with self.recorder.iteration(number, [*_as_list(arguments["model"]), *self.executor.copies]):
            records = self._run_iteration({**arguments, "forward_step_func": self.forward_step}, training, number)
        if not training and self.evaluation.end_iteration():
            self._end_evaluation()
        return records

    def _run_iteration(self, arguments: dict[str, Any], training: bool, number: int) -> list[Any]:
        """Run one iteration, and rerun it as long as it meets new bad samples (`monitoring.bad_samples`)."""
        meter, bad_samples = self.meter if training else self.evaluation, self.bad_samples[training]
        before = meter.tally.copy()
        arguments |= self.packs[training].begin(bad_samples.note, number)
        while True:
            self.bad_steps.begin_iteration(number)
            with self.stages.iteration(training):
                records = self.executor(**arguments)
            if not self.hosts.any(bool(bad_samples.found)):
                return records
            bad_samples.exchange()
            meter.tally = before.copy()
            for module in _as_list(arguments["model"]) if training else ():
                module.zero_grad_buffer()
            arguments |= self.packs[training].rerun(bad_samples.note, number)
            self.executor.forget_images(training)

    @contextmanager
    def _watch(self, action: Action) -> Iterator[None]:
        with self.stages.watch(action), self.recorder.watch(action):
            yield

    def end_training_iteration(self, iteration: int, skipped: bool) -> None:
        """End a training iteration in the meters, after its gradients were checked; `skipped`: without a step."""
        self.iteration = iteration
        if skipped:
            self.meter.tally.losses.zero_()  # the samples count as read, their losses do not
        self.stages.end_iteration()
        more: dict[str, Any] = {}
        if self.meter.ends_interval(iteration):
            failures = {"replaced_samples": len(self.bad_samples[True].known), "skipped_steps": self.bad_steps.total}
            more = {**self.stages.end_interval(), **failures}
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            self.meter.end_iteration(iteration, **more)

    def _end_evaluation(self) -> None:
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            self.meter.exclude(self.evaluation.end_pass(self.iteration))
        if self.iteration == self.args.train_iters:
            self.args.do_valid = False  # else Megatron repeats this evaluation after training


@cache
def _freeze_garbage_collector() -> None:
    """Exclude the half a million objects of the start from garbage collection, whose pauses delay all ranks.

    Undone at exit, since Triton would list what is left.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def _as_list(modules: Any) -> list[Any]:
    return modules if isinstance(modules, list) else [modules]


def main() -> None:
    """Train with the flags of the command line."""
    survive_write_errors()
    inputs = parse_arguments()
    run = Run(inputs)
    refuse(check_run(run))
    apply_weights(inputs.args, run.weights)
    _keep_arguments(inputs)
    with _write_locks(inputs.args), one_plan(inputs.plan, inputs.args):
        platform.take_device()
        exports = inputs.args.save_hf and not inputs.args.rank
        train(Trainer(inputs), SaveExporter(check_like(run.model_folder)) if exports else None)


def train(trainer: Trainer, exports: SaveExporter | None = None) -> None:
    """Run Megatron's `pretrain`; `exports` on the first rank. Raises UnfinishedError if the run ends early."""
    args = trainer.args
    describe = partial(describe_run, args, trainer.architecture, trainer.plan)
    attempts = guard.install(describe, args.save_retain_interval, args.async_save, exports)
    args.save_retain_interval = None  # with it Megatron would remove the older complete save
    trainer.bad_steps.install(trainer.end_training_iteration)
    rates.install()
    log_noise.leave_out_estimates()
    install(trainer.forward_backward)
    provider = partial(trainer.datasets)
    setattr(provider, "is_distributed", True)  # noqa: B010 (every rank builds its own iterators)
    with attempts.ends_saved(), contextlib.closing(trainer):
        pretrain(
            pretrain_cfg_container_from_args(args),
            provider,
            ModelType.encoder_or_decoder,
            trainer.forward_step,
            model_provider=trainer.model,
            get_embedding_ranks=embedding_ranks(trainer.plan),
        )
    if trainer.iteration < args.train_iters and not args.skip_train:
        raise UnfinishedError(
            f"the run ended after iteration {trainer.iteration} of {args.train_iters}; nothing says why"
        )
    trainer.recorder.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextmanager
def _write_locks(args: Namespace) -> Iterator[None]:
    """Make a context in which the first rank locks what the run writes. Raises UserError if another run does."""
    locks = {
        f"--save {args.save}": args.save and Path(args.save) / ".saving.lock",
        f"--metrics-file {args.metrics_file}": args.metrics_file and lock_of(Path(args.metrics_file)),
        f"--tensorboard-dir {args.tensorboard_dir}": args.tensorboard_dir and lock_of(Path(args.tensorboard_dir)),
    }
    with contextlib.ExitStack() as held:
        for what, path in locks.items():
            if path and not args.rank:
                held.enter_context(only_job(path, what))
        yield


def _keep_arguments(inputs: TrainingInputs) -> None:
    """Write Megatron's arguments next to the metrics, on the first rank; print the flags that no test covers."""
    if inputs.args.rank:
        return
    if next_to := inputs.args.metrics_file or inputs.args.save:
        path = Path(next_to).parent / "megatron-arguments.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, inputs.megatron_output)
            say(f"Megatron's arguments: {path}")
        except (OSError, UserError) as error:
            say(f"warning: Megatron's arguments are not kept: {error}")
    if inputs.untested:
        say(f"Megatron's own and untested here: {' '.join(inputs.untested)} (docs/flags.md)")


if __name__ == "__main__":
    run_rank(main)
