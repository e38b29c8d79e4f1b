"""Everything that leaves a rank: transports, the storage of weights and buckets, agreement.

The only importer of ``torch.distributed``.
"""

from lightning_zeroplus.comm.c10d import c10d_transport, shared_transport
from lightning_zeroplus.comm.choose import choose_transport, make_transport
from lightning_zeroplus.comm.loopback import run_virtual_ranks, solo_transport
from lightning_zeroplus.comm.transport import Operation, Tag, Transport, Work

__all__ = [
    "Operation",
    "Tag",
    "Transport",
    "Work",
    "c10d_transport",
    "choose_transport",
    "make_transport",
    "run_virtual_ranks",
    "shared_transport",
    "solo_transport",
]
