"""Exported weights are read by the programs that they are for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_zeroplus.checkpoint import convert_checkpoint, export_weights, write_full
from lightning_zeroplus.errors import CheckpointError
from tests.checkpoint.converting import differences, make, peak_growth_mb


def stored() -> dict[str, Tensor]:
    """The weights that a safetensors file has: a tied one once."""
    return {name: value for name, value in make()["state_dict"].items() if name != "head.weight"}


@pytest.fixture(params=["file", "universal"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_full(make(), tmp_path / "source.ckpt")
    if request.param == "universal":
        convert_checkpoint(tmp_path / "source.ckpt", tmp_path / "folder.ckpt", "universal")
        return tmp_path / "folder.ckpt"
    return tmp_path / "source.ckpt"


def header_of(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    return json.loads(raw[8 : 8 + length])  # type: ignore[no-any-return]


def test_safetensors_reads_the_folder(source: Path) -> None:
    export_weights(source, target := source.with_name("out"))
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert differences(load_file(target / "model.safetensors"), stored()) == []
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_tensors_lie_on_multiples_of_their_elements(source: Path) -> None:
    export_weights(source, target := source.with_name("out.safetensors"))
    header = header_of(target)
    del header["__metadata__"]
    for row in header.values():
        numel = torch.Size(row["shape"]).numel()
        start, stop = row["data_offsets"]
        if numel:
            assert start % ((stop - start) // numel) == 0


def test_shards_have_an_index_as_on_the_hub(source: Path) -> None:
    export_weights(source, target := source.with_name("out"), max_shard_nbytes=200)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, 1 + len(files))
    ]
    assert len(files) > 2
    assert sorted(path.name for path in target.iterdir()) == [
        *files,
        "model.safetensors.index.json",
    ]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored().values())
    found: dict[str, Tensor] = {}
    for name in files:
        part = load_file(target / name)
        assert set(part) == {key for key, file in index["weight_map"].items() if file == name}
        assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= 200
        found |= part
    assert differences(found, stored()) == []


def test_a_name_of_one_file_is_one_file_whatever_its_size(source: Path) -> None:
    export_weights(source, target := source.with_name("w.safetensors"), max_shard_nbytes=1)
    assert differences(load_file(target), stored()) == []


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("fp64", torch.float64),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_floating_point_is_cast_and_nothing_else(
    source: Path, dtype: Any, wanted: torch.dtype, form: Any
) -> None:
    target = source.with_name("w.safetensors" if form == "safetensors" else "w.pt")
    export_weights(source, target, format=form, dtype=dtype)
    found = load_file(target) if form == "safetensors" else torch.load(target)
    cast = {
        name: value.to(wanted) if value.is_floating_point() else value
        for name, value in (stored() if form == "safetensors" else make()["state_dict"]).items()
    }
    assert differences(found, cast) == []


def test_a_large_tensor_is_cast_whole(tmp_path: Path) -> None:
    weights = {"w": torch.randn(3 * 2**20 + 7)}
    write_full(weights, tmp_path / "state.pt")
    export_weights(tmp_path / "state.pt", tmp_path / "w.safetensors", dtype="bf16")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], weights["w"].bfloat16())


def test_a_state_dict_keeps_ties_and_loads_into_the_module(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    write_full({"state_dict": module.state_dict()}, tmp_path / "a.ckpt")
    convert_checkpoint(tmp_path / "a.ckpt", tmp_path / "u.ckpt", "universal")
    export_weights(tmp_path / "u.ckpt", tmp_path / "w.pt", format="torch")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert found["2.weight"].data_ptr() == found["0.weight"].data_ptr()
    assert differences(found, dict(module.state_dict())) == []
    nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).load_state_dict(found)


def test_views_are_written_without_what_is_behind_them(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100_000)[:5], "b": torch.ones(4, 6).t()}, tmp_path / "s.pt")
    export_weights(tmp_path / "s.pt", tmp_path / "w.pt", format="torch")
    assert (tmp_path / "w.pt").stat().st_size < 4000
    assert torch.load(tmp_path / "w.pt")["b"].shape == (6, 4)


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    write_full({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "s.pt")
    message = r"got w of torch\.complex128 .* Export with the format torch\."
    with pytest.raises(CheckpointError, match=message):
        export_weights(tmp_path / "s.pt", tmp_path / "out")
    export_weights(tmp_path / "s.pt", tmp_path / "w.pt", format="torch")
    assert torch.load(tmp_path / "w.pt")["w"].dtype == torch.complex128


def test_a_state_dict_gets_no_name_that_says_safetensors(source: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"Expected a name for a state dict, .*w\.safetensors"
    ):
        export_weights(source, source.with_name("w.safetensors"), format="torch")


def test_something_else_in_the_file_is_named(tmp_path: Path) -> None:
    write_full({"results": [1, 2], "w": torch.ones(2)}, tmp_path / "s.pt")
    with pytest.raises(CheckpointError, match=re.escape("got 'results', 'w' (")):
        export_weights(tmp_path / "s.pt", tmp_path / "out")


@pytest.mark.parametrize("options", ['dtype="bf16"', 'format="torch"', "max_shard_nbytes=10**8"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, options: str) -> None:
    weights = {f"w{n}": torch.full((2**22,), float(n)) for n in range(12)}  # 16 MB each
    write_full({"state_dict": weights}, tmp_path / "large.ckpt")
    convert_checkpoint(tmp_path / "large.ckpt", tmp_path / "universal.ckpt", "universal")
    act = f"export_weights(source, target, force=True, {options})"
    assert peak_growth_mb(act, tmp_path / "universal.ckpt", tmp_path / "out") < 64
