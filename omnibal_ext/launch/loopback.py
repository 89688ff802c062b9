"""Ranks of one machine meet where no other machine reaches them: at 127.0.0.1, on the interface `lo`.

torch's own rendezvous and stores listen on all addresses of the machine and ask nobody for a password; what they are
told, torch unpickles and obeys. Its functions are imported late: this package never loads torch.
"""

import os
import socket
from argparse import Namespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo

HOST = "127.0.0.1"
BACKEND = "loopback"
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Where gloo and NCCL listen (=: no other interface whose name begins so), unless the user has set it."""


def stay_on_this_machine() -> None:
    """Have the process groups of this process, and of those that it starts, listen on `lo` alone."""
    for name, value in INTERFACES.items():
        os.environ.setdefault(name, value)


def loopback_store() -> "TCPStore":
    """A store that listens at `HOST` alone, on a free port, while it is referred to."""
    from torch.distributed import TCPStore

    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def meet_here(arguments: Namespace) -> None:
    """Have torchrun, whose `arguments` are for one machine, start its ranks with the rendezvous `Loopback`."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, Loopback)  # type: ignore[arg-type]
    arguments.standalone = False  # torchrun's own would take its place
    arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id = BACKEND, f"{HOST}:0", str(uuid4())
    stay_on_this_machine()


class Loopback:
    """torch's `RendezvousHandler` for the only agent of a run: it waits for nobody, and each start gets a new store."""

    use_agent_store = True
    """Whether ranks are clients of the agent's store, rather than rank 0 the host of another one."""

    def __init__(self, parameters: Any) -> None:
        self.run_id = str(parameters.run_id)

    def next_rendezvous(self) -> "RendezvousInfo":
        """The store for the agent and its ranks, rank 0 of 1, and where ranks find it."""
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        self.store = loopback_store()
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(HOST, self.store.port))

    def get_backend(self) -> str:
        """The name by which torch knows this class."""
        return BACKEND

    def get_run_id(self) -> str:
        """The run's name."""
        return self.run_id

    def is_closed(self) -> bool:
        """Never: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else is told."""

    def num_nodes_waiting(self) -> int:
        """None: no other machine can ask to join."""
        return 0

    def shutdown(self) -> bool:
        """Whether all is freed; the store ends with this process."""
        return True
