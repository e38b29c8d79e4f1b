"""`zeroplus checkpoint`: look into checkpoints, check, convert and export them.

The work is done elsewhere; here are the options, the progress bar and the text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from lightning_zeroplus.errors import ConfigError

if TYPE_CHECKING:
    from lightning_zeroplus.checkpoint import Summary, Tell

__all__ = ["add_checkpoint_command", "run_checkpoint"]

_SOURCE = "the checkpoint: a universal folder, one of torch.distributed.checkpoint, FSDP or "
_SOURCE += "DeepSpeed, or a file"
_TRUST = "allow objects of any class in the metadata; their code runs, so only for what you trust"


def add_checkpoint_command(commands: Any) -> None:
    """Add ``checkpoint`` with its sub-commands to those of `zeroplus`."""
    parser = ArgumentParser(description="Look into checkpoints, check, convert and export them.")
    commands.add_subcommand("checkpoint", parser, help="inspect, verify, convert or export one")
    kinds = parser.add_subcommands(required=True)
    for name, (fill, about, example) in _COMMANDS.items():
        one = ArgumentParser(description=about, epilog=f"Example: zeroplus checkpoint {example}")
        fill(one)
        one.add_argument("--trust", action="store_true", help=_TRUST)
        kinds.add_subcommand(name, one, help=about)


def run_checkpoint(chosen: Any) -> int:
    """Run the chosen sub-command and return the exit status.

    Raises:
        FileNotFoundError: there is no checkpoint.
        FileExistsError: there is something at the target.
        CheckpointError: the checkpoint is damaged, or the target cannot be written.
    """
    run: dict[str, Callable[[Any], int]] = {
        "inspect": _inspect,
        "verify": _verify,
        "convert": _convert,
        "export": _export,
    }
    return run[chosen.subcommand](chosen[chosen.subcommand])


# -- options


def _inspect_options(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=str, help=_SOURCE)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def _verify_options(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=str, help=_SOURCE)


def _convert_options(parser: ArgumentParser) -> None:
    parser.add_argument("source", type=str, help=_SOURCE)
    parser.add_argument("target", type=str, help="where the new one goes")
    parser.add_argument(
        "--to",
        choices=["universal", "full", "deepspeed"],
        default="universal",
        help="universal: a folder that torch.distributed.checkpoint reads too; full: one file, as "
        "under DDP; deepspeed: the universal folder of DeepSpeed",
    )
    parser.add_argument("--force", action="store_true", help="replace what is at the target")


def _export_options(parser: ArgumentParser) -> None:
    parser.add_argument("source", type=str, help=_SOURCE)
    parser.add_argument(
        "target", type=str, help="a folder for safetensors; a file if it ends in .safetensors"
    )
    parser.add_argument(
        "--format",
        choices=["safetensors", "torch"],
        default="safetensors",
        help="safetensors, with an index where there are several files; torch: a state dict",
    )
    parser.add_argument(
        "--dtype",
        choices=["saved", "fp64", "fp32", "bf16", "fp16"],
        default="saved",
        help="of floating-point tensors",
    )
    parser.add_argument(
        "--max-shard-size",
        type=str,
        default="5GB",
        help="of a file in a folder, as in 500MB or 2GiB",
    )
    parser.add_argument("--force", action="store_true", help="replace what is at the target")


_COMMANDS: dict[str, tuple[Callable[[ArgumentParser], None], str, str]] = {
    "inspect": (
        _inspect_options,
        "Print what is in a checkpoint and who wrote it.",
        "inspect last.ckpt --tensors",
    ),
    "verify": (
        _verify_options,
        "Read all of a checkpoint and compare its checksums; status 1 if it is damaged.",
        "verify last.ckpt",
    ),
    "convert": (
        _convert_options,
        "Write a checkpoint in another form, with optimizer states and all.",
        "convert last.ckpt plain.ckpt --to full",
    ),
    "export": (
        _export_options,
        "Write the weights alone, for other programs.",
        "export last.ckpt weights --dtype bf16",
    ),
}

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def parse_nbytes(text: str) -> int:
    """Return a size in bytes.

    >>> parse_nbytes("5GB"), parse_nbytes("2 MiB")
    (5000000000, 2097152)

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ConfigError(
            f"Expected a size such as 500MB or 2GiB, got {text!r} (--max-shard-size). Give one."
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


# -- what they do


def _inspect(chosen: Any) -> int:
    from lightning_zeroplus.checkpoint import describe_checkpoint

    summary = describe_checkpoint(chosen.path, weights_only=_weights_only(chosen))
    print(format_summary(summary, tensors=chosen.tensors))
    return 0


def _verify(chosen: Any) -> int:
    from lightning_zeroplus.checkpoint import verify_checkpoint

    with _bar("verify") as tell:
        found = verify_checkpoint(chosen.path, weights_only=_weights_only(chosen), tell=tell)
    read = format_nbytes(found.nbytes)
    if found.problems:
        print(f"{chosen.path} is damaged ({read} read):")
        for problem in found.problems:
            print(f"  {problem}")
        return 1
    what = "its checksums agree" if found.has_checksums else "not all of it has checksums"
    print(f"{chosen.path} can be read in full ({read}); {what}.")
    return 0


def _convert(chosen: Any) -> int:
    from lightning_zeroplus.checkpoint import convert_checkpoint

    with _bar("convert") as tell:
        convert_checkpoint(
            chosen.source,
            chosen.target,
            chosen.to,
            force=chosen.force,
            weights_only=_weights_only(chosen),
            tell=tell,
        )
    print(f"Wrote {chosen.target}.")
    return 0


def _export(chosen: Any) -> int:
    from lightning_zeroplus.checkpoint import export_weights

    with _bar("export") as tell:
        export_weights(
            chosen.source,
            chosen.target,
            format=chosen.format,
            dtype=chosen.dtype,
            max_shard_nbytes=parse_nbytes(chosen.max_shard_size),
            force=chosen.force,
            weights_only=_weights_only(chosen),
            tell=tell,
        )
    print(f"Wrote {chosen.target}.")
    return 0


def _weights_only(chosen: Any) -> bool | None:
    return False if chosen.trust else None


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Tell]:
    """Give what moves a progress bar on; there is none where nobody looks."""
    from tqdm import tqdm

    with tqdm(desc=what, unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def tell(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        yield tell


# -- text


def format_nbytes(nbytes: int) -> str:
    """Return a size for people.

    >>> format_nbytes(512), format_nbytes(1_234_000)
    ('512 B', '1.23 MB')
    """
    size = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


_FORMS = {
    "universal": "universal folder",
    "dcp": "folder of torch.distributed.checkpoint",
    "deepspeed": "folder of DeepSpeed",
    "file": "file",
}


def format_summary(summary: Summary, *, tensors: bool) -> str:
    """Return the text that ``inspect`` prints."""
    lines = [f"{summary.path}: {_FORMS.get(summary.form, summary.form)}"]
    lines += [f"  {name.replace('_', ' ')}: {value}" for name, value in summary.facts.items()]
    lines += ["", f"{'part':<32}{'tensors':>9}{'elements':>16}{'size':>12}"]
    for part, (count, numel, nbytes) in summary.parts().items():
        lines.append(f"{part:<32}{count:>9}{numel:>16,}{format_nbytes(nbytes):>12}")
    total = sum(nbytes for _, _, nbytes in summary.parts().values())
    lines += [f"{'all':<57}{format_nbytes(total):>12}", ""]
    for number, rates in enumerate(summary.groups):
        shown = ", ".join(f"{rate:.6g}" if isinstance(rate, float) else str(rate) for rate in rates)
        lines.append(f"optimizer {number}: groups with lr {shown}")
    lines.append(f"callbacks: {', '.join(summary.callbacks) or 'none'}")
    lines += [f"{key}: {kind}" for key, kind in summary.other.items()]
    return "\n".join([*lines, "", *_format_rows(summary, every=tensors)])


_SHOWN = 8


def _format_rows(summary: Summary, *, every: bool) -> list[str]:
    rows = summary.rows if every else summary.rows[:_SHOWN]
    width = max((len(row.name) for row in rows), default=0)
    lines = []
    for row in rows:
        same = f"  same as {row.same_as}" if row.same_as else ""
        lines.append(f"{row.name:<{width}}  {row.dtype:<9} {list(row.shape)}{same}")
    left = len(summary.rows) - len(rows)
    return [*lines, f"... and {left} more; --tensors lists all"] if left else lines
