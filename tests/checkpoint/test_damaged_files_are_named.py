from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from lightning_zeroplus.checkpoint import read_full, write_full
from lightning_zeroplus.errors import CheckpointError


class Custom:
    pass


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*no\.ckpt"):
        read_full(tmp_path / "no.ckpt")


@pytest.mark.parametrize("kept", [0, 1, 3, 100, 0.5, 0.99])
def test_a_file_that_ends_early_is_a_checkpoint_error(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "x.ckpt"
    write_full({"a": torch.randn(1000)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(CheckpointError, match=r"Expected a complete checkpoint file.*x\.ckpt"):
        read_full(path)


def test_a_file_of_other_content_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_text("not a checkpoint at all\n" * 20)
    with pytest.raises(CheckpointError, match="unreadable bytes"):
        read_full(path)


def test_a_folder_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got a folder"):
        read_full(tmp_path)


def test_content_that_is_not_allowed_keeps_the_error_that_says_how_to_allow_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.ckpt"
    write_full({"a": Custom()}, path)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        read_full(path)
    assert isinstance(read_full(path, weights_only=False)["a"], Custom)


def test_files_from_before_zip_archives_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save({"a": torch.arange(4)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(read_full(path)["a"], torch.arange(4))
