"""Count of the bytes that autograd saves for the backward."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor


class KeptBytes:
    """A context manager that counts what autograd saves: `bytes` at present, `peak` at most; a storage counts once.

    `left_out`: tensors not to count, such as weights.
    """

    def __init__(self, left_out: Iterable[Tensor] = ()) -> None:
        # By torch's object address: storages on the meta device have no data pointer.
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
        """Note that one more tensor of this storage is saved; the first of them adds its bytes."""
        if storage._cdata in self.left_out:
            return
        self._holders[storage._cdata] += 1
        if self._holders[storage._cdata] == 1:
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Note that one tensor of this storage is no longer saved; the last of them subtracts its bytes."""
        if storage._cdata in self.left_out:
            return
        self._holders[storage._cdata] -= 1
        if self._holders[storage._cdata] == 0:
            self.bytes -= storage.nbytes()


class _Kept:
    """A stand-in that autograd saves in place of a tensor; it is deleted with the graph's node."""

    def __init__(self, count: KeptBytes, tensor: Tensor) -> None:
        self.count = count
        # Detached: otherwise a saved output would refer to the node that saves it, and neither would be freed.
        self.tensor = tensor.detach()
        self.storage = tensor.untyped_storage()
        count.hold(self.storage)

    def __del__(self) -> None:
        self.count.release(self.storage)
