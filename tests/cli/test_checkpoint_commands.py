"""`zeroplus checkpoint` says what is in one, tells sound from damaged, and writes others."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from lightning_zeroplus.checkpoint import convert_checkpoint, form_of, write_full
from lightning_zeroplus.cli.__main__ import main
from lightning_zeroplus.cli.checkpoint import format_nbytes, parse_nbytes
from lightning_zeroplus.errors import ConfigError
from tests.checkpoint.converting import differences, make
from tests.checkpoint.fixtures.deepspeed import unpack

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    facts = {"stage": 3, "world_size": 2, "global_step": 6, "epoch": 2, "module": "Net"}
    whole = {**make(), "zeroplus": {"facts": facts}}
    write_full(whole, tmp_path / "file.ckpt")
    convert_checkpoint(tmp_path / "file.ckpt", tmp_path / "universal.ckpt", "universal")
    return tmp_path / "universal.ckpt"


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# -- inspect


def test_inspect_says_who_wrote_it_and_how_large_each_part_is(
    universal: Path, capsys: Captured
) -> None:
    assert main(["checkpoint", "inspect", str(universal)]) == 0
    printed = capsys.readouterr().out
    rows = cells(printed)
    assert printed.startswith(f"{universal}: universal folder\n")
    for row in ("stage: 3", "world size: 2", "global step: 6", "epoch: 2", "module: Net"):
        assert f"  {row}\n" in printed
    # embed 15, conv 120 + 2 in bf16, scale 1
    assert ["weights", "4", "138", "548", "B"] in rows
    # frozen 7, empty 0, mean 2, two counters of 8 bytes, mask 2 bytes, 3 complex
    assert ["buffers", "and", "untrained", "weights", "7", "16", "78", "B"] in rows
    assert ["optimizer", "0", "states", "9", "277", "1.11", "KB"] in rows
    assert ["other", "tensors", "3", "11,802", "47.21", "KB"] in rows
    assert ["all", "48.94", "KB"] in rows
    assert "optimizer 0: groups with lr 0.1, 0.02\n" in printed
    assert "callbacks: EMA\n" in printed
    assert "lr_schedulers: 1 of list\n" in printed
    assert "hyper_parameters: {width}\n" in printed
    assert "more; --tensors lists all" in printed


def test_inspect_lists_every_tensor_when_asked(universal: Path, capsys: Captured) -> None:
    assert main(["checkpoint", "inspect", str(universal), "--tensors"]) == 0
    printed = capsys.readouterr().out
    rows = cells(printed)
    assert ["conv.weight", "float32", "[2,", "3,", "4,", "5]"] in rows
    assert ["conv.bias", "bfloat16", "[2]"] in rows
    assert ["scale", "float32", "[]"] in rows
    assert ["head.weight", "float32", "[5,", "3]", "same", "as", "embed.weight"] in rows
    assert ["optimizer_0.state.conv.bias.step", "float32", "[]"] in rows
    assert ["callbacks.EMA.shadow.0", "float32", "[90,", "60]"] in rows
    assert "--tensors lists all" not in printed


def test_inspect_knows_every_form(tmp_path: Path, universal: Path, capsys: Captured) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert_checkpoint(universal, tmp_path / "plain.ckpt", "full")
    torch.save({"w": torch.ones(3)}, tmp_path / "state.pt")
    deepspeed = unpack(tmp_path / "deepspeed")
    wanted = {
        tmp_path / "dcp": ("folder of torch.distributed.checkpoint", "12 B"),
        tmp_path / "plain.ckpt": ("file", "48.94 KB"),
        tmp_path / "state.pt": ("file", "12 B"),
        deepspeed / "s1_fp32/ckpt": ("folder of DeepSpeed", "1.22 MB"),
        deepspeed / "s3_fp32/universal": ("folder of DeepSpeed", "1.22 MB"),
    }
    for path, (form, size) in wanted.items():
        assert main(["checkpoint", "inspect", str(path)]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{path}: {form}\n")
        assert ["all", *size.split()] in cells(printed), printed
    assert "stage: 3" in printed
    assert "world size: 2" in printed
    assert "deepspeed: 0.19.8" in printed


def test_inspect_reads_no_tensor(universal: Path, capsys: Captured) -> None:
    damage(universal / "__0_0.distcp", 6000)
    assert main(["checkpoint", "inspect", str(universal)]) == 0
    assert ["all", "48.94", "KB"] in cells(capsys.readouterr().out)


# -- verify


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_verify_says_that_a_sound_checkpoint_is_sound(universal: Path, capsys: Captured) -> None:
    assert main(["checkpoint", "verify", str(universal)]) == 0
    nbytes = sum(
        path.stat().st_size for path in universal.iterdir() if path.name != "manifest.json"
    )
    assert capsys.readouterr().out == (
        f"{universal} can be read in full ({format_nbytes(nbytes)}); its checksums agree.\n"
    )


def test_verify_names_the_bad_file_and_where(universal: Path, capsys: Captured) -> None:
    size = (universal / "__0_0.distcp").stat().st_size
    damage(universal / "__0_0.distcp", 6000)
    (universal / "meta.pt").unlink()
    with (universal / ".metadata").open("ab") as file:
        file.write(b"x")
    assert main(["checkpoint", "verify", str(universal)]) == 1
    printed = capsys.readouterr().out
    assert f"{universal} is damaged" in printed
    assert f"  __0_0.distcp is damaged between bytes 0 and {size}\n" in printed
    assert "  meta.pt is missing\n" in printed
    assert "  .metadata has " in printed


def test_verify_names_a_damaged_manifest(universal: Path, capsys: Captured) -> None:
    damage(universal / "manifest.json", 200)
    assert main(["checkpoint", "verify", str(universal)]) == 1
    assert "Expected a whole manifest" in capsys.readouterr().err


def test_verify_compares_the_checksums_of_a_file(universal: Path, capsys: Captured) -> None:
    convert_checkpoint(universal, target := universal.with_name("new"), "full")
    values = make()["optimizer_states"][0]["state"]["conv.weight"]["exp_avg"].numpy().tobytes()
    check_archive(target, target, values, capsys)


def test_verify_compares_the_checksums_of_deepspeeds_files(
    tmp_path: Path, capsys: Captured
) -> None:
    folder = unpack(tmp_path) / "s3_fp32" / "universal"
    file = folder / "zero" / "wpe.weight" / "exp_avg.pt"
    check_archive(folder, file, torch.load(file).numpy().tobytes(), capsys)


def check_archive(path: Path, file: Path, values: bytes, capsys: Captured) -> None:
    """Damage one byte of ``values`` in ``file``, and have it found."""
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert "its checksums agree" in capsys.readouterr().out
    start = file.read_bytes().index(values)
    damage(file, start + 8)
    assert main(["checkpoint", "verify", str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"  {file.name} is damaged between bytes {start} and {start + len(values)}" in printed


def test_verify_says_where_there_are_no_checksums(tmp_path: Path, capsys: Captured) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    torch.save({"w": torch.ones(3)}, tmp_path / "new.pt")
    torch.serialization.set_crc32_options(True)
    for name in ("dcp", "old.pt", "new.pt"):
        assert main(["checkpoint", "verify", str(tmp_path / name)]) == 0
        printed = capsys.readouterr().out
        assert "can be read in full" in printed
        assert "; not all of it has checksums" in printed
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:50])
    assert main(["checkpoint", "verify", str(tmp_path / "dcp")]) == 1
    assert "\n  model.w: " in capsys.readouterr().out


def test_verify_names_a_cut_file(tmp_path: Path, capsys: Captured) -> None:
    torch.save({"w": torch.ones(300)}, path := tmp_path / "w.pt")
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert "w.pt cannot be read: File is not a zip file" in capsys.readouterr().out


# -- convert and export


@pytest.mark.parametrize(
    ("to", "form"), [("universal", "universal"), ("full", "file"), ("deepspeed", "deepspeed")]
)
def test_convert_writes_what_is_asked_for(
    universal: Path, to: str, form: str, capsys: Captured
) -> None:
    target = universal.with_name("new.ckpt")
    command = ["checkpoint", "convert", str(universal), str(target), "--to", to]
    assert main(command) == 0
    assert capsys.readouterr().out == f"Wrote {target}.\n"
    assert form_of(target) == form
    assert main(command) == 1
    assert "--force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0


def test_export_writes_shards_in_the_dtype_that_is_asked_for(universal: Path) -> None:
    target = universal.with_name("weights")
    options = ["--dtype", "bf16", "--max-shard-size", "0.1KB"]
    assert main(["checkpoint", "export", str(universal), str(target), *options]) == 0
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 1
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert found["embed.weight"].dtype == torch.bfloat16
    assert found["norm.seen"].dtype == torch.int64


def test_export_writes_a_state_dict(universal: Path) -> None:
    target = universal.with_name("weights.pt")
    command = ["checkpoint", "export", str(universal), str(target), "--format", "torch"]
    assert main(command) == 0
    assert differences(torch.load(target), make()["state_dict"]) == []


@pytest.mark.parametrize("size", ["", "5XB", "0", "-1GB", "GB"])
def test_a_size_that_is_none_is_named(universal: Path, size: str, capsys: Captured) -> None:
    target = str(universal.with_name("weights"))
    command = ["checkpoint", "export", str(universal), target, f"--max-shard-size={size}"]
    assert main(command) == 1
    assert f"got {size!r} (--max-shard-size)" in capsys.readouterr().err


def test_sizes_are_read_as_they_are_written() -> None:
    sizes = {"1": 1, "500MB": 500_000_000, "2 GiB": 2 * 2**30, "1.5kb": 1500, "1TB": 10**12}
    assert {text: parse_nbytes(text) for text in sizes} == sizes
    with pytest.raises(ConfigError):
        parse_nbytes("1e3")


class Odd:
    """A class that no checkpoint may have unless it is trusted."""


@pytest.mark.parametrize("command", ["inspect", "convert", "export"])
def test_objects_of_other_classes_need_trust(
    tmp_path: Path, command: str, capsys: Captured
) -> None:
    torch.save({**make(), "odd": Odd()}, tmp_path / "odd.ckpt")
    words = ["checkpoint", command, str(tmp_path / "odd.ckpt")]
    words += [] if command == "inspect" else [str(tmp_path / "new")]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert f"got the class {__name__}.Odd" in told
    assert "--trust" in told
    assert main([*words, "--trust"]) == 0


# -- as a command


@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "export"])
def test_help_shows_an_example(command: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", command, "--help"])
    assert ended.value.code == 0
    assert f"Example: zeroplus checkpoint {command} last.ckpt" in capsys.readouterr().out


def test_errors_end_with_status_1_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_zeroplus.cli", "checkpoint"]
    (tmp_path / "empty").mkdir()
    for words, told in (
        (["inspect", "nowhere.ckpt"], "Checkpoint file not found: nowhere.ckpt"),
        (["verify", "empty"], "an empty folder (empty)"),
    ):
        done = subprocess.run(
            [*command, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("zeroplus checkpoint: ")
        assert told in done.stderr
        assert "Traceback" not in done.stderr
