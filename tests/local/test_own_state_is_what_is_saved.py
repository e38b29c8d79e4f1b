"""What a rank saves: its own spans, which fit together to the whole, and no more than those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam

from lightning_zeroplus.comm import Transport
from lightning_zeroplus.errors import CheckpointError
from lightning_zeroplus.zero import Engine, SpanTensor, own_part
from tests.local.small import STAGES, Net, on_ranks, sharded, step, whole

WORLDS = [1, 2, 3]
pytestmark = pytest.mark.parametrize("stage", STAGES)


def put_together(parts: list[Any]) -> Tensor:
    """Return the tensor of which each rank has an `OwnSpan`."""
    first = parts[0]
    whole = torch.empty_strided(first.shape, first.stride, dtype=first.local.dtype)
    flat = whole.as_strided((whole.numel(),), (1,))
    stop = 0
    for part in parts:
        assert (part.shape, part.stride) == (first.shape, first.stride)
        assert part.local.shape == (part.span.numel,)
        if part.span.numel:
            assert part.span.start == stop, "in rank order, without a gap"
            stop = part.span.stop
            flat[part.span.start : part.span.stop] = part.local
    assert stop == whole.numel()
    return whole


def by_name(engine: Engine) -> dict[str, Any]:
    own = engine.own_weights()
    return {n: own[id(p)]._replace(local=own[id(p)].local.clone())
            for n, p in engine.module.named_parameters()}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_spans_of_weights_fit_together(stage: int, world: int) -> None:
    def body(transport: Transport) -> Any:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = AdamW(module.parameters(), lr=0.1, eps=1e-2)
        engine.attach(optimizer)
        step(engine, optimizer, transport.rank)
        return by_name(engine), whole(engine)

    ranks = on_ranks(world, body)
    for name, value in ranks[0][1].items():
        assert torch.equal(put_together([own[name] for own, _ in ranks]), value)


@pytest.mark.parametrize("world", WORLDS)
def test_spans_of_optimizer_state_fit_together(stage: int, world: int) -> None:
    def body(transport: Transport) -> Any:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = NAdam(module.parameters(), lr=0.1, eps=1e-2)
        engine.attach(optimizer)
        step(engine, optimizer, transport.rank)
        own = engine.own_optimizer_state(optimizer)
        state = {
            name: {k: own_part(v) if isinstance(v, SpanTensor) else v for k, v in values.items()}
            for name, values in own["state"].items()
        }
        return state, engine.full_optimizer_state_dict(optimizer), own["param_groups"]

    ranks = on_ranks(world, body)
    names = [name for name, _ in Net().named_parameters()]
    full = ranks[0][1]["state"]
    for number, name in enumerate(names):
        for key in ("exp_avg", "exp_avg_sq"):
            parts = [state[name][key] for state, *_ in ranks if key in state[name]]
            assert torch.equal(put_together(parts), full[number][key])
        for key in ("step", "mu_product"):
            there = [state[name][key] for state, *_ in ranks if key in state[name]]
            assert len(there) == 1, "on one rank alone"
            assert torch.equal(there[0], full[number][key])
    for _, _, groups in ranks:
        assert [group["params"] for group in groups] == [names]
        assert groups[0]["lr"] == 0.1


def test_nothing_is_gathered(stage: int) -> None:
    def body(transport: Transport) -> int:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = AdamW(module.parameters(), lr=0.1)
        engine.attach(optimizer)
        step(engine, optimizer, transport.rank)
        before = transport.sent_nbytes
        engine.own_weights()
        for parameter in module.parameters():
            engine.shown_weight(parameter)
        engine.own_optimizer_state(optimizer)
        return int(transport.sent_nbytes - before)

    for sent in on_ranks(3, body):
        assert sent <= 3 * 64, "a digest of the names"


def test_a_span_is_memory_of_the_engine_and_no_copy(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        one, other = engine.own_weights(), engine.own_weights()
        for key, span in one.items():
            assert span.local.data_ptr() == other[key].local.data_ptr()

    on_ranks(2, body)


@pytest.mark.parametrize("world", WORLDS)
def test_masters_are_saved_with_edits_of_narrow_weights_in_them(stage: int, world: int) -> None:
    def body(transport: Transport) -> Any:
        module = Net().bfloat16()
        engine = sharded(module, transport, stage)
        optimizer = SGD(module.parameters(), lr=1e-4)
        engine.attach(optimizer)
        with engine.forward_pass():
            x = torch.full((4, 5), 0.1 + transport.rank).bfloat16()
            loss = module(x).float().square().mean()
        with engine.backward_pass():
            loss.backward()
        optimizer.step()
        before = by_name(engine)
        with engine.full_parameters(writeback=True), torch.no_grad():
            module.first.bias[3] = 7.0
        return before, by_name(engine)

    ranks = on_ranks(world, body)
    before = {n: put_together([b[n] for b, _ in ranks]) for n in ranks[0][0]}
    after = {n: put_together([a[n] for _, a in ranks]) for n in ranks[0][0]}
    assert {value.dtype for value in before.values()} == {torch.float32}
    digits = before["first.weight"]
    assert not torch.equal(digits, digits.bfloat16().float()), "more than the weights have"
    wanted = before["first.bias"].clone()
    wanted[3] = 7.0
    assert torch.equal(after["first.bias"], wanted), "the others keep their digits"
    assert torch.equal(after["second.weight"], before["second.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_the_end_it_is_the_same(stage: int, dtype: torch.dtype) -> None:
    def body(transport: Transport) -> Any:
        module = Net().to(dtype)
        engine = sharded(module, transport, stage)
        optimizer = Adam(module.parameters(), lr=1e-3)
        engine.attach(optimizer)
        with engine.forward_pass():
            loss = module(torch.ones(2, 5, dtype=dtype)).float().square().mean()
        with engine.backward_pass():
            loss.backward()
        optimizer.step()
        states = engine.own_optimizer_state(optimizer)["state"]
        before = by_name(engine), {n: own_part(v["exp_avg"]).local.clone()
                                   for n, v in states.items() if "exp_avg" in v}  # fmt: skip
        engine.close()
        assert type(module.first.weight) is nn.Parameter
        states = engine.own_optimizer_state(optimizer)["state"]
        after = by_name(engine), {n: own_part(v["exp_avg"]).local
                                  for n, v in states.items() if "exp_avg" in v}  # fmt: skip
        with torch.no_grad():
            module.second.bias.fill_(3.0)
        return before, after, by_name(engine)

    ranks = on_ranks(3, body)
    for (weights, states), (weights_after, states_after), edited in ranks:
        for name, part in weights.items():
            assert torch.equal(part.local, weights_after[name].local)
            assert part.local.dtype == weights_after[name].local.dtype
        assert states.keys() == states_after.keys()
        for name, value in states.items():
            assert torch.equal(value, states_after[name])
        assert bool((edited["second.bias"].local == 3.0).all()), "edits after the end count"


def test_groups_that_differ_are_refused_on_every_rank(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        params = list(module.parameters())
        first = 2 if transport.rank == 1 else 3
        optimizer = AdamW([{"params": params[:first]}, {"params": params[first:]}])
        engine.attach(optimizer)
        with pytest.raises(CheckpointError, match=r"others on ranks (1|0, 2)\."):
            engine.own_optimizer_state(optimizer)

    on_ranks(3, body)


def test_the_order_in_a_group_may_differ(stage: int) -> None:
    """Parameters collected in a set come in another order in each process; training allows it."""

    def body(transport: Transport) -> Any:
        module = Net()
        engine = sharded(module, transport, stage)
        params = list(module.parameters())
        if transport.rank == 1:
            params.reverse()
        optimizer = AdamW(params, lr=0.1, eps=1e-2)
        engine.attach(optimizer)
        step(engine, optimizer, transport.rank)
        own = engine.own_optimizer_state(optimizer)
        full = engine.full_optimizer_state_dict(optimizer)
        return {n: own_part(v["exp_avg"]) for n, v in own["state"].items() if "exp_avg" in v}, full

    ranks = on_ranks(2, body)
    for number, (name, _) in enumerate(Net().named_parameters()):
        parts = [state[name] for state, _ in ranks if name in state]
        assert torch.equal(put_together(parts), ranks[0][1]["state"][number]["exp_avg"])


def test_state_of_other_kinds_is_refused_by_name(stage: int) -> None:
    def body(transport: Transport) -> None:
        module = Net()
        engine = sharded(module, transport, stage)
        optimizer = SGD(module.parameters(), lr=0.1)
        engine.attach(optimizer)
        step(engine, optimizer, transport.rank)
        optimizer.state[module.scale]["history"] = [1, 2]
        with pytest.raises(CheckpointError, match=r"list for 'history' of 'scale'"):
            engine.own_optimizer_state(optimizer)

    on_ranks(1, body)


def test_what_is_shown_of_a_weight_can_be_read(stage: int) -> None:
    def body(transport: Transport) -> Any:
        module = Net()
        engine = sharded(module, transport, stage)
        shown = {n: engine.shown_weight(p) for n, p in module.named_parameters()}
        found = {n: v * 1 for n, v in shown.items()}
        for name, value in found.items():  # on all ranks in one order
            found[name] = value.full_tensor() if isinstance(value, SpanTensor) else value.clone()
        return found, whole(engine)

    for found, full in on_ranks(3, body):
        for name, value in full.items():
            assert torch.equal(found[name], value)
