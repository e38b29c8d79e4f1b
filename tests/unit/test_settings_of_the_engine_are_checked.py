"""An engine's settings outside their range are refused by name, all in one error."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from lightning_zeroplus.config import EngineConfig, import_class
from lightning_zeroplus.errors import ConfigError

WRONG: list[tuple[str, Any]] = [
    *(("stage", value) for value in (0, 4, "2", 2.0, True, None)),
    *(("units", value) for value in (("Block", 3), ("",), (None,), "Linear")),
    *(("bucket_nbytes", value) for value in (0, -1, 1.5, "16", True)),
    *(("prefetch", value) for value in (-1, 0.5, None, "1", True)),
    *(("master_dtype", value) for value in ("float32", "int8", 32, "")),
    *(("reduce_dtype", value) for value in ("half", 16, False)),
    *(("unused_gradients", value) for value in ("none", None, 0)),
    *(("unshard_on_access", value) for value in ("raise", True, None)),
]
RIGHT: list[tuple[str, Any]] = [
    *(("stage", value) for value in (1, 2, 3)),
    *(("units", value) for value in (None, (), ("Block",), ("torch.nn.Linear", nn.Linear))),
    *(("bucket_nbytes", value) for value in (None, 1, 1 << 30)),
    *(("prefetch", value) for value in (0, 1, 7)),
    *(("master_dtype", value) for value in (None, "fp16", "bf16", "fp32", "fp64")),
    *(("reduce_dtype", value) for value in (None, "fp16", "bf16", "fp32", "fp64")),
    *(("unused_gradients", value) for value in ("skip", "zero")),
    *(("unshard_on_access", value) for value in ("gather", "error")),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_is_refused_with_its_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: value})
    text = str(caught.value)
    assert field in text
    assert repr(value if field != "units" or isinstance(value, str) else value[-1]) in text
    assert not any(f"{name}=" in text for name in FIELDS if name != field)


@pytest.mark.parametrize(("field", "value"), RIGHT)
def test_a_value_within_the_range_is_taken_as_it_is(field: str, value: Any) -> None:
    assert getattr(EngineConfig(**{field: value}), field) == value


FIELDS = [field.name for field in dataclasses.fields(EngineConfig)]


def test_every_field_has_wrong_and_right_values_here() -> None:
    assert {name for name, _ in WRONG} == {name for name, _ in RIGHT} == set(FIELDS)


def test_all_wrong_values_are_listed_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(
            stage=5,  # type: ignore[arg-type]
            units=("",),
            bucket_nbytes=0,
            prefetch=-1,
            master_dtype="f4",  # type: ignore[arg-type]
            reduce_dtype="f4",  # type: ignore[arg-type]
            unused_gradients="no",  # type: ignore[arg-type]
            unshard_on_access="no",  # type: ignore[arg-type]
        )
    assert all(name in str(caught.value) for name in FIELDS)


def test_an_unknown_value_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"stage=7 \(one of 1, 2, 3\)"):
        EngineConfig(stage=7)  # type: ignore[arg-type]


def test_settings_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().stage = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig(2)  # type: ignore[misc]


def test_a_bare_class_name_is_no_import_path() -> None:
    assert import_class("Linear") is None
    assert import_class("torch.nn.Linear") is nn.Linear


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("torch.nn.Linearr", "has no attribute"),
        ("no_such_package.Block", "No module named"),
        ("torch.nn.", "has no attribute"),
        (".Block", "Empty module name"),
        ("torch.nn.functional.relu", "a function"),
    ],
)
def test_a_path_that_names_no_class_is_refused_with_the_reason(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        import_class(path)
    assert repr(path) in str(caught.value)
