"""One transport for all cases of a rank process: its groups keep threads as long as it lives."""

from __future__ import annotations

import functools
from datetime import timedelta

from lightning_zeroplus.comm import Transport, make_transport
from lightning_zeroplus.config import TransportName


@functools.cache
def rank_transport(timeout_s: float, name: TransportName = "c10d") -> Transport:
    """Return the process's transport; every rank must ask for the same ones in the same order."""
    return make_transport(name, timeout=timedelta(seconds=timeout_s))
