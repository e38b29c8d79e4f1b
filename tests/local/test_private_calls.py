"""Each private call of torch does what the engine's memory tricks need of it."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import psutil
import pytest
import torch

from lightning_zeroplus.comm import Transport, private
from lightning_zeroplus.comm.host.memory import Repeated
from lightning_zeroplus.comm.private import (
    Arena,
    forbid_raw_memory,
    hide_frame_from_compiler,
    hide_from_compiler,
    missing_private_calls,
    resize_fallback,
    swap_memory,
    tensor_over,
)
from lightning_zeroplus.errors import ConfigError
from tests.local.small import Net, assert_weights, on_ranks, plain_step, sharded, step, whole

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


# -- swapping memory


def test_a_swap_exchanges_memory_and_keeps_storages_and_tensors() -> None:
    a, b = torch.arange(8.0), torch.arange(8.0, 16.0)
    view = a[2:5]
    storages = [t.untyped_storage()._cdata for t in (a, b)]
    addresses = [t.data_ptr() for t in (a, b)]
    swap_memory(a.untyped_storage(), b.untyped_storage())
    assert [t.untyped_storage()._cdata for t in (a, b)] == storages
    assert [t.data_ptr() for t in (a, b)] == addresses[::-1]
    assert view.tolist() == [10.0, 11.0, 12.0]
    assert b.tolist() == list(range(8))


def test_a_second_swap_undoes_the_first() -> None:
    a, b = torch.arange(8.0), torch.arange(8.0, 16.0)
    before = a.data_ptr()
    for _ in range(2):
        swap_memory(a.untyped_storage(), b.untyped_storage())
    assert a.data_ptr() == before
    assert a.tolist() == list(range(8))


def test_a_swap_is_seen_by_no_version_counter() -> None:
    a, b = torch.zeros(4), torch.ones(4)
    leaf = torch.nn.Parameter(a)
    before = (a._version, leaf._version)
    swap_memory(a.untyped_storage(), b.untyped_storage())
    assert (a._version, leaf._version) == before
    assert leaf.tolist() == [1.0] * 4


def test_memory_lives_as_long_as_the_storage_that_it_is_under() -> None:
    a, b = torch.zeros(4096), torch.ones(4096)
    swap_memory(a.untyped_storage(), b.untyped_storage())
    del b
    torch.zeros(4096)
    assert bool((a == 1).all())


def test_a_tensor_over_a_storage_is_flat_and_copies_nothing() -> None:
    block = torch.zeros(64, dtype=torch.uint8)
    made = tensor_over(block.untyped_storage(), torch.float32, 10, CPU)
    assert (made.shape, made.stride(), made.dtype) == ((10,), (1,), torch.float32)
    assert made.data_ptr() == block.data_ptr()
    assert made.untyped_storage().nbytes() == 64


# -- the arena


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_resting_tensor_reads_nan(dtype: torch.dtype) -> None:
    resting = tensor_over(Arena.resting_storage(1024, CPU), dtype, 1024 // dtype.itemsize, CPU)
    assert bool(torch.isnan(resting).all())
    assert bool(torch.isnan(resting.double().sum() if not dtype.is_complex else resting.sum()))


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.fill_(0),
        lambda t: t.copy_(torch.zeros_like(t)),
        lambda t: t[3].zero_(),
        lambda t: torch.add(torch.zeros_like(t), 1, out=t),
        lambda t: torch._foreach_mul_([t], 2.0),
    ],
    ids=["fill_", "copy_", "view", "out", "foreach"],
)
def test_a_write_to_a_resting_tensor_raises_and_changes_nothing(write: Any) -> None:
    storage = Arena.resting_storage(256, CPU)
    resting = tensor_over(storage, torch.float32, 64, CPU)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        write(resting)
    assert bool(torch.isnan(resting).all())


def test_a_write_is_allowed_while_other_memory_is_under_the_storage() -> None:
    storage = Arena.resting_storage(256, CPU)
    resting = tensor_over(storage, torch.float32, 64, CPU)
    block = torch.zeros(64)
    swap_memory(storage, block.untyped_storage())
    resting.fill_(3.0)
    swap_memory(storage, block.untyped_storage())
    assert bool((block == 3).all())
    assert bool(torch.isnan(resting).all())
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        resting.fill_(0.0)


def test_resting_tensors_share_one_memory() -> None:
    Arena.resting_storage(1 << 16, CPU)
    before = Arena.nbytes(CPU)
    storages = [Arena.resting_storage(1 << 12, CPU) for _ in range(8)]
    assert Arena.nbytes(CPU) == before
    assert [s.nbytes() for s in storages] == [1 << 12] * 8


def test_a_larger_arena_leaves_those_who_rest_on_the_smaller_one() -> None:
    small = tensor_over(Arena.resting_storage(64, CPU), torch.float32, 16, CPU)
    before, more = Arena.nbytes(CPU), (200 << 20) + 12345
    large = tensor_over(Arena.resting_storage(more, CPU), torch.uint8, more, CPU)
    assert Arena.nbytes(CPU) - before == Arena.price(more, CPU)
    assert bool(torch.isnan(small).all())
    assert bool((large == 255).all())


@pytest.mark.skipif(sys.platform != "linux", reason="maps one piece many times on Linux only")
def test_a_large_arena_is_one_small_piece() -> None:
    nbytes = 64 << 20
    before = psutil.Process().memory_full_info().pss
    repeated = Repeated(nbytes, 255)
    seen = ctypes.string_at(repeated.address, nbytes)
    assert seen.count(b"\xff") == nbytes
    assert repeated.held_nbytes == 1 << 20
    del seen
    assert psutil.Process().memory_full_info().pss - before < 8 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="maps one piece many times on Linux only")
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 64 * 4096, 64 * 4096 + 1, 1 << 20])
def test_repeated_memory_covers_what_was_asked_for(nbytes: int) -> None:
    repeated = Repeated(nbytes, 7)
    assert ctypes.string_at(repeated.address, nbytes) == b"\x07" * nbytes


def test_where_nothing_can_be_repeated_the_arena_is_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Repeated, nbytes: int, byte: int) -> None:
        raise OSError("no more mappings")

    monkeypatch.setattr(Repeated, "__init__", fails)
    monkeypatch.setattr(Arena, "_blocks", {})
    resting = tensor_over(Arena.resting_storage(2 << 20, CPU), torch.uint8, 2 << 20, CPU)
    assert bool((resting == 255).all())
    assert Arena.nbytes(CPU) == 2 << 20


def test_forbidden_memory_raises_instead_of_reading_null() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError("no operator runs")

    made = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    assert forbid_raw_memory(made) is made
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        made.data_ptr()


# -- the compiler


def test_a_hidden_function_runs_as_plain_python_inside_compiled_code() -> None:
    seen: list[bool] = []

    @hide_from_compiler
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return look(x * 2) * 2

    for _ in range(2):
        assert compiled(torch.ones(())).item() == 6
    assert seen == [False, False]
    torch.compiler.reset()


def test_a_function_with_a_hidden_frame_is_the_function_itself() -> None:
    def pack(x: object) -> object:
        return x

    assert hide_frame_from_compiler(pack) is pack


# -- where a call is missing


def test_this_build_lacks_nothing() -> None:
    assert missing_private_calls() == []
    assert resize_fallback() is False


def _older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    older = types.SimpleNamespace(
        UntypedStorage=object, _C=types.SimpleNamespace(), __version__="2.0.0"
    )
    monkeypatch.setattr(private, "torch", older)


def test_missing_calls_are_listed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _older_torch(monkeypatch)
    assert missing_private_calls() == [
        "UntypedStorage._swap_data_ptr_",
        "torch._C._construct_storage_from_data_pointer",
        "torch._C._set_throw_on_mutable_data_ptr",
    ]


@pytest.mark.parametrize("value", [None, "0", "yes"])
def test_a_missing_call_is_refused_with_its_name_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("ZEROPLUS_ALLOW_RESIZE_FALLBACK", raising=False)
    if value is not None:
        monkeypatch.setenv("ZEROPLUS_ALLOW_RESIZE_FALLBACK", value)
    _older_torch(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        resize_fallback()
    text = str(caught.value)
    assert "UntypedStorage._swap_data_ptr_" in text
    assert "for stage 3, got 2.0.0" in text
    assert "Use torch 2.13 or newer, or stage 1 or 2." in text


@pytest.mark.parametrize("stage", [1, 2])
def test_a_missing_call_is_no_matter_where_weights_are_replicated(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(private, "missing_private_calls", lambda: ["a call"])
    on_ranks(2, lambda transport: sharded(Net(), transport, stage).close())


def test_a_missing_call_is_refused_at_stage_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROPLUS_ALLOW_RESIZE_FALLBACK", raising=False)
    monkeypatch.setattr(private, "missing_private_calls", lambda: ["a call"])
    with pytest.raises(ConfigError, match="Expected a torch build with a call for stage 3"):
        on_ranks(2, lambda transport: sharded(Net(), transport, 3))


@pytest.mark.parametrize("world", [1, 2])
def test_the_fallback_trains_stage_3_right(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setenv("ZEROPLUS_ALLOW_RESIZE_FALLBACK", "1")
    monkeypatch.setattr(private, "missing_private_calls", lambda: ["a call"])
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, eps=1e-2)
    for number in range(4):
        plain_step(plain, optimizer, world, number)

    def body(transport: Transport) -> dict[str, torch.Tensor]:
        module = Net()
        engine = sharded(module, transport, 3)
        assert all(unit.weights.resizes for unit in engine.units)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-2)
        engine.attach(optimizer)
        for number in range(4):
            step(engine, optimizer, transport.rank, number)
            for unit in engine.units:
                assert unit.weights.flat.untyped_storage().nbytes() == 0
        found = whole(engine)
        engine.close()
        assert_weights(found, module)
        return found

    for found in on_ranks(world, body):
        assert_weights(found, plain)
