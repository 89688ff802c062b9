"""states.py: what the optimizer keeps of a small model by Megatron's flags, on a machine with Transformer Engine.

Prints of each case in `CASES` the bytes a weight of gradients and states, as `WeightBytes` has them and as they are;
the precisions of the states; and the losses of a few steps.
"""

import json

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.training import training
from megatron.training.training import destroy_global_state

from megatron.vlm.pipeline.executor import Executor
from omnibal_ext.costs.states import WeightBytes
from omnibal_ext.plan import single_stage_plan
from tests.distributed import harness

AWARE = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer"
CASES = {
    "none": "--bf16 --use-distributed-optimizer",
    "all fp32": AWARE,
    "12": f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "10": f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16",
    "narrow": f"{AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16",
}
STEPS = 6


def kept(flags: list[str]) -> dict[str, object]:
    args = harness.start(harness.SMALL, 1, 1, ["--train-iters", str(STEPS), "--lr", "1e-2", *flags])
    chain = harness.build_chain(args, harness.SMALL)
    plan = single_stage_plan(chain.kinds)
    model = harness.build_model(chain, plan)
    config, overrides = training.get_megatron_optimizer_config(args)
    config.lr = 1e-2
    optimizer = get_megatron_optimizer(config, model, overrides)
    losses, executor = [], Executor()
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(harness.run_iteration(model, plan, harness.sample_packs("short"), executor))
        optimizer.step()
    weights = [*model[0].parameters()]
    count = sum(weight.numel() for weight in weights)
    states = [tensor for state in optimizer.optimizer.state.values() for tensor in state.values() if tensor.dim()]
    masters = [] if args.use_precision_aware_optimizer else [weight.main_param for weight in weights]
    each, grads = WeightBytes.of(args), [weight.main_grad for weight in weights]
    found = {
        "bytes": [sum(t.numel() * t.element_size() for t in ts) / count for ts in (grads, [*states, *masters])],
        "counted": [each.gradient, each.state],
        "precisions": sorted({str(tensor.dtype) for tensor in states}),
        "losses": losses,
    }
    destroy_global_state()
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps({name: kept(words.split()) for name, words in CASES.items()}), flush=True)
    torch.distributed.destroy_process_group()
