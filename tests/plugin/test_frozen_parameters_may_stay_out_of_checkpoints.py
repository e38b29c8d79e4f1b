from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.reading import FORMATS, read
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, make_trainer, weights_of

pytestmark = pytest.mark.dist


class Frozen(Net):
    def __init__(self, seed: int = 1, forgets: str = "") -> None:
        super().__init__(seed=seed)
        self.blocks.requires_grad_(False)
        self.forgets = forgets

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop(self.forgets, None)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], eps=1e-2)


def run(
    rank: int,
    world: int,
    settings: dict[str, Any],
    epochs: int,
    path: Path,
    ckpt: Any,
    forgets: str = "",
) -> Any:
    module = Frozen(seed=1, forgets=forgets)
    with torch.no_grad():
        if ckpt is not None:
            module.first.weight.zero_()
    trainer = make_trainer(settings, world, max_epochs=epochs)
    trainer.fit(module, data(), ckpt_path=ckpt)
    trainer.save_checkpoint(path)
    return weights_of(module)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_they_are_left_out_and_kept_on_load(
    pair: RankPool, tmp_path: Path, form: str, stage: int
) -> None:
    settings = {"stage": stage, "exclude_frozen_parameters": True, "save_format": form}
    path, other = tmp_path / "x.ckpt", tmp_path / "y.ckpt"
    straight = pair.run(run, settings, 2, other, None)
    pair.run(run, settings, 1, path, None)
    names = read(path)["state_dict"].keys()
    assert not any("blocks" in name for name in names)
    assert {"first.weight", "norm.running_mean", "again.weight"} <= names
    for resumed, whole in zip(pair.run(run, settings, 2, other, path), straight, strict=True):
        close(resumed, whole)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_by_default_they_are_saved(pair: RankPool, tmp_path: Path, form: str, stage: int) -> None:
    path = tmp_path / "x.ckpt"
    weights = pair.run(run, {"stage": stage, "save_format": form}, 1, path, None)
    close(read(path)["state_dict"], weights[0])


def refuse(rank: int, world: int, path: Path) -> str:
    module = Frozen()
    try:
        make_trainer({"exclude_frozen_parameters": True}, world).fit(module, data(), ckpt_path=path)
    except RuntimeError as error:
        return str(error)
    return "ended"


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_not_frozen_may_not_be_missing(pair: RankPool, tmp_path: Path, form: str) -> None:
    path = tmp_path / "x.ckpt"
    settings = {"stage": 2, "exclude_frozen_parameters": True, "save_format": form}
    pair.run(run, settings, 1, path, None, "first.bias")
    for message in pair.run(refuse, path):
        assert "first.bias is missing" in message
