"""What every test gets: a clean interpreter before and after, and pools of live ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.dist_pool import RankPool

hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    kept = [item for item in items if item.get_closest_marker("full") is None]
    left_out = [item for item in items if item.get_closest_marker("full") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(autouse=True)
def clean_interpreter() -> Iterator[None]:
    """Whatever a test changes in the process is as before when the next one starts."""
    environment = dict(os.environ)
    folder = os.getcwd()
    python_state, numpy_state, torch_state = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
    )
    dtype, threads, grad = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )
    strict = torch.are_deterministic_algorithms_enabled()
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    torch.use_deterministic_algorithms(strict)
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def _pool(world: int) -> Iterator[RankPool]:
    with RankPool(world) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool1() -> Iterator[RankPool]:
    yield from _pool(1)


@pytest.fixture(scope="module")
def pool2() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="module")
def pool3() -> Iterator[RankPool]:
    yield from _pool(3)
