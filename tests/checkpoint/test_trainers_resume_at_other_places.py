"""A Trainer saves at one stage on some processes, another resumes at another on others."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zeroplus.plugin.checkpoint_io import ZeroPlusCheckpointIO
from tests.checkpoint.reading import read
from tests.dist_pool import RankPool
from tests.parity.sharded import pairwise
from tests.plugin.scenes import Net, close, data, make_trainer, seed_everything, weights_of

pytestmark = pytest.mark.dist

ROWS = 6
"""In a global batch; any number of ranks divides it."""


class Tuned(Net):
    """Nothing in it depends on how a batch is divided; a frozen block, a 0-d parameter."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(optimizer=kind, seed=seed)
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.blocks[1].requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(0.5 + seed))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "lr": 0.02, "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "lr": 0.005},
        ]
        kinds: dict[str, Any] = {
            "fused adamw": lambda: torch.optim.AdamW(groups, eps=1e-2, fused=True),
            "sgd": lambda: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
            "nadam": lambda: torch.optim.NAdam(groups, eps=1e-2),
        }
        optimizer = kinds[self.kind]()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(
    rank: int,
    world: int,
    strategy: Any,
    kind: str,
    epochs: int,
    save_to: Path | None = None,
    ckpt_path: Path | None = None,
) -> dict[str, Any]:
    seed_everything(5, verbose=False)
    module = Tuned(kind, seed=1 if ckpt_path is None else 9)
    plugins = {} if isinstance(strategy, dict) else {"plugins": lambda: [ZeroPlusCheckpointIO()]}
    trainer = make_trainer(strategy, world, max_epochs=epochs, **plugins)
    trainer.fit(module, data(48, ROWS // world), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {"weights": weights_of(module), "steps": trainer.global_step, "rates": rates}


@pytest.fixture(scope="module")
def pools(solo: RankPool, pair: RankPool, pool3: RankPool) -> dict[int, RankPool]:
    return {1: solo, 2: pair, 3: pool3}


@pytest.fixture(scope="module")
def saved(pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def save(stage: int, world: int, kind: str) -> Path:
        path = folder / f"{stage} on {world} {kind}.ckpt"
        pools[world].run(train, {"stage": stage}, kind, 1, path)
        return path

    return save


@pytest.fixture(scope="module")
def whole(solo: RankPool) -> Any:
    @cache
    def run(kind: str) -> dict[str, Any]:
        result: dict[str, Any] = solo.run(train, "ddp", kind, 2)[0]
        return result

    return run


FACTORS: dict[str, list[object]] = {
    "stage": [1, 2, 3],
    "world": [1, 2, 3],
    "to_stage": [1, 2, 3],
    "to_world": [1, 2, 3],
    "kind": ["fused adamw", "sgd", "nadam"],
}
ROWS_OF_COVER = [pytest.param(*row.values(), id=str([*row.values()])) for row in pairwise(FACTORS)]


@pytest.mark.parametrize(("stage", "world", "to_stage", "to_world", "kind"), ROWS_OF_COVER)
def test_the_run_goes_on_as_ddp_on_one_process_would(
    pools: dict[int, RankPool],
    saved: Any,
    whole: Any,
    stage: int,
    world: int,
    to_stage: int,
    to_world: int,
    kind: str,
) -> None:
    path = saved(stage, world, kind)
    wanted = whole(kind)
    for rank in pools[to_world].run(train, {"stage": to_stage}, kind, 2, None, path):
        close(rank["weights"], wanted["weights"])
        assert rank["steps"] == wanted["steps"] == 16
        assert rank["rates"] == wanted["rates"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_at_the_same_place_it_goes_on_bit_for_bit(
    pools: dict[int, RankPool], saved: Any, stage: int, world: int
) -> None:
    path = saved(stage, world, "fused adamw")
    pool = pools[world]
    resumed = pool.run(train, {"stage": stage}, "fused adamw", 2, None, path)
    straight = pool.run(train, {"stage": stage}, "fused adamw", 2)
    for one, other in zip(resumed, straight, strict=True):
        close(one["weights"], other["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_ddp_resumes_it_with_our_checkpoint_io(
    pools: dict[int, RankPool], saved: Any, whole: Any, world: int
) -> None:
    for kind in ("fused adamw", "sgd", "nadam"):
        path = saved(3, 3, kind)
        for rank in pools[world].run(train, "ddp", kind, 2, None, path):
            close(rank["weights"], whole(kind)["weights"])


def test_what_was_saved_holds_no_more_than_it_should(saved: Any) -> None:
    found = read(saved(3, 3, "fused adamw"))
    assert torch.equal(found["state_dict"]["again.weight"], found["state_dict"]["last.weight"])
    (optimizer,) = found["optimizer_states"]
    assert not any("blocks.1" in name for name in optimizer["state"])
    assert [len(group["params"]) for group in optimizer["param_groups"]] == [4, 9]
    assert {v["step"].item() for v in optimizer["state"].values()} == {8.0}
