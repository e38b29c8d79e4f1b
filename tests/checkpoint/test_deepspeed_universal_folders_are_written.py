"""What is exported is DeepSpeed's universal layout, field by field, and appears at once."""

from __future__ import annotations

import enum
import resource
import signal
import weakref
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_zeroplus.checkpoint.deepspeed import (
    detect_deepspeed,
    read_deepspeed,
    write_deepspeed_universal,
)
from lightning_zeroplus.checkpoint.deepspeed.unpickle import load_file
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor, read_whole
from lightning_zeroplus.errors import CheckpointError
from lightning_zeroplus.layout.box import Box
from tests.checkpoint.fixtures.deepspeed import LARGE, SMALL, unpack


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("deepspeed"))


def plain_checkpoint() -> dict[str, Any]:
    """A checkpoint of another origin: plain tensors, nothing known of a DeepSpeed run."""
    weight = torch.arange(6.0).reshape(2, 3)
    return {
        "epoch": 2,
        "global_step": 9,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {
            "tied": weight,
            "net.weight": weight,
            "net.bias": torch.ones(2),
            "n": torch.tensor(4),
        },
        "optimizer_states": [
            {
                "state": {
                    "net.weight": {
                        "step": torch.tensor(9.0),
                        "exp_avg": weight + 1,
                        "exp_avg_sq": weight,
                    },
                },
                "param_groups": [
                    {"params": ["net.weight", "net.bias"], "lr": 0.1, "betas": (0.9, 0.99)}
                ],
            }
        ],
        "lr_schedulers": [{"last_epoch": 9}],
        "callbacks": {"best": {"score": torch.tensor([0.5, 2.0]), "path": "x"}},
    }


def equal(one: Any, other: Any) -> bool:
    """Whether two trees are the same in kinds, types, shapes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


# ----------------------------------------------------------------------------- layout
def test_files_and_their_contents_are_those_of_deepspeeds_converter(
    shelf: Path, tmp_path: Path
) -> None:
    theirs, mine = shelf / "s1_fp32/universal", tmp_path / "universal"
    write_deepspeed_universal(read_deepspeed(shelf / "s1_fp32/ckpt"), mine)
    names = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*"))
    assert sorted(str(path.relative_to(mine)) for path in mine.rglob("*")) == names
    assert len([name for name in names if name.endswith(".pt")]) == 4 * 29 + 2
    for path in theirs.rglob("*.pt"):
        if path.name not in ("optimizer_state.pt", "mp_rank_00_model_states.pt"):
            other = torch.load(mine / path.relative_to(theirs), weights_only=True)
            assert equal(torch.load(path), other), path
    latest = (shelf / "s1_fp32/latest_universal").read_bytes()
    assert (tmp_path / "latest_universal").read_bytes() == latest


@pytest.mark.parametrize("variant", ["s1_fp32", "s2_bf16"])
def test_the_model_states_have_deepspeeds_entries(
    shelf: Path, tmp_path: Path, variant: str
) -> None:
    write_deepspeed_universal(read_deepspeed(shelf / variant / "ckpt"), tmp_path / "universal")
    theirs = torch.load(shelf / variant / "universal/mp_rank_00_model_states.pt")
    mine = torch.load(tmp_path / "universal/mp_rank_00_model_states.pt", weights_only=True)
    info = mine.pop("universal_checkpoint_info")  # which this run's caller did not give DeepSpeed
    assert info["universal_checkpoint_version"] == 0.4
    assert len(info) == 9
    assert not any(value for key, value in info.items() if key != "universal_checkpoint_version")
    assert set(mine) == set(theirs)
    module = mine.pop("module")
    expected = OrderedDict((name, value.float()) for name, value in theirs.pop("module").items())
    if variant == "s2_bf16":  # DeepSpeed has the rounded weights there; these are the masters
        module = OrderedDict((name, v.bfloat16().float()) for name, v in module.items())
    assert equal(module, expected)
    for key, value in theirs.items():
        assert equal(mine[key], value), key


@pytest.mark.parametrize("variant", ["s1_fp32", "s2_bf16"])
def test_the_optimizer_state_has_deepspeeds_entries(
    shelf: Path, tmp_path: Path, variant: str
) -> None:
    write_deepspeed_universal(read_deepspeed(shelf / variant / "ckpt"), tmp_path / "universal")
    theirs = load_file(shelf / variant / "universal/zero/optimizer_state.pt")
    mine = torch.load(tmp_path / "universal/zero/optimizer_state.pt", weights_only=True)
    theirs.pop("loss_scaler")  # an object of a class of DeepSpeed
    assert set(mine) == set(theirs)
    for key, value in theirs.items():
        if key == "param_groups":
            assert mine[key] == value
        else:
            assert equal(mine[key], value), key


@pytest.mark.parametrize("variant", LARGE)
def test_files_have_no_class_and_no_bytes_of_other_tensors(
    shelf: Path, tmp_path: Path, variant: str
) -> None:
    write_deepspeed_universal(read_deepspeed(shelf / variant / "ckpt"), tmp_path / "universal")
    for path in (tmp_path / "universal").rglob("*.pt"):
        torch.load(path, weights_only=True)
        with zipfile.ZipFile(path) as archive:
            content = b"".join(archive.read(n) for n in archive.namelist() if n.endswith(".pkl"))
        assert b"zeroplus" not in content
        assert b"deepspeed." not in content
        value = torch.load(path)
        if isinstance(value, dict) and "param" in value:
            assert value["param"].untyped_storage().nbytes() == value["param"].nbytes
            assert value["param"].is_contiguous()


# ----------------------------------------------------------------------------- round trip
@pytest.mark.parametrize("variant", [*LARGE, *(f"small/{name}" for name in SMALL)])
def test_what_is_exported_is_read_back(shelf: Path, tmp_path: Path, variant: str) -> None:
    before = read_deepspeed(shelf / variant / ("" if variant.startswith("small") else "ckpt"))
    if "nadam" in variant:
        for state in before["optimizer_states"][0]["state"].values():
            del state["mu_product"]
    write_deepspeed_universal(before, tmp_path / "x")
    assert detect_deepspeed(tmp_path) == "universal"
    after = read_deepspeed(tmp_path)
    for name in set(before["state_dict"]) | set(after["state_dict"]):
        one, other = before["state_dict"][name], after["state_dict"][name]
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name
    one, other = before["optimizer_states"][0], after["optimizer_states"][0]
    assert one["param_groups"] == other["param_groups"]
    assert set(one["state"]) == set(other["state"])
    for name, state in one["state"].items():
        assert set(state) == set(other["state"][name])
        for key, value in state.items():
            assert torch.equal(value, other["state"][name][key])
    if variant.startswith("small"):
        assert after["state_dict"]["head.weight"] is after["state_dict"]["emb.weight"]
        assert after["deepspeed"]["buffer_names"] == ["count", "table"]
        assert after["deepspeed"]["frozen_names"] == ["frozen.weight", "frozen.bias"]
        assert after["epoch"] == 1
        assert equal(after["callbacks"], before["callbacks"])
        assert after["lr_schedulers"] == before["lr_schedulers"]
        assert after["deepspeed"]["global_steps"] == 3


def test_a_checkpoint_of_another_origin(tmp_path: Path) -> None:
    write_deepspeed_universal(plain_checkpoint(), tmp_path / "x")
    model = torch.load(tmp_path / "x/mp_rank_00_model_states.pt", weights_only=True)
    assert model["buffer_names"] == ["n"]
    assert model["shared_params"] == {"tied": "net.weight"}
    assert model["param_shapes"] == [
        {"net.weight": torch.Size([2, 3]), "net.bias": torch.Size([2])}
    ]
    assert (model["global_steps"], model["dp_world_size"], model["mp_world_size"]) == (9, 1, 1)
    assert "global_samples" not in model
    assert (model["ds_version"], model["lr_scheduler"]) == ("0.19.8", {"last_epoch": 9})
    assert model["module"]["tied"].data_ptr() == model["module"]["net.weight"].data_ptr()
    optimizer = torch.load(tmp_path / "x/zero/optimizer_state.pt", weights_only=True)
    assert optimizer["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]
    assert not {"loss_scaler", "dynamic_loss_scale", "clip_grad"} & optimizer.keys()
    after, before = read_deepspeed(tmp_path), plain_checkpoint()
    assert equal(read_whole(after["state_dict"]), before["state_dict"])
    assert equal(after["callbacks"], before["callbacks"])
    assert (after["epoch"], after["pytorch-lightning_version"]) == (2, "2.6.0")


def test_parameters_without_states_get_zeros_as_the_group_has_one_step(tmp_path: Path) -> None:
    write_deepspeed_universal(plain_checkpoint(), tmp_path / "x")
    state = read_deepspeed(tmp_path)["optimizer_states"][0]["state"]["net.bias"]
    assert equal(
        {key: read_whole(value) for key, value in sorted(state.items())},
        {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2), "step": torch.tensor(9.0)},
    )


def test_masters_become_fp32_and_states_keep_their_dtype(tmp_path: Path) -> None:
    checkpoint = plain_checkpoint()
    weights = checkpoint["state_dict"]
    weights["net.weight"] = weights["tied"] = weights["net.weight"].bfloat16()
    state = checkpoint["optimizer_states"][0]["state"]["net.weight"]
    state["exp_avg"] = state["exp_avg"].bfloat16().t().contiguous().t()
    write_deepspeed_universal(checkpoint, tmp_path / "x")
    folder = tmp_path / "x/zero/net.weight"
    assert torch.load(folder / "fp32.pt")["param"].dtype == torch.float32
    saved = torch.load(folder / "exp_avg.pt")["param"]
    assert (saved.dtype, saved.is_contiguous()) == (torch.bfloat16, True)
    assert torch.equal(saved, state["exp_avg"])


def test_what_is_a_buffer_or_tied_can_be_said(tmp_path: Path) -> None:
    checkpoint = plain_checkpoint()
    checkpoint["state_dict"]["tied"] = checkpoint["state_dict"]["tied"].clone()
    checkpoint["state_dict"]["still"] = torch.ones(3)
    write_deepspeed_universal(
        checkpoint, tmp_path / "x", buffer_names=["n"], shared_params={"tied": "net.weight"}
    )
    after = read_deepspeed(tmp_path)
    assert after["deepspeed"]["buffer_names"] == ["n"]
    assert after["deepspeed"]["frozen_names"] == ["still"]
    assert after["deepspeed"]["shared_params"] == {"tied": "net.weight"}
    assert torch.equal(after["state_dict"]["still"], torch.ones(3))


def test_one_tensor_is_read_at_a_time(tmp_path: Path) -> None:
    """No tensor that was read is still held when the next one is."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def fetch(box: Box) -> torch.Tensor:
        nonlocal most
        tensor = torch.ones(box.sizes)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    def saved() -> SavedTensor:
        return SavedTensor((4, 5), torch.float32, fetch)

    names = [f"layer.{n}" for n in range(12)]
    checkpoint = {
        "state_dict": {name: saved() for name in names},
        "optimizer_states": [
            {
                "state": {name: {"momentum_buffer": saved()} for name in names},
                "param_groups": [{"params": names, "lr": 1.0}],
            }
        ],
    }
    write_deepspeed_universal(checkpoint, tmp_path / "x")
    assert 1 <= most <= 2  # the one that was written is let go once the next is there


# ----------------------------------------------------------------------------- plain values
class Color(enum.Enum):
    RED = "red"


class Own(dict):
    pass


def test_values_become_plain_ones(tmp_path: Path) -> None:
    checkpoint = plain_checkpoint()
    checkpoint["hyper_parameters"] = Own(
        a=np.float64(0.5),
        b=np.int64(3),
        c=Color.RED,
        d=OrderedDict(x=(1, None)),
        e={1, 2},
        f=torch.float16,
        g=b"x",
        h=torch.tensor(1.0),
    )
    write_deepspeed_universal(checkpoint, tmp_path / "x")
    found = read_deepspeed(tmp_path)["hyper_parameters"]
    assert found.pop("h") == torch.tensor(1.0)
    assert (found["a"], found["b"], found["c"], found["d"]) == (0.5, 3, "red", {"x": (1, None)})
    assert [type(found[key]) for key in "abcd"] == [float, int, str, dict]
    assert (found["e"], found["f"], found["g"]) == ({1, 2}, torch.float16, b"x")


def test_objects_are_refused_by_their_place(tmp_path: Path) -> None:
    checkpoint = plain_checkpoint()
    checkpoint["callbacks"]["best"]["model"] = [object()]
    with pytest.raises(CheckpointError, match=r"callbacks\.best\.model\[0\], a builtins\.object"):
        write_deepspeed_universal(checkpoint, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------- refusals
def change(at: str, value: Any) -> Any:
    def apply(checkpoint: dict[str, Any]) -> None:
        *path, last = at.split("/")
        place: Any = checkpoint
        for key in path:
            place = place[int(key) if key.isdigit() else key]
        place[last] = value

    return apply


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (change("state_dict", None), "a state_dict in the checkpoint, got NoneType"),
        (change("optimizer_states", []), "the states of one optimizer in the checkpoint, got 0"),
        (change("optimizer_states", [{}, {}]), "the states of one optimizer .*got 2"),
        (change("optimizer_states", None), "the states of one optimizer .*got none"),
        (change("optimizer_states/0/param_groups/0/params", [0, 1]), "by their names .*got 0, 1"),
        (
            change("optimizer_states/0/param_groups/0/params", ["net.bias", "net.bias"]),
            "got a name in two groups",
        ),
        (
            change("optimizer_states/0/state/net.bias", {"step": torch.tensor(3.0)}),
            r"the same step for a whole group, got 3\.0, 9\.0",
        ),
        (
            change("optimizer_states/0/state/net.weight/mu_product", torch.tensor(0.1)),
            r"of the shape of net.weight, \[2, 3\], got 'mu_product': \[\]",
        ),
        (
            change("optimizer_states/0/state/net.weight/sum", 1.0),
            "got 'sum': float",
        ),
        (
            change("optimizer_states/0/state/net.weight/..", torch.ones(2, 3)),
            "a state of the optimizer to be the name of a folder",
        ),
        (change("mp_world_size", 2), "got one named mp_world_size, which is DeepSpeed's"),
        (change("deepspeed", {"shared_params": {"x": "net.bias"}}), "'x' for 'net.bias'"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(tmp_path: Path, alter: Any, message: str) -> None:
    checkpoint = plain_checkpoint()
    alter(checkpoint)
    with pytest.raises(CheckpointError, match=message) as caught:
        write_deepspeed_universal(checkpoint, tmp_path / "x")
    assert str(caught.value).startswith("Expected ")
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_that_cannot_name_a_folder_is_refused(tmp_path: Path) -> None:
    checkpoint = plain_checkpoint()
    checkpoint["state_dict"]["../x"] = torch.ones(2)
    checkpoint["optimizer_states"][0]["param_groups"][0]["params"].append("../x")
    with pytest.raises(CheckpointError, match="a parameter to be the name of a folder"):
        write_deepspeed_universal(checkpoint, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(FileExistsError, match="use force"):
        write_deepspeed_universal(plain_checkpoint(), target)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    write_deepspeed_universal(plain_checkpoint(), target, force=True)
    assert not (target / "old").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_universal", "x"]
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(FileExistsError):
        write_deepspeed_universal(plain_checkpoint(), link)
    write_deepspeed_universal(plain_checkpoint(), link, force=True)
    assert not link.is_symlink()
    assert (target / "zero").is_dir()


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_deepspeed_universal(plain_checkpoint(), tmp_path / "a/b/x")
    assert read_deepspeed(tmp_path / "a/b")["epoch"] == 2


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "x"
    write_deepspeed_universal(plain_checkpoint(), target)
    large = plain_checkpoint()
    large["state_dict"]["net.bias"] = torch.ones(20_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match="Expected to write a universal checkpoint"):
            write_deepspeed_universal(large, target, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_universal", "x"]
    assert read_deepspeed(tmp_path)["state_dict"]["net.bias"].shape == (2,)


def test_an_interruption_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_zeroplus.checkpoint.deepspeed.export.save_streamed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_deepspeed_universal(plain_checkpoint(), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
