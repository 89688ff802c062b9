"""Host time of a layer beside the device's: who sets the pace, the one that asks or the one that computes?

    python benchmarks/host.py [MODEL...]                          # TORCHDYNAMO_DISABLE=0: whole layers compiled

Layers are built as where there is CUDA (without Transformer Engine, small functions compiled), with so few and narrow
rows that computing them takes next to nothing: what is left is Python, autograd, the dispatcher and what torch's
compiler puts around a function. A layer's is the difference of five and one. The device's time is the analytic one of
an H100 at the model's packs. Host time is this process's, of the rounds that took least: neighbours only add to it.
The last line is the largest share of the device's time that the host takes.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cards import machine  # noqa: E402 (found by the path)

ASKED = ("cuda.", "accelerator.", "autograd.", "Tensor.pin_memory")
OWN = {
    name: reduce(getattr, name.split("."), torch)
    for name in machine.REPLACED
    if name.startswith(ASKED) and "nvtx" not in name and name != "cuda._sleep"
}
"""What the machine replaces and the compiler asks for, as torch has it."""
GIVEN = os.environ.get("TORCHDYNAMO_DISABLE", "")
for name in ("compile", "nn.attention.varlen.varlen_attn"):
    del machine.REPLACED[name]
machine.install()

from megatron.vlm import platform  # noqa: E402 (the machine comes first)
from megatron.vlm.models.attention import core_attention  # noqa: E402
from megatron.vlm.models.chain import Chain  # noqa: E402
from megatron.vlm.profiling.stage_pass import (  # noqa: E402
    StagePass,
    synthetic_pack,
    wrapped_stage,
)
from megatron.vlm.single import single_process  # noqa: E402
from omnibal_ext.architectures.architecture import Architecture  # noqa: E402
from omnibal_ext.architectures.presets import PRESETS, preset  # noqa: E402
from omnibal_ext.console import print_json, print_table  # noqa: E402
from omnibal_ext.costs.analytic import analytic_profile  # noqa: E402
from tests.languages import altered, with_layers  # noqa: E402

MODELS = ("internvl3.5-2b", "internvl3.5-8b", "internvl-chat-1.5", "qwen2.5-vl-7b", "qwen3-vl-8b")
TILES, PATCHES, TOKENS = 9, 9216, 4096
ONE, MORE = 1, 5
TOWERS = ("vit", "llm")


def attend_in_no_time() -> None:
    """Let torch's attention over packs, which has no kernel here, give zeros: what computing takes is the device's.

    It is chosen as in half precision, whose products take a CPU longer."""
    from torch.nn.attention import varlen

    core_attention.choose_kernel = lambda *_: "variable_length"

    zeros, state = torch.zeros_like, torch.zeros(2, dtype=torch.uint64)
    operations: Any = varlen
    operations._varlen_attn.register_kernel("cpu")(
        lambda query, *_, **__: (zeros(query), torch.zeros(query.shape[1], len(query)), state.clone())
    )
    operations._varlen_attn_backward.register_kernel("cpu")(lambda _, *given, **__: tuple(map(zeros, given[:3])))


def narrow(model: Architecture, layers: int) -> Architecture:
    """The same layers, a few numbers wide."""
    vision, language = model.vision, model.language
    native = vision.native and replace(vision.native, full_layers=(), learned_positions=None)
    side = vision.patch_size * (1 if native else 2)
    few: dict[str, Any] = {"layers": layers, "hidden_size": 32, "heads": 4, "ffn_hidden_size": 64, "native": native}
    small = replace(vision, **few, feature_layers=(), side_by_side=(), image_size=side)
    sections = (2, 3, 3) if language.attentions[0].rope.sections else ()
    text = altered(language, heads=4, kv_heads=2, head_dim=16, ffn_hidden_size=64, sections=sections, hidden_size=64,
                   vocab_size=128)  # fmt: skip
    (first, *_), experts = text.each_layer, text.each_layer[0].experts
    few_experts = experts and replace(experts, count=2, chosen=2)
    text = with_layers(replace(text, each_layer=(replace(first, experts=few_experts),)), layers)
    found = replace(model, name=f"{model.name}, narrow", vision=small, language=text)
    PRESETS[found.name] = found
    return found


def host_seconds(model: Architecture, layers: int, rounds: int) -> dict[str, tuple[float, ...]]:
    """Forward and backward of each tower's layers."""
    small = narrow(model, layers)
    machine.install()
    os.environ["TORCHDYNAMO_DISABLE"] = GIVEN
    cards = machine.power_on()
    platform.take_device()
    words = ["--make-vocab-size-divisible-by", "16"]
    with single_process(small.name, words) as inputs:
        chain = Chain.of(inputs.args, small)
        pack = synthetic_pack(small, {"tiles": small.least_tiles}, [8])
        firsts = {tower: chain.kinds.index(tower) for tower in TOWERS}
        steps = {tower: StagePass(chain, wrapped_stage(chain, at, at + layers), pack) for tower, at in firsts.items()}
        with torch.compiler.set_stance("force_eager"):  # what a pack knows is made while there are cards
            for step in steps.values():
                step.forward()
                step.backward()
                step.stage._views = partial(_given, step.stage._views(pack))
        machine.power_off()
        for name, value in OWN.items():
            machine.put(name, value)
        machine.put("cuda.current_device", lambda: platform.CPU)  # where core has what nobody reads
        machine.put("cuda.get_device_capability", lambda: (9, 0))
        found = {tower: _smallest(rounds, step.forward, step.backward) for tower, step in steps.items()}
        machine.install()
        machine.power_on()
    assert cards.count == 1
    machine.power_off()
    return found


def _given(value: Any, _: object) -> Any:
    return value


def _smallest(rounds: int, *parts: Callable[[], object]) -> tuple[float, ...]:
    """Seconds of each part."""
    taken = []
    for _ in range(rounds):
        moments = [time.process_time()]
        for part in parts:
            part()
            moments.append(time.process_time())
        taken.append([later - earlier for earlier, later in pairwise(moments)])
    return tuple(sorted(column)[rounds // 20] for column in zip(*taken, strict=True))


def rows_of(name: str, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of a layer of each tower."""
    model = preset(name)
    few, many = (host_seconds(model, layers, rounds) for layers in (ONE, MORE))
    vit = PATCHES if model.vision.native else TILES
    profile = analytic_profile(model, "h100", {"tiles": vit, "tokens": TOKENS})
    rows = []
    for tower in TOWERS:
        host = [(b - a) / (MORE - ONE) for a, b in zip(few[tower], many[tower], strict=True)]
        layer = profile.layers[tower]
        device = (layer.forward_seconds, layer.backward_seconds)
        rows.append({"model": name, "layer": tower, "host": host, "device": device, "share": sum(host) / sum(device)})
    return rows


def main() -> None:
    """Print the table, and the largest share last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    attend_in_no_time()
    rows = [row for name in asked.models for row in rows_of(name, asked.rounds)]
    if asked.json:
        print_json({"layers": rows})
        return
    table = [
        (row["model"], row["layer"], *(f"{1e6 * s:.0f}" for s in (*row["host"], *row["device"])), f"{row['share']:.2f}",
         "host" if row["share"] > 1 else "device") for row in rows
    ]  # fmt: skip
    columns = ("model", "layer", "host forward", "backward", "device forward", "backward", "host / device", "bound by")
    print_table(
        f"microseconds a layer; packs of {TILES} tiles or {PATCHES} patches, {TOKENS} tokens, TP 1", columns, table
    )
    worst = max(rows, key=lambda row: row["share"])
    print(f"{worst['model']} {worst['layer']}: the host takes {worst['share']:.2f} of the device's time")


if __name__ == "__main__":
    main()
