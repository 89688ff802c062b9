"""What machine is this: CUDA or CPU, and which optional accelerators are there. No other file asks."""

import contextlib
import importlib
import os
import shutil
import sys
import time
import typing
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from torch.torch_version import TorchVersion

from megatron.vlm import no_cuda
from megatron.vlm.compiling import for_any_rows
from megatron.vlm.no_cuda import CPU
from megatron.vlm.optional import UNUSABLE, installed, usable
from omnibal_ext.costs.analytic import OVERHEAD_BYTES
from omnibal_ext.flags import flag_value


def _choose_queues(words: Sequence[str]) -> None:
    """Give the device one queue where the command line asks for tensor parallelism, unless the user has said how many.

    An exchange that is asked for before a kernel then starts before it, and so runs at the same time; up to Hopper
    Megatron insists on that. Elsewhere it only harms: a kernel that waits in its stream keeps back all that come after
    it."""
    if flag_value("--tensor-model-parallel-size", words) not in (None, "1"):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


_choose_queues(sys.argv[1:])  # CUDA reads it when it starts, which it does where it is first asked for
HAS_CUDA: bool = torch.cuda.is_available()
if not HAS_CUDA:
    # No queues here, but Megatron insists as well.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Read when torch first compiles: Megatron compiles small functions, and not every CPU machine has a compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _gated_backward_works() -> bool:
    """Say whether flash-linear-attention computes the gradients of a gated delta rule here.

    On Hopper GPUs, Triton 3.4 to 3.7.0 compiles its kernel wrongly: it then takes TileLang's, or raises at the first
    backward (`chunk_bwd_dqkwg`), minutes after a run began.
    """
    triton = TorchVersion(importlib.import_module("triton").__version__)
    wrong = torch.cuda.get_device_capability()[0] == 9 and triton >= "3.4.0" and triton < "3.7.1"
    if wrong and not (installed("tilelang") and shutil.which("nvcc")):
        UNUSABLE["fla"] = "its gradients are wrong on Hopper GPUs with Triton 3.4 to 3.7.0 (torch 2.13 brings 3.7.1)"
        return False
    return True


HAS_TRANSFORMER_ENGINE: bool = HAS_CUDA and usable(
    "transformer_engine.pytorch", "DotProductAttention", "num_gqa_groups", "qkv_format", "softmax_scale"
)
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")
"""What flash-attn's functions are given, by name: version 4 has them at other positions."""
HAS_FLASH_ATTENTION: bool = HAS_CUDA and usable("flash_attn", "flash_attn_varlen_func", *PACKED)
HAS_FLASH_ATTENTION_4: bool = (
    HAS_CUDA and installed("flash_attn.cute") and usable("flash_attn.cute", "flash_attn_varlen_func", *PACKED)
)
if HAS_FLASH_ATTENTION_4:
    UNUSABLE.pop("flash_attn", None)  # version 4 alone, whose functions are in `flash_attn.cute`
HAS_VARIABLE_LENGTH: bool = HAS_CUDA and installed("torch.nn.attention.varlen")
# flash-linear-attention from 0.6 on: what carries states, and the convolution before it.
HAS_LINEAR_ATTENTION: bool = (
    HAS_CUDA
    and usable("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "cu_seqlens", "chunk_indices")
    and usable("fla.modules.causal_conv1d", "causal_conv1d", "cu_seqlens", "chunk_indices")
    and _gated_backward_works()
)
# Apex can be installed without its kernels: then it has nothing to be used, and `prepare` hides it.
HAS_APEX: bool = (
    HAS_CUDA
    and installed("apex")
    and usable("amp_C", "multi_tensor_l2norm")
    and usable("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32")
)
ADDS_IN_FP32 = TorchVersion(torch.__version__) >= "2.10"
"""Whether torch's products of half precision can be added to a matrix in fp32 (pytorch/pytorch PR 167931)."""
CLOCK_RATE = 2e9
"""Cycles a second, of which no GPU has more."""


def device() -> torch.device:
    """Return the device this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else CPU


def take_device() -> None:
    """Let this process compute on its own device, by torchrun's number; before anything is allocated.

    All ranks of a machine see all of its GPUs, and would take the first.
    """
    if HAS_CUDA:
        torch.cuda.set_device(_own_number())


def _own_number() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def multiply_exactly() -> None:
    """Turn off TF32, so that numbers of fp32 can be compared; before anything is computed.

    torch's convolutions and Transformer Engine's products round to TF32 otherwise, to three digits.
    """
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    torch.backends.cudnn.allow_tf32 = False


def device_name() -> str:
    """Return the hardware's name, for profiles and logs."""
    if HAS_CUDA:
        return torch.cuda.get_device_name()
    import platform as machine

    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else machine.processor() or machine.machine()


def device_count() -> int:
    """Return the number of GPUs of this machine, or of cores where there are none."""
    return torch.cuda.device_count() if HAS_CUDA else os.cpu_count() or 1


def device_memory() -> int:
    """Return the bytes of one device's memory; of the machine's where there are no GPUs, shared by all ranks."""
    if HAS_CUDA:
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def overhead_bytes() -> float:
    """Return the bytes of a device that no tensor of a layer has: driver context, communication buffers, fragmentation.

    What is taken now outside the allocator, which holds what layers had while they were measured; and no less than a
    whole job's, which has more communicators. 0 where there is no GPU.
    """
    if not HAS_CUDA:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return max(OVERHEAD_BYTES, float(total - free - torch.cuda.memory_reserved()))


def allocated_bytes() -> int | None:
    """Return the bytes of tensors on this rank's device, by its allocator without waiting; None without a GPU."""
    return int(torch.cuda.memory_allocated()) if HAS_CUDA else None


def peak_bytes() -> int | None:
    """Return the most bytes of tensors on this rank's device since it started; None where there is no GPU."""
    return int(torch.cuda.max_memory_allocated()) if HAS_CUDA else None


def unseen_gpu() -> str:
    """Say what shows that this machine has GPUs although torch sees none, or "": they may be hidden on purpose."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if HAS_CUDA or visible in ("", "-1"):
        return ""
    if Path("/dev/nvidia0").exists():
        return "this machine has an NVIDIA GPU (/dev/nvidia0)"
    if visible:
        return f"CUDA_VISIBLE_DEVICES is {visible}"
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    return "" if on_node == "0" else f"SLURM_GPUS_ON_NODE is {on_node}"


def now() -> float:
    """Wait until the device has done all that it was given; return seconds of a clock."""
    if HAS_CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def sleep(seconds: float) -> None:
    """Let the device do nothing for about so long, and not less, before what it is asked next; the host goes on."""
    if HAS_CUDA:
        torch.cuda._sleep(int(seconds * CLOCK_RATE))


class Moment:
    """A point in what this rank's device is doing. Taking one waits for nothing; comparing two does."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if HAS_CUDA else None
        if self._event is not None:
            self._event.record()

    def reached(self) -> bool:
        """Say whether the device has come to it; waits for nothing, and may be asked by any thread."""
        if self._event is None:
            return True
        with torch.cuda.device(self._event.device):  # a new thread's is the first, which this rank must not open
            return bool(self._event.query())

    def seconds_until(self, later: "Moment") -> float:
        """Return the seconds between two moments; waits until the device has reached the later one."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1e3


def point_to_point_options() -> Any:
    """Return options of a process group between two pipeline neighbours; None for the backend's own.

    A message must not queue behind computing, and a receive that waits must not hold many thread blocks meanwhile.
    """
    if not HAS_CUDA or torch.distributed.get_backend() != "nccl":
        return None
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    return options


def host_group(timeout: timedelta) -> torch.distributed.ProcessGroup | None:
    """Make a group of all ranks whose hosts talk while devices compute; None where the default one does. Collective."""
    if torch.distributed.get_backend() == "gloo":
        return None
    return torch.distributed.new_group(backend="gloo", timeout=timeout, group_desc="hosts")


def beside_computing(purpose: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context whose allocations and copies do not wait for what the device was given to compute.

    On a GPU each purpose ("receiving", "copying") has a stream of its own, in order.
    """
    return torch.cuda.stream(_stream(purpose)) if HAS_CUDA else contextlib.nullcontext()


@cache
def _stream(_: str) -> Any:
    return torch.cuda.Stream()


def wait_for(purpose: str) -> None:
    """Let what the device is given from now on wait for all of a purpose that was given in `beside_computing`."""
    if HAS_CUDA:
        torch.cuda.current_stream().wait_stream(_stream(purpose))


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to this rank's device by pinned memory, so that the host does not wait."""
    return (tensor.pin_memory() if HAS_CUDA else tensor).to("cuda", non_blocking=True)


def once_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is on `device`, else a copy on this rank's, to be kept: it is copied only once."""
    return tensor if tensor.device == device else to_device(tensor)


def used_here(tensor: torch.Tensor) -> None:
    """Keep a tensor made in `beside_computing` in memory until what the current stream computes with it is done."""
    if HAS_CUDA:
        tensor.record_stream(torch.cuda.current_stream())


class Reading:
    """What a tensor holds, on its way to the host, which goes on meanwhile."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here = tensor.to(CPU, non_blocking=True)
        self._event = torch.cuda.Event() if HAS_CUDA else None
        if self._event is not None:
            self._event.record()

    def numbers(self) -> Any:
        """Return the tensor's numbers as nested lists. Waits until they are here."""
        if self._event is not None:
            self._event.synchronize()
        return self._here.tolist()


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply matrices of half precision to a product in fp32; on a GPU without fp32 copies of them."""
    if HAS_CUDA:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@torch.no_grad()
def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to `total`, which may be fp32 where they are half precision; in one kernel where possible."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif not HAS_CUDA:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    elif ADDS_IN_FP32:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


def empty_groups_are_left_out() -> bool:
    """Say whether torch's grouped product leaves an empty sum unwritten: reported of GPUs after Hopper."""
    return HAS_CUDA and torch.cuda.get_device_capability()[0] > 9


def compiles_layers() -> bool:
    """Check whether the user asks for compiled layers (docs/compiled.md)."""
    return os.environ.get("TORCHDYNAMO_DISABLE") == "0"


def multiplies_float8() -> bool:
    """Say whether the device multiplies matrices in float8: GPUs from Ada and Hopper on."""
    return HAS_CUDA and torch.cuda.get_device_capability() >= (8, 9)


FLASH_4_WIDTHS: dict[int, tuple[int, ...]] = {
    9: tuple(range(8, 257, 8)),
    10: (*range(8, 129, 8), 256),
    11: (*range(8, 129, 8), 256),
}
"""Widths of heads that FlashAttention-4 takes, by the GPU's generation: Hopper's, Blackwell's of data centres."""


def attention_kernels(width: int) -> list[str]:
    """Return the kernels here that attend over packs in half precision with heads of so many numbers, the preferred
    first."""
    there = {
        "flash_attention_4": HAS_FLASH_ATTENTION_4
        and width in FLASH_4_WIDTHS.get(torch.cuda.get_device_capability()[0], ()),
        "transformer_engine": HAS_TRANSFORMER_ENGINE,
        "flash_attention": HAS_FLASH_ATTENTION,
        "variable_length": HAS_VARIABLE_LENGTH,
    }
    return [name for name, is_there in there.items() if is_there]


def megatron_defaults() -> dict[str, Any]:
    """Return defaults of Megatron's own flags (by attribute name) that this machine needs."""
    defaults: dict[str, Any] = {}
    if not HAS_TRANSFORMER_ENGINE:
        defaults |= {"transformer_impl": "local", "persist_layer_norm": False, "no_persist_layer_norm": True}
        defaults |= {"apply_rope_fusion": False}
    if not HAS_APEX:
        defaults["masked_softmax_fusion"] = False
    if not HAS_CUDA:
        defaults |= {
            "distributed_backend": "gloo",
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": HAS_TRANSFORMER_ENGINE,
            "bias_swiglu_fusion": False,
            "bias_gelu_fusion": False,
            "bias_dropout_fusion": False,
            "num_workers": 0,
        }
    return defaults


@cache
def prepare() -> None:
    """Make `megatron.core` importable here; once a process, before its first import. Where it is not installed, as in
    other trainers' environments, there is nothing to do: conversations are measured without it (`omnibal look`)."""
    if not installed("megatron.core"):
        return
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override
    if not HAS_APEX:
        # Megatron takes whatever Apex can be imported, and it raises where its kernels are first called.
        sys.modules["apex"] = None  # type: ignore[assignment]
    if not HAS_TRANSFORMER_ENGINE:
        # Without a GPU it raises when it is imported, and Megatron would try.
        sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    if HAS_CUDA:
        _meet_on_own_devices()
        torch.compile = for_any_rows(torch.compile)  # before core decorates its functions with it
    else:
        no_cuda.stand_in()


def _meet_on_own_devices() -> None:
    """Let barriers name this rank's device: NCCL would guess it from the rank's number, and warn."""
    barrier = torch.distributed.barrier

    def meet(group: Any = None, async_op: bool = False, device_ids: Any = None, *more: Any, **named: Any) -> Any:
        if device_ids is None and torch.distributed.get_backend(group) == "nccl":
            device_ids = [_own_number()]
        return barrier(group, async_op, device_ids, *more, **named)

    torch.distributed.barrier = meet
