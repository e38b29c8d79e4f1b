"""What is written through a view of a resting weight is in the weight, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.comm import Transport
from lightning_zeroplus.errors import PhaseError
from tests.local.small import Net, on_ranks, sharded

EDITS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda w: w[3:20].zero_(),
    "a row": lambda w: w[36].fill_(0.5),
    "rows assigned": lambda w: w.__setitem__(slice(3, 20), 0.0),
    "rows by mask": lambda w: w.__setitem__(torch.arange(37) % 3 == 0, 0.0),
    "rows by index": lambda w: w.__setitem__(torch.tensor([0, 36]), torch.ones(2, 5)),
    "an element": lambda w: w.__setitem__((36, 4), 7.0),
    "a column": lambda w: w[:, 2].mul_(2),
    "flat": lambda w: w.view(-1)[50:100].zero_(),
    "transposed": lambda w: w.t().mul_(2),
    "data": lambda w: w.data[0].zero_(),
    "data assigned": lambda w: w.data.__setitem__(0, 0.0),
    "detached": lambda w: w.detach()[0].zero_(),
    "pieces": lambda w: w.unbind()[1].zero_(),
    "the diagonal": lambda w: w.fill_diagonal_(1.0),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_through_a_view_counts_or_is_refused(name: str) -> None:
    def body(transport: Transport) -> tuple[bool, Tensor]:
        module = Net()
        engine = sharded(module, transport, 3)
        done = False
        with torch.no_grad(), suppress(PhaseError):
            EDITS[name](module.first.weight)
            done = True
        with engine.full_parameters():
            return done, module.first.weight.detach().clone()

    before = Net().first.weight.detach().clone()
    after = before.clone()
    EDITS[name](after)
    for done, found in on_ranks(2, body):
        torch.testing.assert_close(found, after if done else before, rtol=0, atol=0)
