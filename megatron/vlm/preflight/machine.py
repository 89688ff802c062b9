"""Checks of the machine: devices, and the rendezvous port of several nodes."""

import contextlib
import errno
import socket
import threading
from datetime import timedelta

import torch

from megatron.vlm import platform
from megatron.vlm.preflight.findings import Note
from omnibal_ext.errors import UserError

ANSWER_SECONDS = 3


def check_devices(local_ranks: int) -> str:
    """Raise UserError for more ranks than GPUs, or GPUs that torch does not see."""
    if not platform.HAS_CUDA:
        if sign := platform.unseen_gpu():
            raise UserError(
                f"{sign}, but torch {torch.__version__} sees no CUDA device: training would run on the CPU; install a "
                "torch built for this driver, or set CUDA_VISIBLE_DEVICES= (empty) if the CPU is meant"
            )
        cores = platform.device_count()
        found = f"{local_ranks} ranks on the CPU, {cores} cores"
        return Note(f"{found}: ranks will wait for each other") if local_ranks > cores else found
    count = platform.device_count()
    if local_ranks > count:
        raise UserError(
            f"{local_ranks} ranks on this node, but torch sees {count} GPUs; lower --nproc-per-node, or see to "
            "CUDA_VISIBLE_DEVICES"
        )
    found = f"{local_ranks} ranks, {count} x {platform.device_name()}"
    unusable = [
        f"{package} is installed and not used, as it fails: {why}" for package, why in platform.UNUSABLE.items()
    ]
    return Note("; ".join([found, *unusable])) if unusable else found


def check_rendezvous(endpoint: str) -> str:
    """Raise UserError if the rendezvous port cannot be used; endpoint: HOST:PORT.

    If HOST is this machine, the port must be free, or be another launch's TCPStore.
    """
    host, _, written = endpoint.rpartition(":")
    if not host or not written.isdecimal() or not 0 < int(written) < 2**16:
        raise UserError(f"--rdzv-endpoint {endpoint}: must be HOST:PORT, the first node's name and a free port there")
    port = int(written)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"--rdzv-endpoint {endpoint}: {host} is unknown here ({error.strerror or error})") from None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return _answers(host, port)
                continue  # not an address of this machine
            return f"{endpoint} is free here"
    return f"{endpoint} is another node's"


def _answers(host: str, port: int) -> str:
    found: list[torch.distributed.TCPStore] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            limit = timedelta(seconds=ANSWER_SECONDS)
            found.append(torch.distributed.TCPStore(host, port, is_master=False, timeout=limit))

    # The timeout covers connecting only; a program that accepts and never answers would block for ever.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    if not found:
        raise UserError(
            f"--rdzv-endpoint {host}:{port}: the port is used by another program; choose another one for all nodes"
        )
    return f"{host}:{port} is open for the other nodes"
