"""Which parameters form a unit.

Replicated weights form units by size, so that a reduction is worth its fixed cost. Flat weights
form units by module: one per repeated block, small blocks merged; the rest by owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_zeroplus.config import EngineConfig, import_class
from lightning_zeroplus.errors import ConfigError
from lightning_zeroplus.layout.bucket import pack_by_size
from lightning_zeroplus.layout.names import plain_name
from lightning_zeroplus.zero.model import ModelParam

__all__ = ["UnitPlan", "plan_by_module", "plan_by_size", "uses_by_module"]


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The parameters of one unit, all of one dtype."""

    name: str
    params: tuple[ModelParam, ...]
    scattered: bool = False
    """Used from several places of the model: stays unsharded between them."""

    roots: tuple[nn.Module, ...] = ()
    """Modules around whose forward the unit is unsharded."""

    @property
    def first(self) -> int:
        """Registration position of its first parameter."""
        return min(entry.position for entry in self.params)


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    params: tuple[ModelParam, ...]
    is_block: bool
    root: nn.Module


def _nbytes(params: Iterable[ModelParam]) -> int:
    return sum(entry.numel * entry.param.element_size() for entry in params)


def _by_kind(
    params: Sequence[ModelParam], key: Callable[[ModelParam], object]
) -> list[list[ModelParam]]:
    kinds: dict[object, list[ModelParam]] = {}
    for entry in params:
        kinds.setdefault(key(entry), []).append(entry)
    return list(kinds.values())


def plan_by_size(params: Sequence[ModelParam], bound_nbytes: int) -> list[UnitPlan]:
    """Return units of at most ``bound_nbytes`` (or one parameter), trainable ones apart."""
    plans: list[UnitPlan] = []
    for kind in _by_kind(params, lambda e: (e.param.dtype, e.param.requires_grad)):
        groups = pack_by_size([_nbytes([entry]) for entry in kind], bound_nbytes)
        for group in groups:
            members = tuple(kind[n] for n in group)
            plans.append(UnitPlan(_span_name(members), members))
    return plans


def _span_name(members: Sequence[ModelParam]) -> str:
    return members[0].fqn if len(members) == 1 else f"{members[0].fqn}..{members[-1].fqn}"


def _blocks_by_request(module: nn.Module, units: Sequence[str | type]) -> dict[int, str]:
    wanted: list[type] = []
    names: list[object] = []
    for entry in units:
        found = entry if isinstance(entry, type) else import_class(entry)
        if found is None:
            names.append(entry)
        else:
            wanted.append(found)
    blocks: dict[int, str] = {}
    matched: set[object] = set()

    def visit(child: nn.Module, name: str, outer: bool) -> None:
        hits: list[object] = [t for t in wanted if isinstance(child, t)]
        hits += [n for n in names if type(child).__name__ == n]
        if name:
            matched.update(hits)
            if hits and not outer:
                blocks.setdefault(id(child), name)
                outer = True
        for key, grandchild in child.named_children():
            visit(grandchild, f"{name}.{key}" if name else key, outer)

    visit(module, "", False)
    missing = [str(w) for w in (*wanted, *names) if w not in matched]
    if missing:
        present = sorted({type(m).__name__ for m in module.modules() if any(m.children())})
        raise ConfigError(
            f"Expected units to name modules of the model, got {', '.join(missing)}, which match "
            f"nothing. Modules with children are: {', '.join(present)}."
        )
    return blocks


def _blocks_by_repetition(module: nn.Module) -> dict[int, str]:
    """Children of containers whose class repeats there; outermost ones only."""
    blocks: dict[int, str] = {}

    def visit(parent: nn.Module, name: str) -> None:
        children = [(k, c) for k, c in parent.named_children()]
        classes = [type(c) for _, c in children if any(True for _ in c.parameters())]
        container = isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for key, child in children:
            path = f"{name}.{key}" if name else key
            if container and classes.count(type(child)) > 1:
                if any(True for _ in child.parameters()):
                    blocks.setdefault(id(child), path)
            else:
                visit(child, path)

    visit(module, "")
    return blocks


def _groups(
    module: nn.Module, params: Sequence[ModelParam], blocks: dict[int, str]
) -> list[_Group]:
    inside: dict[int, int] = {}
    by_id = {id(child): child for child in module.modules()}
    for child in module.modules():
        if id(child) in blocks:
            for part in child.modules():
                inside.setdefault(id(part), id(child))
    order: dict[tuple[str, int], list[ModelParam]] = {}
    for entry in params:
        owner = entry.owners[0]
        block = inside.get(id(owner))
        key = ("block", block) if block is not None else ("rest", id(owner))
        order.setdefault(key, []).append(entry)
    groups = []
    for (kind, home), members in order.items():
        name = plain_name(blocks[home]) if kind == "block" else members[0].fqn.rpartition(".")[0]
        groups.append(_Group(name or "root", tuple(members), kind == "block", by_id[home]))
    return groups


def plan_by_module(
    module: nn.Module, params: Sequence[ModelParam], config: EngineConfig, least_nbytes: int
) -> list[UnitPlan]:
    """Return one unit per block and dtype, small blocks merged up to ``least_nbytes``.

    Raises:
        ConfigError: `config.units` names something that the model does not have.
    """
    asked = config.units is not None
    blocks = (
        _blocks_by_request(module, config.units or ()) if asked else _blocks_by_repetition(module)
    )
    groups = _groups(module, params, blocks)
    plans: list[UnitPlan] = []
    merged = _merge([g for g in groups if g.is_block], 0 if asked else least_nbytes)
    rest = _merge([g for g in groups if not g.is_block], least_nbytes)
    for batch, is_rest in [(b, True) for b in rest] + [(b, False) for b in merged]:
        members = [entry for group in batch for entry in group.params]
        name = batch[0].name if len(batch) == 1 else f"{batch[0].name}..{batch[-1].name}"
        kinds = _by_kind(members, lambda e: e.param.dtype)
        for kind in kinds:
            label = name if len(kinds) == 1 else f"{name} ({_dtype_name(kind[0].param.dtype)})"
            owners = {id(o) for entry in kind for o in entry.owners}
            scattered = is_rest and len(owners) > 1
            roots = tuple(group.root for group in batch)
            plans.append(UnitPlan(label, tuple(kind), scattered, roots))
    return plans


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _merge(groups: Sequence[_Group], least_nbytes: int) -> list[list[_Group]]:
    batches: list[list[_Group]] = []
    filled = least_nbytes
    for group in groups:
        if filled >= least_nbytes:
            batches.append([])
            filled = 0
        batches[-1].append(group)
        filled += _nbytes(group.params)
    if len(batches) > 1 and filled < least_nbytes // 2:
        batches[-2].extend(batches.pop())
    return batches


def uses_by_module(plans: Sequence[UnitPlan]) -> dict[nn.Module, list[int]]:
    """Return which plans (by position) each root needs in its forward, tied weights included."""
    home = {id(entry.param): n for n, plan in enumerate(plans) for entry in plan.params}
    blocks = {id(r) for plan in plans for r in plan.roots if not plan.scattered}
    uses: dict[nn.Module, list[int]] = {}
    inside: set[int] = set()
    for plan in plans:
        for root in plan.roots:
            deep = id(root) in blocks and _holds_all(root, plan)
            inside.update(id(m) for m in (root.modules() if deep else (root,)))
            found = (home[id(p)] for p in root.parameters(recurse=deep) if id(p) in home)
            uses[root] = list(dict.fromkeys([*uses.get(root, []), *found]))
    for n, plan in enumerate(plans):
        for entry in plan.params:
            for owner in entry.owners[1:]:
                # A module that holds nothing but another one's weight.
                if id(owner) not in inside and n not in uses.get(owner, []):
                    uses.setdefault(owner, []).append(n)
    return uses


def _holds_all(root: nn.Module, plan: UnitPlan) -> bool:
    """Whether ``root`` owns parameters of ``plan`` below itself, i.e. is a block and no leaf."""
    direct = {id(p) for p in root.parameters(recurse=False)}
    below = {id(p) for p in root.parameters()} - direct
    return any(id(entry.param) in below for entry in plan.params)
