"""Blockwise sums have the bits of whole ones."""

from __future__ import annotations

import pytest
import torch

from lightning_zeroplus.zero.sums import BLOCK_NUMEL, add_sum, sum_into

SIZES = [0, 1, 7, BLOCK_NUMEL, BLOCK_NUMEL + 5, 3 * BLOCK_NUMEL - 1]


def terms_of(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count + numel)
    return [(torch.randn(numel, generator=generator) * 10**n).to(dtype) for n in range(count)]


def in_order(terms: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    total = terms[0].to(dtype)
    for term in terms[1:]:
        total = total + term.to(dtype)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", SIZES)
def test_a_sum_is_taken_first_to_last(count: int, numel: int, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    terms = terms_of(count, numel, dtype)
    out = torch.full((numel,), float("nan"), dtype=wide)
    sum_into(out, terms)
    assert torch.equal(out, in_order(terms, wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", SIZES)
def test_terms_are_summed_before_they_are_added(count: int, numel: int, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    terms = terms_of(count, numel, dtype)
    before = torch.randn(numel, dtype=wide, generator=torch.Generator().manual_seed(1))
    out = before.clone()
    add_sum(out, terms, torch.empty(BLOCK_NUMEL, dtype=wide))
    assert torch.equal(out, before + in_order(terms, wide))
