"""Models of transformers that are tried, and the kernels of attention under which they are: flash-attention's by a
stand-in that obeys its lengths, on any device. Private names of transformers are in this file alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.vlm.prove.findings import IGNORED
from omnibal_ext.errors import UserError
from omnibal_ext.joining.checks import KERNELS

WHOLE = 2**26
"""Weights of a model that is run whole; of a larger one the first layer of each kind is, with random weights."""
DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers")
OF_LAYERS = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
"""Fields that number an encoder's layers, for two of them: features may be the last layer's but one."""
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
"""Kernels by our names and transformers'."""


class Ran(NamedTuple):
    """What a model made of a batch: logits [B, T, V] without gradients, its own loss, the sum and the number of its
    supervised tokens' losses, and positions [axes, B, T] as the language model's rotation was given them, if it has
    one."""

    logits: Tensor
    loss: Tensor | None
    summed: Tensor
    supervised: int
    positions: Tensor | None


def load(folder: Path, seed: int) -> Any:
    """Load a folder's model in fp32, with random weights if it has none; of one with more than `WHOLE` weights only the
    first layers, with random ones. Raises UserError if transformers cannot build it."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = getattr(transformers, config.architectures[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: no config.json of a model that transformers has: {error}") from error
    try:
        return _built(kind, config, folder, seed)
    except Exception as error:  # sizes that do not go together, weights of another shape or no weights
        raise UserError(f"{folder}: transformers does not build it: {type(error).__name__}: {error}") from error


def _built(kind: Any, config: Any, folder: Path, seed: int) -> Any:
    with torch.device("meta"):
        is_large = sum(weight.numel() for weight in kind(config).parameters()) > WHOLE
    if not is_large and any(folder.glob("*.safetensors")):
        return ready(kind.from_pretrained(folder, local_files_only=True))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ready(kind(first_layers(config) if is_large else config))


def ready(model: Any) -> Any:
    """Return the model in fp32, without dropout, and without key-value cache, as Trainer sets it: with one,
    transformers does not look for packs."""
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model.eval().float()


def first_layers(config: Any) -> Any:
    """Cut a configuration in place: a language-model layer of each kind, two of each encoder; return it."""
    text = config.get_text_config()
    if kinds := list(dict.fromkeys(getattr(text, "layer_types", None) or ())):
        text.layer_types = kinds
    text.num_hidden_layers = max(len(kinds), 1)
    for part in (getattr(config, name) for name in config.sub_configs):
        fewer: dict[str, Any] = {name: min(2, getattr(part, name)) for name in DEPTHS if hasattr(part, name)}
        for name, value in (OF_LAYERS | fewer).items():
            if part is not text and hasattr(part, name):
                setattr(part, name, value)
    return config


def run(model: Any, batch: Mapping[str, Any]) -> Ran:
    """Run a model forward on a batch of tensors; return its logits, losses and positions."""
    positions: list[Tensor] = []

    def note(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = named["position_ids"] if "position_ids" in named else args[1]
        positions.append((given if given.dim() == 3 else given[None]).expand(-1, len(batch["input_ids"]), -1))

    parts = [part for name, part in model.get_decoder().named_modules() if "rotary_emb" in name and "vis" not in name]
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:  # of the batch before
            module.rope_deltas = None
    try:
        out = model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    targets, logits = labels_of(batch)[:, 1:].flatten(), out.logits[:, :-1].flatten(0, 1)
    summed = cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return Ran(
        out.logits.detach(), out.loss, summed, int((targets != IGNORED).sum()), positions[0] if positions else None
    )


def labels_of(batch: Mapping[str, Any]) -> Tensor:
    """Return a batch's labels [B, T], not shifted, also where the batch has shifted ones; -100 where there is none."""
    none = torch.full_like(batch["input_ids"], IGNORED)
    if (ahead := batch.get("shift_labels")) is not None:
        return torch.cat([none[:, :1], ahead[:, :-1]], dim=1)
    return none if batch.get("labels") is None else batch["labels"]


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradient of each weight by name, 0 where there is none, and clear them in the model."""
    found = {name: torch.zeros(()) if one.grad is None else one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    return found


@contextmanager
def attention(model: Any, kernel: str) -> Iterator[None]:
    """Make a context in which a model attends by a kernel of `ATTENTION`. Raises UserError where it cannot."""
    from transformers import modeling_flash_attention_utils as theirs
    from transformers import modeling_utils

    if kernel == "flash" and not model._supports_flash_attn:
        raise UserError("transformers does not run this model with flash-attention")
    lacking = [package for module, package in KERNELS.items() if not find_spec(module)]
    if lacking and "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        raise UserError(f"layers of linear attention keep samples apart with {' and '.join(lacking)}, not installed")
    taken: Any = theirs._lazy_define_process_function(flash_attn_varlen_func)
    taken = (taken, dict) if hasattr(theirs, "_process_with_kvcache_kwargs_fn") else taken  # before 5.19
    functions = (flash_attn_func, flash_attn_varlen_func, None, theirs._pad_input, theirs._unpad_input)
    replaced: dict[tuple[Any, str], Any] = {
        (theirs, "lazy_import_flash_attention"): lambda *_, **__: (functions, taken),
        (modeling_utils, "lazy_import_flash_attention"): lambda *_, **__: None,
        (modeling_utils.PreTrainedModel, "_flash_attn_can_dispatch"): lambda *_, **__: True,
    }
    kept = {key: getattr(*key) for key in replaced}
    try:
        for key, value in replaced.items():
            setattr(*key, value)
        try:
            model.set_attn_implementation(ATTENTION[kernel])
        except (ValueError, ImportError):  # an encoder that lacks it keeps its own
            model.set_attn_implementation({"text_config": ATTENTION[kernel]})
        yield
    finally:
        for key, value in kept.items():
            setattr(*key, value)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Attend within sequences of equal boundaries [sequences + 1], as flash-attention's of this name: queries [T,
    heads, D], keys and values [T, groups, D]; `window_size`: keys before and after that are seen, -1: all."""
    if cu_seqlens_q.dtype != torch.int32 or cu_seqlens_k.dtype != torch.int32:
        raise TypeError(f"flash-attention takes boundaries of int32, not {cu_seqlens_q.dtype}")
    if max_seqlen_q is not None and int(max_seqlen_q) < (longest := int(cu_seqlens_q.diff().max())):
        raise ValueError(f"flash-attention is told of {max_seqlen_q} tokens at most, a sequence has {longest}")
    groups, positions = q.shape[1] // k.shape[1], torch.arange(len(q))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    sequence = torch.bucketize(positions, cu_seqlens_q[1:].long(), right=True)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    ahead, (before, after) = positions - positions[:, None], (len(q) if side < 0 else side for side in window_size)
    seen = (sequence[:, None] == sequence) & (ahead >= -before) & (ahead <= (0 if causal else after))
    attended = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", attended, v) * (sequence < len(cu_seqlens_q) - 1)[:, None, None]


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Attend as `flash_attn_varlen_func`, in a batch [B, T, heads, D], each row a sequence."""
    ends, flat = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1], [one.flatten(0, 1) for one in (q, k, v)]
    return flash_attn_varlen_func(flat[0], flat[1], flat[2], ends, ends, **how).view_as(q)
