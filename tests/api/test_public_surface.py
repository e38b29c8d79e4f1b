"""The public surface is frozen: a change here is a change of what users rely on.

A wanted change is made in these lists and told in CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

import lightning_zeroplus
from lightning_zeroplus import ZeroPlusStrategy, config, errors, zero

PACKAGE = [
    "ZeroPlusCheckpointIO",
    "ZeroPlusStrategy",
    "__version__",
    "consolidate",
    "load_from_checkpoint",
]

ENGINE = ["Engine", "MemoryReport", "OwnSpan", "SpanTensor", "own_part", "shard"]

ERRORS = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "LayoutError",
    "PhaseError",
    "ZeroPlusError",
    "name_offenders",
]

ENGINE_CONFIG = {
    "stage": 2,
    "units": None,
    "bucket_nbytes": None,
    "prefetch": 1,
    "master_dtype": None,
    "reduce_dtype": None,
    "unused_gradients": "skip",
    "unshard_on_access": "gather",
}

STRATEGY_ARGUMENTS = [
    "stage",
    "units",
    "bucket_nbytes",
    "prefetch",
    "master_dtype",
    "reduce_dtype",
    "transport",
    "unused_gradients",
    "unshard_on_access",
    "save_format",
    "exclude_frozen_parameters",
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
]

STRATEGY_METHODS = [
    "full_gradient",
    "full_optimizer_state",
    "full_parameters",
    "grad_norm",
    "memory_report",
    "set_full_optimizer_state",
]

REGISTERED_NAMES = [
    "zeroplus",
    *(
        f"zeroplus_stage_{stage}{form}"
        for stage in (1, 2, 3)
        for form in ("", "_fork", "_notebook", "_spawn")
    ),
]


@pytest.mark.parametrize(
    ("module", "names"),
    [(lightning_zeroplus, PACKAGE), (zero, ENGINE), (errors, ERRORS)],
    ids=["package", "zero", "errors"],
)
def test_public_names_are_frozen_and_resolve(module: object, names: list[str]) -> None:
    assert sorted(module.__all__) == names
    for name in names:
        assert getattr(module, name) is not None


def test_fields_and_defaults_of_the_engine_config_are_frozen() -> None:
    found = {field.name: field.default for field in dataclasses.fields(config.EngineConfig)}
    assert found == ENGINE_CONFIG
    assert list(found) == list(ENGINE_CONFIG)


def test_every_field_of_the_engine_config_has_a_docstring() -> None:
    source = inspect.getsource(config.EngineConfig)
    for name in ENGINE_CONFIG:
        _, _, after = source.partition(f"    {name}: ")
        assert after.split("\n", 2)[1].strip().startswith('"""'), name


def test_arguments_of_the_strategy_are_frozen() -> None:
    assert list(inspect.signature(ZeroPlusStrategy).parameters) == STRATEGY_ARGUMENTS


def test_methods_of_the_strategy_are_there() -> None:
    for name in STRATEGY_METHODS:
        assert inspect.getdoc(getattr(ZeroPlusStrategy, name)), name


def test_importing_the_package_registers_its_names_and_nothing_heavy() -> None:
    program = (
        "import sys, lightning_zeroplus\n"
        "assert 'lightning' not in sys.modules and 'torch' not in sys.modules\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print(*sorted(n for n in StrategyRegistry.available_strategies() if 'zeroplus' in n))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(REGISTERED_NAMES)
