"""Shared memory between the ranks of one host.

Every rank has one anonymous file for small things, its *board*, and one per engine for weight
shards and gradient buckets; peers open both through ``/proc/<pid>/fd`` and map them. An operation
is *posted*: the rank writes a record (tag, and where its memory lies) on its board and raises a
counter. A peer that needs it waits for the counter, compares tags, and reads the memory where it
is; it then raises a counter of what it has *taken*, which tells the owner that the memory may be
written again. Nothing is sent, and nothing has a name in a file system that a killed run could
leave behind.

Source: measured in this project; the counters are those of a single-producer ring buffer.
"""

from lightning_zeroplus.comm.host.board import Board
from lightning_zeroplus.comm.host.transport import HostTransport, over_host

__all__ = ["Board", "HostTransport", "over_host"]
