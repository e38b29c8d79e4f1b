"""A manifest whose checksum is right but whose content is not ends in an error that says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zeroplus.checkpoint import read_checkpoint, read_whole
from lightning_zeroplus.errors import CheckpointError
from tests.checkpoint.small_folder import rewrite, same_tensors, write_small


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_small(tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


def box(content: Any, key: str = "model.a", number: int = 0) -> Any:
    """Return ``[file, start, stop, body, offsets, sizes]``."""
    return content["tensors"][key][2][number]


def put(number: int, value: Any, key: str = "model.a") -> Callable[[Any], None]:
    return lambda content: box(content, key).__setitem__(number, value)


def rename(name: str) -> Callable[[Any], None]:
    """Have the data in a file of another name, listed with its checksums."""

    def change(content: Any) -> None:
        content["files"][name] = content["files"].pop("__0_0.distcp")
        for row in content["tensors"].values():
            for one in row[2]:
                one[0] = name if one[0] == "__0_0.distcp" else one[0]

    return change


def shape(key: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["tensors"][key].__setitem__(1, value)


def dtype(value: Any) -> Callable[[Any], None]:
    return lambda content: content["tensors"]["model.a"].__setitem__(0, value)


def sums(value: Any) -> Callable[[Any], None]:
    return lambda content: content["files"].__setitem__("__0_0.distcp", value)


def overlap(content: Any) -> None:
    rows = content["tensors"]["model.a"][2]
    rows[1][4:] = rows[0][4:]


def gap(content: Any) -> None:
    del content["tensors"]["model.a"][2][-1]


def twice(content: Any) -> None:
    content["tensors"]["model.c"][2] *= 2


def bytes_of_another(content: Any) -> None:
    """A box that claims more elements than its blob has: what follows would be read as weights."""
    row = box(content, "model.f")
    row[3] = row[2] - 8


def unlisted(content: Any) -> None:
    del content["files"]["__1_0.distcp"]


def without(key: str) -> Callable[[Any], None]:
    return lambda content: content.pop(key) and None


def no_such_key(content: Any) -> None:
    del content["tensors"]["model.f"]


HUGE = 10**30
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a file above the folder": rename("../x.distcp"),
    "an absolute file": rename("/etc/passwd"),
    "a file in a subfolder": rename("sub/x.distcp"),
    "a file with a backslash": rename("..\\x.distcp"),
    "a file on a drive": rename("c:x"),
    "a file with a zero byte": rename("x\0y"),
    "a file without a name": rename(""),
    "the folder itself": rename("."),
    "the folder above": rename(".."),
    "the manifest as data": rename("manifest.json"),
    "a file that is not listed": unlisted,
    "boxes that overlap": overlap,
    "boxes with a gap": gap,
    "one box twice": twice,
    "a box before the tensor": put(4, [-1, 0, 0]),
    "a box behind the tensor": put(4, [5, 0, 0]),
    "a box of fewer dimensions": put(4, [0, 0]),
    "a box of no size": put(5, [0, 7, 3]),
    "a box of negative size": put(5, [-2, 7, 3]),
    "a huge box": put(5, [HUGE, 7, 3]),
    "a box of text": put(4, ["0", "0", "0"]),
    "a box of fractions": put(4, [0.5, 0, 0]),
    "a box that is a number": put(4, 7),
    "a start behind the file": put(1, HUGE),
    "a stop behind the file": put(2, HUGE),
    "a negative start": put(1, -64),
    "elements before their blob": put(3, 0, "model.f"),
    "elements that are fewer than the box has": bytes_of_another,
    "an offset that is text": put(3, "x"),
    "an offset that is nothing": put(3, None),
    "a huge tensor": shape("model.a", [HUGE, 7, 3]),
    "a tensor of negative size": shape("model.a", [-5, -7, 3]),
    "an empty tensor of negative size": shape("model.e", [0, -3]),
    "an empty tensor of huge size": shape("model.e", [0, HUGE]),
    "a shape that is text": shape("model.a", "573"),
    "a shape that is a number": shape("model.a", 5),
    "an unknown dtype": dtype("float33"),
    "a function instead of a dtype": dtype("load"),
    "a dotted name instead of a dtype": dtype("hub.load"),
    "a dtype that is a list": dtype(["float32"]),
    "checksums that are too few": sums([10**9, [1]]),
    "a negative length": sums([-5, []]),
    "a length that is text": sums(["5", [1]]),
    "checksums that are no list": sums([5, 1]),
    "a file entry that is a number": sums(5),
    "no tensors": without("tensors"),
    "no files": without("files"),
    "no facts": without("facts"),
    "no version": without("version"),
    "no format": without("format"),
    "a later version": lambda content: content.__setitem__("version", 2),
    "a version that is text": lambda content: content.__setitem__("version", "1"),
    "a version that is nothing": lambda content: content.__setitem__("version", None),
    "tensors that are a list": lambda content: content.__setitem__("tensors", [1]),
    "files that are a list": lambda content: content.__setitem__("files", [1]),
    "facts that are a number": lambda content: content.__setitem__("facts", 1),
    "a tensor without a record": no_such_key,
    "a list": lambda _: [1, 2],
    "a number": lambda _: 7,
    "nothing": lambda _: b"null",
    "no JSON": lambda _: b"{",
    "deep nesting": lambda _: b"[" * 100_000 + b"]" * 100_000,
    "bytes that are no text": lambda _: b"\xff\xfe\xfd",
}


def use(path: Path) -> Any:
    """Open it and read every tensor."""
    return read_whole(read_checkpoint(path))


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_refused_by_a_checkpoint_error(path: Path, name: str) -> None:
    rewrite(path, CHANGES[name])
    with pytest.raises(CheckpointError, match=r"x\.ckpt"):
        use(path)


def test_a_manifest_that_is_written_again_unchanged_is_read(path: Path) -> None:
    rewrite(path, lambda content: None)
    assert same_tensors(use(path)["state_dict"])


def test_a_later_version_says_what_to_do(path: Path) -> None:
    rewrite(path, lambda content: content.__setitem__("version", 9))
    with pytest.raises(CheckpointError, match=r"version 1 at most, got version 9.*Update"):
        use(path)


def test_names_that_a_later_minor_version_may_add_do_no_harm(path: Path) -> None:
    rewrite(path, lambda content: content.__setitem__("more", {"a": 1}))
    assert same_tensors(use(path)["state_dict"])


def test_a_checksum_that_does_not_fit_is_found_before_the_content_is_parsed(path: Path) -> None:
    file = path / "manifest.json"
    raw = file.read_bytes()
    for at in range(0, len(raw), max(1, len(raw) // 40)):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(CheckpointError, match="manifest"):
            use(path)
    for end in (0, 1, 20, len(raw) // 2, len(raw) - 1):
        file.write_bytes(raw[:end])
        with pytest.raises(CheckpointError, match=r"manifest"):
            use(path)


def test_nothing_in_the_folder_but_dcps_metadata_is_a_pickle_of_classes(path: Path) -> None:
    json.loads((path / "manifest.json").read_bytes())
    meta = torch.load(path / "meta.pt", weights_only=True)
    assert meta["epoch"] == 3
