"""An error lists ten offenders at most, then how many more there are."""

from __future__ import annotations

import pytest

from lightning_zeroplus import errors
from lightning_zeroplus.errors import ZeroPlusError, name_offenders


@pytest.mark.parametrize("count", [0, 1, 9, 10])
def test_up_to_ten_offenders_are_all_named(count: int) -> None:
    names = [f"w{n}" for n in range(count)]
    assert name_offenders(iter(names)) == ", ".join(names)


@pytest.mark.parametrize("count", [11, 40])
def test_more_than_ten_offenders_end_in_a_count(count: int) -> None:
    text = name_offenders(f"w{n}" for n in range(count))
    assert text.startswith("w0, w1, ")
    assert text.endswith(f"w9 and {count - 10} more")
    assert "w10" not in text


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("LayoutError", ValueError),
        ("PhaseError", RuntimeError),
        ("CollectiveError", RuntimeError),
        ("CheckpointError", RuntimeError),
    ],
)
def test_each_error_is_ours_and_what_callers_already_catch(
    name: str, builtin: type[Exception]
) -> None:
    assert issubclass(getattr(errors, name), ZeroPlusError)
    assert issubclass(getattr(errors, name), builtin)
