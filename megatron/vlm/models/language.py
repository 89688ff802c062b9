"""The language model's layers of the chain: word embedding with the image tokens merged in, layers, head."""

from copy import copy
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import dropout

from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.attention.core_attention import IsolatedAttention
from megatron.vlm.models.attention.normed_values import KeysAsValues, NormedValues, QueriesAlone
from megatron.vlm.models.attention.padding import loads_without_padding
from megatron.vlm.models.configs import ACTIVATIONS, outside_layers
from megatron.vlm.models.cross_entropy import cap_logits, token_losses
from megatron.vlm.models.draws import own_draws
from megatron.vlm.models.exchange import features_to_tokens
from megatron.vlm.models.language_view import LanguageView
from megatron.vlm.models.layer_inputs import LayerInput
from megatron.vlm.models.linear.gated_delta_net import GatedDeltaNet
from megatron.vlm.models.mixture.beside import beside_builder
from megatron.vlm.models.mixture.experts import experts_builder
from megatron.vlm.models.norm import BranchNormAdd, HeadRMSNorm, build_norm
from megatron.vlm.models.perceptron import Perceptron
from megatron.vlm.models.region import RegionLayer
from megatron.vlm.models.specs import layer_submodules, perceptron_projections, projections, set_projections
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.flow import in_rows
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.language.linear_attention import LinearAttention


class WordEmbedding(MegatronModule):
    """The layer that embeds the pack's tokens and writes the projected image tokens to their positions.

    image [tiles * image tokens, 1, width] -> [T, 1, width]; under sequence parallelism this rank's share of T. With a
    newline (LLaVA-1.6), `Images.sources` has the image token, or newline, of each position; with `Images.weights`
    (LLaVA-OneVision) each is a mean of four image tokens. Some models scale embeddings (Gemma 3). Hidden dropout is
    applied to the embeddings, as in core's LLaVA, before the sequence is sharded: all ranks use one mask.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, architecture: Architecture) -> None:
        super().__init__(config)
        scale = torch.tensor(config.hidden_size**0.5 if architecture.language.scaled_words else 1.0, device="cpu")
        self.scale = scale.to(config.params_dtype).item()
        self.sequence_parallel = config.sequence_parallel
        self.embedding = VocabParallelEmbedding(
            vocab_size, config.hidden_size, init_method=config.embedding_init_method, config=config
        )
        # The last encoder of the chain is the ViT, whose tokens are the hidden states that enter.
        self.others = [one.modality.size for one in in_rows(architecture.encoders)[1:]]
        self.newline = None
        if architecture.newline:
            self.newline = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
            config.embedding_init_method(self.newline.data)
        inputs = architecture.language.layer_inputs
        self.inputs_norm = torch.nn.Parameter(torch.ones(inputs.width, dtype=config.params_dtype)) if inputs else None

    def forward(self, image: Tensor, batch: Microbatch, *extras: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Map image tokens [image tokens, 1, width] to the pack [T, 1, width], or this rank's share of it.

        `extras`: tokens of the other encoders [audio tokens, 1, width], then features. Returned with features at their
        tokens' positions, zero at words; and what second inputs of layers read.
        """
        features = extras[len(self.others) :]
        images = Images.of(batch)
        if batch.shard is not None and Images.of(batch.full_pack).amount:
            image, *rest = features_to_tokens((image, *features), batch.shard)
            features = tuple(rest)
        words = self.embedding(batch.input_ids)
        words = words if self.scale == 1 else words * self.scale
        words = dropout(words, self.config.hidden_dropout, self.training)
        for size, tokens in zip(self.others, extras, strict=False):
            words = batch.media_of(size).placed(words, tokens.squeeze(1))
        hidden = self._placed(words, self._in_order(image.squeeze(1), images), images)
        given = [self._placed(one.new_zeros(batch.tokens, one.shape[2]), one.squeeze(1), images) for one in features]
        if self.inputs_norm is not None:
            given += [hidden, tensor_parallel.copy_to_tensor_model_parallel_region(self.inputs_norm)]
        return (hidden, *given) if given else hidden

    def _in_order(self, tokens: Tensor, images: Images) -> Tensor:
        """Return the pack's image tokens, with newlines among them, from the projected ones."""
        if self.newline is None or images.sources is None:
            return tokens
        tokens = torch.cat([tokens, self.newline.to(tokens.dtype)])
        if images.weights is None:
            return tokens[images.sources]
        mixed = zip(images.sources.T, images.weights.T, strict=True)
        return sum(tokens[source] * weight[:, None] for source, weight in mixed)

    def _placed(self, words: Tensor, image: Tensor, images: Images) -> Tensor:
        """Write image tokens to their positions in the pack; under sequence parallelism return this rank's share."""
        whole = images.placed(words, image).unsqueeze(1)
        return tensor_parallel.scatter_to_sequence_parallel_region(whole) if self.sequence_parallel else whole


class LanguageLayer(RegionLayer):
    """Core's transformer layer over a pack: [T, 1, width] -> [T, 1, width]."""

    mixer: Attention | LinearAttention
    scalar: Tensor | None
    """Factor of the layer's output; None: 1."""
    routes = True
    """Whether a router chooses among experts in this layer."""
    input: LayerInput | None
    """The layer's second input, in models that have one."""

    def configure(self, language: LanguageArchitecture, number: int) -> None:
        """Set what layer `number` of the model has of its own: output factor, attention, experts, second input."""
        layer = language.each_layer[number]
        self.register_buffer("scalar", torch.ones(1, dtype=self.config.params_dtype) if layer.layer_scalar else None)
        self.mixer, self.routes = layer.mixer, layer.experts is not None
        if isinstance(self.self_attention, NormedValues):
            self.self_attention.gives = any(other.keys_from == number for other in language.each_layer)
        self.input = LayerInput(self.config, layer.layer_inputs) if layer.layer_inputs else None

    def forward(
        self, hidden: Tensor, batch: Microbatch, view: LanguageView, *extras: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """Map [T, 1, width] to [T, 1, width]; also return key and value, if later layers use them.

        `extras`: the first hidden states and a norm's weight for a second input; key and value of an earlier layer.
        """
        seen = view.runs if isinstance(self.mixer, LinearAttention) else view.seen[self.mixer.window]
        if isinstance(self.self_attention, QueriesAlone):
            self.self_attention.taken = extras[-2:]
        with own_draws(self), get_fp8_context(self.config, self.layer_number - 1):
            out = self.run(hidden, seen, view.balance if self.routes else None)
        out = out if self.input is None else self.input(out, view.words, *extras[:2])
        out = out if self.scalar is None else out * self.scalar
        given = self.self_attention.give() if isinstance(self.self_attention, NormedValues) else ()
        return (out, *given) if given else out


def language_layer_config(config: TransformerConfig, described: Layer) -> TransformerConfig:
    """Return core's configuration of one language layer: the model's `config`, with what the layer has of its own.

    `qk_layernorm` is set here only: set for the whole model, core would sum the gradients of all QK-norms over ranks.
    Without dropout a residual connection is one addition: a compiled function would save no kernel, and take the host
    four times as long.
    """
    layer = copy(config)
    if attention := described.attention:
        layer.qk_layernorm, layer.attention_output_gate = attention.qk_norm, attention.output_gate
        layer.softmax_scale = None if attention.query_scale is None else attention.query_scale**-0.5
        groups = attention.groups_over(config.tensor_model_parallel_size)
        layer.num_query_groups, layer.kv_channels = groups, attention.head_dim
        layer.num_attention_heads = groups * (attention.heads // attention.kv_heads)
    layer.bias_dropout_fusion = config.bias_dropout_fusion and config.hidden_dropout > 0
    if not described.experts:
        layer.ffn_hidden_size, layer.num_moe_experts = described.ffn_hidden_size, None
    if described.activation != "silu":
        layer.activation_func = ACTIVATIONS[described.activation]
        layer.bias_activation_fusion = False  # core's is another GELU; `perceptron.Perceptron` fuses the model's own
    return layer


def language_layer_spec(config: TransformerConfig, layer: Layer, recompute: bool) -> ModuleSpec:
    """Return core's layer with attention isolated per sample or linear attention and, where the layer has them, QK-norm
    of every head, norms behind both branches, experts. `recompute`: built so that its cheap outputs can be
    recomputed."""
    submodules = layer_submodules(config, recompute)
    if layer.branch_norms:
        submodules.self_attn_bda = submodules.mlp_bda = ModuleSpec(BranchNormAdd, params={"config": config})
    if layer.activation != "silu":
        submodules.mlp = partial(Perceptron.as_mlp_submodule, **submodules.mlp.keywords)
    if (experts := layer.experts) and experts.beside:
        submodules.mlp = beside_builder(perceptron_projections(config), experts.beside)
        submodules.pre_mlp_layernorm = IdentityOp
    elif experts:
        submodules.mlp, submodules.pre_mlp_layernorm = experts_builder(perceptron_projections(config)), build_norm
    if isinstance(mixer := layer.mixer, LinearAttention):
        submodules.self_attention = linear_attention_spec(config, mixer, recompute)
        return ModuleSpec(LanguageLayer, submodules=submodules)
    attention = submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(IsolatedAttention, params={"cap": mixer.score_cap})
    less = 2 if mixer.reads_keys else int(mixer.keys_are_values)
    own = {"heads_less": less} if less else {}
    set_projections(attention, config, mixer.kv_heads, mixer.qkv_bias, recompute, **own)
    if mixer.value_norm:
        submodules.self_attention.module = (NormedValues, KeysAsValues, QueriesAlone)[less]
    attention.q_layernorm = attention.k_layernorm = HeadRMSNorm if mixer.qk_norm else IdentityOp
    if mixer.reads_keys:
        attention.k_layernorm = IdentityOp
    return ModuleSpec(LanguageLayer, submodules=submodules)


def linear_attention_spec(config: TransformerConfig, linear: LinearAttention, recompute: bool) -> ModuleSpec:
    """Return the spec of linear attention, which core's layer builds instead of attention."""
    filled = linear.groups_over(config.tensor_model_parallel_size)
    into, out_of = projections(config, linear.groups, filled, has_bias=False, recompute=recompute)
    return ModuleSpec(GatedDeltaNet, params={"linear": linear, "into": into, "out_of": out_of})


class Head(MegatronModule):
    """The last layer: final norm, output projection and, where labels are given, the loss of every token that counts.

    [T, 1, width] -> losses fp32 [T], zero at tokens not in `batch.supervised`; without labels logits [T, local
    vocabulary], capped in models that cap. Rows of the projection beyond the model's words are padding, and never
    chosen.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int, language: LanguageArchitecture) -> None:
        super().__init__(config)
        words, self.cap = language.vocab_size, language.logit_cap
        self.norm = build_norm(config, config.hidden_size, config.layernorm_epsilon)
        self.linear = ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=outside_layers(config),
            init_method=config.init_method,
            bias=False,
            disable_grad_reduce=config.sequence_parallel,  # the gather's backward pass reduces
        )
        local = self.linear.output_size_per_partition
        self.words_here = min(max(words - self.linear.tp_group.rank() * local, 0), local)

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """Map [T, 1, width] to each token's loss [T], or without labels to logits [T, words of this rank]."""
        hidden = self.norm(hidden)
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        chosen = None if batch.labels is None else batch.supervised
        if chosen is not None:
            hidden = hidden.index_select(0, chosen)
        logits, _ = self.linear(hidden)
        logits = logits.squeeze(1)
        if self.cap is not None:
            cap_logits(logits, self.cap)
        if self.words_here < logits.shape[1]:
            with torch.no_grad():  # the gradient of a word that cannot be is zero either way
                logits[:, self.words_here :] = -torch.inf
        if batch.labels is None:
            return logits
        labels = batch.labels if chosen is None else batch.labels.index_select(0, chosen)
        losses = token_losses(self.config, logits, labels, self.linear.tp_group, self.cap)
        return losses if chosen is None else losses.new_zeros(batch.tokens).index_copy(0, chosen, losses)

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> ShardedStateDict:
        """Return core's entries, which a checkpoint with another vocabulary padding can fill."""
        return loads_without_padding(super().sharded_state_dict(*arguments, **options))
