"""The trainer: our model, data and schedule, handed to Megatron-LM's own `pretrain`.

torchrun --nproc-per-node 2 -m megatron.vlm.pretrain --preset tiny --plan plan.json --data D --packs P ...
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from torch import Tensor

from megatron.vlm.arguments import TrainingInputs, parse_arguments
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.loader import Needs, PackDataset, PackOrder, first_iteration, microbatches
from megatron.vlm.drift import DriftMeter
from megatron.vlm.loss import token_loss
from megatron.vlm.meters import BalanceMeter
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.configs import language_config, vision_config
from megatron.vlm.pipeline.executor import Executor, install
from megatron.vlm.pipeline.stage import Stage, stage_number
from megatron.vlm.pipeline.tied import embedding_ranks
from megatron.vlm.preflight.findings import refuse
from megatron.vlm.preflight.run import Run, check_run
from megatron.vlm.weights import apply_weights
from omnibal_ext.errors import UserError
from omnibal_ext.packing.dispatch import PackStream
from omnibal_ext.packing.index import PackedIndex


class Trainer:
    """The providers that Megatron's `pretrain` asks for, over one set of inputs."""

    def __init__(self, inputs: TrainingInputs) -> None:
        self.args, self.architecture, self.plan = inputs.args, inputs.architecture, inputs.plan
        self.meter = BalanceMeter(self.args.log_interval, self.args.train_iters, self.args.metrics_file)
        self.drift = DriftMeter(self.plan)
        self.executor = Executor(self.plan.schedule, self.drift.watch)

    def model(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> Stage:
        """The stage of the plan that this rank (and chunk) runs."""
        language = config or language_config(self.args, self.architecture)
        vision = vision_config(language, self.architecture)
        args = self.args
        chain = Chain(self.architecture, language, vision, args.padded_vocab_size, args.seed, tuple(args.freeze))
        stage = self.plan.stages[stage_number(vp_stage)]
        recompute = (stage.recompute, stage.recompute_attention, stage.recompute_mlp)
        return Stage(chain, *stage.layers, *recompute, vp_stage, pg_collection)

    def datasets(
        self, _: Any, vp_stage: int | None = None
    ) -> tuple[Iterator[Microbatch] | None, Iterator[Microbatch] | None, None]:
        """Training and validation microbatches of this rank, from where the checkpoint left off."""
        args = self.args
        train = self._microbatches(args.data, args.packs, vp_stage, args.global_batch_size, args.consumed_train_samples)
        valid = None
        if args.eval_packs:
            valid = self._microbatches(args.eval_data, args.eval_packs, vp_stage, args.eval_global_batch_size, 0)
        return train, valid, None

    def _microbatches(
        self, data: str, packs: str, vp_stage: int | None, packs_an_iteration: int, consumed: int
    ) -> Iterator[Microbatch]:
        args = self.args
        first, end = self.plan.stages[stage_number(vp_stage)].layers
        dataset = PackDataset(
            ChatDataset(data),
            PackedIndex.open(packs),
            Needs.of(self.plan.chain[first:end]),
            args.tensor_model_parallel_size if args.sequence_parallel else 1,
        )
        stream = PackStream(dataset.index, args.data_parallel_size, packs_an_iteration // args.data_parallel_size)
        order = PackOrder(
            stream, parallel_state.get_data_parallel_rank(), first_iteration(consumed, packs_an_iteration)
        )
        return microbatches(dataset, order, args.num_workers)

    def forward_step(self, data: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        """Run one microbatch through a stage."""
        batch = next(data)
        if model.training and get_attr_wrapped_model(model, "post_process"):
            self.meter.count(batch)
        return model(batch), partial(token_loss, self.args.loss_reduction, batch)

    def forward_backward(self, **arguments: Any) -> list[Any]:
        """One iteration by the plan's schedule; a training iteration is metered."""
        with self.drift.iteration(training=not arguments.get("forward_only")):
            records = self.executor(forward_step_func=self.forward_step, **_without(arguments, "forward_step_func"))
        if not arguments.get("forward_only") and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            self.meter.end_iteration(get_args().curr_iteration + 1, records)
        return records


def _without(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != name}


def main() -> None:
    """Train as the command line says."""
    inputs = parse_arguments()
    run = Run(inputs)
    refuse(check_run(run))
    apply_weights(inputs.args, run.weights)
    trainer = Trainer(inputs)
    install(trainer.forward_backward)
    provider = partial(trainer.datasets)
    setattr(provider, "is_distributed", True)  # noqa: B010 (every rank builds its own iterators)
    pretrain(
        pretrain_cfg_container_from_args(trainer.args),
        provider,
        ModelType.encoder_or_decoder,
        trainer.forward_step,
        model_provider=trainer.model,
        get_embedding_ranks=embedding_ranks(trainer.plan),
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")  # in one piece, between those of other ranks
        sys.exit(2)
