"""The language model's links of the chain: word embedding with the image tokens merged in, layers, head."""

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.attention import IsolatedAttention
from megatron.vlm.models.norm import build_norm


class WordEmbedding(torch.nn.Module):
    """Embeds the pack's tokens and puts the projected image tokens in their places.

    image [tiles * image tokens, 1, width] -> [T, 1, width]; under sequence parallelism this rank's share of T.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.embedding = VocabParallelEmbedding(
            vocab_size, config.hidden_size, init_method=config.embedding_init_method, config=config
        )

    def forward(self, image: Tensor, batch: Microbatch) -> Tensor:
        words = self.embedding(batch.input_ids)
        merged = words.index_copy(0, batch.image_positions, image.squeeze(1).to(words.dtype)).unsqueeze(1)
        return tensor_parallel.scatter_to_sequence_parallel_region(merged) if self.sequence_parallel else merged


class LanguageLayer(TransformerLayer):
    """Core's transformer layer over a pack: [T, 1, width] -> the same."""

    def forward(self, hidden: Tensor, batch: Microbatch, rotary: Tensor) -> Tensor:
        return super().forward(hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=batch.segments)[0]


def language_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Core's layer with attention isolated per sample."""
    submodules = get_gpt_layer_local_submodules(normalization=config.normalization)
    submodules.input_layernorm = submodules.pre_mlp_layernorm = build_norm
    submodules.self_attention.submodules.core_attention = IsolatedAttention
    return ModuleSpec(LanguageLayer, submodules=submodules)


class Head(torch.nn.Module):
    """Final norm, output projection and, where labels are given, the loss of every token.

    [T, 1, width] -> losses [T] in fp32, or without labels logits [T, local vocabulary].
    """

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        self.norm = build_norm(config, config.hidden_size, config.layernorm_epsilon)
        self.linear = ColumnParallelLinear(
            config.hidden_size, vocab_size, config=config, init_method=config.init_method, bias=False
        )

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        logits, _ = self.linear(self.norm(hidden))
        logits = logits.squeeze(1)
        if batch.labels is None:
            return logits
        return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), batch.labels)
