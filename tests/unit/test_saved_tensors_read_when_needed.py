"""A tensor of a checkpoint is read when an operation needs it, and only as far as that."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor, read_whole
from lightning_zeroplus.layout.box import Box
from lightning_zeroplus.layout.span import Span


class Source:
    """Counts the elements that are read of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.numel = 0
        self.saved = SavedTensor(tensor.shape, tensor.dtype, self.fetch)

    def fetch(self, box: Box) -> torch.Tensor:
        self.numel += box.numel
        return self.tensor[box.slices()]


@pytest.fixture
def source() -> Source:
    return Source(torch.arange(24.0).reshape(4, 6))


def test_shape_and_dtype_are_known_without_reading(source: Source) -> None:
    saved = source.saved
    assert isinstance(saved, torch.Tensor)
    assert (saved.shape, saved.dtype, saved.numel(), saved.dim()) == ((4, 6), torch.float32, 24, 2)
    assert "SavedTensor(shape=(4, 6)" in repr(saved)
    assert isinstance(saved.detach(), SavedTensor)
    assert source.numel == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda s: s.clone(),
        lambda s: s + 0,
        lambda s: s.to(torch.float32, copy=True),
        lambda s: s[:],
        lambda s: torch.from_numpy(s.numpy()),
        lambda s: torch.from_numpy(np.asarray(s)),
        lambda s: torch.tensor(s.tolist()),
        copy.deepcopy,
        lambda s: torch.empty(4, 6).copy_(s),
        lambda s: read_whole({"x": [s]})["x"][0],
    ],
)
def test_any_operation_reads_the_values(source: Source, read) -> None:
    value = read(source.saved)
    assert type(value) is torch.Tensor
    assert torch.equal(value, source.tensor)
    assert source.numel == 24


def test_a_write_stays_out_of_the_file(source: Source) -> None:
    before = source.tensor.clone()
    source.saved.clone().zero_()
    source.saved.numpy()[:] = 1
    read_whole(source.saved).zero_()
    assert torch.equal(source.tensor, before)


def test_it_pickles_as_the_tensor_it_stands_for(source: Source) -> None:
    file = io.BytesIO()
    torch.save({"x": source.saved}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["x"], source.tensor)


def test_a_module_loads_it(source: Source) -> None:
    module = nn.Linear(6, 4, bias=False)
    module.load_state_dict({"weight": source.saved})
    assert torch.equal(module.weight, source.tensor)


@pytest.mark.parametrize("span", [Span(0, 24), Span(5, 19), Span(7, 8), Span(6, 6)])
def test_a_span_reads_its_own_elements_alone(source: Source, span: Span) -> None:
    part = source.saved.read_span(span, (6, 1))
    assert torch.equal(part, source.tensor.reshape(-1)[span.start : span.stop])
    assert source.numel == span.numel


def test_a_span_of_another_memory_order() -> None:
    tensor = torch.arange(120.0).reshape(2, 3, 4, 5)
    last = tensor.contiguous(memory_format=torch.channels_last)
    flat = torch.as_strided(last, (120,), (1,))
    source = Source(tensor)
    for span in (Span(0, 120), Span(1, 119), Span(17, 43), Span(60, 61)):
        part = source.saved.read_span(span, last.stride())
        assert torch.equal(part, flat[span.start : span.stop])


def test_a_span_is_cast_into_what_it_fills(source: Source) -> None:
    out = torch.zeros(3, dtype=torch.float64)
    assert source.saved.read_span(Span(4, 7), (6, 1), out) is out
    assert out.tolist() == [4.0, 5.0, 6.0]


def test_scalars() -> None:
    source = Source(torch.tensor(5.0))
    assert float(source.saved) == 5.0
    assert source.saved.item() == 5.0
    assert source.saved.read_span(Span(0, 1), ()).tolist() == [5.0]
