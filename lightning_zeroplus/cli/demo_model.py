"""The demo's model and text: a byte-level GPT on the standard library's own sources."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

__all__ = ["GPT", "Block", "ByteWindows", "StdlibText", "read_stdlib"]

_VOCABULARY = 256
_WARMUP = 20


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return `x` of shape `[batch, length, width]` plus what the block adds."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.contract(F.gelu(self.expand(self.norm_2(x))))
        return x + added


class GPT(LightningModule):
    """A small GPT over bytes; input and output embeddings are one tied weight.

    Args:
        layers: number of blocks.
        width: size of a token's vector.
        heads: attention heads per block; divides `width`.
        context: most bytes that the model sees at once.
        lr: peak learning rate of AdamW.
        total: steps after which the rate, once risen, has fallen to a tenth of its peak.
    """

    def __init__(
        self,
        *,
        layers: int = 6,
        width: int = 128,
        heads: int = 4,
        context: int = 64,
        lr: float = 1.5e-3,
        total: int = 350,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context, self.lr, self.total = context, lr, total
        self.token = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds_to_stream = name.endswith(("project.weight", "contract.weight"))
                scale = math.sqrt(2 * layers) if adds_to_stream else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, length, 256]` for `tokens`, int64 `[batch, length]`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, window: Tensor) -> Tensor:
        """Return nats per byte of predicting `window[:, 1:]` from what stands before."""
        logits = self(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of one batch of windows and show it in the progress bar."""
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss, averaged over batches and ranks, as `val_loss`."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return fused AdamW and its schedule, stepped per step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _rate(self, step: int) -> float:
        if step < _WARMUP:
            return (step + 1) / _WARMUP
        done = min(1.0, (step - _WARMUP) / max(1, self.total - _WARMUP))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    @torch.no_grad()
    def generate(
        self, prompt: bytes, count: int, *, temperature: float = 0.7, seed: int = 0
    ) -> bytes:
        """Return `prompt` and `count` more bytes, sampled; the same for the same seed."""
        source = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(count):
            seen = torch.tensor([tokens[-self.context :]], device=self.device)
            logits = self(seen)[0, -1].float().cpu() / temperature
            tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=source)))
        return bytes(tokens)


class ByteWindows(Dataset[Tensor]):
    """Windows of `length` bytes, one every `stride` bytes, as int64 `[length]`."""

    def __init__(self, text: bytes, length: int, stride: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length
        self._stride = stride

    def __len__(self) -> int:
        return max(0, (len(self._text) - self._length) // self._stride + 1)

    @override
    def __getitem__(self, index: int) -> Tensor:
        start = index * self._stride
        return self._text[start : start + self._length].long()


class StdlibText(LightningDataModule):
    """The sources of the standard library's top-level modules; every tenth one validates.

    Args:
        context: bytes that the model sees at once; a window is one byte longer.
        batch_size: windows per rank and microbatch.
        validation_windows: windows of the validation set, equal at any number of ranks.
    """

    def __init__(
        self, *, context: int = 64, batch_size: int = 16, validation_windows: int = 128
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.validation_windows = validation_windows

    @override
    def setup(self, stage: str) -> None:
        """Read the text; every rank reads the same."""
        training, validation = read_stdlib()
        length = self.context + 1
        self._training = ByteWindows(training, length, self.context // 2)
        stride = max(1, (len(validation) - length) // (self.validation_windows - 1))
        self._validation = ByteWindows(validation, length, stride)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return shuffled windows; Lightning gives each rank its part."""
        return DataLoader(self._training, self.batch_size, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return windows spread evenly over the validation text."""
        return DataLoader(self._validation, self.batch_size)


def read_stdlib() -> tuple[bytes, bytes]:
    """Return training and validation text from the interpreter's own `*.py` files.

    Raises:
        FileNotFoundError: this interpreter has no sources on disk.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    texts = [path.read_bytes() for path in files if path.stat().st_size > 0]
    if len(texts) < 10:
        raise FileNotFoundError(
            f"Expected the standard library's sources in {folder}, got {len(texts)} files. "
            "Use an interpreter that is installed with its sources."
        )
    training = b"\n".join(text for n, text in enumerate(texts) if n % 10)
    return training, b"\n".join(texts[::10])
