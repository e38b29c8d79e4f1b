"""What a checkpoint holds and how it lies on disk; knows neither the engine nor Lightning."""

from lightning_zeroplus.checkpoint.convert import ConvertTo, consolidate, convert_checkpoint
from lightning_zeroplus.checkpoint.describe import (
    Summary,
    Verdict,
    describe_checkpoint,
    verify_checkpoint,
)
from lightning_zeroplus.checkpoint.export import ExportDtype, ExportFormat, export_weights
from lightning_zeroplus.checkpoint.folder import folder_at, local_path, remove_at
from lightning_zeroplus.checkpoint.full import read_full, write_full
from lightning_zeroplus.checkpoint.lazy import Tell
from lightning_zeroplus.checkpoint.names import align_names, find_mismatches
from lightning_zeroplus.checkpoint.read import form_of, read_checkpoint
from lightning_zeroplus.checkpoint.save import Group, Solo, pack, save_universal, unpack
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor, read_whole
from lightning_zeroplus.checkpoint.sharded import Piece, ShardedCheckpoint
from lightning_zeroplus.checkpoint.tree import Path as TreePath
from lightning_zeroplus.checkpoint.tree import free_key, join_key, map_leaves, mark

__all__ = [
    "ConvertTo",
    "ExportDtype",
    "ExportFormat",
    "Group",
    "Piece",
    "SavedTensor",
    "ShardedCheckpoint",
    "Solo",
    "Summary",
    "Tell",
    "TreePath",
    "Verdict",
    "align_names",
    "consolidate",
    "convert_checkpoint",
    "describe_checkpoint",
    "export_weights",
    "find_mismatches",
    "folder_at",
    "form_of",
    "free_key",
    "join_key",
    "local_path",
    "map_leaves",
    "mark",
    "pack",
    "read_checkpoint",
    "read_full",
    "read_whole",
    "remove_at",
    "save_universal",
    "unpack",
    "verify_checkpoint",
    "write_full",
]
