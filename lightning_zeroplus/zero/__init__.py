"""The engine. Works without Lightning on a plain ``nn.Module`` and ``torch.optim`` optimizer."""

from lightning_zeroplus.zero.engine import Engine, shard
from lightning_zeroplus.zero.local_state import OwnSpan, own_part
from lightning_zeroplus.zero.memory import MemoryReport
from lightning_zeroplus.zero.span_tensor import SpanTensor

__all__ = ["Engine", "MemoryReport", "OwnSpan", "SpanTensor", "own_part", "shard"]
