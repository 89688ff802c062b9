"""The device of shapes: torch's fake tensors on a backend of their own, with Megatron's calls of CUDA led there.

Imported before anything of Megatron. What is compiled on a GPU counts as one kernel, what Transformer Engine has one
kernel for too (`counter`). Attention is torch's flash attention, which CUDA takes for half precision.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from shapes.counter import Event, compiled, run_as_kernel
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration

ENGINE = str(Path(__file__).parents[1] / "engine")


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What `scaled_dot_product_attention` launches on CUDA in half precision."""
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
    return out


class RMSNorm(torch.autograd.Function):
    """What torch launches on CUDA: one kernel in either direction, which keeps 1 / deviation of every row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, scale)
        return run_as_kernel(_like, x, *(() if weight is None else (weight,)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, scale = ctx.saved_tensors
        return run_as_kernel(_like, x, grad, scale), None if weight is None else torch.empty_like(weight)


def _like(x: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(x)


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None = None) -> Tensor:
    out: Tensor = RMSNorm.apply(x, weight)
    return out


def without_numbers(array: Any, really: Any = torch.from_numpy) -> Tensor:
    """Takes the place of `torch.from_numpy`, whose numbers are those of a real tensor."""
    return torch.empty(array.shape, dtype=really(array).dtype)


def allreduce_one_by_one(group: torch.distributed.ProcessGroup, tensors: list[Tensor], *_: Any) -> Any:
    """Fake tensors know no reductions of several."""
    return [group.allreduce([tensor]) for tensor in tensors][-1]


@contextmanager
def machine(engine: bool) -> Iterator[FakeTensorMode]:
    """A GPU's machine, with Transformer Engine or without; one a process, for good. `rank_of` comes next."""
    gc.disable()  # a tenth of the time, of a process that ends soon
    backend_registration._setup_privateuseone_for_python_backend("shapes")
    device = torch.device("shapes:0")
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.from_numpy = without_numbers
    torch.Tensor.record_stream = lambda *_: None
    torch.distributed.ProcessGroup.allreduce_coalesced = allreduce_one_by_one
    torch.compile = compiled  # before core decorates its functions with it
    torch.nn.functional.rms_norm = torch.rms_norm = rms_norm
    torch.nn.functional.scaled_dot_product_attention = flash_attention
    if engine:
        sys.path.insert(0, ENGINE)
        from transformer_engine.pytorch import kernels

        kernels.run = run_as_kernel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    from megatron.vlm import no_cuda, platform

    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # states are real tensors, and nothing is drawn here
    platform.HAS_CUDA = True
    torch.nn.Module.cuda = moved
    platform.HAS_TRANSFORMER_ENGINE = engine
    platform.HAS_VARIABLE_LENGTH = True
    torch.cuda.current_device, torch.cuda.Event = lambda: device, Event
    torch.cuda.device = lambda _: nullcontext()
    no_cuda.send_cuda_to(device)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        yield mode


def rank_of(tensor_parallel: int, pipeline_parallel: int = 1, stage: int = 0) -> None:
    """Make this process the first tensor-parallel rank of a pipeline's stage; its messages go nowhere."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as core

    rank, ranks = stage * tensor_parallel, tensor_parallel * pipeline_parallel
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)})
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("cpu:fake,shapes:fake", rank=rank, world_size=ranks, store=FakeStore())
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel, create_gloo_process_groups=False)
    core.model_parallel_cuda_manual_seed(1)


def move(module: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """What `Module.cuda` and `Module.to(dtype)` do, where weights cannot change in place."""
    for part in module.modules():
        if hasattr(part, "are_apart"):  # ranges of a ViT that clamps
            part.are_apart = False  # without numbers to be compared
        for name, weight in part._parameters.items():
            if weight is not None and (weight.device.type == "cpu" or weight.dtype != (dtype or weight.dtype)):
                moved = torch.nn.Parameter(weight.detach().to("shapes", dtype), requires_grad=weight.requires_grad)
                vars(moved).update({key: value for key, value in vars(weight).items() if key not in vars(moved)})
                part._parameters[name] = moved
        for name, numbers in part._buffers.items():
            if numbers is not None and numbers.is_floating_point():
                part._buffers[name] = numbers.to("shapes", dtype)


def moved(module: torch.nn.Module, *_: Any) -> torch.nn.Module:
    """Takes the place of `Module.cuda`."""
    move(module)
    return module


def end(answer: str) -> NoReturn:
    """Say it, and leave without taking the interpreter down: threads of torch's may be left over, and abort it then."""
    print(answer, flush=True)
    os._exit(0)
