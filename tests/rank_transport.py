"""One transport for all cases of a rank process: its groups keep threads as long as it lives."""

from __future__ import annotations

import functools
from datetime import timedelta

from lightning_zeroplus.comm import Transport, c10d_transport


@functools.cache
def rank_transport(timeout_s: float) -> Transport:
    """Return the process's transport; every rank must ask for the same ones in the same order."""
    return c10d_transport(timeout=timedelta(seconds=timeout_s))
