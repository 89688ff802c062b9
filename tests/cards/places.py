"""On which card a tensor is: all memory is the host's, and each storage is noted with the card that it stands for."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Storages:
    """A value for each of some storages, for as long as they live."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[StorageWeakRef, int, int]] = {}
        """By address, which is given to no other storage while there is a reference."""
        self._swept = 1024

    def note(self, tensor: Tensor, value: int) -> None:
        """Its storage has this value from here on."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._values[reference.cdata] = reference, value, storage.nbytes()
        if len(self._values) > self._swept:
            self._sweep()

    def get(self, tensor: Tensor) -> int | None:
        """The value of a tensor's storage; None: it has none."""
        known = self._values.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def bytes_of(self, value: int) -> int:
        self._sweep()
        return sum(size for _, its, size in self._values.values() if its == value)

    def _sweep(self) -> None:
        self._values = {key: known for key, known in self._values.items() if not known[0].expired()}
        self._swept = max(1024, 2 * len(self._values))


class Cards:
    """This process's cards: which one it computes on, what is where, and what its host has waited for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.current: int | None = None
        """None until `torch.cuda.set_device`: the process then has no card of its own."""
        self.card = Storages()
        """The number of the card of every tensor that is on one; all others are the host's."""
        self.pinned = Storages()
        """What the host has pinned."""
        self.waits: list[str] = []
        """What the host has waited for, and where in the code."""
        self.forbidden = False
        """Whether the host may wait for nothing, as torch's `set_sync_debug_mode` says."""
        self.asked = self.reached = 0
        """Events given to the card, and those that the host knows to be behind it."""

    def wait(self, where: str) -> None:
        """The host waits until the card has done all that it was asked. RuntimeError where it is forbidden."""
        if self.forbidden:
            raise RuntimeError(f"called a synchronizing CUDA operation: {where}")
        self.waits.append(where)
        self.reached = self.asked

    def here(self) -> int:
        """The card that "cuda" means. RuntimeError where none was chosen: CUDA would take the first, on all ranks."""
        if self.current is None:
            raise RuntimeError("a card is used before torch.cuda.set_device")
        return self.current

    def number(self, device: object) -> int | None:
        """The card that a device of a call names; None: the host, or nothing that is for us."""
        if isinstance(device, int) and not isinstance(device, bool):
            return device
        if not isinstance(device, (str, torch.device)) or not str(device).startswith("cuda"):
            return None
        index = torch.device(device).index
        return self.here() if index is None else index

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor is, as torch says it."""
        number = self.of(tensor)
        return tensor.device if number is None else torch.device("cuda", number)

    def put(self, tensors: Iterable[Tensor], number: int | None) -> None:
        """From here on these are on a card, or the host's (None)."""
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self.card.note(tensor, -1 if number is None else number)

    def of(self, tensor: Tensor) -> int | None:
        """The card of a tensor; None: the host's."""
        if tensor.device.type != "cpu" or torch._C._functorch.is_batchedtensor(tensor):
            return None
        number = self.card.get(tensor)
        return None if number == -1 else number
