from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, make_trainer

pytestmark = pytest.mark.dist


def sample(n: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(n)
    return [torch.randn(7, generator=source), torch.randn(7, generator=source)]


class Sized(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> list[torch.Tensor]:
        if n >= self.count:
            raise IndexError
        return sample(n)


class Unsized(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return (sample(n) for n in range(self.count))


class Evaluated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.seen: list[float] = []

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(float(self.loss(batch)))
        self.log("test_loss", self.loss(batch), sync_dist=False)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> float:
        return float(self.loss(batch))


def evaluate(
    rank: int, world: int, strategy: Any, kind: type, counts: list[list[int]], limit: float
) -> Any:
    trainer = make_trainer(
        strategy,
        world,
        limit_test_batches=limit,
        limit_predict_batches=limit,
        use_distributed_sampler=False,
    )
    module = Evaluated()
    loaders = [DataLoader(kind(of_rank[rank])) for of_rank in counts]
    trainer.test(module, loaders, verbose=False)
    return module.seen, trainer.predict(module, loaders)


@pytest.mark.parametrize("kind", [Sized, Unsized])
@pytest.mark.parametrize("limit", [1.0, 3])
@pytest.mark.parametrize(
    "counts",
    [[[2, 5]], [[4, 1]], [[1, 3], [4, 2]], [[3, 1], [0, 2], [1, 1]], [[0, 2], [0, 1]]],
    ids=str,
)
def test_ranks_with_other_numbers_of_batches_end_with_their_own_results(
    pair: RankPool, kind: type, counts: list[list[int]], limit: float
) -> None:
    if kind is Unsized and limit == 3:
        limit = 4
    wanted = pair.run(evaluate, "ddp", kind, counts, limit)
    got = pair.run(evaluate, {"stage": 3}, kind, counts, limit)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class FetchesItself(Evaluated):
    def predict_step(self, dataloader_iter: Any) -> float:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return float(self.loss(batch))


def fetch(rank: int, world: int, strategy: Any, kind: type) -> Any:
    trainer = make_trainer(strategy, world, use_distributed_sampler=False)
    return trainer.predict(FetchesItself(), DataLoader(kind(2 + 3 * rank)))


@pytest.mark.parametrize("kind", [Sized, Unsized])
def test_steps_that_fetch_for_themselves_are_served_too(pair: RankPool, kind: type) -> None:
    wanted = pair.run(fetch, "ddp", kind)
    got = pair.run(fetch, {"stage": 3}, kind)
    assert [len(g) for g in got] == [2, 5]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


class InFit(Net):
    """Metrics reduced over ranks right after the loop, and a forward at its end."""

    def __init__(self, stage_end_forward: bool = True) -> None:
        super().__init__()
        self.stage_end_forward = stage_end_forward

    def on_validation_epoch_end(self) -> None:
        if self.stage_end_forward:
            self.log("at_end", self(torch.ones(2, 7)).sum(), sync_dist=True)


def fit_with_uneven_validation(rank: int, world: int, strategy: Any) -> Any:
    trainer = make_trainer(
        strategy, world, use_distributed_sampler=False, val_check_interval=2, max_epochs=2
    )
    module = InFit()
    trainer.fit(
        module,
        DataLoader(Sized(16), batch_size=4),
        DataLoader(Sized(3 + 4 * rank)),
    )
    return {k: float(v) for k, v in trainer.callback_metrics.items()}, module.losses


@pytest.mark.parametrize("stage", [2, 3])
def test_validation_inside_a_fit_may_be_uneven(pair: RankPool, stage: int) -> None:
    got = pair.run(fit_with_uneven_validation, {"stage": stage})
    assert got[0][0] == pytest.approx(got[1][0])
    assert got[0][1] == pytest.approx(got[1][1])
    assert {"val_loss", "at_end"} <= set(got[0][0])
