"""The whole model in fp64, written plainly from the papers and from InternVL's and LLaVA's descriptions.

Independent of our code: it takes weights by name and gives losses. Where plain loops say it best, there are loops.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.vlm.microbatch import Microbatch
from omnibal_ext.architectures.architecture import Architecture


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight + bias


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def gelu(x: Tensor, kind: str = "gelu") -> Tensor:
    return x * torch.sigmoid(1.702 * x) if kind == "quick_gelu" else x * (1 + torch.erf(x / math.sqrt(2))) / 2


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """One head of one sequence: [s, d] each."""
    scores = query @ key.T / math.sqrt(query.shape[-1])
    if causal:
        later = torch.arange(len(key))[None] > torch.arange(len(query))[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ value


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions from 0, dimension i paired with i + d/2 (as Llama's): x [s, d]."""
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * speeds
    first, second = x[:, :half], x[:, half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


@dataclass
class Reference:
    """A model of `architecture` whose weights go by our names; all of them fp64."""

    architecture: Architecture
    weights: dict[str, Tensor]

    def losses(self, batch: Microbatch) -> Tensor:
        """Cross entropy of every token of the pack, [T]."""
        logits = self.logits(batch)
        return -logits.log_softmax(-1)[torch.arange(batch.tokens), batch.labels]

    def logits(self, batch: Microbatch) -> Tensor:
        """[T, words]."""
        image = torch.cat([self._project(self._see(tile)) for tile in batch.pixels.double()] or [torch.zeros(0)])
        hidden = self._of("word_embed.embedding.weight")[batch.input_ids].clone()
        if len(image):
            hidden[batch.image_positions] = image
        samples = [self._read(sample) for sample in hidden.split(batch.lengths)]
        language = self.architecture.language
        out = rms_norm(torch.cat(samples), self._of("head.norm.weight"), language.norm_epsilon)
        head = "word_embed.embedding.weight" if self.architecture.tied else "head.linear.weight"
        return out @ self._of(head)[: language.vocab_size].T

    def _of(self, name: str) -> Tensor:
        return self.weights[name]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self._of(f"{name}.weight").T
        return out + self._of(f"{name}.bias") if f"{name}.bias" in self.weights else out

    def _see(self, tile: Tensor) -> Tensor:
        """The ViT on one tile: [3, size, size] -> [1 + patches, width]."""
        vision = self.architecture.vision
        size, kernel = vision.patch_size, self._of("patch_embed.projection.weight").flatten(1)
        rows = range(0, vision.image_size, size)
        patches = [kernel @ tile[:, y : y + size, x : x + size].flatten() for y in rows for x in rows]
        hidden = torch.stack(patches)
        if vision.patch_bias:
            hidden = hidden + self._of("patch_embed.projection.bias")
        hidden = torch.cat([self._of("patch_embed.class_token")[0], hidden]) + self._of("patch_embed.positions")[:, 0]
        if vision.pre_norm:
            hidden = self._norm(hidden, "patch_embed.norm", "LayerNorm", vision.norm_epsilon)
        for layer in range(vision.layers):
            name = f"vit_{layer}"
            hidden = hidden + self._scaled(self._look(hidden, name), f"{name}.self_attn_bda.scale")
            inner = self._norm(hidden, f"{name}.pre_mlp_layernorm", vision.normalization, vision.norm_epsilon)
            inner = gelu(self._linear(inner, f"{name}.mlp.linear_fc1"), vision.activation)
            hidden = hidden + self._scaled(self._linear(inner, f"{name}.mlp.linear_fc2"), f"{name}.mlp_bda.scale")
        return hidden

    def _norm(self, x: Tensor, name: str, kind: str, epsilon: float) -> Tensor:
        weight = self._of(f"{name}.weight")
        return rms_norm(x, weight, epsilon) if kind == "RMSNorm" else layer_norm(
            x, weight, self._of(f"{name}.bias"), epsilon
        )  # fmt: skip

    def _scaled(self, x: Tensor, name: str) -> Tensor:
        return x * self._of(name) if self.architecture.vision.layer_scale else x

    def _look(self, hidden: Tensor, name: str) -> Tensor:
        """Attention of all tokens of a tile to all."""
        vision = self.architecture.vision
        entering = self._norm(hidden, f"{name}.input_layernorm", vision.normalization, vision.norm_epsilon)
        query, key, value = self._heads(entering, f"{name}.self_attention", vision.heads, vision.heads)
        if vision.qk_norm:  # over all heads together
            weights = (self._of(f"{name}.self_attention.{which}_layernorm.weight") for which in "qk")
            query, key = (
                rms_norm(torch.cat(one, -1), weight, vision.norm_epsilon).chunk(vision.heads, -1)
                for one, weight in zip((query, key), weights, strict=True)
            )
        heads = [attend(*one, causal=False) for one in zip(query, key, value, strict=True)]
        return self._linear(torch.cat(heads, -1), f"{name}.self_attention.linear_proj")

    def _heads(
        self, entering: Tensor, name: str, heads: int, groups: int
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Query, key and value of every head; the weight holds group by group its queries, its key, its value."""
        out = self._linear(entering, f"{name}.linear_qkv")
        share = heads // groups
        width = out.shape[-1] // (groups * (share + 2))
        query, key, value = [], [], []
        for group in out.split(width * (share + 2), -1):
            *queries, one_key, one_value = group.split(width, -1)
            query += queries
            key += [one_key] * share
            value += [one_value] * share
        return query, key, value

    def _project(self, hidden: Tensor) -> Tensor:
        """[1 + patches, ViT width] -> [image tokens, LLM width]."""
        model = self.architecture
        if model.vision.final_norm:
            hidden = self._norm(hidden, "projector.vision_norm", "LayerNorm", model.vision.norm_epsilon)
        image = hidden if model.class_token else hidden[1:]
        if model.shuffle > 1:
            side, step = math.isqrt(model.vision.patches), model.shuffle
            corners = [(row, column) for row in range(0, side, step) for column in range(0, side, step)]
            image = torch.stack(
                [
                    torch.cat([image[(row + y) * side + column + x] for y in range(step) for x in range(step)])
                    for row, column in corners
                ]
            )
        if model.projector_norm:
            image = self._norm(image, "projector.norm", "LayerNorm", 1e-5)
        return self._linear(gelu(self._linear(image, "projector.linear_fc1")), "projector.linear_fc2")

    def _read(self, hidden: Tensor) -> Tensor:
        """The language model's layers on one sample: [s, width] -> the same."""
        language = self.architecture.language
        for layer in range(language.layers):
            name, epsilon = f"llm_{layer}", language.norm_epsilon
            entering = rms_norm(hidden, self._of(f"{name}.input_layernorm.weight"), epsilon)
            query, key, value = self._heads(entering, f"{name}.self_attention", language.heads, language.kv_heads)
            turned = [[rotate(head, language.rope_theta) for head in one] for one in (query, key)]
            heads = [attend(*one, causal=True) for one in zip(*turned, value, strict=True)]
            hidden = hidden + self._linear(torch.cat(heads, -1), f"{name}.self_attention.linear_proj")
            entering = rms_norm(hidden, self._of(f"{name}.pre_mlp_layernorm.weight"), epsilon)
            gate, up = self._linear(entering, f"{name}.mlp.linear_fc1").chunk(2, -1)
            hidden = hidden + self._linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.linear_fc2")
        return hidden
