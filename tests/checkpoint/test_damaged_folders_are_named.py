"""Every way in which a folder can be incomplete or damaged is an error that says which file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_zeroplus.checkpoint import read_checkpoint, read_whole
from lightning_zeroplus.errors import CheckpointError
from tests.checkpoint.small_folder import same_tensors, write_small

WORLDS = [1, 2, 3]


def truncate(name: str, kept: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / name
        os.truncate(file, int(file.stat().st_size * kept))

    return damage


def lengthen(path: Path) -> None:
    with (path / "__1_0.distcp").open("ab") as file:
        file.write(b"\0")


def lose(*names: str) -> Callable[[Path], None]:
    return lambda path: [(path / name).unlink() for name in names] and None


def flip(name: str, at: float = 0.5) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / name
        raw = bytearray(file.read_bytes())
        raw[int((len(raw) - 1) * at)] ^= 0x10
        file.write_bytes(raw)

    return damage


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def half_copied(path: Path) -> None:
    """The names come in the order of the alphabet; the copy was stopped after the first data."""
    for name in sorted(os.listdir(path))[2:]:
        (path / name).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "data truncated": (truncate("__1_0.distcp", 0.9), r"__1_0\.distcp has \d+ bytes instead of"),
    "data emptied": (truncate("__0_0.distcp", 0), r"__0_0\.distcp has 0 bytes instead of"),
    "data too long": (lengthen, r"__1_0\.distcp has \d+ bytes instead of"),
    "data missing": (lose("__1_0.distcp"), r"__1_0\.distcp is missing"),
    "all data missing": (lose("__0_0.distcp", "__1_0.distcp"), r"__0_0.*missing.*__1_0.*missing"),
    "data flipped": (flip("__0_0.distcp"), r"__0_0\.distcp is damaged"),
    "padding of data flipped": (flip("__1_0.distcp", 1.0), r"__1_0\.distcp is damaged"),
    "metadata flipped": (flip("meta.pt"), r"meta\.pt is damaged"),
    "metadata missing": (lose("meta.pt"), r"meta\.pt is missing"),
    "metadata truncated": (truncate("meta.pt", 0.5), r"meta\.pt has \d+ bytes instead of"),
    "DCP's metadata flipped": (flip(".metadata"), r"\.metadata is damaged"),
    "DCP's metadata missing": (lose(".metadata"), r"\.metadata is missing"),
    "manifest flipped": (flip("manifest.json"), r"manifest"),
    "manifest truncated": (truncate("manifest.json", 0.5), r"manifest"),
    "manifest emptied": (truncate("manifest.json", 0), r"manifest"),
    "manifest missing": (lose("manifest.json"), r"without its manifest\.json"),
    "manifest and DCP's metadata missing": (
        lose("manifest.json", ".metadata"),
        r"without its manifest\.json",
    ),
    "only data left": (
        lose("manifest.json", ".metadata", "meta.pt"),
        r"without its manifest\.json",
    ),
    "nothing left": (empty, r"empty folder"),
    "half copied": (half_copied, r"without its manifest\.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_it_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.ckpt"
    write_small(path)
    damage, cause = DAMAGES[name]
    damage(path)
    with pytest.raises(CheckpointError, match=rf"(?s){cause}.*x\.ckpt|x\.ckpt.*{cause}"):
        read_checkpoint(path)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["data flipped", "metadata flipped", "DCP's metadata flipped"])
def test_ranks_that_share_the_check_miss_nothing(tmp_path: Path, name: str, world: int) -> None:
    path = tmp_path / "x.ckpt"
    write_small(path, world=2)
    DAMAGES[name][0](path)
    found = []
    for rank in range(world):
        try:
            read_checkpoint(path, rank=rank, world_size=world)
        except CheckpointError as error:
            found.append(str(error))
    assert len(found) == 1


def test_no_flipped_byte_of_any_file_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_small(path)
    for name in os.listdir(path):
        whole = (path / name).read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 60)):
            (path / name).write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
            with pytest.raises(CheckpointError):
                read_checkpoint(path)
        (path / name).write_bytes(whole)
    assert same_tensors(read_whole(read_checkpoint(path))["state_dict"])


def test_all_damages_are_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_small(path, world=3)
    flip("__0_0.distcp")(path)
    lose("__1_0.distcp")(path)
    truncate("__2_0.distcp", 0.5)(path)
    with pytest.raises(CheckpointError, match=r"__0_0.*damaged") as raised:
        read_checkpoint(path)
    assert "__1_0.distcp is missing" in str(raised.value)
    assert "__2_0.distcp has" in str(raised.value)


def test_a_copy_under_another_name_is_a_checkpoint(tmp_path: Path) -> None:
    write_small(tmp_path / "x.ckpt")
    shutil.copytree(tmp_path / "x.ckpt", tmp_path / "elsewhere" / "any name")
    shutil.rmtree(tmp_path / "x.ckpt")
    found = read_whole(read_checkpoint(tmp_path / "elsewhere" / "any name"))
    assert same_tensors(found["state_dict"])
    assert found["epoch"] == 3


def test_a_folder_of_other_things_is_named(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("meow")
    with pytest.raises(CheckpointError, match=r"a folder of cat\.png"):
        read_checkpoint(tmp_path / "photos")


def test_nothing_at_the_path_is_a_file_not_found_error(tmp_path: Path) -> None:
    (tmp_path / "dangling.ckpt").symlink_to("gone.ckpt")
    for name in ("no.ckpt", "dangling.ckpt"):
        with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*ckpt"):
            read_checkpoint(tmp_path / name)
