"""A parameter's own gradient slot means what it means in plain PyTorch, whatever fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from lightning_zeroplus.errors import PhaseError
from lightning_zeroplus.zero.grad_span import GradSpan
from tests.local.small import STAGES, Net, Run, loss_of, on_ranks, same_training, sharded

pytestmark = pytest.mark.parametrize("stage", STAGES)


def sgd(run: Run) -> SGD:
    optimizer = SGD(run.module.parameters(), lr=0.1, momentum=0.5)
    run.attach(optimizer)
    return optimizer


def full(grad: Tensor | None) -> Tensor | None:
    """Return a plain copy of what a slot holds."""
    if grad is None:
        return None
    return (grad.full_tensor() if isinstance(grad, GradSpan) else grad).clone()


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def assert_answers(answers: tuple[Any, list[Any]]) -> None:
    """Every rank answered what the plain run did."""
    plain, ranks = answers
    for found in ranks:
        assert_close(found, plain)


# -- what the slot holds


def test_an_unblocked_backward_leaves_a_span_of_the_full_gradient(stage: int) -> None:
    def script(run: Run) -> list[Tensor | None]:
        run.backward()
        params = list(run.module.parameters())
        if run.engine is not None:
            assert all(type(p.grad) is GradSpan for p in params)
            assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in params)
        return [full(p.grad) for p in params]

    assert_answers(same_training(script, stage, world=3))


def test_the_slot_is_empty_before_the_first_backward(stage: int) -> None:
    def script(run: Run) -> list[Tensor | None]:
        return [p.grad for p in run.module.parameters()]

    plain, ranks = same_training(script, stage)
    assert [plain, *ranks] == [[None] * 5] * 3


def test_the_same_object_fills_the_slot_for_ever(stage: int) -> None:
    def script(run: Run) -> bool:
        run.backward(0)
        before = run.module.scale.grad
        run.backward(1)
        return run.module.scale.grad is before

    _, ranks = same_training(script, stage)
    assert ranks == [True, True]


def test_several_backwards_add_up(stage: int) -> None:
    def script(run: Run) -> list[Tensor | None]:
        optimizer = sgd(run)
        for number in range(3):
            run.backward(number)
        found = [full(p.grad) for p in run.module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        run.update(optimizer, 3)
        return found

    assert_answers(same_training(script, stage))


def test_several_forwards_may_come_before_their_backwards(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        ranks = range(run.world) if run.engine is None else [run.rank]
        losses = [(loss_of(run.module, r, n) / len(ranks), n) for r in ranks for n in range(2)]
        for loss, _ in losses:
            loss.backward()
        optimizer.step()

    same_training(script, stage)


# -- emptying it


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", ["optimizer", "module"])
def test_zero_grad_starts_anew(stage: int, who: str, set_to_none: bool) -> None:
    def script(run: Run) -> list[Tensor | None]:
        optimizer = sgd(run)
        owner: Any = optimizer if who == "optimizer" else run.module
        run.backward(0)
        owner.zero_grad(set_to_none=set_to_none)
        found = [full(p.grad) for p in run.module.parameters()]
        run.backward(1)
        optimizer.step()
        return found

    assert_answers(same_training(script, stage))


def test_zeroed_gradients_are_gradients_and_emptied_ones_are_none(stage: int) -> None:
    """Momentum moves a weight whose gradient is zero, and leaves one that has none."""

    def script(run: Run) -> None:
        optimizer = sgd(run)
        run.update(optimizer, 0)
        for set_to_none in (False, True):
            run.backward(1)
            optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.step()

    same_training(script, stage)


def test_an_emptied_slot_drops_what_was_accumulated(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        run.backward(0)
        run.module.first.weight.grad = None
        run.backward(1)
        run.module.second.bias.grad = None
        optimizer.step()

    same_training(script, stage)


def test_a_deleted_gradient_is_none(stage: int) -> None:
    def script(run: Run) -> bool:
        run.backward(0)
        del run.module.scale.grad
        return run.module.scale.grad is None

    plain, ranks = same_training(script, stage)
    assert [plain, *ranks] == [True] * 3


# -- what the user puts in


def test_an_assigned_gradient_is_stepped_on(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        run.backward(0)
        run.module.first.weight.grad = torch.arange(185.0).view(37, 5) / 100
        optimizer.step()

    same_training(script, stage)


def test_a_backward_adds_to_an_assigned_gradient(stage: int) -> None:
    def script(run: Run) -> list[Tensor | None]:
        optimizer = sgd(run)
        run.module.first.weight.grad = torch.arange(185.0).view(37, 5) / 100
        run.backward(0)
        run.module.second.weight.grad = torch.ones(3, 37)
        run.backward(1)
        found = [full(p.grad) for p in run.module.parameters()]
        optimizer.step()
        return found

    assert_answers(same_training(script, stage))


def test_a_gradient_without_any_backward_is_stepped_on(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        for p in run.module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    same_training(script, stage)


@pytest.mark.parametrize(
    "edit",
    [
        lambda g: g.mul_(0.25),
        lambda g: g.add_(torch.ones(37, 5)),
        lambda g: g.masked_fill_(torch.arange(185).view(37, 5) % 2 == 0, 0.0),
        lambda g: g.copy_(torch.full((37, 5), 0.3)),
        lambda g: g.clamp_(-0.01, 0.01),
        lambda g: g.zero_(),
        lambda g: g[3:20].mul_(2.0),
        lambda g: g.__setitem__(36, 0.0),
        lambda g: g.__setitem__(torch.arange(37) % 3 == 0, 0.0),
        lambda g: g.t()[2].fill_(0.1),
        lambda g: g.view(-1)[100:].zero_(),
        lambda g: g.data[0].zero_(),
    ],
    ids=[
        "mul_", "add_", "masked_fill_", "copy_", "clamp_", "zero_",
        "rows", "row assigned", "rows by mask", "column", "flat view", "data",
    ],
)  # fmt: skip
def test_an_edit_of_the_gradient_counts(stage: int, edit: Callable[[Tensor], Any]) -> None:
    def script(run: Run) -> Tensor | None:
        optimizer = sgd(run)
        run.backward(0)
        edit(run.module.first.weight.grad)
        run.backward(1)
        found = full(run.module.first.weight.grad)
        optimizer.step()
        return found

    assert_answers(same_training(script, stage))


# -- reading it


@pytest.mark.parametrize("number", [0.5, float("inf"), float("nan")])
def test_reads_answer_for_the_full_gradient(stage: int, number: float) -> None:
    """The odd number lies in the span of the last rank."""

    def script(run: Run) -> list[Any]:
        run.backward(0)
        grad = torch.linspace(-1, 1, 185).view(37, 5)
        grad[36, 4] = number
        weight = run.module.first.weight
        weight.grad = grad
        run.backward(1)
        g = weight.grad
        return [
            bool(torch.isfinite(g).all()),
            bool(g.isnan().any()),
            bool((g.abs() > 0.99).any()),
            g.norm(),
            g.sum(),
            g.abs().max(),
            g[36].tolist()[:4],
        ]

    plain, ranks = same_training(script, stage)
    for found in ranks:
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_by_torch_equals_plain(stage: int, norm_type: float, foreach: Any) -> None:
    def script(run: Run) -> list[Tensor]:
        optimizer = sgd(run)
        norms = []
        for number in range(2):
            run.backward(number)
            params = run.module.parameters()
            norms.append(nn.utils.clip_grad_norm_(params, 0.05, norm_type, foreach=foreach))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    assert_answers(same_training(script, stage))


def test_clipping_values_by_torch_equals_plain(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        run.backward()
        nn.utils.clip_grad_value_(run.module.parameters(), 0.01)
        optimizer.step()

    same_training(script, stage)


def test_the_engines_norm_and_clipping_equal_those_of_torch(stage: int) -> None:
    def script(run: Run) -> list[Tensor]:
        optimizer = sgd(run)
        params = list(run.module.parameters())
        run.backward()
        if run.engine is None:
            norm = nn.utils.clip_grad_norm_(params, 0.05)
            after = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        else:
            norm = run.engine.clip_grad_norm_(params, 0.05)
            after = run.engine.grad_norm()
        optimizer.step()
        return [norm, after]

    assert_answers(same_training(script, stage))


# -- errors


def test_a_backward_with_create_graph_is_refused_by_name(stage: int) -> None:
    def body(transport: Any) -> str:
        module = Net()
        sharded(module, transport, stage)
        with pytest.raises(PhaseError) as caught:
            loss_of(module, transport.rank).backward(create_graph=True)
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "create_graph" in text
        assert any(f"({name})" in text for name, _ in Net().named_parameters())
        assert "torch.autograd.grad" in text


def test_higher_derivatives_by_autograd_grad_equal_plain(stage: int) -> None:
    def script(run: Run) -> None:
        optimizer = sgd(run)
        ranks = range(run.world) if run.engine is None else [run.rank]
        for rank in ranks:
            loss = loss_of(run.module, rank)
            params = list(run.module.parameters())
            grads = torch.autograd.grad(loss, params, create_graph=True)
            penalty = sum(g.square().sum() for g in grads)
            ((loss + penalty) / len(ranks)).backward()
        optimizer.step()

    same_training(script, stage)


def test_a_weight_used_twice_in_one_backward_counts_twice(stage: int) -> None:
    """Reentrant checkpointing runs a backward inside the backward."""

    def script(run: Run) -> None:
        optimizer = sgd(run)
        ranks = range(run.world) if run.engine is None else [run.rank]
        module = run.module
        for number in range(2):
            for rank in ranks:
                generator = torch.Generator().manual_seed(10 * number + rank)
                x = torch.randn(4, 5, generator=generator).requires_grad_()
                y = checkpoint(module, x, use_reentrant=True)
                z = module(y @ torch.ones(3, 5))
                (z.square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    same_training(script, stage)
