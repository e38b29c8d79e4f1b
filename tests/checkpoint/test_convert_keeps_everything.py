"""Whatever form a checkpoint is written in, it is the same checkpoint."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_zeroplus import consolidate
from lightning_zeroplus.checkpoint import (
    SavedTensor,
    convert_checkpoint,
    folder_at,
    form_of,
    write_full,
)
from lightning_zeroplus.checkpoint.lazy import save_lazily
from lightning_zeroplus.checkpoint.load import open_universal, read_manifest
from lightning_zeroplus.errors import CheckpointError
from tests.checkpoint.converting import contents, differences, make, peak_growth_mb
from tests.checkpoint.fixtures.deepspeed import unpack


def numbered(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return ``checkpoint`` with its optimizer as torch has it."""
    (optimizer,) = checkpoint["optimizer_states"]
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    number = {name: n for n, name in enumerate(names)}
    groups = [
        {**group, "params": [number[name] for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    state = {number[name]: value for name, value in optimizer["state"].items()}
    return {**checkpoint, "optimizer_states": [{"state": state, "param_groups": groups}]}


@pytest.fixture
def named(tmp_path: Path) -> Path:
    write_full(make(), tmp_path / "named.ckpt")
    return tmp_path / "named.ckpt"


@pytest.fixture
def universal(named: Path) -> Path:
    convert_checkpoint(named, named.with_name("universal.ckpt"), "universal")
    return named.with_name("universal.ckpt")


def test_a_file_becomes_a_universal_folder(universal: Path) -> None:
    assert form_of(universal) == "universal"
    assert differences(contents(universal), make()) == []


def test_tied_weights_are_stored_once_and_equal_scalars_are_not_tied(universal: Path) -> None:
    tensors = read_manifest(folder_at(universal)).tensors
    assert tensors["model.head.weight"] == tensors["model.embed.weight"]
    before = torch.load(universal.with_name("named.ckpt"))["state_dict"]
    after = universal.with_name("again.ckpt")
    consolidate(universal, after)
    weights = torch.load(after)["state_dict"]
    for state in (before, weights):
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        assert state["norm.seen"].data_ptr() != state["other.seen"].data_ptr()


def test_a_universal_folder_becomes_a_file_as_under_ddp(universal: Path) -> None:
    consolidate(universal, target := universal.with_name("plain.ckpt"))
    found = torch.load(target, weights_only=True)
    assert differences(found, numbered(make())) == []
    assert list(found["optimizer_states"][0]["state"]) == [0, 1, 2]
    steps = [state["step"] for state in found["optimizer_states"][0]["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)


def test_a_universal_folder_becomes_another_one_with_what_ranks_had(tmp_path: Path) -> None:
    # As two ranks wrote it: one after the other they would be found again.
    write_full(make(), tmp_path / "named.ckpt")
    convert_checkpoint(tmp_path / "named.ckpt", tmp_path / "one.ckpt", "universal")
    saved = open_universal(folder_at(tmp_path / "one.ckpt"))
    assert saved["zeroplus"].keys() == {"facts"}
    ranks = [{"random": torch.tensor([rank])} for rank in range(2)]
    facts = {"stage": 3, "world_size": 2, "global_step": 6}
    whole = {**make(), "zeroplus_resume": ranks, "zeroplus": {"facts": facts}}
    write_full(whole, tmp_path / "two.ckpt")
    convert_checkpoint(tmp_path / "two.ckpt", tmp_path / "three.ckpt", "universal")
    convert_checkpoint(tmp_path / "three.ckpt", tmp_path / "four.ckpt", "universal")
    found = open_universal(folder_at(tmp_path / "four.ckpt"))
    ours = found.pop("zeroplus")
    assert differences(found["zeroplus_resume"], ranks) == []
    assert facts.items() <= ours["facts"].items()
    assert ours["facts"]["converted_from"] == "universal"
    whole = {**make(), "zeroplus_resume": ranks}
    assert differences(contents(tmp_path / "four.ckpt"), whole) == []


def test_plain_dcp_reads_what_was_converted(universal: Path) -> None:
    wanted = make()["state_dict"]
    state = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=universal)
    assert differences(state["model"], wanted) == []


@pytest.mark.parametrize("to", ["universal", "full"])
def test_a_folder_of_torch_distributed_checkpoint_is_converted(tmp_path: Path, to: str) -> None:
    made = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": made["state_dict"], "optimizer_0": made["optimizer_states"][0]},
            checkpoint_id=tmp_path / "dcp",
            no_dist=True,
        )
    convert_checkpoint(tmp_path / "dcp", tmp_path / "new.ckpt", to)
    found = contents(tmp_path / "new.ckpt")
    wanted = made if to == "universal" else numbered(made)
    for key in ("state_dict", "optimizer_states"):
        assert differences(found[key], wanted[key]) == []


def test_a_file_with_states_by_number_keeps_them_by_number(tmp_path: Path) -> None:
    plain = numbered(make())
    write_full(plain, tmp_path / "plain.ckpt")
    for source, to in (("plain", "universal"), ("universal", "full"), ("full", "full")):
        target = tmp_path / (f"{to}.ckpt" if source != to else "again.ckpt")
        convert_checkpoint(tmp_path / f"{source}.ckpt", target, to)
        assert differences(contents(target), plain) == []


def test_a_file_whose_optimizer_knows_names_has_states_by_name(tmp_path: Path) -> None:
    parameters = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.ones(2))}
    groups = [
        {"params": [("b", parameters["b"])], "lr": 0.5},
        {"params": [("a", parameters["a"])]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    parameters["a"].grad = torch.arange(3.0)
    optimizer.step()
    state = {name: value.detach() for name, value in parameters.items()}
    whole = {"state_dict": state, "optimizer_states": [optimizer.state_dict()]}
    write_full(whole, tmp_path / "plain.ckpt")
    convert_checkpoint(tmp_path / "plain.ckpt", tmp_path / "universal.ckpt", "universal")
    (found,) = contents(tmp_path / "universal.ckpt")["optimizer_states"]
    assert [group["params"] for group in found["param_groups"]] == [["b"], ["a"]]
    assert differences(found["state"], {"a": {"momentum_buffer": torch.arange(3.0)}}) == []


@pytest.mark.parametrize(
    "name", ["s1_fp32/ckpt", "s2_bf16/ckpt", "s3_fp32/ckpt", "s1_fp32/universal"]
)
def test_a_checkpoint_of_deepspeed_is_converted(tmp_path: Path, name: str) -> None:
    source = unpack(tmp_path) / name
    before = contents(source)
    convert_checkpoint(source, tmp_path / "u.ckpt", "universal")
    convert_checkpoint(source, tmp_path / "f.ckpt", "full")
    convert_checkpoint(tmp_path / "u.ckpt", tmp_path / "ds", "deepspeed")
    assert differences(contents(tmp_path / "u.ckpt"), before) == []
    plain = torch.load(tmp_path / "f.ckpt", weights_only=True)
    assert differences(plain["state_dict"], before["state_dict"]) == []
    assert differences(plain["optimizer_states"], numbered(before)["optimizer_states"]) == []
    assert {"epoch", "global_step", "pytorch-lightning_version"} <= set(plain)
    convert_checkpoint(source, tmp_path / "copy", "deepspeed")
    for back in (contents(tmp_path / "ds"), contents(tmp_path / "copy")):
        for key in ("state_dict", "optimizer_states"):
            assert differences(back[key], before[key]) == []


def test_a_tied_weight_keeps_the_name_that_the_optimizer_has(tmp_path: Path) -> None:
    made = make()
    weights: dict[str, Tensor] = {
        "first": made["state_dict"]["embed.weight"],
        "second": made["state_dict"]["embed.weight"],
    }
    state = {"second": {"exp_avg": torch.ones(5, 3), "step": torch.tensor(1.0)}}
    groups = [{"lr": 0.1, "params": ["second"]}]
    optimizer = {"state": state, "param_groups": groups}
    write_full({"state_dict": weights, "optimizer_states": [optimizer]}, tmp_path / "a.ckpt")
    convert_checkpoint(tmp_path / "a.ckpt", tmp_path / "ds", "deepspeed")
    found = contents(tmp_path / "ds")
    assert found["deepspeed"]["shared_params"] == {"first": "second"}
    assert differences(found["state_dict"], weights) == []
    assert differences(found["optimizer_states"], [optimizer]) == []


def test_states_by_number_have_no_place_in_deepspeeds_layout(tmp_path: Path) -> None:
    write_full(numbered(make()), tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match="by parameter name, got them by number"):
        convert_checkpoint(tmp_path / "plain.ckpt", tmp_path / "ds", "deepspeed")
    assert [path.name for path in tmp_path.iterdir()] == ["plain.ckpt"]


def test_states_outside_of_all_groups_are_refused(tmp_path: Path) -> None:
    made = make()
    made["optimizer_states"][0]["param_groups"].pop()
    write_full(made, tmp_path / "odd.ckpt")
    with pytest.raises(CheckpointError, match=r"got states of embed\.weight too"):
        consolidate(tmp_path / "odd.ckpt", tmp_path / "plain.ckpt")


def test_objects_of_other_classes_keep_the_tensors_in_them(tmp_path: Path) -> None:
    made = make()
    made["extra"] = Holder(torch.arange(5.0))
    torch.save(made, tmp_path / "odd.ckpt")
    with pytest.raises(CheckpointError, match=r"got the class tests\.checkpoint\.test_convert"):
        consolidate(tmp_path / "odd.ckpt", tmp_path / "plain.ckpt")
    consolidate(tmp_path / "odd.ckpt", tmp_path / "plain.ckpt", weights_only=False)
    found = torch.load(tmp_path / "plain.ckpt", weights_only=False)
    assert found.pop("extra").tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert differences(found, numbered(make())) == []


def test_what_cannot_be_read_is_what_is_reported(tmp_path: Path) -> None:
    def fail(_: object) -> Tensor:
        raise CheckpointError("Expected a readable w.")

    tree = {"a": torch.ones(5), "w": SavedTensor((3,), torch.float32, fail), "b": torch.ones(5)}
    file = (tmp_path / "new").open("xb")
    with file, pytest.raises(CheckpointError, match="Expected a readable w"):
        save_lazily(tree, file)


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_every_record_of_a_file_that_was_written_has_its_checksum(universal: Path) -> None:
    consolidate(universal, target := universal.with_name("plain.ckpt"))
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        assert all(entry.CRC for entry in archive.infolist() if entry.file_size)


@pytest.mark.parametrize("to", ["universal", "full", "deepspeed"])
def test_progress_is_told_up_to_the_end(universal: Path, to: str) -> None:
    told: list[tuple[int, int]] = []
    target = universal.with_name("new")
    convert_checkpoint(universal, target, to, tell=lambda *step: told.append(step))
    done, (total,) = sum(nbytes for nbytes, _ in told), {total for _, total in told}
    # Small tensors of callbacks stand in the metadata and may not be read one by one.
    assert total - 16_000 < done <= total


@pytest.mark.parametrize("to", ["universal", "full"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, to: str) -> None:
    weights = {f"w{n}": torch.full((2**22,), float(n)) for n in range(12)}  # 16 MB each
    write_full({"state_dict": weights}, tmp_path / "large.ckpt")
    convert_checkpoint(tmp_path / "large.ckpt", tmp_path / "universal.ckpt", "universal")
    act = f"convert_checkpoint(source, target, {to!r}, force=True)"
    assert peak_growth_mb(act, tmp_path / "universal.ckpt", tmp_path / "new.ckpt") < 64
    assert differences(contents(tmp_path / "new.ckpt")["state_dict"], weights) == []
