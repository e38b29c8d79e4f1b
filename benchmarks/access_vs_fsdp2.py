"""How ways of touching parameters train under stage 3 and under FSDP2, as a table.

    python -m benchmarks.access_vs_fsdp2
    python -m benchmarks.access_vs_fsdp2 --write docs/explanation/access.md
    python -m benchmarks.access_vs_fsdp2 --case "weight_norm"
    python -m benchmarks.access_vs_fsdp2 --results access.json   # goes on where it stopped

Every case of `tests/local/access_cases.py` trains a few steps in two processes over Gloo, under
stage 3 with both settings of `unshard_on_access` and under `fully_shard`, and is compared with
plain PyTorch in one process. A case that raises, hangs or kills a process ends the processes; the
next one starts with new ones.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_zeroplus.comm import c10d_transport
from tests.dist_pool import RankError, RankPool, RankTimeout
from tests.local.access_cases import CASES, Scene, ShardedScene, run_case

WORLD = 2
LIMIT_S = 120.0
VARIANTS = {
    "gather": 'stage 3, `"gather"`',
    "error": 'stage 3, `"error"`',
    "fsdp2": "FSDP2",
}
_MARKS = ("<!-- table: benchmarks/access_vs_fsdp2.py -->", "<!-- end of table -->")


class FSDP2Scene(Scene):
    """One rank of `fully_shard`: blocks and the root's children are units, as at stage 3."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world

    def shard(self, module: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (self.world,))
        for child in _units(module):
            fully_shard(child, mesh=mesh)
        fully_shard(module, mesh=mesh)

    def whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def mean(self, value: Tensor) -> Tensor:
        value = self.whole(value)
        dist.all_reduce(value)
        return value / self.world

    def finish(self, module: nn.Module) -> None:
        for name, param in module.named_parameters():
            self.keep(f"weight of {name}", param.detach())


def _units(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += child.children()
        elif not isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            found.append(child)
    unique = dict.fromkeys(found)
    return [unit for unit in unique if any(True for _ in unit.parameters())]


def train_on_rank(rank: int, world: int, name: str, variant: str) -> str:
    """Train one case; return `equal`, or what differs most from plain PyTorch."""
    warnings.simplefilter("ignore")
    expected = run_case(name, Scene())
    scene: Scene
    if variant == "fsdp2":
        scene = FSDP2Scene(rank, world)
    else:
        transport = c10d_transport(timeout=timedelta(seconds=LIMIT_S / 2))
        scene = ShardedScene(transport, 3, on_access="gather" if variant == "gather" else "error")
    found = run_case(name, scene)
    dist.barrier()
    return _verdict(found, expected, CASES[name].tolerance)


def _verdict(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> str:
    if found.keys() != expected.keys():
        return "**different** (other parameters)"
    worst = 0.0
    for what, value in expected.items():
        mine = found[what]
        if mine.shape != value.shape or mine.dtype != value.dtype:
            return "**different** (shape or type)"
        if not torch.allclose(mine, value, rtol=rtol, atol=rtol / 10):
            worst = max(worst, float((mine - value).abs().max()))
    return f"**different** (by {worst:.1g})" if worst else "equal"


def judge(pool: RankPool, name: str, variant: str) -> str:
    """Return the verdict of one case under one variant."""
    try:
        verdicts = pool.run(train_on_rank, name, variant, timeout=LIMIT_S)
    except RankTimeout:
        return "**hang**"
    except RankError as error:
        return "**crash**" if error.error_type == "death" else f"error: {_last_line(error)}"
    return next((v for v in verdicts if v != "equal"), "equal")


def _last_line(error: RankError) -> str:
    lines = [
        line for line in str(error).splitlines() if re.match(r"^[\w.]+(Error|Exception)\b", line)
    ]
    text = lines[-1] if lines else error.error_type
    kind, _, message = text.rpartition(": ") if text.count(": ") == 1 else text.partition(": ")
    message = message.replace("|", "/").replace("<", "&lt;")
    short = message if len(message) <= 60 else message[:57] + "..."
    return f"{kind.rpartition('.')[2]} ({short})" if short else kind


def table(rows: list[tuple[str, dict[str, str]]]) -> str:
    """Return the verdicts as Markdown, with a line of counts."""
    lines = [
        "| case | " + " | ".join(VARIANTS.values()) + " |",
        "|---" * (1 + len(VARIANTS)) + "|",
    ]
    lines += [
        f"| {name} | " + " | ".join(found[v] for v in VARIANTS) + " |" for name, found in rows
    ]
    counts = []
    for variant in VARIANTS:
        kinds = Counter(_kind(found[variant]) for _, found in rows)
        counts.append(", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))
    lines.append(f"| **{len(rows)} cases** | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def _kind(verdict: str) -> str:
    if verdict.startswith("error: PhaseError"):
        return "refused by name"
    return verdict.strip("*").partition("**")[0].partition(":")[0].strip()


def write(path: Path, text: str) -> None:
    """Put the table between the marks of a document."""
    before, mark, rest = path.read_text().partition(_MARKS[0])
    _, end, after = rest.partition(_MARKS[1])
    if not mark or not end:
        raise SystemExit(f"Expected the marks {_MARKS} in {path}, got none.")
    path.write_text(f"{before}{mark}\n\n{text}\n\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--write", type=Path, help="a document with the marks of the table")
    parser.add_argument("--results", type=Path, help="keep verdicts here, and take them from here")
    options = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    if options.results is not None and options.results.exists():
        found = json.loads(options.results.read_text())
    names = [name for name in CASES if options.case in name]
    with RankPool(WORLD) as pool:
        for name in names:
            if name in found:
                continue
            found[name] = {variant: judge(pool, name, variant) for variant in VARIANTS}
            print(name, *found[name].values(), sep=" | ", flush=True)
            if options.results is not None:
                options.results.write_text(json.dumps(found, indent=1))
    text = table([(name, found[name]) for name in names])
    print(text)
    if options.write is not None:
        write(options.write, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
