from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, make_trainer
from tests.plugin.test_uneven_evaluation_is_served import Sized, Unsized

pytestmark = pytest.mark.dist


def train(
    rank: int, world: int, stage: int, kind: type, counts: list[int], options: dict[str, Any]
) -> tuple[str, int]:
    trainer = make_trainer(
        {"stage": stage}, world, use_distributed_sampler=False, max_epochs=2, **options
    )
    try:
        trainer.fit(Net(), DataLoader(kind(2 * counts[rank]), batch_size=2))
    except Exception as error:
        return f"{type(error).__name__}: {error}", trainer.global_step
    return "ended", trainer.global_step


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [Sized, Unsized])
@pytest.mark.parametrize("counts", [[3, 4], [4, 3]], ids=str)
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 4}], ids=str)
def test_all_ranks_raise_before_the_batch_that_only_some_have(
    pair: RankPool, stage: int, kind: type, counts: list[int], options: dict[str, Any]
) -> None:
    for message, steps in pair.run(train, stage, kind, counts, options):
        assert message.startswith("CollectiveError: Expected as many training batches on every")
        assert "rank 0 " in message
        assert "rank 1 " in message
        assert "limit_train_batches" in message
        assert steps in (2, 3)


@pytest.mark.parametrize("kind", [Sized, Unsized])
@pytest.mark.parametrize(
    ("counts", "options", "steps"),
    [([3, 3], {}, 6), ([3, 4], {"limit_train_batches": 2}, 4), ([3, 4], {"max_steps": 2}, 2)],
    ids=str,
)
def test_what_is_even_in_effect_trains(
    pair: RankPool, kind: type, counts: list[int], options: dict[str, Any], steps: int
) -> None:
    assert pair.run(train, 2, kind, counts, options) == [("ended", steps)] * 2
