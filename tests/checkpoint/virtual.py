"""Training, saving and resuming on virtual ranks, beside the same run on one process."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zeroplus.checkpoint import (
    ShardedCheckpoint,
    folder_at,
    read_checkpoint,
    read_whole,
    save_universal,
)
from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.plugin.saving import own_state
from lightning_zeroplus.plugin.universal import OwnState, TransportGroup, shard_checkpoint
from lightning_zeroplus.zero import Engine, shard

__all__ = [
    "OPTIMIZERS",
    "PLACES",
    "Live",
    "Place",
    "State",
    "batch",
    "differences",
    "far",
    "make_checkpoint",
    "plain",
    "resumed",
    "saved",
    "straight",
    "write",
]

Place = tuple[int, int]
"""Stage and number of ranks."""

PLACES: list[Place] = [(stage, world) for stage in (1, 2, 3) for world in (1, 2, 3)]
ROWS = 6
"""In a global batch: any world divides it."""


class Mixed(nn.Module):
    """Every kind of parameter whose place in a checkpoint could go wrong; all are trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, (3, 2))
        self.norm = nn.LayerNorm(5)
        self.tokens = nn.Embedding(13, 5)
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen = nn.Parameter(torch.empty(11), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.shift = nn.Parameter(torch.empty(1))
        self.two = nn.Parameter(torch.empty(2))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(2, 1, 3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.to(memory_format=torch.channels_last)
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in sorted(self.named_parameters()):
                noise = torch.randn(parameter.shape, generator=source, dtype=torch.float32)
                parameter.copy_(0.4 * noise + (1.0 if parameter.dim() < 2 else 0.0))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            # Depends on weights alone, so that every rank and the plain run have the same.
            self.mean.mul_(0.9).add_(0.1 * self.scale.detach())
        x = torch.tanh(self.conv(images)).mean((2, 3))
        x = self.norm(x) + self.tokens(tokens)
        x = self.outer(F.gelu(self.inner(x))) * self.scale + self.shift + self.empty.sum()
        return self.head(x * self.two[0] + self.two[1]) * self.frozen.mean()


def batch(number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(77 + number)
    images = torch.randn(ROWS, 3, 5, 4, generator=source).to(dtype)
    tokens = torch.randint(13, (ROWS,), generator=source)
    return images, tokens, torch.randint(13, (ROWS,), generator=source)


def _loss(module: nn.Module, number: int, rank: int, world: int) -> Tensor:
    dtype = next(module.parameters()).dtype
    images, tokens, wanted = (part.chunk(world)[rank] for part in batch(number, dtype))
    return F.cross_entropy(module(images, tokens).float(), wanted)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # Large eps: a small one hides gradients that are wrong by a constant factor.
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.02, eps=1e-2, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.02, eps=1e-2),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02, lr_decay=0.01, eps=1e-2),
}


def make_optimizer(name: str, module: nn.Module, lr: float = 0.03) -> torch.optim.Optimizer:
    """Two groups whose learning rates differ; the frozen parameter is in one of them."""
    params = list(module.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "lr": lr, "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "lr": lr / 4},
    ]
    return OPTIMIZERS[name](groups)


def slow_down(optimizer: torch.optim.Optimizer) -> None:
    """What a scheduler does: settings of groups that no constructor knows."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] *= 0.5 + 0.25 * number


# -- one process, the judge


@cache
def plain(optimizer: str, steps: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return weights and buffers after ``steps`` on the global batch."""
    module = Mixed().to(dtype)
    stepper = make_optimizer(optimizer, module)
    for number in range(steps):
        _loss(module, number, 0, 1).backward()
        stepper.step()
        stepper.zero_grad()
        slow_down(stepper)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


# -- virtual ranks


@dataclass
class State:
    """All that a run is, gathered."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """By name, masters where there are any; buffers too."""

    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name and key."""

    groups: list[dict[str, Any]] = field(default_factory=list)


class Live:
    """A run on one virtual rank."""

    def __init__(
        self,
        transport: Transport,
        stage: int,
        optimizer: str,
        *,
        module: nn.Module | None = None,
        lr: float = 0.03,
        **options: Any,
    ) -> None:
        transport.least_unit_nbytes = 0  # type: ignore[misc]
        self.transport = transport
        self.module = Mixed() if module is None else module
        originals = options.pop("originals", None)
        config = EngineConfig(stage=stage, bucket_nbytes=512, **options)  # type: ignore[arg-type]
        self.engine: Engine = shard(self.module, config, transport, originals=originals)
        self.optimizer = make_optimizer(optimizer, self.module, lr)
        self.engine.attach(self.optimizer)

    def train(self, start: int, stop: int) -> None:
        rank, world = self.transport.rank, self.transport.world_size
        for number in range(start, stop):
            with self.engine.forward_pass():
                loss = _loss(self.module, number, rank, world)
            with self.engine.backward_pass():
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            slow_down(self.optimizer)

    def state(self) -> State:
        """Gather everything with the engine's own means, none of which saving uses."""
        engine, found = self.engine, State()
        with engine.full_parameters():
            for name, value in self.module.state_dict().items():
                found.weights[name] = value.detach().clone()
        whole = engine.full_optimizer_state_dict(self.optimizer, keep_on=0)
        if self.transport.rank:
            return found
        names = [
            engine.find(p).fqn  # type: ignore[union-attr]
            for group in self.optimizer.param_groups
            for p in group["params"]
        ]
        for place, values in whole["state"].items():  # type: ignore[attr-defined]
            values = dict(values)
            master = values.pop("zeroplus_master", None)
            if master is not None:
                for name in engine.by_name[names[place]].model.names:
                    found.weights[name] = master
            if values:
                found.optimizer[names[place]] = values
        for group in self.optimizer.param_groups:
            fqns = [engine.find(p).fqn for p in group["params"]]  # type: ignore[union-attr]
            found.groups.append({**group, "params": fqns})
        return copy.deepcopy(found)


def make_checkpoint(live: Live, **more: Any) -> tuple[ShardedCheckpoint, dict[str, Any]]:
    """What the strategy makes of Lightning's dictionary on this rank."""
    own = OwnState(live.engine, own_state(live.module))
    checkpoint = {
        "epoch": 1,
        "global_step": 2,
        "state_dict": dict(own.values),
        "optimizer_states": [live.engine.own_optimizer_state(live.optimizer)],
        "lr_schedulers": [{"last_epoch": 2, "_last_lr": [0.1, 0.2]}],
        **more,
    }
    return shard_checkpoint(checkpoint, own, live.transport.rank), checkpoint


def write(live: Live, path: str | Path, **more: Any) -> None:
    sharded, _ = make_checkpoint(live, **more)
    save_universal(sharded, folder_at(path), TransportGroup(live.transport))


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Go when the process ends."""


@cache
def saved(
    optimizer: str, place: Place, dtype: torch.dtype = torch.float32, steps: int = 2
) -> tuple[Path, State]:
    """Return a folder written at ``place`` after ``steps``, and what was in memory then."""
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="zeroplus-grid-"))
    path = Path(_FOLDERS[-1].name) / "x.ckpt"
    stage, world = place

    def body(transport: Transport) -> State:
        live = Live(transport, stage, optimizer, module=Mixed().to(dtype))
        live.train(0, steps)
        state = live.state()
        write(live, path)
        return state

    return path, run_virtual_ranks(world, body)[0]


@cache
def straight(
    optimizer: str, place: Place, steps: int, dtype: torch.dtype = torch.float32
) -> list[State]:
    """Return what an uninterrupted run ends with, on each rank."""

    def body(transport: Transport) -> State:
        live = Live(transport, place[0], optimizer, module=Mixed().to(dtype))
        live.train(0, steps)
        return live.state()

    return run_virtual_ranks(place[1], body)


def resumed(
    path: Path,
    optimizer: str,
    place: Place,
    *,
    until: int = 4,
    dtype: torch.dtype = torch.float32,
    late: bool = False,
    **options: Any,
) -> tuple[State, list[State]]:
    """Load ``path`` at ``place``; return what is there then, and after training on.

    Args:
        path: of the checkpoint.
        optimizer: its name.
        place: stage and world size.
        until: number of the step before which to stop.
        dtype: of the module's weights.
        late: load into the shards instead of into the module before it is sharded.
        options: of the engine.
    """

    def body(transport: Transport) -> tuple[State, State]:
        rank, world = transport.rank, transport.world_size
        checkpoint = read_checkpoint(path, rank=rank, world_size=world)
        module = Mixed(seed=1 + rank).to(dtype)
        state = checkpoint["state_dict"]
        originals = None
        if not late:
            module.load_state_dict(state)
            originals = read_whole({n: state[n] for n, _ in module.named_parameters()})
        live = Live(
            transport, place[0], optimizer, module=module, lr=9.0, originals=originals, **options
        )
        if late:
            live.engine.load_full_state(state)
        (own,) = checkpoint["optimizer_states"]
        live.engine.load_full_optimizer_state_dict(live.optimizer, own)
        loaded = live.state()
        live.train(2, until)
        return loaded, live.state()

    ranks = run_virtual_ranks(place[1], body)
    return ranks[0][0], [after for _, after in ranks]


# -- comparing


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.cpu())
        )
    return type(one) is type(other) and bool(one == other)


def _compare(kind: str, found: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> list[str]:
    wrong = [f"{kind} {key} is missing" for key in wanted if key not in found]
    wrong += [f"{kind} {key} is unexpected" for key in found if key not in wanted]
    return wrong + [
        f"{kind} {key}" for key in wanted if key in found and not _same(found[key], wanted[key])
    ]


def differences(found: State, wanted: State) -> list[str]:
    """Return what is not the same to the last bit."""
    wrong = _compare("weight", found.weights, wanted.weights)
    wrong += _compare("state of", dict.fromkeys(found.optimizer), dict.fromkeys(wanted.optimizer))
    for name, values in wanted.optimizer.items():
        wrong += _compare(f"state of {name}:", found.optimizer.get(name, {}), values)
    if len(found.groups) != len(wanted.groups):
        wrong.append("number of groups")
    for number, (mine, theirs) in enumerate(zip(found.groups, wanted.groups, strict=False)):
        wrong += _compare(f"group {number}:", mine, theirs)
    return wrong


def far(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float = 1e-5) -> list[str]:
    """Return the names of values that are not equal within the design's promise."""
    wrong = [name for name in wanted if name not in found]
    for name, value in found.items():
        right = wanted[name].double()
        error = (value.double() - right).abs()
        if not bool((error <= 1e-6 + rtol * right.abs()).all()):
            wrong.append(f"{name} (off by {float(error.max()):.1e})")
    return wrong
