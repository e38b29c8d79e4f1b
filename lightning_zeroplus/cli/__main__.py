"""Entry point of the command `zeroplus`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from lightning_zeroplus.cli.checkpoint import add_checkpoint_command, run_checkpoint
from lightning_zeroplus.cli.demo import run_demo
from lightning_zeroplus.errors import ZeroPlusError

__all__ = ["main"]

_DEMO_EXAMPLE = "Example: zeroplus demo --steps 350 --folder zeroplus-demo"


def build_parser() -> ArgumentParser:
    """Return the parser of `zeroplus` with all its sub-commands."""
    parser = ArgumentParser(prog="zeroplus", description="ZeRO sharding for PyTorch Lightning.")
    commands = parser.add_subcommands(required=True)
    demo = ArgumentParser(
        description="Train a small GPT at stage 3 on two CPU processes, resume it on one, and "
        "print what each stage keeps in memory.",
        epilog=_DEMO_EXAMPLE,
    )
    demo.add_function_arguments(run_demo)
    commands.add_subcommand("demo", demo, help="train, save, resume and measure a small GPT")
    add_checkpoint_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit status: 0 when it did what it says."""
    chosen = build_parser().parse_args(argv)
    try:
        if chosen.subcommand == "checkpoint":
            return run_checkpoint(chosen.checkpoint)
        run_demo(**chosen.demo.as_dict())
    except (ZeroPlusError, OSError) as error:
        print(f"zeroplus {chosen.subcommand}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
