"""`torch.distributed.checkpoint` reads what we write, in one process and into FSDP2."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.reading import read
from tests.checkpoint.virtual import PLACES, Place, saved
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, data, fit

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of a process without a group


def zeros_like(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: zeros_like(value) for key, value in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_full_state_dict_is_filled(place: Place) -> None:
    path, state = saved("fused AdamW", place)
    tensors = {
        name: {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        for name, values in state.optimizer.items()
    }
    wanted = {"model": state.weights, "optimizer_0": {"state": tensors}}
    found = zeros_like(wanted)
    dcp.load(found, checkpoint_id=path)
    for name, value in state.weights.items():
        assert torch.equal(found["model"][name], value), name
    for name, values in tensors.items():
        for key, value in values.items():
            assert torch.equal(found["optimizer_0"]["state"][name][key], value), (name, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_masters_are_what_it_finds(dtype: torch.dtype) -> None:
    path, state = saved("fused AdamW", (3, 2), dtype)
    found = {"model": zeros_like(state.weights)}
    dcp.load(found, checkpoint_id=path)
    for name, value in state.weights.items():
        assert torch.equal(found["model"][name], value), name


def test_it_becomes_one_file_of_torchs(tmp_path: Path) -> None:
    path, state = saved("NAdam", (3, 3))
    dcp_to_torch_save(path, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["model"].keys() == state.weights.keys()
    for name, value in state.weights.items():
        assert torch.equal(found["model"][name], value), name
    for name, values in state.optimizer.items():
        for key, value in values.items():
            assert torch.equal(found["optimizer_0"]["state"][name][key], value), (name, key)


def test_a_state_dict_of_another_model_is_refused_by_dcp() -> None:
    path, _ = saved("SGD", (2, 2))
    with pytest.raises(BaseException, match=r"nowhere"):
        dcp.load({"model": {"nowhere": torch.zeros(3)}}, checkpoint_id=path)


# -- FSDP2 on real ranks


def sharded_net(world: int) -> tuple[Net, torch.optim.Optimizer]:
    module = Net(seed=9)
    mesh = init_device_mesh("cpu", (world,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in module.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return module, torch.optim.AdamW(groups, lr=0.02, eps=1e-2)


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def into_fsdp2(rank: int, world: int, path: Path) -> Any:
    warnings.simplefilter("ignore")
    module, optimizer = sharded_net(world)
    for batch in data(8):  # makes its state
        module.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, states = get_model_state_dict(module), get_optimizer_state_dict(module, optimizer)
    dcp.load({"model": model, "optimizer_0": {"state": states["state"]}}, checkpoint_id=path)
    set_model_state_dict(module, model)
    set_optimizer_state_dict(module, optimizer, states)
    weights = get_model_state_dict(module, options=FULL)
    full = get_optimizer_state_dict(module, optimizer, options=FULL)
    dist.barrier()
    return weights, full.get("state", {})  # on rank 0


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 3])
def test_fsdp2_takes_weights_and_optimizer_state(
    pair: RankPool, tmp_path: Path, stage: int
) -> None:
    path = tmp_path / "x.ckpt"
    pair.run(fit, {"stage": stage}, {"max_epochs": 1}, Net, {}, None, path)
    wanted = read(path)
    weights, states = pair.run(into_fsdp2, path)[0]
    close(weights, wanted["state_dict"], rtol=0, atol=0)
    (own,) = wanted["optimizer_states"]
    assert states.keys() == own["state"].keys()
    for name, values in own["state"].items():
        for key, value in values.items():
            assert torch.equal(states[name][key], value), (name, key)


def test_our_folder_has_nothing_else_in_it() -> None:
    path, _ = saved("SGD", (3, 3))
    names = sorted(file.name for file in path.iterdir())
    data_files = [f"__{rank}_0.distcp" for rank in range(3)]
    assert names == sorted([".metadata", *data_files, "manifest.json", "meta.pt"])
