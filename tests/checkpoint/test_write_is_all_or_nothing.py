from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from lightning_zeroplus.checkpoint import read_full, remove_at, write_full
from lightning_zeroplus.errors import CheckpointError


def test_a_file_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    write_full({"a": torch.arange(5)}, tmp_path / "deep" / "x.ckpt")
    assert os.listdir(tmp_path / "deep") == ["x.ckpt"]
    assert torch.equal(torch.load(tmp_path / "deep" / "x.ckpt")["a"], torch.arange(5))


def test_a_full_disk_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_full({"a": torch.zeros(3)}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"got OSError: .*too large.*x\.ckpt.*unchanged"):
            write_full({"a": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert torch.equal(read_full(path)["a"], torch.zeros(3))


def test_something_that_cannot_be_saved_leaves_no_draft(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="lambda"):
        write_full({"a": lambda: None}, tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    write_full({"a": 1}, best)
    last.symlink_to(best.name)
    write_full({"a": 2}, last)
    assert not last.is_symlink()
    assert (read_full(best)["a"], read_full(last)["a"]) == (1, 2)


def test_a_dangling_link_is_replaced(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    last.symlink_to("gone.ckpt")
    write_full({"a": 2}, last)
    assert read_full(last)["a"] == 2
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").mkdir()
    with pytest.raises(CheckpointError, match=r"IsADirectoryError.*x\.ckpt"):
        write_full({"a": 1}, tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_file_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_full({"a": 1}, tmp_path / "x.ckpt")
    finally:
        os.umask(before)
    assert (tmp_path / "x.ckpt").stat().st_mode & 0o777 == 0o640


def test_removing_takes_links_files_and_folders_but_no_target(tmp_path: Path) -> None:
    best, last, dangling, folder = (tmp_path / n for n in ("best", "last", "dangling", "folder"))
    write_full({"a": 1}, best)
    last.symlink_to(best.name)
    dangling.symlink_to("nothing")
    write_full({}, folder / "inner")
    for path in (last, dangling, folder, tmp_path / "never there"):
        remove_at(path)
    assert os.listdir(tmp_path) == ["best"]
    remove_at(best)
    assert os.listdir(tmp_path) == []
