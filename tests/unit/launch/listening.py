"""A rank that joins process groups and prints where it, and the process whose store it uses, listen: RESULT {json}.

`renamed`: the name of its machine leads to another address than 127.0.0.1 where that can be arranged. `alone`: without
torchrun.
"""

import ctypes
import json
import os
import socket
import sys

import psutil
import torch.distributed as dist

NEW_UTS = 0x04000000
"""Linux: a name of the machine for this process alone."""


def outer_address() -> str | None:
    """An address of this machine that others reach; None: it has no other than 127.0.0.1."""
    found = [each.address for one in psutil.net_if_addrs().values() for each in one if each.family == socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), None)


def is_renamed() -> bool:
    """Give the machine a name that leads to its outer address; False: not allowed, or there is none."""
    name = (outer_address() or "").encode()
    libc = ctypes.CDLL(None)
    return bool(name) and libc.unshare(NEW_UTS) == 0 and libc.sethostname(name, len(name)) == 0


def listening(pid: int) -> list[str]:
    """The addresses at which a process listens."""
    return [each.laddr.ip for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def main() -> None:
    renamed = "renamed" in sys.argv and is_renamed()
    if "alone" in sys.argv:
        from megatron.vlm.single import set_single_rank

        set_single_rank()
        dist.init_process_group("gloo")
        dist.destroy_process_group()
        set_single_rank()
    dist.init_process_group("gloo")
    dist.new_group(backend="gloo")
    dist.barrier()
    port = int(os.environ["MASTER_PORT"])
    hosts = {each.pid for each in psutil.net_connections("tcp") if each.laddr.port == port and each.status == "LISTEN"}
    found = {
        "renamed": renamed,
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
        "rank": listening(os.getpid()),
        "store": [listening(pid) for pid in hosts if pid],
    }
    print(f"RESULT {json.dumps(found)}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
