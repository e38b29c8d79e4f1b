"""Does an optimizer survive sharding? Asked of the optimizer itself.

Its class steps small 2-D tensors whole, and again cut into flat spans as ranks would hold them. An
optimizer whose update of an element looks at other elements (a norm, a matrix, a line search)
gives other numbers, and is refused by name.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zeroplus.errors import ConfigError

__all__ = ["probe_optimizer", "settle_dtype"]

_STEPS = 3
_SHAPES = ((16, 12), (8, 24))
_CUT = 64


def probe_optimizer(optimizer: Optimizer, dtypes: Iterable[torch.dtype]) -> None:
    """Check that ``optimizer`` may step on spans, by the settings of each of its groups. *Local.*

    Leaves the optimizer untouched.

    Raises:
        ConfigError: its class mixes elements, or needs a closure or whole matrices.
    """
    groups = {_settings(group): group for group in optimizer.param_groups}
    for dtype in dtypes:
        for group in groups.values():
            problem = _difference(optimizer, group, dtype)
            if problem:
                raise ConfigError(
                    f"Expected an optimizer that updates each element by itself, got "
                    f"{type(optimizer).__name__}, {problem}. Use an elementwise one (SGD, Adam, "
                    f"AdamW, Adagrad, RMSprop, Lion, ...), or an unsharded strategy such as 'ddp'."
                )


def _settings(group: dict[str, Any]) -> str:
    return repr(sorted((k, v) for k, v in group.items() if k != "params"))


def _difference(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> str:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(s, generator=generator).to(dtype) for s in _SHAPES]
    grads = [
        [torch.randn(s, generator=generator).to(dtype) for s in _SHAPES] for _ in range(_STEPS)
    ]
    try:
        whole = _run(optimizer, group, [w.clone() for w in weights], grads)
        parts = []
        for cut in (slice(0, _CUT), slice(_CUT, None)):
            local = [w.reshape(-1)[cut].clone() for w in weights]
            local_grads = [[g.reshape(-1)[cut].clone() for g in row] for row in grads]
            parts.append(_run(optimizer, group, local, local_grads))
    except Exception as error:  # noqa: BLE001 - whatever a foreign optimizer raises is the answer
        return f"which fails on flat spans ({type(error).__name__}: {str(error)[:120]})"
    if any(torch.equal(after, before) for after, before in zip(whole, weights, strict=True)):
        return "which leaves the parameters of its param_groups as they were"
    for n, weight in enumerate(whole):
        joined = torch.cat([part[n] for part in parts])
        if not torch.allclose(joined, weight.reshape(-1), rtol=1e-5, atol=1e-6, equal_nan=True):
            return "whose update of one element depends on others"
    return ""


def _run(
    optimizer: Optimizer,
    settings: dict[str, Any],
    weights: list[torch.Tensor],
    grads: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    twin = _twin_of(optimizer, settings, weights)
    for row in grads:
        _step(twin, row)
    return [p.detach() for p in weights]


def _twin_of(
    optimizer: Optimizer, settings: Mapping[str, Any], weights: list[torch.Tensor]
) -> Optimizer:
    """Return an optimizer of the same class and settings without state, for ``weights``."""
    twin = copy.copy(optimizer)
    twin.__dict__ = dict(optimizer.__dict__)
    twin.__dict__.pop("step", None)
    twin.__dict__["state"] = defaultdict(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = OrderedDict()
    group: dict[str, Any] = dict(settings)
    # A small learning rate would hide a difference below the tolerance.
    lr = group.get("lr")
    if isinstance(lr, torch.Tensor):
        group["lr"] = torch.full_like(lr, 0.1)
    elif isinstance(lr, int | float):
        group["lr"] = 0.1
    params = [w.requires_grad_() for w in weights]
    twin.__dict__["param_groups"] = [{**group, "params": params}]
    return twin


def _step(twin: Optimizer, grads: list[torch.Tensor]) -> None:
    for param, grad in zip(twin.param_groups[0]["params"], grads, strict=True):
        param.grad = grad.clone()
    type(twin).step(twin)


def settle_dtype(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    saved: Mapping[str, torch.dtype],
) -> dict[str, torch.dtype]:
    """Return in which dtype saved elementwise state goes on, by key. *Local.*

    As it was saved if the optimizer makes it so itself, or steps with it although it is wider than
    what it makes; else in the dtype that the optimizer makes.

    Args:
        optimizer: is left untouched.
        settings: its group.
        dtype: of the weights it steps on.
        saved: dtypes in the checkpoint.
    """
    if all(kind == dtype for kind in saved.values()):
        return dict(saved)  # as every optimizer makes it, and the usual case
    weights = [torch.ones(8, dtype=dtype)]
    twin = _twin_of(optimizer, settings, weights)
    with torch.enable_grad():
        _step(twin, [torch.ones(8, dtype=dtype)])
        made = dict(twin.state[weights[0]])
        native = {
            key: made[key].dtype if isinstance(made.get(key), torch.Tensor) else kind
            for key, kind in saved.items()
        }
        wide = {
            key: kind if torch.promote_types(kind, native[key]) == kind else native[key]
            for key, kind in saved.items()
        }
        if wide == native:
            return native
        state = twin.state[weights[0]]
        for key, kind in wide.items():
            if isinstance(state.get(key), torch.Tensor):
                state[key] = state[key].to(kind)
        try:
            _step(twin, [torch.ones(8, dtype=dtype)])
        except (RuntimeError, TypeError):
            return native
    return wide
