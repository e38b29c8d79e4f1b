"""DeepSpeed's checkpoints, read and written without DeepSpeed. *Local.*

Two forms are read: the checkpoint as ZeRO 1, 2 or 3 wrote it, and the universal folder that
DeepSpeed's converter makes of it. The universal form of stages 1 and 2 is written.
"""

from lightning_zeroplus.checkpoint.deepspeed.export import write_deepspeed_universal
from lightning_zeroplus.checkpoint.deepspeed.folders import detect_deepspeed
from lightning_zeroplus.checkpoint.deepspeed.reading import read_deepspeed

__all__ = ["detect_deepspeed", "read_deepspeed", "write_deepspeed_universal"]
