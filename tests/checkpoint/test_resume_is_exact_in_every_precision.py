"""Loss scales, wide masters and accumulated gradients do not keep a resume from being exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.checkpoint.reading import FORMATS
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, fit

pytestmark = pytest.mark.dist


def loss_scaled() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    return MixedPrecision("16-mixed", "cpu", scaler)


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16-true": {"precision": "bf16-true"},
    "16-mixed": {"plugins": loss_scaled},
    "64-true, accumulating": {"precision": "64-true", "accumulate_grad_batches": 4},
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("form", FORMATS)
def test_resume_is_exact_in_every_precision(
    pair: RankPool, tmp_path: Path, form: str, name: str, stage: int
) -> None:
    """Wide masters and the loss scale are part of what is saved."""
    options = PRECISIONS[name]
    path = tmp_path / "x.ckpt"
    settings = {"stage": stage, "save_format": form}
    pair.run(fit, settings, {**options, "max_epochs": 1}, Net, {}, None, path)
    straight = pair.run(fit, {"stage": stage}, {**options, "max_epochs": 2})
    resumed = pair.run(fit, {"stage": stage}, {**options, "max_epochs": 2}, Net, {"seed": 9}, path)
    for whole, rest in zip(straight, resumed, strict=True):
        close(rest["weights"], whole["weights"], rtol=0, atol=0)
