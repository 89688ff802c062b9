"""Run as a program, one a machine: what a GPU is asked for by one layer of every kind, forward and backward.

program.py engine|local PRESET TENSOR_PARALLEL TILES TOKENS...

Prints, for each preset (with its numbers) and kind: kernels, bytes of elementwise work, operations, bytes kept; what
waits for the device, and fp32 copies made outside of kernels. "gpt" is core's own Transformer Engine layer, as wide as
the ViT's ("gpt vit") and as the language model's ("gpt llm"). In one pass over all kinds also the loss.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # not as `tests`, which imports Megatron
from shapes import device

Answer = dict[str, Any]
FRAMES = 3000
"""Mel frames of a pack, of models that hear."""


def main() -> None:
    kind, *words = sys.argv[1:]
    result = {}
    sizes = [words[place : place + 4] for place in range(0, len(words), 4)]
    with device.machine(engine=kind == "engine"):
        for name, tensor, tiles, tokens in sizes:
            device.rank_of(int(tensor))
            result[name] = measure(name, int(tensor), int(tiles), int(tokens), kind == "engine")
    device.end("RESULT " + json.dumps(result))


def one_of_each(layers: tuple[Any, ...], tokens: int) -> tuple[Any, ...]:
    """A layer of every cost, in mixtures of those with experts; windows as wide as the pack. One that takes keys and
    values takes those of the first here that has a window like its own, or none."""
    apart = [*dict.fromkeys(one for one in layers if one.experts or not any(other.experts for other in layers))]
    near, found = [bool(one.attention and one.attention.window) for one in apart], []
    for one, is_near in zip(apart, near, strict=True):
        mixer = replace(one.mixer, window=tokens) if is_near else one.mixer
        found.append(replace(one, mixer=mixer, keys_from=None if one.keys_from is None else near.index(is_near)))
    return tuple(found)


def measure(name: str, tensor: int, tiles: int, tokens: int, engine: bool) -> dict[str, Answer]:
    """One layer of every kind, alone; then all of them and the loss."""
    import torch
    from languages import altered
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron.vlm.pipeline.stage import Stage
    from megatron.vlm.profiling.stage_pass import equal_lengths, synthetic_pack
    from omnibal_ext.adapters import Adapters
    from omnibal_ext.architectures.presets import preset
    from omnibal_ext.chain import ADAPTABLE_KINDS, PARTS, RECOMPUTABLE_KINDS
    from omnibal_ext.modalities.modality import VISION

    args = start(name, tensor)
    model = preset(name)
    model = replace(model, language=altered(model.language, sees_images=False))  # masks are none of this device's
    language = replace(model.language, each_layer=one_of_each(model.language.each_layer, tokens))
    alone = replace(
        model.vision, layers=min(1, model.vision.layers), feature_layers=(),
        side_by_side=(0,) * len(model.vision.side_by_side),
    )  # fmt: skip
    further = tuple(replace(each, layers=1) for each in model.further)
    one = replace(model, vision=alone, language=language, further=further)
    chain = padded_chain(args, one)
    args.delay_wgrad_compute = engine
    late = padded_chain(args, one)
    trained_by_adapters = replace(chain, frozen=tuple(PARTS), adapters=Adapters(16, 32.0, tuple(PARTS)))
    weights = torch.empty(4, device="cuda") if one.language.experts else None  # their routers are balanced by them
    pack = replace(
        synthetic_pack(one, {"tiles": tiles, "frames": FRAMES}, equal_lengths(tokens, 4)), sample_weights=weights
    )
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device="cuda")  # as in an iteration
    found = {}
    for layer, (kind, cost) in enumerate(zip(chain.kinds, names_in(model, one), strict=True)):
        stage = Stage(chain, layer, layer + 1)
        entering = None
        if layer:
            shape = chain.shape_before(
                layer, pack, len(pack.media_of("tiles").positions) if kind == "word_embed" else None
            )
            entering = torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        found[cost] = count(stage, lambda s=stage, e=entering: run(s, e, pack))
        if kind in RECOMPUTABLE_KINDS:
            cheap, entering.grad = Stage(chain, layer, layer + 1, recompute_cheap=(layer,)), None
            found[cost]["cheap"] = count(cheap, lambda s=cheap, e=entering: run(s, e, pack))
        if kind in ADAPTABLE_KINDS:
            adapted, entering.grad = Stage(trained_by_adapters, layer, layer + 1), None
            found[cost]["adapted"] = count(adapted, lambda s=adapted, e=entering: run(s, e, pack))
        split = Stage(late, layer, layer + 1)
        found[cost]["late"] = held_until_w(split, lambda s=split, e=entering: run(s, e, pack))
        without_beside(found[cost], chain, layer, pack)
    whole = Stage(chain, 0, len(chain.kinds))
    found["step"] = count(whole, lambda: weighted(whole(pack), pack))
    if engine and one.language.usual.activation == "silu":  # core's own layers know no other
        found |= {f"gpt {kind}": core_layer(config, pack) for kind, config in
                  (("vit", chain.configs[VISION]), ("llm", chain.language))}  # fmt: skip
    return found


def names_in(model: Any, one: Any) -> list[str]:
    """What the costs of the layers of `one` stand under in `model`, of which it has one layer of every kind."""
    names = dict(zip(zip(model.chain, model.layers, strict=True), model.cost_kinds, strict=True))
    return [names[pair] for pair in zip(one.chain, one.layers, strict=True)]


def without_beside(found: Answer, chain: Any, layer: int, pack: Any) -> None:
    """What a layer reads of others, or sounds that pass it, lies in one tensor with the hidden states: a stage holds it
    once, however many layers read it."""
    if chain.kinds[layer] in ("vit", "llm"):
        rows, _, width = chain.hidden_shape_before(layer, pack)
        beside = 2 * width * (chain.shape_before(layer, pack)[0] - rows)
        for way in (found, found.get("cheap"), found.get("adapted")):
            if way:
                way["kept"] -= beside
        found["late"] -= beside * (chain.kinds[layer] == "llm")


def start(name: str, tensor: int) -> Namespace:
    """Megatron's arguments and groups, as a run with these flags has them."""
    from megatron.training import global_vars

    from megatron.vlm import platform
    from megatron.vlm.arguments import read_arguments

    flags = ["--tensor-model-parallel-size", str(tensor), "--sequence-parallel", "--bf16", "--lr", "0"]
    flags += ["--train-iters", "1", "--global-batch-size", "1", "--no-check-for-nan-in-loss-and-grad"]
    if platform.HAS_TRANSFORMER_ENGINE:
        flags += ["--no-gradient-accumulation-fusion"]  # the stand-in's is no kernel
    args = read_arguments(["--preset", name, *flags]).args
    global_vars._GLOBAL_ARGS = args
    return args


def padded_chain(args: Namespace, model: Any) -> Any:
    """With as many words as Megatron makes of the model's."""
    from megatron.vlm.models.chain import Chain

    multiple = 128 * args.tensor_model_parallel_size
    return replace(Chain.of(args, model), vocab_size=-(-model.language.vocab_size // multiple) * multiple)


def run(stage: Any, entering: Any, pack: Any) -> Any:
    stage.set_input_tensor(entering)
    return stage(pack)


def weighted(losses: Any, pack: Any) -> Any:
    from megatron.vlm.loss import token_loss

    return token_loss("token", pack, losses)[0]


def prepare(module: Any) -> None:
    """On the device, with gradients beside the weights as Megatron's DDP has them."""
    import torch

    device.move(module)
    for weight in module.parameters():
        weight.main_grad = torch.empty(weight.shape, dtype=torch.float32, device="cuda")
        weight.grad_added_to_main_grad = False


def count(module: Any, forward: Callable[[], Any]) -> Answer:
    """Forward and backward once to warm up, then counted."""
    import torch
    from shapes.counter import Count

    from megatron.vlm.profiling.kept import KeptBytes

    prepare(module)
    forward()
    with Count() as counted, KeptBytes(module.parameters()) as kept:
        out = forward()
        bytes_kept = kept.bytes
        if out.requires_grad:
            out.backward(torch.empty_like(out))
    return {
        "kernels": sum(counted.kernels.values()), "bytes": sum(counted.bytes.values()),
        "operations": counted.operations, "attention": counted.attention_operations, "kept": bytes_kept,
        "waits": counted.waits, "wide": counted.wide, "by kernel": dict(counted.bytes.most_common(12)),
    }  # fmt: skip


def held_until_w(module: Any, forward: Callable[[], Any]) -> int:
    import torch

    from megatron.vlm.pipeline.weight_gradients import Late, WeightGradients

    prepare(module)
    gradients, aside = WeightGradients(), list[Late]()
    gradients.attach(module)
    out = forward()
    with gradients.delaying(aside):
        if out.requires_grad:
            out.backward(torch.empty_like(out))
    storages = [tensor.untyped_storage() for late in aside for tensor in late.held]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def core_layer(config: Any, pack: Any) -> Answer:
    """Core's Transformer Engine layer of these sizes over as many tokens, with core's own attention."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.spec_utils import build_module

    from megatron.vlm.models.vit.layers import shared_rows

    causal = config.gated_linear_unit
    if not causal:
        config = replace_quietly(config, activation_func=torch.nn.functional.gelu)  # core fuses no other
    config = replace_quietly(config, qk_layernorm=False, bias_activation_fusion=True, bias_dropout_fusion=True)
    layer = build_module(get_gpt_layer_with_transformer_engine_spec(), config=config, layer_number=1)
    rows = pack.tokens if causal else 1025 * pack.media_of("tiles").amount
    entering = torch.empty(
        shared_rows(rows, config), 1, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    rotary = torch.empty(rows, 1, 1, config.kv_channels, device="cuda") if causal else None
    return count(layer, lambda: layer(entering, attention_mask=None, rotary_pos_emb=rotary)[0])


def replace_quietly(config: Any, **changed: Any) -> Any:
    from copy import copy

    config = copy(config)
    for name, value in changed.items():
        setattr(config, name, value)
    return config


if __name__ == "__main__":
    main()
