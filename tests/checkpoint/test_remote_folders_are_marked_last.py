"""Stores without a rename: the manifest, written last, is what makes files a checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_zeroplus.checkpoint import folder_at, read_checkpoint, read_whole, remove_at
from lightning_zeroplus.checkpoint.folder import RemoteFolder
from lightning_zeroplus.errors import CheckpointError
from lightning_zeroplus.plugin.checkpoint_io import ZeroPlusCheckpointIO
from tests.checkpoint.small_folder import same_tensors, write_small
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, close, fit


@pytest.fixture
def path() -> Iterator[str]:
    name = f"memory://bucket-{uuid.uuid4().hex}/run/x.ckpt"
    yield name
    fs = fsspec.filesystem("memory")
    root = name.removeprefix("memory://").partition("/")[0]
    if fs.exists(root):
        fs.rm(root, recursive=True)


def names_at(path: str) -> set[str]:
    fs, root = fsspec.core.url_to_fs(path)
    return {Path(found).name for found in fs.ls(root, detail=False)} if fs.exists(root) else set()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_write_and_read_it(path: str, world: int) -> None:
    write_small(path, world)
    data = {f"__{rank}_0.distcp" for rank in range(world)}
    assert names_at(path) == data | {".metadata", "meta.pt", "manifest.json"}
    for rank in range(world):
        found = read_checkpoint(path, rank=rank, world_size=world)
        assert same_tensors(read_whole(found["state_dict"]))
        assert found["epoch"] == 3


def test_a_part_of_a_tensor_takes_a_part_of_the_file(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    write_small(path)
    state = read_checkpoint(path)["state_dict"]
    fs = type(fsspec.filesystem("memory"))
    fetched: list[int] = []
    cat = fs.cat_file

    def counted(self: Any, name: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        found = cat(self, name, start=start, end=end, **options)
        fetched.append(len(found))
        return found

    monkeypatch.setattr(fs, "cat_file", counted)
    from lightning_zeroplus.layout.box import Box

    assert state["a"].read_box(Box((1, 0, 0), (1, 7, 3))).flatten().tolist() == [
        float(n) for n in range(21, 42)
    ]
    assert sum(fetched) == 84


def test_the_manifest_is_written_last(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    order: list[str] = []
    opened = RemoteFolder.open

    def noted(self: RemoteFolder, token: str, name: str) -> Any:
        assert "manifest.json" not in names_at(path)
        order.append(name)
        return opened(self, token, name)

    monkeypatch.setattr(RemoteFolder, "open", noted)
    write_small(path)
    order.clear()
    write_small(path, world=3, scale=2.0)  # over the earlier one
    assert order[-1] == "manifest.json"
    assert sorted(order[:3]) == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert same_tensors(read_whole(read_checkpoint(path)["state_dict"]), 2.0)


FILES = ["__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata", "manifest.json"]


@pytest.mark.parametrize("over", [False, True], ids=["a new name", "over an earlier one"])
@pytest.mark.parametrize("at", FILES)
def test_an_upload_that_was_interrupted_is_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, at: str, over: bool
) -> None:
    """The writer is gone: it had no chance to clean up."""
    if over:
        write_small(path)
    opened = RemoteFolder.open

    def ends(self: RemoteFolder, token: str, name: str) -> Any:
        if name == at:
            raise KeyboardInterrupt
        return opened(self, token, name)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "open", ends)
        patch.setattr(RemoteFolder, "abandon", lambda self, token: None)
        with pytest.raises(BaseException):
            write_small(path)
    for read in (read_checkpoint, ZeroPlusCheckpointIO().load_checkpoint):
        with pytest.raises((CheckpointError, FileNotFoundError)) as raised:
            read(path)
        if names_at(path) and at != "__0_0.distcp":
            assert isinstance(raised.value, CheckpointError)
            assert "manifest.json" in str(raised.value)
    write_small(path, scale=4.0)
    assert same_tensors(read_whole(read_checkpoint(path)["state_dict"]), 4.0)


def test_a_failed_upload_leaves_nothing(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    opened = RemoteFolder.open

    def fails(self: RemoteFolder, token: str, name: str) -> Any:
        if name == "__1_0.distcp":
            raise PermissionError("bucket is read-only")
        return opened(self, token, name)

    monkeypatch.setattr(RemoteFolder, "open", fails)
    with pytest.raises(CheckpointError, match=r"PermissionError: bucket.*\(rank 1\).*memory://"):
        write_small(path)
    assert names_at(path) == set()


def test_a_data_file_that_is_cut_short_is_named(path: str) -> None:
    write_small(path)
    fs, root = fsspec.core.url_to_fs(path)
    fs.pipe_file(f"{root}/__1_0.distcp", fs.cat_file(f"{root}/__1_0.distcp")[:-5])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp has \d+ bytes instead of"):
        read_checkpoint(path)
    fs.rm_file(f"{root}/__1_0.distcp")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        read_checkpoint(path)


def test_a_single_file_in_the_way_is_replaced(path: str) -> None:
    fs, root = fsspec.core.url_to_fs(path)
    fs.pipe_file(root, b"an old checkpoint")
    write_small(path)
    assert same_tensors(read_whole(read_checkpoint(path)["state_dict"]))


def test_removing_leaves_nothing(path: str) -> None:
    write_small(path)
    remove_at(path)
    remove_at(path)
    assert names_at(path) == set()


def test_nothing_at_the_path_is_a_file_not_found_error(path: str) -> None:
    with pytest.raises(FileNotFoundError, match="not found"):
        read_checkpoint(path)


def test_a_local_address_is_the_local_disk(tmp_path: Path) -> None:
    write_small(f"file://{tmp_path}/x.ckpt")
    assert (tmp_path / "x.ckpt" / "manifest.json").is_file()
    assert same_tensors(read_whole(read_checkpoint(f"file://{tmp_path}/x.ckpt")["state_dict"]))
    assert str(folder_at(f"file://{tmp_path}/x.ckpt")) == f"{tmp_path}/x.ckpt"


def resume_remotely(rank: int, world: int, path: str) -> Any:
    """One process: the store is in its memory."""
    fit(rank, world, {"stage": 3}, {"max_epochs": 1}, Net, {}, None, path)
    resumed = fit(rank, world, {"stage": 2}, {"max_epochs": 2}, Net, {"seed": 9}, path)
    return resumed["weights"], fit(rank, world, {"stage": 2}, {"max_epochs": 2})["weights"]


@pytest.mark.dist
def test_a_trainer_saves_and_resumes_there(solo: RankPool, path: str) -> None:
    ((resumed, straight),) = solo.run(resume_remotely, path)
    close(resumed, straight)
