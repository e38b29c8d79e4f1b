"""What a checkpoint holds and how it lies on disk; knows neither the engine nor Lightning."""

from lightning_zeroplus.checkpoint.full import read_full, remove_full, write_full
from lightning_zeroplus.checkpoint.names import align_names, find_mismatches, plain_name

__all__ = [
    "align_names",
    "find_mismatches",
    "plain_name",
    "read_full",
    "remove_full",
    "write_full",
]
