"""Units of Flat weights are the model's repeated blocks, or what was asked for by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zeroplus.comm import Transport, run_virtual_ranks
from lightning_zeroplus.config import EngineConfig
from lightning_zeroplus.errors import ConfigError
from lightning_zeroplus.zero import shard
from lightning_zeroplus.zero.model import scan_parameters
from lightning_zeroplus.zero.plan import UnitPlan, plan_by_module, plan_by_size, uses_by_module

HUGE = 1 << 40


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)


class Special(Block):
    """A block by inheritance."""


class Model(nn.Module):
    """A stem, repeated blocks, a head, and a parameter of its own."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Embedding(6, 4)
        self.blocks = blocks
        self.head = nn.Linear(4, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(()))


def plans_of(
    module: nn.Module, *, units: tuple[str | type, ...] | None = None, least_nbytes: int = 0
) -> list[UnitPlan]:
    config = EngineConfig(stage=3, units=units)
    return plan_by_module(module, scan_parameters(module), config, least_nbytes)


def names(plans: list[UnitPlan]) -> dict[str, list[str]]:
    return {plan.name: [entry.fqn for entry in plan.params] for plan in plans}


def block_names(prefix: str) -> list[str]:
    return [f"{prefix}.{part}" for part in ("up.weight", "up.bias", "down.weight", "down.bias")]


# -- found by itself


@pytest.mark.parametrize(
    ("blocks", "keys"),
    [
        (nn.ModuleList([Block(), Block(), Block()]), ["0", "1", "2"]),
        (nn.Sequential(Block(), Block()), ["0", "1"]),
        (nn.ModuleDict({"a": Block(), "b": Block()}), ["a", "b"]),
    ],
    ids=["ModuleList", "Sequential", "ModuleDict"],
)
def test_each_repeated_child_of_a_container_is_a_unit(blocks: nn.Module, keys: list[str]) -> None:
    found = names(plans_of(Model(blocks)))
    for key in keys:
        assert found[f"blocks.{key}"] == block_names(f"blocks.{key}")
    assert len(found) == len(keys) + 3


def test_every_parameter_is_in_one_unit() -> None:
    module = Model(nn.ModuleList([Block(), Block()]))
    for least in (0, 200, HUGE):
        plans = plans_of(module, least_nbytes=least)
        fqns = [entry.fqn for plan in plans for entry in plan.params]
        assert sorted(fqns) == sorted(name for name, _ in module.named_parameters())


def test_a_child_whose_class_does_not_repeat_is_looked_into() -> None:
    inner = nn.ModuleList([Block(), Block()])
    found = names(plans_of(Model(nn.Sequential(nn.Sequential(nn.ReLU(), inner), nn.Linear(4, 4)))))
    assert "blocks.0.1.0" in found
    assert "blocks.1" in found


def test_outermost_repetition_wins() -> None:
    towers = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(2)])
    found = names(plans_of(Model(towers)))
    assert found["blocks.0"] == [*block_names("blocks.0.0"), *block_names("blocks.0.1")]


def test_repeated_modules_without_parameters_are_no_blocks() -> None:
    module = Model(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(4, 4)))
    assert not any(plan.name in ("blocks.0", "blocks.1") for plan in plans_of(module))


def test_repetition_outside_of_containers_is_no_block() -> None:
    assert set(names(plans_of(Block()))) == {"up", "down"}


def test_one_shared_block_is_one_unit() -> None:
    block = Block()
    found = names(plans_of(Model(nn.ModuleList([block, block, Block()]))))
    assert found["blocks.0"] == block_names("blocks.0")
    assert "blocks.1" not in found


# -- asked for


@pytest.mark.parametrize("entry", ["Block", f"{__name__}.Block", Block])
def test_units_are_asked_for_by_name_path_or_class(entry: str | type) -> None:
    module = Model(nn.Sequential(Block(), nn.ReLU()))
    found = names(plans_of(module, units=(entry,), least_nbytes=HUGE))
    assert found["blocks.0"] == block_names("blocks.0")


def test_a_class_finds_its_subclasses_and_a_bare_name_does_not() -> None:
    module = Model(nn.ModuleList([Special(), Block()]))
    assert "blocks.0" in names(plans_of(module, units=(Block,)))
    assert "blocks.0" not in names(plans_of(module, units=("Block",), least_nbytes=HUGE))


def test_several_entries_may_be_asked_for() -> None:
    module = Model(nn.ModuleList([Special(), Block()]))
    found = names(plans_of(module, units=("Special", Block, "torch.nn.Embedding")))
    assert {"blocks.0", "blocks.1", "stem"} <= set(found)


def test_an_entry_inside_another_requested_unit_is_there() -> None:
    towers = nn.Sequential(nn.ModuleList([Block(), Block()]))
    assert set(names(plans_of(towers, units=("Block", "Linear")))) == {"0.0", "0.1"}


def test_units_that_were_asked_for_are_never_merged() -> None:
    found = names(
        plans_of(Model(nn.ModuleList([Block(), Block()])), units=("Block",), least_nbytes=HUGE)
    )
    assert {"blocks.0", "blocks.1"} <= set(found)


def test_no_units_asked_for_leaves_one_rest() -> None:
    module = Model(nn.ModuleList([Block(), Block()]))
    assert len(plans_of(module, units=(), least_nbytes=HUGE)) == 1


def test_an_entry_that_matches_nothing_is_refused_with_the_modules_there_are() -> None:
    module = Model(nn.ModuleList([Block(), Block()]))
    with pytest.raises(ConfigError) as caught:
        plans_of(module, units=("Layer", "Block", nn.Conv2d))
    text = str(caught.value)
    assert "Layer" in text
    assert "Conv2d" in text
    assert "Modules with children are: Block, Model, ModuleList." in text


def test_a_path_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Expected an importable class, got 'nowhere\.Block'"):
        plans_of(Block(), units=("nowhere.Block",))


# -- sizes and kinds


def test_small_blocks_are_merged_up_to_the_least_size() -> None:
    # A block has 40 elements, 160 bytes.
    module = Model(nn.ModuleList([Block() for _ in range(6)]))
    merged = [name for name in names(plans_of(module, least_nbytes=320)) if "blocks" in name]
    assert merged == ["blocks.0..blocks.1", "blocks.2..blocks.3", "blocks.4..blocks.5"]


def test_a_small_last_batch_joins_the_one_before() -> None:
    module = Model(nn.ModuleList([Block() for _ in range(4)]))
    merged = [name for name in names(plans_of(module, least_nbytes=400)) if "blocks" in name]
    assert merged == ["blocks.0..blocks.3"]


def test_the_rest_is_merged_and_scattered() -> None:
    plans = plans_of(Model(nn.ModuleList([Block(), Block()])), least_nbytes=HUGE)
    rest = [plan for plan in plans if plan.scattered]
    assert [sorted(e.fqn for e in plan.params) for plan in rest] == [
        ["head.weight", "scale", "stem.weight"]
    ]


def test_a_unit_has_one_dtype() -> None:
    module = Model(nn.ModuleList([Block(), Block()]))
    module.blocks[0].down.to(torch.float64)
    found = names(plans_of(module))
    assert found["blocks.0 (float32)"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert found["blocks.0 (float64)"] == ["blocks.0.down.weight", "blocks.0.down.bias"]
    for plan in plans_of(module, least_nbytes=HUGE):
        assert len({entry.param.dtype for entry in plan.params}) == 1


def test_names_carry_no_wrapper_prefixes() -> None:
    module = Model(nn.ModuleList([Block(), Block()]))
    holder = nn.Module()
    holder._orig_mod = module
    assert set(names(plans_of(holder))) == set(names(plans_of(module)))


def test_replicated_units_are_formed_by_size_with_frozen_parameters_apart() -> None:
    module = Block()
    module.down.weight.requires_grad_(False)
    module.up.bias.data = module.up.bias.data.double()
    plans = plan_by_size(scan_parameters(module), 1 << 20)
    groups = sorted(sorted(entry.fqn for entry in plan.params) for plan in plans)
    assert groups == [["down.bias", "up.weight"], ["down.weight"], ["up.bias"]]
    assert len(plan_by_size(scan_parameters(module), 1)) == 4


# -- tied weights and what a forward needs


def test_a_tied_weight_is_in_one_unit_under_all_its_names() -> None:
    module = Model(nn.ModuleList([Block(), Block()]))
    module.head.weight = module.stem.weight
    plans = plans_of(module)
    (tied,) = [e for plan in plans for e in plan.params if len(e.names) > 1]
    assert tied.names == ["stem.weight", "head.weight"]
    assert sum(entry.param is module.stem.weight for plan in plans for entry in plan.params) == 1


def test_a_module_with_a_tied_weight_needs_the_unit_that_holds_it() -> None:
    module = Model(nn.ModuleList([Block(), Block()]))
    module.blocks[1].up.weight = module.blocks[0].up.weight
    plans = plans_of(module)
    number = {plan.name: n for n, plan in enumerate(plans)}
    uses = uses_by_module(plans)
    assert uses[module.blocks[0]] == [number["blocks.0"]]
    assert sorted(uses[module.blocks[1]]) == sorted([number["blocks.0"], number["blocks.1"]])


def test_a_module_that_holds_nothing_but_a_tied_weight_needs_its_unit() -> None:
    module = Model(nn.ModuleList([Block(), Block()]))
    module.head.weight = module.stem.weight
    plans = plans_of(module)
    (home,) = [n for n, plan in enumerate(plans) if plan.name == "stem"]
    uses = uses_by_module(plans)
    assert uses[module.head] == [home]
    assert uses[module.stem] == [home]


def test_a_tied_head_is_served_by_the_strict_setting() -> None:
    def body(transport: Transport) -> None:
        transport.least_unit_nbytes = 0  # type: ignore[misc]
        module = Model(nn.ModuleList([Block(), Block()]))
        module.head.weight = module.stem.weight
        engine = shard(module, EngineConfig(stage=3, unshard_on_access="error"), transport)
        module.head(module.stem(torch.tensor([1]))).sum().backward()
        assert not any(unit.weights.is_unsharded for unit in engine.units)

    run_virtual_ranks(2, body, timeout_s=20)


@pytest.mark.parametrize("least_nbytes", [0, 320, HUGE])
def test_each_block_needs_its_own_unit(least_nbytes: int) -> None:
    module = Model(nn.ModuleList([Block() for _ in range(4)]))
    plans = plans_of(module, least_nbytes=least_nbytes)
    uses = uses_by_module(plans)
    for block in module.blocks:
        needed = {e.fqn for n in uses[block] for e in plans[n].params}
        assert {id(p) for p in block.parameters()} <= {
            id(e.param) for n in uses[block] for e in plans[n].params
        }, needed
