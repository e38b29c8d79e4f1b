"""Pools that stay alive across the files of this folder; starting one imports Lightning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist_pool import RankPool


@pytest.fixture(scope="package")
def solo() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="package")
def pair() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool
