"""compiling.py MODEL: how many graphs torch's compiler is given by each pack of a model, printed as JSON.

Functions are fused as where there is CUDA; what is compiled is run as it is. A third of the layers is recomputed, of a
third norms and activation functions alone, and a third not.
"""

import json
import os
import sys
from contextlib import nullcontext
from functools import cache, partial, wraps
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "0"

import torch
import torch._dynamo
from torch.utils._triton import has_triton

torch._dynamo.config.fail_on_recompile_limit_hit = True  # a function behind it runs as it is, at other bytes
has_triton()  # asked and kept before anything stands in for CUDA
GIVEN: list[Any] = []
COMPILE = torch.compile


def noted(graph: Any, _: Any) -> Any:
    GIVEN.append(graph)
    return graph.forward


def outside_modes(function: Any, **options: Any) -> Any:
    """As on a GPU, where no mode stands between a function and its tensors."""
    launch = COMPILE(function, backend=noted, **options)

    @wraps(function)
    def launched(*arguments: Any, **named: Any) -> Any:
        modes = torch._C._len_torch_function_stack()
        with torch.overrides._pop_mode_temporarily() if modes else nullcontext():
            return launch(*arguments, **named)

    return launched


def compiled(function: Any = None, **options: Any) -> Any:
    """Takes the place of `torch.compile` before anything of Megatron is there, ours included."""
    if function is None:
        return partial(compiled, **options)

    @cache
    def launch() -> Any:
        from megatron.vlm.compiling import for_any_rows

        return for_any_rows(outside_modes)(function, **options)

    @wraps(function)
    def launched(*arguments: Any, **named: Any) -> Any:
        return launch()(*arguments, **named)

    return launched


def graphs(model: str) -> list[int]:
    torch.compile = compiled
    from megatron.vlm import platform
    from megatron.vlm.models.chain import Chain
    from megatron.vlm.pipeline.stage import Stage
    from megatron.vlm.profiling.stage_pass import ModelType, StagePass, get_model
    from tests.distributed import harness
    from tests.unit.alone import megatron_alone

    usual = platform.megatron_defaults()
    fused = {name: value for name, value in usual.items() if not name.startswith("bias_")}
    platform.megatron_defaults = lambda: fused
    # The first has words and tiles, the last one tile: one is a size of its own.
    packs = sorted(
        harness.sample_packs(model=model), key=lambda pack: (pack.media_of("tiles").amount == 1, -len(pack.lengths))
    )
    with megatron_alone(model) as inputs:
        chain = Chain.of(inputs.args, harness.MODELS[model])
        layers = len(chain.kinds)
        again = (tuple(range(0, layers, 3)), tuple(range(1, layers, 3)))
        (stage,) = get_model(lambda **_: Stage(chain, 0, layers, *again), ModelType.encoder_or_decoder)
        found = []
        for pack in packs:
            step = StagePass(chain, stage, pack)
            step.forward()
            step.backward()
            found.append(len(GIVEN))
    return found


if __name__ == "__main__":
    print(json.dumps(graphs(sys.argv[1])))
