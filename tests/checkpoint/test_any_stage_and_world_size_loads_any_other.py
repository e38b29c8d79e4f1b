"""Saved at one stage and number of ranks, loaded at every other: the same bits, the same run."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lightning_zeroplus.checkpoint import read_checkpoint, read_whole
from tests.checkpoint.virtual import (
    OPTIMIZERS,
    PLACES,
    Place,
    State,
    differences,
    far,
    plain,
    resumed,
    saved,
    straight,
)


def name_of(place: Place) -> str:
    return f"stage {place[0]} on {place[1]}"


def grid() -> list[Any]:
    """One optimizer in all places; of the others a third, in which each place is left and taken."""
    rows = []
    for (n, optimizer), (a, at), (b, to) in product(
        enumerate(OPTIMIZERS), enumerate(PLACES), enumerate(PLACES)
    ):
        rest = n > 0 and at != to and (a + b + n) % 3 > 0
        rows.append(
            pytest.param(
                optimizer,
                at,
                to,
                id=f"{optimizer}, {name_of(at)} to {name_of(to)}",
                marks=[pytest.mark.full] if rest else [],
            )
        )
    return rows


@pytest.mark.parametrize("place", PLACES, ids=name_of)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_folder_holds_what_was_in_memory(optimizer: str, place: Place) -> None:
    path, state = saved(optimizer, place)
    checkpoint = read_whole(read_checkpoint(path))
    (own,) = checkpoint["optimizer_states"]
    found = State(checkpoint["state_dict"], own["state"], own["param_groups"])
    wrong = differences(found, state)
    assert not wrong
    assert list(found.weights) == list(state.weights)
    wrong = far(found.weights, plain(optimizer, 2))
    assert not wrong


@pytest.mark.parametrize(("optimizer", "at", "to"), grid())
def test_what_is_loaded_is_what_was_saved_and_trains_on(
    optimizer: str, at: Place, to: Place
) -> None:
    path, state = saved(optimizer, at)
    loaded, after = resumed(path, optimizer, to)
    wrong = differences(loaded, state)
    assert not wrong
    for rank in after:
        wrong = far(rank.weights, plain(optimizer, 4))
        assert not wrong
    if at == to:
        for rank, whole in zip(after, straight(optimizer, to, 4), strict=True):
            wrong = differences(rank, whole)
            assert not wrong


@pytest.mark.parametrize("to", PLACES, ids=name_of)
@pytest.mark.parametrize("at", [(2, 3), (3, 2)], ids=name_of)
def test_shards_that_are_there_already_take_it_as_well(at: Place, to: Place) -> None:
    path, state = saved("fused AdamW", at)
    loaded, after = resumed(path, "fused AdamW", to, late=True)
    wrong = differences(loaded, state)
    assert not wrong
    wrong = far(after[0].weights, plain("fused AdamW", 4))
    assert not wrong
