"""Reads of one weight `[11, 13]`: what they touch, by name.

`METADATA` needs no element, `SHARDWISE` one number per rank at most (under `no_grad`), `GATHERING`
the full weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["EDITS", "GATHERING", "METADATA", "SHARDWISE"]

Read = Callable[[Any], Any]


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * 2


METADATA: dict[str, Read] = {
    "shape": lambda p: p.shape,
    "size()": lambda p: p.size(),
    "size(0)": lambda p: p.size(0),
    "dim": lambda p: (p.dim(), p.ndim, p.ndimension()),
    "numel": lambda p: (p.numel(), p.nelement(), torch.numel(p)),
    "len": lambda p: len(p),
    "stride": lambda p: p.stride(),
    "is_contiguous": lambda p: p.is_contiguous(),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "element_size": lambda p: (p.element_size(), p.itemsize),
    "nbytes": lambda p: p.nbytes,
    "kinds": lambda p: (p.is_cuda, p.is_sparse, p.is_meta, p.is_quantized, p.is_nested),
    "number kinds": lambda p: (p.is_floating_point(), p.is_complex(), p.is_signed()),
    "finfo": lambda p: torch.finfo(p.dtype).max,
    "requires_grad": lambda p: p.requires_grad,
    "requires_grad_": lambda p: p.requires_grad_() is p,
    "is_leaf": lambda p: (p.is_leaf, p.grad_fn, p.grad),
    "version": lambda p: isinstance(p._version, int),
    "isinstance": lambda p: (isinstance(p, nn.Parameter), isinstance(p, Tensor)),
    "is_tensor": lambda p: (torch.is_tensor(p), torch.is_floating_point(p)),
    "hash": lambda p: (hash(p) == id(p), {p: 1}[p]),
    "print": lambda p: isinstance(f"{p!r}{p!s}", str),
    "class name": lambda p: type(p).__name__,
}

SHARDWISE: dict[str, Read] = {
    "norm": lambda p: p.norm(),
    "norm of order 1": lambda p: p.norm(1),
    "largest norm": lambda p: p.norm(float("inf")),
    "linalg norm": lambda p: torch.linalg.vector_norm(p),
    "foreach norm": lambda p: torch.stack(torch._foreach_norm([p, p])),
    "total norm": lambda p: nn.utils.get_total_norm([p, p]),
    "sum": lambda p: p.sum(),
    "equal": lambda p: torch.equal(p, p),
    "equal to a clone": lambda p: torch.equal(p, p.detach().clone()),
    "clone": lambda p: p.clone(),
    "detached clone": lambda p: p.detach().clone(),
    "clone of data": lambda p: p.data.clone(),
    "double": lambda p: p.double(),
    "half": lambda p: p.half(),
    "to": lambda p: p.to(torch.bfloat16),
    "arithmetic": lambda p: 1 - (p + 1) * 2 / (p.abs() + 1),
    "with a row": lambda p: p * torch.arange(13.0),
    "with a column": lambda p: p + torch.arange(11.0)[:, None],
    "functions": lambda p: p.exp().clamp(0, 1).round().sign().pow(2),
    "where": lambda p: torch.where(p > 0, p, 0.0),
    "maximum": lambda p: torch.maximum(p, torch.zeros(13)),
    "lerp": lambda p: torch.lerp(p, torch.ones(13), 0.3),
    "addcmul": lambda p: torch.addcmul(p, p, p),
    "isnan": lambda p: p.isnan(),
    "like": lambda p: torch.zeros_like(p) + torch.ones_like(p) + torch.full_like(p, 3.0),
    "foreach": lambda p: torch._foreach_mul([p], 2.0)[0],
    "custom function": lambda p: _Double.apply(p).detach(),
}

GATHERING: dict[str, Read] = {
    "mean": lambda p: p.mean(),
    "max": lambda p: p.max(),
    "min": lambda p: p.min(),
    "argmax": lambda p: p.argmax(),
    "largest by item": lambda p: p.abs().max().item(),
    "count": lambda p: (p > 0).sum(),
    "all finite": lambda p: torch.isfinite(p).all(),
    "any nan": lambda p: bool(p.isnan().any()),
    "norm of rows": lambda p: p.norm(dim=1),
    "zero norm": lambda p: p.norm(0),
    "matrix norm": lambda p: torch.linalg.matrix_norm(p, 2),
    "singular values": lambda p: torch.linalg.svdvals(p),
    "std": lambda p: p.std(),
    "median": lambda p: p.median(),
    "quantile": lambda p: p.quantile(0.3),
    "histogram": lambda p: torch.histc(p),
    "sum of rows": lambda p: p.sum(0),
    "prod": lambda p: p.prod(),
    "softmax": lambda p: p.softmax(-1),
    "cumsum": lambda p: p.cumsum(0),
    "topk": lambda p: p.topk(2).values,
    "sort": lambda p: p.sort().values,
    "unique": lambda p: p.unique().numel(),
    "nonzero": lambda p: p.nonzero(),
    "element": lambda p: p[0, 0].item(),
    "row": lambda p: p[1].clone(),
    "rows from the end": lambda p: p[-1, -2:].clone(),
    "fancy index": lambda p: p[torch.tensor([0, 2])],
    "mask": lambda p: p[p > 0],
    "iteration": lambda p: torch.stack(list(p)),
    "format": lambda p: f"{p[0, 0]:.3f}",
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy().sum().item(),
    "numpy from the cpu": lambda p: p.detach().cpu().numpy().copy().tolist(),
    "asarray": lambda p: np.asarray(p.detach()).tolist(),
    "transposed": lambda p: p.t().contiguous(),
    "matmul": lambda p: p @ p.T,
    "right matmul": lambda p: torch.ones(2, 11) @ p,
    "linear": lambda p: F.linear(torch.ones(2, 13), p),
    "conv": lambda p: F.conv1d(torch.ones(1, 13, 4), p[:, :, None]),
    "embedding": lambda p: F.embedding(torch.tensor([1, 3]), p),
    "layer_norm": lambda p: F.layer_norm(p, (13,)),
    "einsum": lambda p: torch.einsum("ij,ij->i", p, p),
    "flat view": lambda p: p.view(-1).clone(),
    "reshape": lambda p: p.reshape(13, 11).sum(0),
    "view of another type": lambda p: p.detach().view(torch.int32).clone(),
    "permute": lambda p: p.permute(1, 0).sum(0),
    "expand": lambda p: p.expand(2, 11, 13).sum(),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "split": lambda p: torch.stack(p.split(1)),
    "gather": lambda p: p.gather(1, torch.zeros(11, 1, dtype=torch.long)),
    "tril": lambda p: p.tril(),
    "flip": lambda p: p.flip(0),
    "kron": lambda p: torch.kron(p, p),
    "as_strided": lambda p: p.as_strided((2, 2), (1, 1)).sum(),
    "plain class": lambda p: p.as_subclass(Tensor).sum(),
    "to a vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "deepcopy": copy.deepcopy,
    "into a full tensor": lambda p: torch.empty(11, 13).copy_(p.detach()),
}

EDITS: dict[str, Callable[[Any], object]] = {
    "mul_": lambda p: p.mul_(0.5),
    "add_": lambda p: p.add_(1.5),
    "add_ with alpha": lambda p: p.add_(p, alpha=-0.1),
    "sub by operator": lambda p: p.__isub__(0.25),
    "mul by operator": lambda p: p.__imul__(torch.arange(13.0)),
    "lerp_": lambda p: p.lerp_(torch.ones(11, 13), 0.3),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "copy_": lambda p: p.copy_(torch.arange(143.0).view(11, 13)),
    "copy_ of a row": lambda p: p.copy_(torch.arange(13.0)),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(0.3),
    "addcmul_": lambda p: p.addcmul_(p, torch.full((11, 1), 2.0)),
    "addcdiv_": lambda p: p.addcdiv_(torch.ones(13), torch.arange(1.0, 14.0)),
    "chained": lambda p: p.mul_(2).add_(1).sqrt_().nan_to_num_(0.0),
    "data.mul_": lambda p: p.data.mul_(0.5),
    "data by operator": lambda p: p.data.__iadd__(1),
    "detach().clamp_": lambda p: p.detach().clamp_(min=0),
    "assigned data of its own": lambda p: setattr(p, "data", p.data * 0.5),
    "assigned full data": lambda p: setattr(p, "data", torch.arange(143.0).view(11, 13)),
    "foreach mul_": lambda p: torch._foreach_mul_([p], 0.5),
    "foreach add_": lambda p: torch._foreach_add_([p], [torch.ones(11, 13)], alpha=0.5),
    "foreach lerp_": lambda p: torch._foreach_lerp_([p], [torch.ones(11, 13)], 0.25),
    "zeros_": lambda p: nn.init.zeros_(p),
    "ones_": lambda p: nn.init.ones_(p),
    "constant_": lambda p: nn.init.constant_(p, 0.7),
}
