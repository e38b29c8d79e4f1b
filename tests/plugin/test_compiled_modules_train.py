from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.reading import FORMATS, read
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, make_trainer, weights_of

pytestmark = pytest.mark.dist


class CompiledParts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.compile(self.first, backend="eager")  # type: ignore[assignment]


def train(rank: int, world: int, strategy: Any, model: Any, path: Path | None) -> Any:
    module = model()
    trainer = make_trainer(strategy, world)
    trainer.fit(module, data(), data(seed=1))
    if path is not None:
        trainer.save_checkpoint(path)
    return weights_of(module)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_compiled_parts_train_and_are_saved_under_plain_names(
    pair: RankPool, tmp_path: Path, form: str, stage: int
) -> None:
    path = tmp_path / "x.ckpt"
    got = pair.run(train, {"stage": stage, "save_format": form}, CompiledParts, path)
    wanted = pair.run(train, "ddp", Net, None)[0]
    state = read(path)["state_dict"]
    close(state, wanted)
    assert "first._orig_mod.weight" in got[0]
    for loaded in pair.run(load, {"stage": stage}, path):
        close(loaded, got[0])


def load(rank: int, world: int, strategy: Any, path: Path) -> Any:
    module = CompiledParts()
    make_trainer(strategy, world).validate(module, data(), path, verbose=False)
    return weights_of(module)


def whole(rank: int, world: int, strategy: Any) -> Any:
    module = Net()
    compiled = torch.compile(module, backend="eager")
    make_trainer(strategy, world).fit(compiled, data(), data(seed=1))
    return weights_of(module)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_compiled_lightning_module_trains(pair: RankPool, stage: int) -> None:
    close(pair.run(whole, {"stage": stage})[0], pair.run(train, "ddp", Net, None)[0])
