"""Checkpoints are converted from and to stores that fsspec reaches."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from torch import Tensor

from lightning_zeroplus import consolidate
from lightning_zeroplus.checkpoint import (
    SavedTensor,
    convert_checkpoint,
    describe_checkpoint,
    export_weights,
    verify_checkpoint,
    write_full,
)
from lightning_zeroplus.checkpoint.lazy import save_lazily
from lightning_zeroplus.checkpoint.target import new_file
from lightning_zeroplus.errors import CheckpointError
from tests.checkpoint.converting import contents, differences, make


@pytest.fixture
def store() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_full(make(), tmp_path / "source.ckpt")
    return tmp_path / "source.ckpt"


def test_there_and_back(source: Path, store: str) -> None:
    convert_checkpoint(source, f"{store}/u.ckpt", "universal")
    assert verify_checkpoint(f"{store}/u.ckpt").problems == []
    consolidate(f"{store}/u.ckpt", f"{store}/f.ckpt")
    assert describe_checkpoint(f"{store}/f.ckpt").form == "file"
    convert_checkpoint(f"{store}/f.ckpt", source.with_name("back.ckpt"), "universal")
    convert_checkpoint(f"{store}/u.ckpt", source.with_name("copy.ckpt"), "universal")
    assert differences(contents(source.with_name("copy.ckpt")), make()) == []
    back = contents(source.with_name("back.ckpt"))
    assert differences(back["state_dict"], make()["state_dict"]) == []


def test_exports(source: Path, store: str) -> None:
    export_weights(source, f"{store}/weights", max_shard_nbytes=200)
    names = sorted(
        path.rpartition("/")[2]
        for path in fsspec.filesystem("memory").ls(f"{store}/weights", detail=False)
    )
    assert names[-1] == "model.safetensors.index.json"
    assert len(names) > 2
    export_weights(source, f"{store}/weights.pt", format="torch")
    with fsspec.open(f"{store}/weights.pt", "rb") as file:
        assert differences(torch.load(file), make()["state_dict"]) == []


@pytest.mark.parametrize("to", ["universal", "full"])
def test_what_is_there_stays_unless_forced(source: Path, store: str, to: str) -> None:
    with fsspec.open(f"{store}/x", "wb") as file:
        file.write(b"mine")
    with pytest.raises(FileExistsError, match=r"got one \(memory://"):
        convert_checkpoint(source, f"{store}/x", to)
    with fsspec.open(f"{store}/x", "rb") as file:
        assert file.read() == b"mine"
    convert_checkpoint(source, f"{store}/x", to, force=True)
    assert differences(contents(source), make()) == []
    assert describe_checkpoint(f"{store}/x").form == ("file" if to == "full" else to)


def test_a_remote_checkpoint_is_not_written_over_itself(source: Path, store: str) -> None:
    convert_checkpoint(source, f"{store}/x", "universal")
    with pytest.raises(CheckpointError, match="got the checkpoint's own"):
        convert_checkpoint(f"{store}/x", f"{store}/x/", "full", force=True)


def test_deepspeed_needs_a_local_path(source: Path, store: str) -> None:
    with pytest.raises(CheckpointError, match="Expected a local path"):
        convert_checkpoint(source, f"{store}/ds", "deepspeed")


@pytest.mark.parametrize("source_name", ["u.ckpt", "f.ckpt"])
def test_nothing_there_is_said(store: str, source_name: str, tmp_path: Path) -> None:
    with pytest.raises((FileNotFoundError, CheckpointError)):
        consolidate(f"{store}/{source_name}", tmp_path / "x.ckpt")
    assert list(tmp_path.iterdir()) == []


def fail(_: object) -> Tensor:
    raise ZeroDivisionError


def test_a_failed_remote_file_is_removed(store: str) -> None:
    def write() -> None:
        with new_file(f"{store}/f.ckpt") as file:
            save_lazily({"w": torch.ones(9), "v": SavedTensor((3,), torch.float32, fail)}, file)

    with pytest.raises(ZeroDivisionError):
        write()
    assert not fsspec.filesystem("memory").exists(f"{store}/f.ckpt")
