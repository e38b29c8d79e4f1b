"""Plain single-process PyTorch on the global batch: what every sharded run has to equal.

Uses nothing of the package under test.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from tests.parity.zoo import build, microbatch

__all__ = [
    "DTYPES",
    "MAX_NORM",
    "MAX_VALUE",
    "STEPS",
    "Case",
    "Result",
    "forward_context",
    "local_batch",
    "make_optimizer",
    "narrow_training",
    "plain_training",
    "windows",
]

STEPS = 8
LOCAL_BATCH = 4
MAX_NORM = 0.8
MAX_VALUE = 0.01
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16-autocast": torch.float32,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run, whatever carries it out."""

    model: str = "odd"
    optimizer: Literal["sgd", "adamw", "groups", "fused_sgd", "fused_adamw"] = "adamw"
    accumulate: int = 1
    clip: Literal["none", "norm", "value"] = "none"
    world: int = 2
    short_last: bool = False
    """The last window has one microbatch less than the others (loss scaled as ever)."""
    precision: Literal["fp32", "fp64", "bf16", "fp16", "bf16-autocast"] = "fp32"

    def __str__(self) -> str:
        last = "-short" if self.short_last else ""
        return (
            f"{self.model}-{self.optimizer}-accumulate{self.accumulate}{last}-clip_{self.clip}"
            f"-world{self.world}-{self.precision}"
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run leaves: parameters by name, norms of each step before clipping, losses."""

    parameters: dict[str, Tensor]
    norms: list[float]
    losses: list[float]


def windows(case: Case) -> list[list[int]]:
    """Return the numbers of the microbatches in each window."""
    sizes = [case.accumulate] * STEPS
    if case.short_last:
        sizes[-1] -= 1
    starts = [sum(sizes[:step]) for step in range(STEPS)]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer over the module's parameters.

    Adam's eps is large on purpose: with a tiny one, gradients that are wrong by a constant factor
    give the same update.
    """
    parameters = list(module.parameters())
    match name:
        case "sgd" | "fused_sgd":
            fused = name == "fused_sgd"
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=fused)
        case "adamw" | "fused_adamw":
            fused = name == "fused_adamw"
            return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.1, fused=fused)
        case "groups":
            matrices = [p for p in parameters if p.dim() > 1]
            rest = [p for p in parameters if p.dim() <= 1]
            groups = [
                {"params": rest, "lr": 3e-3, "weight_decay": 0.0},
                {"params": matrices, "betas": (0.8, 0.95)},
            ]
            return torch.optim.AdamW(groups, lr=2e-2, eps=1e-2, weight_decay=0.3)
    raise ValueError(name)


def local_batch(case: Case, rank: int, number: int) -> tuple[Tensor, ...]:
    """Return one rank's microbatch in the dtype of the run."""
    batch = microbatch(case.model, rank, number, LOCAL_BATCH)
    dtype = DTYPES[case.precision]
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)


def forward_context(case: Case) -> AbstractContextManager[object]:
    """Return the context of forward and loss."""
    autocast = case.precision == "bf16-autocast"
    return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()


def _clip(case: Case, module: nn.Module, norms: list[float]) -> None:
    if case.clip == "norm":
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
    elif case.clip == "value":
        nn.utils.clip_grad_value_(module.parameters(), MAX_VALUE)


def _result(module: nn.Module, norms: list[float], losses: list[float]) -> Result:
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    return Result(parameters=parameters, norms=norms, losses=losses)


@cache
def plain_training(case: Case) -> Result:
    """Train on the batches of all ranks together, in one process."""
    module = build(case.model).to(DTYPES[case.precision])
    optimizer = make_optimizer(case.optimizer, module)
    norms: list[float] = []
    losses = []
    for window in windows(case):
        for number in window:
            by_rank = [local_batch(case, rank, number) for rank in range(case.world)]
            with forward_context(case):
                loss = module.loss(*map(torch.cat, zip(*by_rank, strict=True)))
            (loss / case.accumulate).backward()
            losses.append(float(loss.detach()))
        _clip(case, module, norms)
        optimizer.step()
        optimizer.zero_grad()
    return _result(module, norms, losses)


@cache
def narrow_training(case: Case) -> Result:
    """Train narrow weights with fp32 masters in one process; the masters are returned.

    Ranks' gradients are taken one after the other, because in narrow numbers a gradient of the
    global batch is not the mean of the ranks' gradients.
    """
    module = build(case.model).to(DTYPES[case.precision])
    masters = build(case.model)
    pairs = list(zip(module.parameters(), masters.parameters(), strict=True))
    optimizer = make_optimizer(case.optimizer, masters)
    norms: list[float] = []
    losses = []
    for window in windows(case):
        for number in window:
            by_rank = []
            for rank in range(case.world):
                with forward_context(case):
                    loss = module.loss(*local_batch(case, rank, number))
                (loss / case.accumulate).backward()
                by_rank.append(float(loss.detach()))
                for weight, master in pairs:
                    _add_gradient(master, weight, 1.0 / case.world)
            losses.append(sum(by_rank) / case.world)
        _clip(case, masters, norms)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in pairs:
                weight.copy_(master)
    return _result(masters, norms, losses)


def _add_gradient(master: nn.Parameter, weight: nn.Parameter, scale: float) -> None:
    if weight.grad is not None:
        gradient = weight.grad.to(master.dtype) * scale
        master.grad = gradient if master.grad is None else master.grad + gradient
        weight.grad = None
