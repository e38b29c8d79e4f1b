"""What an access case sees: shard, batch, optimizer, and a place for what it wants compared.

The plain scene is one process on the global batch; the sharded one is a rank on its part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_zeroplus.comm import Operation, Transport
from lightning_zeroplus.config import EngineConfig, Stage, UnshardOnAccess
from lightning_zeroplus.zero import Engine, shard

__all__ = [
    "CASES",
    "Bracket",
    "Case",
    "Scene",
    "ShardedScene",
    "case",
    "expecting",
    "run_case",
    "train",
]

FEATURES, CLASSES, ROWS, STEPS = 6, 3, 12, 4

Bracket = Literal["none", "loss", "step"]
"""Around what `Engine.forward_pass` lies: nothing, the loss (automatic optimization), or the whole
step with its backwards and updates (manual optimization)."""

# Modules draw their first weights from the one generator of the process.
_BUILDING = threading.Lock()


class Scene:
    """Plain single-process PyTorch on the global batch."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a module with the same weights in every scene and rank."""
        with _BUILDING:
            torch.manual_seed(0)
            return make()

    def shard(self, module: nn.Module) -> None:
        """Shard `module` in place; called once, before training."""

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build and shard."""
        module = self.build(make)
        self.shard(module)
        return module

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the optimizer step on what the scene made of the parameters."""
        return optimizer

    def sgd(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> torch.optim.Optimizer:
        """Return an attached SGD with momentum."""
        return self.attach(torch.optim.SGD(params, lr=lr, momentum=0.9))

    def batch(
        self, step: int, *shape: int, rows: int = ROWS, classes: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of the inputs `[rows, *shape]` and targets of one step."""
        drawn = torch.Generator().manual_seed(step)
        if classes is None:
            x = torch.randn(rows, *(shape or (FEATURES,)), generator=drawn)
        else:
            x = torch.randint(0, classes, (rows, *shape), generator=drawn)
        y = torch.randn(rows, CLASSES, generator=drawn)
        mine = slice(self.rank * rows // self.world, (self.rank + 1) * rows // self.world)
        return x[mine], y[mine]

    def around_loss(self) -> AbstractContextManager[None]:
        """Bracket what automatic optimization calls the training step."""
        return nullcontext()

    def around_step(self) -> AbstractContextManager[None]:
        """Bracket what manual optimization calls the training step."""
        return nullcontext()

    def keep(self, name: str, value: Tensor | float) -> None:
        """Compare `value`, equal on all ranks, with the plain one; sharded tensors in full."""
        self.kept[name] = self.whole(torch.as_tensor(value)).detach().clone()

    def keep_mean(self, name: str, value: Tensor) -> None:
        """Compare the mean of `value` over ranks with the plain one."""
        self.kept[name] = self.mean(value.detach().clone())

    def whole(self, value: Tensor) -> Tensor:
        """Return the full tensor of a shard-aware one."""
        return value

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over ranks."""
        return value

    def finish(self, module: nn.Module) -> None:
        """Keep every parameter, and end the sharding."""
        for name, param in module.named_parameters():
            self.kept[f"weight of {name}"] = param.detach().clone()


class ShardedScene(Scene):
    """One rank of the engine."""

    def __init__(
        self,
        transport: Transport,
        stage: Stage,
        *,
        on_access: UnshardOnAccess = "gather",
        bracket: Bracket = "loss",
        least_unit_nbytes: int = 0,  # every block is a unit of its own
        prefetch: int = 1,
    ) -> None:
        super().__init__()
        transport.least_unit_nbytes = least_unit_nbytes
        self.transport = transport
        self.rank, self.world = transport.rank, transport.world_size
        self.config = EngineConfig(stage=stage, unshard_on_access=on_access, prefetch=prefetch)
        self.bracket = bracket
        self.engine: Engine | None = None

    def shard(self, module: nn.Module) -> None:
        self.engine = shard(module, self.config, self.transport)

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._live.attach(optimizer)
        return optimizer

    @property
    def _live(self) -> Engine:
        if self.engine is None:
            raise AssertionError("the case trains before it shards")
        return self.engine

    def around_loss(self) -> AbstractContextManager[None]:
        return self._live.forward_pass() if self.bracket == "loss" else nullcontext()

    def around_step(self) -> AbstractContextManager[None]:
        return self._live.forward_pass() if self.bracket == "step" else nullcontext()

    def whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    def mean(self, value: Tensor) -> Tensor:
        rows = value.new_empty(self.world, value.numel())
        tag = self._live.context.weights_tag(Operation.TOUCH, -1, "a mean that a test compares")
        self.transport.all_gather(rows.view(-1), value.reshape(-1), tag).wait()
        return rows.mean(0).view(value.shape)

    def finish(self, module: nn.Module) -> None:
        self._live.close()
        super().finish(module)


@dataclass(frozen=True)
class Case:
    """One way of touching parameters."""

    name: str
    run: Callable[[Scene], None]
    refused: bool
    """Whether `unshard_on_access="error"` refuses it at stage 3."""

    tolerance: float

    in_threads: bool
    """Whether torch lets two threads of one process do this at once."""


CASES: dict[str, Case] = {}


def case(
    name: str, *, refused: bool = False, tolerance: float = 1e-5, in_threads: bool = True
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Register a case under a name that reads like what it does."""

    def register(run: Callable[[Scene], None]) -> Callable[[Scene], None]:
        if name in CASES:
            raise AssertionError(f"two cases named {name!r}")
        CASES[name] = Case(name, run, refused, tolerance, in_threads)
        return run

    return register


def run_case(name: str, scene: Scene) -> dict[str, Tensor]:
    """Run one case and return what it kept."""
    CASES[name].run(scene)
    return scene.kept


def train(
    scene: Scene,
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    batch: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Run a few steps of SGD on `loss(x, y)`, then keep the parameters."""
    if loss is None:

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return mse_loss(module(x), y)

    optimizer = optimizer or scene.sgd(module.parameters())
    for step in range(STEPS):
        x, y = (batch or scene.batch)(step)
        with scene.around_step():
            optimizer.zero_grad()
            with scene.around_loss():
                value = loss(x, y)
            value.backward()
            before_step()
            optimizer.step()
        after_step(step)
    scene.finish(module)


@contextmanager
def expecting(kind: type[Exception]) -> Iterator[None]:
    """Go on after an exception of the given type, which must come."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")
