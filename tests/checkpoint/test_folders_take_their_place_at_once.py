"""Whatever is at the path, and whenever the writer is killed: the old checkpoint or the new one."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zeroplus.checkpoint import (
    Solo,
    folder,
    folder_at,
    read_checkpoint,
    read_whole,
    save_universal,
    write_full,
)
from lightning_zeroplus.checkpoint import datafile as datafile_module
from lightning_zeroplus.checkpoint.datafile import DataFile
from lightning_zeroplus.checkpoint.folder import LocalFolder
from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.errors import CheckpointError
from lightning_zeroplus.plugin.universal import TransportGroup
from tests.checkpoint.small_folder import part_of, same_tensors, write_small

DRAFT = re.compile(r"\..*[0-9a-f]{32}\.tmp")  # hidden, and no name of a checkpoint


def scale_at(path: Path) -> float:
    """Return which of the writes is at ``path``, whole."""
    checkpoint = read_whole(read_checkpoint(path))
    scale = float(checkpoint["big"][0, 0])
    assert same_tensors(checkpoint["state_dict"], scale)
    return scale


# -- what is at the path


def nothing(path: Path) -> None:
    pass


def missing_folders(path: Path) -> None:
    path.parent.rmdir()


def a_file(path: Path) -> None:
    write_full({"a": 1}, path)


def a_folder(path: Path) -> None:
    write_small(path, world=3)


def another_folder(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "notes.txt").write_text("old")


def an_empty_folder(path: Path) -> None:
    path.mkdir()


def a_link_to_a_folder(path: Path) -> None:
    write_small(path.with_name("best.ckpt"))
    path.symlink_to("best.ckpt")


def a_link_to_a_file(path: Path) -> None:
    write_full({"a": 1}, path.with_name("best.ckpt"))
    path.symlink_to("best.ckpt")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("gone.ckpt")


BEFORE: list[Callable[[Path], None]] = [
    nothing,
    missing_folders,
    a_file,
    a_folder,
    another_folder,
    an_empty_folder,
    a_link_to_a_folder,
    a_link_to_a_file,
    a_dangling_link,
]


@pytest.fixture(params=[True, False], ids=["exchange", "no exchange"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With and without the system call that swaps two folders."""
    if not request.param:
        monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    return bool(request.param)


@pytest.mark.parametrize("before", BEFORE, ids=lambda f: f.__name__)
def test_the_new_one_is_there_and_nothing_else(
    tmp_path: Path, before: Callable[[Path], None], exchange: bool
) -> None:
    path = tmp_path / "run" / "x.ckpt"
    path.parent.mkdir()
    before(path)
    target = path.with_name("best.ckpt")
    kept = target.lstat() if os.path.lexists(target) else None
    write_small(path, scale=2.0)
    assert scale_at(path) == 2.0
    assert not path.is_symlink()
    others = set(os.listdir(path.parent)) - {"x.ckpt"}
    assert others == ({"best.ckpt"} if kept else set())
    if kept:
        assert target.lstat().st_ino == kept.st_ino
        if target.is_dir():
            assert scale_at(target) == 1.0
        else:
            assert read_checkpoint(target) == {"a": 1}


def test_folders_and_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_small(tmp_path / "x.ckpt")
    finally:
        os.umask(before)
    assert (tmp_path / "x.ckpt").stat().st_mode & 0o777 == 0o750
    for file in (tmp_path / "x.ckpt").iterdir():
        assert file.stat().st_mode & 0o777 == 0o640


def test_every_file_is_flushed_before_the_folder_gets_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    write_small(tmp_path / "x.ckpt")
    order = [e for e in events if not DRAFT.fullmatch(e)]
    assert set(order[:2]) == {"__0_0.distcp", "__1_0.distcp"}
    assert order[2:] == ["meta.pt", ".metadata", "manifest.json", "rename", tmp_path.name]
    assert [e for e in events if DRAFT.fullmatch(e)], "the draft's own table of names"


# -- a rank that cannot


def fails(error: BaseException) -> Callable[..., Any]:
    def instead(*_: Any, **__: Any) -> Any:
        raise error

    return instead


FULL = OSError(errno.ENOSPC, "No space left on device")
DENIED = PermissionError(errno.EACCES, "Permission denied")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
FAILURES: dict[str, tuple[int, Any, str, BaseException]] = {
    "rank 0 may not make the draft": (0, LocalFolder, "prepare", DENIED),
    "rank 0 may not open its file": (0, LocalFolder, "open", READ_ONLY),
    "rank 1 may not open its file": (1, LocalFolder, "open", READ_ONLY),
    "rank 0 finds the disk full": (0, DataFile, "write", FULL),
    "rank 1 finds the disk full": (1, DataFile, "write", FULL),
    "rank 2 finds the disk full when it flushes": (2, DataFile, "close", FULL),
    "rank 0 may not rename": (0, LocalFolder, "commit", DENIED),
    "rank 1 has an error of its own": (1, DataFile, "write_span", ValueError("planted")),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_on_one_rank_is_everybodys_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "x.ckpt"
    write_small(path)
    victim, owner, method, error = FAILURES[name]
    original = getattr(owner, method)
    ranks: dict[int, int] = {}

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ranks.get(threading.get_ident()) == victim:
            raise error
        return original(self, *args, **kwargs)

    def body(transport: Transport) -> str:
        ranks[threading.get_ident()] = transport.rank
        part = part_of(transport.rank, 3, scale=2.0)
        try:
            save_universal(part, folder_at(path), TransportGroup(transport))
        except CheckpointError as raised:
            return str(raised)
        return "ended"

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, broken)
        messages = run_virtual_ranks(3, body, timeout_s=20.0)
    for message in messages:
        assert f"{type(error).__name__}: {error} (rank {victim})" in message
        assert "x.ckpt" in message
        assert "unchanged" in message
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert scale_at(path) == 1.0
    write_small(path, world=3, scale=3.0)
    assert scale_at(path) == 3.0


def test_a_file_in_the_place_of_a_parent_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"(File|Not|Exists).*\(rank 0\).*file/x\.ckpt"):
        write_small(tmp_path / "file" / "x.ckpt")
    assert (tmp_path / "file").read_text() == ""


def test_without_the_exchange_a_failing_rename_brings_the_old_one_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    write_small(path)
    monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    rename = Path.rename
    calls = []

    def fails_second(self: Path, target: Path) -> Path:
        calls.append(self.name)
        if len(calls) == 2:  # aside, onto the name
            raise DENIED
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_second)
    with pytest.raises(CheckpointError, match="Permission denied"):
        write_small(path, scale=2.0)
    assert len(calls) > 2
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert scale_at(path) == 1.0


# -- a writer that is killed


def points() -> Iterator[tuple[Any, str]]:
    """Where the writer may be killed."""
    yield from ((LocalFolder, name) for name in ("prepare", "open", "commit"))
    yield from ((DataFile, name) for name in ("write", "close"))
    yield from ((Path, name) for name in ("mkdir", "rename", "unlink"))
    yield from ((os, name) for name in ("fsync",))
    yield from ((shutil, name) for name in ("rmtree",))
    yield (folder, "_exchange")
    yield (datafile_module, "bytes_of")


def killed_at(number: int, path: Path, count: Path | None = None) -> int:
    """Save in a process of its own that ends at the given point; return its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        torch.set_num_threads(1)
        seen = 0

        def hook(original: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == number:
                    os._exit(9)
                return original(*args, **kwargs)

            return run

        for owner, name in points():
            setattr(owner, name, hook(getattr(owner, name)))
        save_universal(part_of(0, 1, scale=2.0), folder_at(path), Solo())
        if count is not None:
            count.write_text(str(seen))
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize(
    "before", [nothing, a_file, a_folder, a_link_to_a_folder], ids=lambda f: f.__name__
)
def test_a_killed_writer_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, before: Callable[[Path], None]
) -> None:
    path = tmp_path / "run" / "x.ckpt"

    def start() -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        before(path)

    start()
    assert killed_at(-1, path, tmp_path / "count") == 0
    total = int((tmp_path / "count").read_text())
    assert total > 40
    outcomes = set()
    # Most points are writes of one data file; all that surround it are tried.
    numbers = [n for n in range(1, total + 1) if n < 8 or n > total - 40 or n % 7 == 0]
    for number in numbers:
        start()
        target = path.with_name("best.ckpt")
        assert killed_at(number, path) == 9
        left = set(os.listdir(path.parent)) - {"x.ckpt", "best.ckpt"}
        assert all(map(DRAFT.fullmatch, left)), left
        if target.exists():
            assert scale_at(target) == 1.0
        if not path.exists():
            outcomes.add("nothing")
            assert before in (nothing, a_link_to_a_folder), number
        elif path.is_file():
            outcomes.add("old")
            assert read_checkpoint(path) == {"a": 1}
        else:
            outcomes.add("new" if scale_at(path) == 2.0 else "old")
        write_small(path, scale=3.0)  # the next save
        assert scale_at(path) == 3.0
        assert set(os.listdir(path.parent)) <= {"x.ckpt", "best.ckpt"}, "drafts are removed"
    assert "new" in outcomes
    assert len(outcomes) >= 2


def test_drafts_of_other_names_are_left_alone(tmp_path: Path) -> None:
    LocalFolder(tmp_path / "y.ckpt").prepare(uuid.uuid4().hex)
    LocalFolder(tmp_path / "xx.ckpt").prepare(uuid.uuid4().hex)
    (tmp_path / ".x.ckpt.mine.tmp").write_text("")
    before = set(os.listdir(tmp_path))
    LocalFolder(tmp_path / "x.ckpt").prepare(uuid.uuid4().hex)
    assert len(os.listdir(tmp_path)) == 4
    write_small(tmp_path / "x.ckpt")
    assert set(os.listdir(tmp_path)) == before | {"x.ckpt"}


# -- removing


def test_removing_takes_the_mark_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_small(path)
    monkeypatch.setattr(shutil, "rmtree", fails(OSError("stopped")))
    with pytest.raises(OSError, match="stopped"):
        folder.remove_at(path)
    with pytest.raises(CheckpointError, match="manifest"):
        read_checkpoint(path)


def test_removing_a_link_keeps_its_target(tmp_path: Path) -> None:
    write_small(tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    folder.remove_at(tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == ["best.ckpt"]
    assert scale_at(tmp_path / "best.ckpt") == 1.0
    folder.remove_at(tmp_path / "best.ckpt")
    folder.remove_at(tmp_path / "never there")
    assert os.listdir(tmp_path) == []
