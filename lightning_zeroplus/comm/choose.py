"""Which transport a run gets."""

from __future__ import annotations

from datetime import timedelta

import torch

from lightning_zeroplus.comm.c10d import c10d_transport, shared_transport
from lightning_zeroplus.comm.host import HostTransport, over_host
from lightning_zeroplus.comm.transport import Transport
from lightning_zeroplus.config import TransportName
from lightning_zeroplus.errors import ConfigError

__all__ = ["choose_transport", "make_transport"]

_OVER: dict[str, tuple[Transport, HostTransport | None, str]] = {}
"""By purpose: the transport beneath, the one over it, and why there is none."""


def choose_transport(
    name: TransportName, device: torch.device, *, timeout: timedelta, purpose: str = "training"
) -> Transport:
    """Return this process's transport for ``purpose``, made when it is first asked for; collective.

    Args:
        name: "auto" uses shared memory where all ranks compute on the CPUs of one host.
        device: of this rank.
        timeout: longest silence of a peer.
        purpose: there is one transport of each.

    Raises:
        ConfigError: shared memory was asked for by name and cannot be used; it says why.
    """
    base = shared_transport(purpose, timeout=timeout)
    if not _uses_host(name, device, base):
        return base
    known = _OVER.get(purpose)
    if known is None or known[0] is not base:
        known = _OVER[purpose] = (base, *over_host(base))
    return _settle(name, *known)


def make_transport(
    name: TransportName = "auto",
    *,
    timeout: timedelta = timedelta(minutes=30),
    device: torch.device | None = None,
) -> Transport:
    """Return a new transport over all ranks of the default process group; collective.

    For loops of your own; each keeps its process groups until the process ends.

    Args:
        name: "auto" uses shared memory where all ranks compute on the CPUs of one host.
        timeout: longest silence of a peer.
        device: of this rank; None: the CPU.

    Raises:
        ConfigError: shared memory was asked for by name and cannot be used; it says why.
    """
    base = c10d_transport(timeout=timeout)
    if not _uses_host(name, device or torch.device("cpu"), base):
        return base
    return _settle(name, base, *over_host(base))


def _uses_host(name: TransportName, device: torch.device, base: Transport) -> bool:
    if name == "shared_memory" and device.type != "cpu":
        raise ConfigError(
            f"Expected ranks on CPUs for transport='shared_memory', got {device}. "
            f"Use transport='auto'."
        )
    return name != "c10d" and device.type == "cpu" and base.world_size > 1


def _settle(
    name: TransportName, base: Transport, over: HostTransport | None, reason: str
) -> Transport:
    if over is None and name == "shared_memory":
        raise ConfigError(
            f"Expected ranks that share memory for transport='shared_memory', got: {reason}. "
            f"Use transport='auto'."
        )
    return over or base
