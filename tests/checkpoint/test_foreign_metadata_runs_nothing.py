"""DCP's `.metadata` is a pickle: only classes that belong there are made, and nothing is run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from lightning_zeroplus.checkpoint import read_checkpoint, read_whole
from lightning_zeroplus.checkpoint.checksum import Checksum
from lightning_zeroplus.errors import CheckpointError
from tests.checkpoint.small_folder import TENSORS, rewrite, same_tensors, write_small

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of a process without a group


@pytest.fixture
def path(tmp_path: Path) -> Path:
    dcp.save({"model": TENSORS}, checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


@pytest.fixture
def bait(tmp_path: Path) -> Iterator[Path]:
    """What the pickles below try to make; nobody may."""
    file = tmp_path / "was here"
    yield file
    assert not file.exists()


def use(path: Path) -> Any:
    return read_whole(read_checkpoint(path))


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.row = function, args

    def __reduce__(self) -> Any:
        return self.row


def call_by_text(module: str, name: str, argument: str) -> bytes:
    """Return protocol 0, in which a name may be anything."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


def call_by_stack(module: str, name: str, argument: str) -> bytes:
    """Return protocol 4, in which a name may have dots."""
    out = io.BytesIO()
    pickler = pickle._Pickler(out, protocol=4)  # type: ignore[attr-defined]
    pickler.write(pickle.PROTO + b"\x04")
    for text in (module, name):
        pickler.save(text)
    pickler.write(pickle.STACK_GLOBAL)
    pickler.write(pickle.MARK)
    pickler.save(argument)
    pickler.write(pickle.TUPLE + pickle.REDUCE + pickle.STOP)
    return out.getvalue()


NAMES = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("builtins", "open"),
    ("subprocess", "Popen"),
    ("functools", "partial"),
    ("operator", "attrgetter"),
    ("importlib", "import_module"),
    ("torch", "load"),
    ("torch", "save"),
    ("torch", "os.system"),
    ("torch", "hub.load"),
    ("torch.hub", "load"),
    ("torch.serialization", "load"),
    ("torch.serialization", "os.system"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
    ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
    ("pathlib", "os.system"),
    ("pathlib", "Path.touch"),
    ("pathlib", "Path.unlink"),
    ("collections", "namedtuple"),
    ("", ""),
]


@pytest.mark.parametrize("build", [call_by_text, call_by_stack], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("module", "name"), NAMES, ids=".".join)
def test_any_other_class_is_refused_by_name(
    path: Path, bait: Path, build: Callable[..., bytes], module: str, name: str
) -> None:
    (path / ".metadata").write_bytes(build(module, name, f"touch '{bait}'"))
    with pytest.raises(CheckpointError) as raised:
        use(path)
    if module:
        assert f"{module}.{name}" in str(raised.value)
        assert str(path) in str(raised.value)


def test_a_call_inside_of_good_metadata_is_refused(path: Path, bait: Path) -> None:
    for place in ("planner_data", "storage_data", "state_dict_metadata", "storage_meta"):
        metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
        setattr(metadata, place, {"x": Calls(Path.touch, bait)})
        (path / "bad").write_bytes(pickle.dumps(metadata))
        raw = (path / ".metadata").read_bytes()
        (path / ".metadata").write_bytes((path / "bad").read_bytes())
        with pytest.raises(CheckpointError, match=r"getattr|touch"):
            use(path)
        (path / ".metadata").write_bytes(raw)


def test_a_call_inside_of_a_data_file_is_refused(path: Path, bait: Path) -> None:
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    out = io.BytesIO()
    torch.save({"x": Calls(Path.touch, bait)}, out)
    (path / "evil.distcp").write_bytes(out.getvalue())
    for index in metadata.storage_data:
        metadata.storage_data[index] = _StorageInfo("evil.distcp", 0, len(out.getvalue()))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises((CheckpointError, pickle.UnpicklingError)):
        use(path)


def test_the_metadata_of_our_own_folders_is_not_even_unpickled(tmp_path: Path, bait: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_small(path)
    evil = pickle.dumps(Calls(Path.touch, bait))
    (path / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"\.metadata has"):
        use(path)
    right = Checksum()
    right.update(evil)
    sums = [len(evil), [right.value]]
    rewrite(path, lambda content: content["files"].__setitem__(".metadata", sums))
    assert same_tensors(use(path)["state_dict"])


def test_classes_in_lightnings_metadata_are_refused_unless_allowed(path: Path, bait: Path) -> None:
    torch.save({"x": Calls(Path.touch, bait)}, path / "meta.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        use(path)


# -- paths


def moved(path: Path, name: str) -> None:
    """Have the metadata name another file."""
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = _StorageInfo(name, info.offset, info.length)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "name",
    ["../y.distcp", "a/../../y.distcp", "{absolute}", "..\\y.distcp", "a\\..\\..\\y", "..", ""],
)
def test_files_outside_of_the_folder_are_refused(path: Path, tmp_path: Path, name: str) -> None:
    (source,) = path.glob("*.distcp")
    source.rename(tmp_path / "y.distcp")
    moved(path, name.replace("{absolute}", str(tmp_path / "y.distcp")))
    with pytest.raises(CheckpointError, match="files of the checkpoint's folder"):
        use(path)


def test_files_in_folders_below_are_read(path: Path) -> None:
    (source,) = path.glob("*.distcp")
    (path / "sub").mkdir()
    source.rename(path / "sub" / "x.distcp")
    moved(path, "sub/x.distcp")
    assert torch.equal(use(path)["state_dict"]["a"], TENSORS["a"])


# -- content


def edit(path: Path, change: Callable[[Metadata], Any]) -> None:
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    changed = change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))


def chunks(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["model.a"].chunks  # type: ignore[union-attr]


def chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def a_gap(metadata: Metadata) -> None:
    chunks(metadata)[:] = [chunk([0, 0, 0], [4, 7, 3])]


def no_chunk(metadata: Metadata) -> None:
    chunks(metadata).clear()


def a_larger_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a"].size = torch.Size([6, 7, 3])  # type: ignore[union-attr]
    chunks(metadata)[:] = [chunk([0, 0, 0], [6, 7, 3])]


def no_place(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex("model.a", torch.Size([0, 0, 0]))]


def behind_the_end(metadata: Metadata) -> None:
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = _StorageInfo(info.relative_path, 10**9, info.length)


def negative(metadata: Metadata) -> None:
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = _StorageInfo(info.relative_path, -5, info.length)


def another_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a"].properties.dtype = torch.float64  # type: ignore[union-attr]


CONTENTS: dict[str, Callable[[Metadata], Any]] = {
    "a tensor with a gap": a_gap,
    "a tensor without data": no_chunk,
    "a chunk that is larger than its data": a_larger_chunk,
    "data without a place": no_place,
    "a place behind the end of the file": behind_the_end,
    "a place before the file": negative,
    "data of another dtype": another_dtype,
    "no tensors": lambda metadata: metadata.__setattr__("state_dict_metadata", None),
    "no places": lambda metadata: metadata.__setattr__("storage_data", None),
    "a list": lambda metadata: [1, 2],
    "nothing": lambda metadata: {},
}


@pytest.mark.parametrize("name", CONTENTS)
def test_content_that_does_not_fit_is_an_error(path: Path, name: str) -> None:
    edit(path, CONTENTS[name])
    with pytest.raises(CheckpointError, match=str(path)):
        use(path)


def test_damaged_files_are_named(path: Path) -> None:
    (source,) = path.glob("*.distcp")
    whole, metadata = source.read_bytes(), (path / ".metadata").read_bytes()
    for raw in (whole[:-40], whole[: len(whole) // 2], b""):
        source.write_bytes(raw)
        with pytest.raises(CheckpointError, match=source.name):
            use(path)
    source.unlink()
    with pytest.raises((CheckpointError, FileNotFoundError), match=source.name):
        use(path)
    source.write_bytes(whole)
    for raw in (metadata[:-1], metadata[:50], b"", b"no pickle"):
        (path / ".metadata").write_bytes(raw)
        with pytest.raises(CheckpointError, match="metadata"):
            use(path)
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError):
        use(path)
    (path / ".metadata").write_bytes(metadata)
    assert torch.equal(use(path)["state_dict"]["a"], TENSORS["a"])
