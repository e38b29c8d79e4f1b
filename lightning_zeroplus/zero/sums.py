"""Sums of gradient terms in rank order, block by block.

A block stays in a processor's cache from its first term to its last, and what has to be widened is
never widened as a whole. How tensors are cut changes no bit: every element is summed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BLOCK_NUMEL", "add_sum", "sum_into"]

BLOCK_NUMEL = 1 << 18


def sum_into(out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """Overwrite ``out`` with the sum of 1-D ``terms``, taken in its dtype, first to last."""
    if len(terms) <= 2 and all(term.dtype == out.dtype for term in terms):
        _sum(out, terms)  # one pass as it is
        return
    for start in range(0, out.numel(), BLOCK_NUMEL):
        stop = start + BLOCK_NUMEL
        _sum(out[start:stop], [term[start:stop] for term in terms])


def add_sum(out: torch.Tensor, terms: Sequence[torch.Tensor], scratch: torch.Tensor) -> None:
    """Add the sum of 1-D ``terms`` to ``out``.

    Args:
        out: as long as each term.
        terms: summed among themselves first, in the dtype of ``out``.
        scratch: ``[BLOCK_NUMEL]`` of that dtype; overwritten.
    """
    if len(terms) == 1:
        out.add_(terms[0])
        return
    for start in range(0, out.numel(), BLOCK_NUMEL):
        into = out[start : start + BLOCK_NUMEL]
        total = scratch[: into.numel()]
        _sum(total, [term[start : start + BLOCK_NUMEL] for term in terms])
        into.add_(total)


def _sum(out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    if len(terms) == 1 or terms[0].dtype != out.dtype:
        out.copy_(terms[0])
        rest = terms[1:]
    else:
        torch.add(terms[0], terms[1], out=out)
        rest = terms[2:]
    for term in rest:
        out.add_(term)
