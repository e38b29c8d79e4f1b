"""Training goes on from an imported DeepSpeed checkpoint as it would have in DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zeroplus.checkpoint.deepspeed import read_deepspeed, write_deepspeed_universal
from lightning_zeroplus.checkpoint.saved_tensor import read_whole
from tests.checkpoint.fixtures.deepspeed import Gpt, recorded_losses, unpack


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("deepspeed"))


def continue_plainly(checkpoint: dict[str, Any], data: torch.Tensor) -> list[float]:
    """Train on in plain PyTorch, in one process with the batches of all ranks."""
    model = Gpt()
    model.load_state_dict(checkpoint["state_dict"])
    parameters = dict(model.named_parameters())
    saved = checkpoint["optimizer_states"][0]
    optimizer = torch.optim.AdamW(
        [
            dict(group, params=[parameters[name] for name in group["params"]])
            for group in saved["param_groups"]
        ]
    )
    for name, state in saved["state"].items():
        optimizer.state[parameters[name]] = read_whole(state)
    losses = []
    for batch in data:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("form", ["ckpt", "universal", "exported"])
@pytest.mark.parametrize(
    ("variant", "tolerance"), [("s1_fp32", 1e-5), ("s3_fp32", 1e-5), ("s2_bf16", 1e-2)]
)
def test_the_next_losses_are_the_recorded_ones(
    shelf: Path, tmp_path: Path, variant: str, tolerance: float, form: str
) -> None:
    if form == "exported":
        write_deepspeed_universal(read_deepspeed(shelf / variant / "ckpt"), tmp_path / "universal")
        checkpoint = read_deepspeed(tmp_path)
    else:
        checkpoint = read_deepspeed(shelf / variant / form)
    step = checkpoint["deepspeed"]["global_steps"]
    losses = continue_plainly(checkpoint, torch.load(shelf / "data.pt")[step:])
    assert losses == pytest.approx(recorded_losses(shelf, variant)[step:], abs=tolerance, rel=0)


def test_a_shared_step_would_be_noticed(shelf: Path) -> None:
    checkpoint = read_deepspeed(shelf / "s1_fp32")
    states = checkpoint["optimizer_states"][0]["state"]
    shared = next(iter(states.values()))["step"]
    for state in states.values():
        state["step"] = shared
    losses = continue_plainly(checkpoint, torch.load(shelf / "data.pt")[5:7])
    assert losses != pytest.approx(recorded_losses(shelf, "s1_fp32")[5:7], abs=1e-5, rel=0)
