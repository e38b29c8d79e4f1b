"""One `.ckpt` is the same thing under DDP and here, at any stage and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, fit, make_trainer, seed_everything, weights_of

pytestmark = pytest.mark.dist

STAGES = [{"stage": stage, "save_format": "full"} for stage in (1, 2, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("travel")


@pytest.fixture(scope="module")
def saved(pair: RankPool, folder: Path) -> dict[str, Path]:
    """The same half run, saved by DDP and by each stage."""
    paths = {}
    for strategy in ["ddp", *STAGES]:
        name = strategy if isinstance(strategy, str) else f"stage {strategy['stage']}"
        paths[name] = folder / f"{name}.ckpt"
        pair.run(fit, strategy, {"max_epochs": 1}, Net, {}, None, paths[name])
    return paths


def test_keys_names_and_shapes_are_those_of_ddp(saved: dict[str, Path]) -> None:
    theirs = torch.load(saved["ddp"])
    for name, path in saved.items():
        ours = torch.load(path)
        more = set() if name == "ddp" else {"zeroplus_resume"}
        assert ours.keys() == theirs.keys() | more, name
        assert list(ours["state_dict"]) == list(theirs["state_dict"])
        close(ours["state_dict"], theirs["state_dict"])
        assert torch.equal(ours["state_dict"]["last.weight"], ours["state_dict"]["again.weight"])
        assert ours["loops"] == theirs["loops"]
        assert ours["lr_schedulers"] == theirs["lr_schedulers"]
        assert ours["hyper_parameters"] == theirs["hyper_parameters"]
        mine, other = ours["optimizer_states"][0], theirs["optimizer_states"][0]
        assert [g["params"] for g in mine["param_groups"]] == [
            g["params"] for g in other["param_groups"]
        ]
        torch.testing.assert_close(mine["state"], other["state"], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def finished(pair: RankPool) -> dict[str, torch.Tensor]:
    """The run that was never interrupted."""
    weights: dict[str, torch.Tensor] = pair.run(fit, "ddp", {"max_epochs": 2})[0]["weights"]
    return weights


@pytest.mark.parametrize("resumed_by", ["ddp", "stage 1", "stage 2", "stage 3"])
@pytest.mark.parametrize("saved_by", ["ddp", "stage 1", "stage 2", "stage 3"])
def test_a_run_goes_on_where_it_was_whoever_saved_it(
    pair: RankPool,
    saved: dict[str, Path],
    finished: dict[str, torch.Tensor],
    saved_by: str,
    resumed_by: str,
) -> None:
    strategy = "ddp" if resumed_by == "ddp" else {"stage": int(resumed_by[-1])}
    for rank in pair.run(fit, strategy, {"max_epochs": 2}, Net, {"seed": 9}, saved[saved_by]):
        close(rank["weights"], finished)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume_is_exact(pair: RankPool, saved: dict[str, Path], stage: int) -> None:
    """Bit for bit what the run would have been, had it not stopped."""
    straight = pair.run(fit, {"stage": stage}, {"max_epochs": 2})
    resumed = pair.run(
        fit, {"stage": stage}, {"max_epochs": 2}, Net, {"seed": 9}, saved[f"stage {stage}"]
    )
    for whole, rest in zip(straight, resumed, strict=True):
        close(rest["weights"], whole["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_another_number_of_ranks_takes_it_up(
    solo: RankPool, pair: RankPool, folder: Path, stage: int
) -> None:
    """One rank on the whole batch and two on halves of it are the same run without BatchNorm."""
    path = folder / f"solo {stage}.ckpt"
    settings = {"stage": stage, "save_format": "full"}
    wanted = solo.run(whole_batches, settings, 2, None, path)[0]
    assert wanted
    first = solo.run(whole_batches, settings, 1, None, path)[0]
    assert first
    back = folder / f"back {stage}.ckpt"
    two = pair.run(whole_batches, settings, 2, path, back)[0]
    close(two, wanted)
    again = solo.run(whole_batches, {"stage": 4 - stage}, 3, back, None)[0]
    close(again, solo.run(whole_batches, settings, 3, None, None)[0])


def whole_batches(
    rank: int, world: int, strategy: Any, epochs: int, ckpt_path: Path | None, save: Path | None
) -> dict[str, torch.Tensor]:
    seed_everything(5, verbose=False)
    module = Net(seed=1 if ckpt_path is None else 8)
    module.norm = torch.nn.Identity()  # type: ignore[assignment]
    trainer = make_trainer(strategy, world, max_epochs=epochs)
    trainer.fit(module, data(48, 8 // world), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return weights_of(module)


def load_weights(rank: int, world: int, path: Path) -> dict[str, torch.Tensor]:
    return weights_of(Net.load_from_checkpoint(path))


def test_load_from_checkpoint_reads_it(solo: RankPool, saved: dict[str, Path]) -> None:
    wanted = torch.load(saved["ddp"])["state_dict"]
    close(solo.run(load_weights, saved["stage 3"])[0], wanted)


def evaluate_checkpoint(rank: int, world: int, strategy: Any, path: Path) -> float:
    trainer = make_trainer(strategy, world)
    return float(trainer.test(Net(seed=4), data(seed=1), path, verbose=False)[0]["test_loss"])


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_loads_weights_only(pair: RankPool, saved: dict[str, Path], stage: int) -> None:
    wanted = pair.run(evaluate_checkpoint, "ddp", saved["ddp"])
    got = pair.run(evaluate_checkpoint, {"stage": stage}, saved["ddp"])
    assert got == pytest.approx(wanted, rel=1e-5)
