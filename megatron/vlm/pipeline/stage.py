"""A stage: a contiguous slice of the layer chain, as the module that Megatron wraps, trains and checkpoints."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd import Variable

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain, Layers
from megatron.vlm.models.draws import begin_draws
from megatron.vlm.models.encoders import ENCODERS
from megatron.vlm.models.language_view import LanguageViewer
from megatron.vlm.pipeline.tied import share_in_checkpoint, tie
from omnibal_ext.chain import TOWER_KINDS
from omnibal_ext.schedules.placement import Placement


class Stage(MegatronModule):
    """Layers [first, end) of the chain; those in `recompute` keep only their input for the backward.

    Those in `recompute_cheap` recompute the outputs of norms and activation functions. Layers have their names in the
    chain, which do not depend on the layout: a checkpoint written by one layout is read by any other.

    Layers in `owned` are of a replicated tower: the stage holds their weights, unsharded, to be trained and saved, but
    does not run them (`pipeline.tower` does).
    """

    def __init__(
        self,
        chain: Chain,
        first: int,
        end: int,
        recompute: tuple[int, ...] = (),
        recompute_cheap: tuple[int, ...] = (),
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        owned: tuple[int, ...] = (),
    ) -> None:
        super().__init__(chain.language)
        self.chain, self.first, self.end = chain, first, end
        self.recompute = frozenset(recompute)
        self.kinds = chain.kinds[first:end]
        self.has_tower_layers = not set(TOWER_KINDS).isdisjoint(self.kinds)
        # What Megatron asks of the modules it trains.
        self.vp_stage = vp_stage
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.pre_process, self.post_process = first == 0, end == len(chain.kinds)
        self.share_embeddings_and_output_weights = False
        self.input_tensor: Tensor | None = None
        names, self.owned = [name.replace(".", "_") for name in chain.names], owned
        own = {names[layer]: chain.build(layer, layer in recompute_cheap) for layer in range(first, end)}
        others = {names[layer]: build_owned(chain, layer) for layer in owned}
        # Those of others in front: their gradients come last, and no reduction waits for them.
        self.links = Layers(others | own, whole=others)
        tie(chain, self.links)
        if "llm" in self.kinds:
            self.language_viewer = LanguageViewer(chain.architecture, chain.language.params_dtype)
        self.viewers = torch.nn.ModuleDict()
        for encoder in chain.architecture.encoders:
            built, config = ENCODERS[encoder.modality], chain.configs[encoder.modality]
            if not set(built.viewed).isdisjoint(self.kinds) and (viewer := built.viewer(config, chain.architecture)):
                self.viewers[encoder.modality.name] = viewer

    @property
    def run_layers(self) -> list[tuple[int, torch.nn.Module]]:
        """Layers that this stage runs, with their indices in the chain."""
        return [*enumerate([*self.links.values()][len(self.owned) :], start=self.first)]

    @property
    def owned_weights(self) -> list[torch.nn.Parameter]:
        """Weights of `owned` layers."""
        owned = [*self.links.values()][: len(self.owned)]
        return [weight for layer in owned for weight in layer.parameters()]

    @property
    def has_backward(self) -> bool:
        """Whether anything up to the end of this stage is trained."""
        return self.chain.is_trained_before(self.end)

    @property
    def receives_gradient(self) -> bool:
        """Whether the next stage sends the gradient of this one's output."""
        return not self.post_process and self.has_backward

    @property
    def sends_gradient(self) -> bool:
        """Whether the stage before takes the gradient of this one's input: a layer before this stage is trained."""
        return not self.pre_process and self.chain.is_trained_before(self.first)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Take the tensor received from the stage before; Megatron calls this."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def input_shape(self, batch: Microbatch) -> tuple[int, int, int] | None:
        """Return the shape of the tensor that this stage receives for `batch`; None for the first stage."""
        return None if self.pre_process else self.chain.shape_before(self.first, batch)

    def gathers_first(self, batch: Microbatch) -> bool:
        """Return whether `batch` needs all weights gathered before: tower layers are skipped, or ranks exchange."""
        deals = self.chain.architecture.language.experts is not None and self.config.expert_model_parallel_size > 1
        skips = any(self.chain.passes_by(layer, batch) for layer in range(self.first, self.end))
        return self.has_tower_layers and (skips or batch.shard is not None or deals)

    def forward(self, batch: Microbatch) -> Tensor:
        """Run the layers on the tensor that `set_input_tensor` took; return hidden states [s, b, h] and extras behind
        the last one, as one tensor; in the last stage tokens' losses [T], without labels logits."""
        carrier, views = self.chain.carrier(batch), self._views(batch)
        flow = carrier.split(self.first, self.input_tensor)
        recomputed = self.recompute if self.training and torch.is_grad_enabled() and self.has_backward else frozenset()
        for layer, module in self.run_layers:
            if self.training and batch.iteration and self.chain.draws(layer):
                begin_draws(self.chain.seed, batch, layer)
            step = partial(_run, module, batch, views.get(self.chain.kinds[layer], ()))
            if self.chain.passes_by(layer, batch):
                weights = [weight.detach() if self.chain.is_whole else weight for weight in module.parameters()]
                step = partial(_pass_by, weights, self.chain.hidden_shape_before(layer + 1, batch))
            elif layer in recomputed:
                step = partial(_recomputed, step, self.chain.gradient_mode(layer) == "adapted")
            if self.chain.gradient_mode(layer) == "idle":
                step = partial(_without_gradient, step)
            flow = carrier.through(layer, flow, step)
        out = carrier.joined(self.end, flow)
        # A view would keep a larger tensor alive and cannot be released after sending.
        return out.clone() if out._base is not None else out

    def _views(self, batch: Microbatch) -> dict[str, tuple[Any, ...]]:
        """Return what layers read of a pack besides hidden states (positions, bounds of samples), by kind of layer."""
        views: dict[str, tuple[Any, ...]] = {"llm": (self.language_viewer(batch),)} if "llm" in self.kinds else {}
        for modality in (encoder.modality for encoder in self.chain.architecture.encoders):
            if modality.name in self.viewers and batch.media_of(modality.size).amount:
                views |= dict.fromkeys(ENCODERS[modality].viewed, (self.viewers[modality.name](batch),))
        return views

    def sharded_state_dict(self, prefix: str = "", *arguments: Any, **options: Any) -> ShardedStateDict:
        """Return what a checkpoint holds of this stage: entries of core's kind by layer names; a tied weight once."""
        state = super().sharded_state_dict(prefix, *arguments, **options)
        share_in_checkpoint(self.chain, self.links, state, f"{prefix}links.")
        return state


def build_owned(chain: Chain, layer: int) -> torch.nn.Module:
    """Build a replicated tower's layer, not cut over tensor-parallel ranks; its weights are marked to count in the
    gradient norm on whichever rank has them."""
    module = chain.whole().build(layer)
    for weight in module.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(weight)
        setattr(weight, "tensor_model_parallel", True)  # noqa: B010 (Megatron marks weights so)
    return module


def _run(module: torch.nn.Module, batch: Microbatch, view: tuple[Any, ...], hidden: Any, *extras: Tensor) -> Any:
    return module(hidden, batch, *view, *extras)


def _without_gradient(step: Callable[..., Any], hidden: Tensor | None, *extras: Tensor) -> Any:
    """Run a layer that needs no gradient on detached inputs; they may have one, of audio tokens that bypass it."""
    return step(None if hidden is None else hidden.detach(), *(extra.detach() for extra in extras))


def _recomputed(step: Callable[..., Any], is_adapted: bool, hidden: Any, *extras: Tensor) -> Any:
    """Run a layer keeping only its input, from which the backward recomputes it. `is_adapted`: make the input require a
    gradient, without which core does not recompute (there is none before the first adapters)."""
    if is_adapted:
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
    return tensor_parallel.checkpoint(step, False, hidden, *extras)


def _pass_by(weights: Sequence[Tensor], shape: tuple[int, ...], hidden: Tensor | None, *_: Tensor) -> Tensor:
    """Return an encoder layer's output for a pack without tiles or sounds: an empty tensor that depends on input and
    weights, so that all weights get a gradient, for which the data-parallel reduction waits. (A replicated tower's
    copies, which are not reduced so, come detached.)"""
    empty: Tensor = _Empty.apply(shape, *weights, *([] if hidden is None else [hidden]))
    return empty


class _Empty(torch.autograd.Function):
    """An empty tensor of a shape. What it depends on is not read; its gradients are zero.

    Weights with a `main_grad` are marked as if a fused product had added the gradient already: the gradient returned
    here is not read, and nothing as large as the weights is written.
    """

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return sources[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        sources = ctx.saved_tensors
        added = [source for source in sources if _is_added_up(source) and not source.grad_added_to_main_grad]
        for weight in added:
            weight.grad_added_to_main_grad = True
        Variable._execution_engine.queue_callback(partial(_no_more_added, added))
        return None, *(
            torch.empty_like(source) if _is_added_up(source) else source.new_zeros(()).expand_as(source)
            for source in sources
        )


def _is_added_up(source: Any) -> bool:
    """Return whether Megatron adds a weight's gradient to `main_grad` in this backward; it does not if W does."""
    return hasattr(source, "main_grad") and not getattr(source, "skip_backward_post_hook", False)


def _no_more_added(weights: list[Any]) -> None:
    """Set the mark that these weights' gradients were added back to false, before the next backward."""
    for weight in weights:
        weight.grad_added_to_main_grad = False


def stage_number(placement: Placement, vp_stage: int | None) -> int:
    """Return the number of the stage that this pipeline rank runs as its chunk `vp_stage`; None is its only one."""
    return placement.stages_of[parallel_state.get_pipeline_model_parallel_rank()][vp_stage or 0]
