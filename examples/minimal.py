"""Train a small classifier at stage 3 on two CPU processes: `python examples/minimal.py`.

The data are made here: points in 16 dimensions, labelled by a fixed random rule.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zeroplus import ZeroPlusStrategy


class Classifier(pl.LightningModule):
    """Four equal layers; each becomes a unit that is gathered when it runs."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.inward = nn.Linear(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.outward = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits `[batch, 4]`."""
        x = self.inward(x)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.outward(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the cross entropy of one batch."""
        points, labels = batch
        loss = F.cross_entropy(self(points), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Log the share of points that are labelled right."""
        points, labels = batch
        right = (self(points).argmax(-1) == labels).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW; the strategy shards its state."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def make_points(count: int, seed: int) -> TensorDataset:
    """Return `count` points and their labels."""
    rule = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    points = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points @ rule).argmax(-1))


if __name__ == "__main__":
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy=ZeroPlusStrategy(stage=3),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
    )
    training = DataLoader(make_points(8192, seed=1), batch_size=32, shuffle=True)
    validation = DataLoader(make_points(1024, seed=2), batch_size=32)
    trainer.fit(Classifier(), training, validation)
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.3f}")
