"""Run as a program: what packs ask a GPU for, by kind of layer, pass and kind of work; without a GPU, and no seconds.

launches.py engine|local PRESET PACKS.json [COUNT]

PACKS.json has packs as lists of samples, (tiles, tokens); the first COUNT count. Prints, for "vit forward" and the
like, of all layers of that kind and all packs: [kernels, operations, bytes read and written] of products, of attention
(exact: within samples, half under a causal mask) and of elementwise kernels. What is compiled is one kernel. Gradients
are added up as Megatron's DDP does where no kernel has done so.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # not as `tests`, which imports Megatron
from shapes import device
from shapes.program import names_in, one_of_each, padded_chain, prepare, run, start

LEARNT = 0.3
"""Share of a pack's tokens that are learnt, as in `benchmarks/gpu_packs.py`."""
BACKWARD_ATTENTION = 2.5
Work = dict[str, dict[str, list[float]]]
"""[kernels, operations, bytes] by "vit forward" and the like, and kind of work."""


def main() -> None:
    kind, name, packs, *count = sys.argv[1:]
    asked = json.loads(Path(packs).read_text())[: int(count[0]) if count else None]
    with device.machine(engine=kind == "engine"):
        device.rank_of(1)
        found = launches(name, asked)
    device.end("RESULT " + json.dumps(found))


def launches(name: str, packs: Sequence[Sequence[Sequence[int]]]) -> Work:
    """Of one layer of every cost, times their number."""
    import torch
    from languages import altered

    from megatron.vlm.pipeline.stage import Stage
    from megatron.vlm.profiling.stage_pass import synthetic_pack
    from omnibal_ext.architectures.presets import preset
    from omnibal_ext.costs.works import layer_works

    args, model = start(name, 1), preset(name)
    model = replace(model, language=altered(model.language, sees_images=False))  # masks are none of this device's
    longest = max(sum(tokens for _, tokens in pack) for pack in packs)
    vision = replace(model.vision, layers=min(1, model.vision.layers), feature_layers=(),
                     side_by_side=(0,) * len(model.vision.side_by_side))  # fmt: skip
    language = replace(model.language, each_layer=one_of_each(model.language.each_layer, longest))
    one = replace(model, vision=vision, language=language)
    chain, layers = padded_chain(args, one), Counter(model.cost_kinds)
    found: Work = {}
    for samples in packs:
        tiles, lengths = sum(tiles for tiles, _ in samples), [tokens for _, tokens in samples]
        pack = synthetic_pack(one, {"tiles": tiles}, lengths)
        pack = replace(pack, supervised=torch.empty(int(LEARNT * sum(lengths)), dtype=torch.long, device="cuda"))
        works = layer_works(model, {"tiles": max(1, tiles), "tokens": sum(lengths)}, 1)
        for layer, (kind, cost) in enumerate(zip(chain.kinds, names_in(model, one), strict=True)):
            if kind in ("patch_embed", "vit", "projector") and not tiles:
                continue
            attention = works[cost].per_square * sum(length**2 for length in lengths) or works[cost].attention
            for phase, (asked, share) in passes(Stage(chain, layer, layer + 1), pack).items():
                asked["attention"][1] = attention * share
                into = found.setdefault(f"{kind} {phase}", {work: [0.0, 0.0, 0.0] for work in asked})
                for work, figures in asked.items():
                    into[work] = [a + layers[cost] * b for a, b in zip(into[work], figures, strict=True)]
    return found


def passes(stage: Any, pack: Any) -> dict[str, tuple[dict[str, list[float]], float]]:
    """What a layer asks for forward and backward, and attention's operations as a share of the forward's; without what
    is made once a pack."""
    import torch
    from shapes.counter import Count

    entering = None
    if stage.first:
        rows = len(pack.media_of("tiles").positions) if stage.kinds[0] == "word_embed" else None
        shape = stage.chain.shape_before(stage.first, pack, rows)
        entering = torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    prepare(stage)
    for weight in stage.parameters():
        weight.register_post_accumulate_grad_hook(_add_up)
    run(stage, entering, pack)
    with Count() as once:
        stage._views(pack)
    with Count() as forward:
        out = run(stage, entering, pack)
    with Count() as backward:
        out.backward(torch.empty_like(out))
    forward.kernels.subtract(once.kernels)
    forward.bytes.subtract(once.bytes)
    return {"forward": (_by_work(forward), 1.0), "backward": (_by_work(backward), BACKWARD_ATTENTION)}


def _add_up(weight: Any) -> None:
    """What Megatron's DDP does with a gradient."""
    if not weight.grad_added_to_main_grad:
        weight.main_grad.add_(weight.grad)
    weight.grad = None


def _by_work(count: Any) -> dict[str, list[float]]:
    from shapes.counter import ATTENTION

    attention = sum(number for name, number in count.kernels.items() if any(part in name for part in ATTENTION))
    elementwise = sum(count.kernels[name] for name in count.bytes)
    products = sum(count.kernels.values()) - attention - elementwise
    return {
        "product": [products, count.operations, 0.0],
        "attention": [attention, 0.0, 0.0],
        "elementwise": [elementwise, 0.0, sum(count.bytes.values())],
    }


if __name__ == "__main__":
    main()
