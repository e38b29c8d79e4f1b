"""What is at a target stays, or is replaced at once; a failure leaves nothing behind."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_zeroplus import consolidate
from lightning_zeroplus.checkpoint import (
    convert_checkpoint,
    export_weights,
    form_of,
    write_full,
)
from lightning_zeroplus.errors import CheckpointError
from tests.checkpoint.converting import contents, differences, make

Write = Callable[..., None]

WAYS: dict[str, Write] = {
    "universal": lambda a, b, **k: convert_checkpoint(a, b, "universal", **k),
    "full": lambda a, b, **k: convert_checkpoint(a, b, "full", **k),
    "deepspeed": lambda a, b, **k: convert_checkpoint(a, b, "deepspeed", **k),
    "shards": lambda a, b, **k: export_weights(a, b, max_shard_nbytes=300, **k),
    "state dict": lambda a, b, **k: export_weights(a, b, format="torch", **k),
}


@pytest.fixture(params=WAYS)
def write(request: pytest.FixtureRequest) -> Write:
    return WAYS[request.param]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_full(make(), tmp_path / "source.ckpt")
    return tmp_path / "source.ckpt"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("latest"))


def put_file(target: Path) -> None:
    target.write_text("mine")


def put_folder(target: Path) -> None:
    target.mkdir()


def put_checkpoint(target: Path) -> None:
    write_full({"state_dict": {"old": torch.ones(1)}}, target.with_name("old"))
    convert_checkpoint(target.with_name("old"), target, "universal")
    target.with_name("old").unlink()


def put_link(target: Path) -> None:
    target.with_name("behind").write_text("not to be touched")
    target.symlink_to("behind")


def put_dangling_link(target: Path) -> None:
    target.symlink_to("nowhere")


THINGS = [put_file, put_folder, put_checkpoint, put_link, put_dangling_link]


@pytest.mark.parametrize("put", THINGS)
def test_without_force_what_is_there_stays(source: Path, write: Write, put: Write) -> None:
    put(target := source.with_name("target"))
    before = names(source.parent)
    with pytest.raises(FileExistsError, match=r"got one \(.*target\)\. Choose another name"):
        write(source, target)
    assert names(source.parent) == before


@pytest.mark.parametrize("put", THINGS)
def test_with_force_it_is_replaced_and_links_are_not_followed(
    source: Path, write: Write, put: Write
) -> None:
    put(target := source.with_name("target"))
    behind = source.with_name("behind")
    write(source, target, force=True)
    write(source, source.with_name("fresh"))
    assert not target.is_symlink()
    assert target.is_dir() == source.with_name("fresh").is_dir()
    assert names(source.parent) == sorted(
        ["source.ckpt", "target", "fresh", *(["behind"] if behind.exists() else [])]
    )
    if behind.exists():
        assert behind.read_text() == "not to be touched"


def test_a_checkpoint_can_be_converted_in_its_own_place(source: Path) -> None:
    convert_checkpoint(source, source, "universal", force=True)
    assert form_of(source) == "universal"
    assert differences(contents(source), make()) == []
    consolidate(source, source, force=True)
    assert source.is_file()


def test_a_folder_of_other_things_is_never_replaced(source: Path, write: Write) -> None:
    target = source.with_name("target")
    target.mkdir()
    (target / "thesis.tex").write_text("mine")
    (target / "model.safetensors").write_text("exported")
    with pytest.raises(FileExistsError, match=r"got a folder of model\.safetensors, thesis\.tex"):
        write(source, target, force=True)
    assert names(target) == ["model.safetensors", "thesis.tex"]


def test_the_folder_around_the_checkpoint_is_never_replaced(source: Path, write: Write) -> None:
    with pytest.raises(CheckpointError, match="got the folder that it is in"):
        write(source, source.parent, force=True)
    assert names(source.parent) == ["source.ckpt"]


def test_an_export_replaces_an_export(source: Path) -> None:
    target = source.with_name("weights")
    export_weights(source, target, max_shard_nbytes=300)
    assert "model.safetensors.index.json" in names(target)
    export_weights(source, target, force=True)
    assert names(target) == ["model.safetensors"]


def test_a_damaged_checkpoint_leaves_the_target_alone(source: Path, write: Write) -> None:
    convert_checkpoint(source, damaged := source.with_name("damaged.ckpt"), "universal")
    with (damaged / "__0_0.distcp").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xfe\xfd")
    put_file(target := source.with_name("target"))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged between bytes 0 and"):
        write(damaged, target, force=True)
    assert target.read_text() == "mine"
    assert names(source.parent) == ["damaged.ckpt", "source.ckpt", "target"]


def test_no_checkpoint_is_no_target(tmp_path: Path, write: Write) -> None:
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "nothing.ckpt", tmp_path / "target")
    assert names(tmp_path) == []


FULL_DISK = """
import resource, signal, sys
from lightning_zeroplus.checkpoint import *
from lightning_zeroplus.errors import CheckpointError
from tests.checkpoint.test_convert_overwrites_nothing import WAYS
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    WAYS[sys.argv[1]](sys.argv[2], sys.argv[3], force=True)
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_leaves_the_target_alone(tmp_path: Path, way: str) -> None:
    assert hasattr(resource, "RLIMIT_FSIZE")
    assert hasattr(signal, "SIGXFSZ")
    weights = {"w": torch.ones(200, 200), "v": torch.ones(3)}
    state = {"w": {"exp_avg": torch.ones(200, 200)}}
    optimizer = {"state": state, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    whole = {"state_dict": weights, "optimizer_states": [optimizer]}
    write_full(whole, tmp_path / "source.ckpt")
    put_file(target := tmp_path / "target")
    command = [sys.executable, "-c", FULL_DISK, way, str(tmp_path / "source.ckpt"), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout, done.stdout + done.stderr
    assert str(target) in done.stdout
    assert target.read_text() == "mine"
    assert names(tmp_path) == ["source.ckpt", "target"]
