from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, make_trainer, weights_of

pytestmark = pytest.mark.dist


class Frozen(Net):
    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], eps=1e-2)


def run(rank: int, world: int, settings: dict[str, Any], epochs: int, path: Path, ckpt: Any) -> Any:
    module = Frozen(seed=1)
    with torch.no_grad():
        if ckpt is not None:
            module.first.weight.zero_()
    trainer = make_trainer(settings, world, max_epochs=epochs)
    trainer.fit(module, data(), ckpt_path=ckpt)
    trainer.save_checkpoint(path)
    return weights_of(module)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_they_are_left_out_and_kept_on_load(pair: RankPool, tmp_path: Path, stage: int) -> None:
    settings = {"stage": stage, "exclude_frozen_parameters": True}
    path, other = tmp_path / "x.ckpt", tmp_path / "y.ckpt"
    straight = pair.run(run, settings, 2, other, None)
    pair.run(run, settings, 1, path, None)
    names = torch.load(path)["state_dict"].keys()
    assert not any("blocks" in name for name in names)
    assert {"first.weight", "norm.running_mean", "again.weight"} <= names
    for resumed, whole in zip(pair.run(run, settings, 2, other, path), straight, strict=True):
        close(resumed, whole)


@pytest.mark.parametrize("stage", [1, 3])
def test_by_default_they_are_saved(pair: RankPool, tmp_path: Path, stage: int) -> None:
    path = tmp_path / "x.ckpt"
    weights = pair.run(run, {"stage": stage}, 1, path, None)
    close(torch.load(path)["state_dict"], weights[0])


def refuse(rank: int, world: int, path: Path) -> str:
    module = Frozen()
    try:
        make_trainer({"exclude_frozen_parameters": True}, world).fit(module, data(), ckpt_path=path)
    except RuntimeError as error:
        return str(error)
    return "ended"


def test_what_is_not_frozen_may_not_be_missing(pair: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    pair.run(run, {"stage": 2, "exclude_frozen_parameters": True}, 1, path, None)
    state = torch.load(path)
    del state["state_dict"]["first.bias"]
    torch.save(state, path)
    for message in pair.run(refuse, path):
        assert "first.bias is missing" in message
