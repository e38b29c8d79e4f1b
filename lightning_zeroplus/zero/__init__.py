"""The engine. Works without Lightning on a plain ``nn.Module`` and ``torch.optim`` optimizer."""

from lightning_zeroplus.zero.engine import Engine, shard
from lightning_zeroplus.zero.memory import MemoryReport

__all__ = ["Engine", "MemoryReport", "shard"]
