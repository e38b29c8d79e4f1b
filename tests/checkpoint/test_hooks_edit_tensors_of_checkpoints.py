"""What hooks of modules do to a checkpoint's tensors has the effect that it has under DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.reading import read
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, make_trainer, seed_everything, weights_of

pytestmark = pytest.mark.dist

State = dict[str, Any]


def multiply_in_place(state: State) -> None:
    state["first.weight"].mul_(2)


def assign_a_row(state: State) -> None:
    state["first.weight"][1] = 7.0


def fill_data(state: State) -> None:
    state["first.bias"].data.fill_(0.25)


def copy_over(state: State) -> None:
    state["first.bias"].copy_(torch.arange(11.0))


def add_through_a_view(state: State) -> None:
    state["blocks.0.linear.weight"].view(-1)[:5].add_(1)


def replace(state: State) -> None:
    state["first.weight"] = state["first.weight"] * 0.5 + 1


def narrow(state: State) -> None:
    state["first.weight"] = state["first.weight"].bfloat16()


def swap_names(state: State) -> None:
    one, other = "blocks.0.linear.weight", "blocks.1.linear.weight"
    state[one], state[other] = state[other], state[one]


def transposed(state: State) -> None:
    state["blocks.2.linear.weight"] = state["blocks.2.linear.weight"].t()


def averaged(state: State) -> None:
    rows = [state[f"blocks.{n}.linear.weight"] for n in range(3)]
    state["blocks.0.linear.weight"] = torch.stack(rows).mean(0)


EDITS: dict[str, Callable[[State], None]] = {
    edit.__name__.replace("_", " "): edit
    for edit in (
        multiply_in_place,
        assign_a_row,
        fill_data,
        copy_over,
        add_through_a_view,
        replace,
        narrow,
        swap_names,
        transposed,
        averaged,
    )
}
IN_PLACE = 5
"""The first ones; under DDP they would change the weights themselves while saving."""


class Edited(Net):
    def __init__(self, on_save: str = "", on_load: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.on_save, self.on_load = on_save, on_load

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.on_save:
            EDITS[self.on_save](checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.on_load:
            EDITS[self.on_load](checkpoint["state_dict"])


def save(rank: int, world: int, strategy: Any, edit: str, path: Path) -> None:
    seed_everything(5, verbose=False)
    module = Edited(edit)
    trainer = make_trainer(strategy, world)
    trainer.fit(module, data(16))
    trainer.save_checkpoint(path)


def load(rank: int, world: int, strategy: Any, edit: str, path: Path) -> dict[str, Tensor]:
    module = Edited(on_load=edit, seed=4)
    make_trainer(strategy, world).validate(module, data(8), path, verbose=False)
    return weights_of(module)


@pytest.fixture(scope="module")
def plain(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    folder = tmp_path_factory.mktemp("plain")
    paths = {"ddp": folder / "ddp.ckpt", 1: folder / "1.ckpt", 3: folder / "3.ckpt"}
    for name, path in paths.items():
        pair.run(save, name if name == "ddp" else {"stage": name}, "", path)
    return paths


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_while_loading(pair: RankPool, plain: dict[Any, Path], edit: str, stage: int) -> None:
    wanted = pair.run(load, "ddp", edit, plain["ddp"])[0]
    unedited = pair.run(load, "ddp", "", plain["ddp"])[0]
    assert any(not torch.equal(wanted[name], unedited[name]) for name in wanted)
    for got in pair.run(load, {"stage": stage}, edit, plain[stage]):
        close(got, wanted)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("edit", list(EDITS)[IN_PLACE:])
def test_edits_while_saving(pair: RankPool, tmp_path: Path, edit: str, stage: int) -> None:
    for name, strategy in (("ddp", "ddp"), ("ours", {"stage": stage})):
        pair.run(save, strategy, edit, tmp_path / name)
    ours, theirs = read(tmp_path / "ours")["state_dict"], read(tmp_path / "ddp")["state_dict"]
    close(ours, theirs)
    assert {n: v.dtype for n, v in ours.items()} == {n: v.dtype for n, v in theirs.items()}
