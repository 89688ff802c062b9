"""Counts the bytes that autograd keeps for the backward pass, while it keeps them."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor


class KeptBytes:
    """A context in which every storage that autograd saves counts once, from when it is saved until it is let go.

    `left_out` are tensors that are there anyway: weights.
    """

    def __init__(self, left_out: Iterable[Tensor] = ()) -> None:
        # By their address in torch: storages of a device that exists only in shapes have no memory.
        self.left_out = {tensor.untyped_storage()._cdata for tensor in left_out}
        self.bytes = self.peak = 0
        self._holders: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: _Kept(self, t), lambda kept: kept.tensor)

    def __enter__(self) -> "KeptBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def hold(self, storage: torch.UntypedStorage) -> None:
        """One more saved tensor lies in this storage."""
        if storage._cdata in self.left_out:
            return
        self._holders[storage._cdata] += 1
        if self._holders[storage._cdata] == 1:
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        """One less."""
        if storage._cdata in self.left_out:
            return
        self._holders[storage._cdata] -= 1
        if self._holders[storage._cdata] == 0:
            self.bytes -= storage.nbytes()


class _Kept:
    """What autograd holds in place of a saved tensor; it dies with the graph's node."""

    def __init__(self, count: KeptBytes, tensor: Tensor) -> None:
        self.count = count
        # Detached: an output that was saved would otherwise hold the node that holds it.
        self.tensor = tensor.detach()
        self.storage = tensor.untyped_storage()
        count.hold(self.storage)

    def __del__(self) -> None:
        self.count.release(self.storage)
