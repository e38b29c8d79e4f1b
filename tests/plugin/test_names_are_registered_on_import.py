from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_zeroplus.plugin.registry import NAMES, register


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_a_name_for_every_stage_and_start_method() -> None:
    stages = [f"zeroplus_stage_{n}" for n in (1, 2, 3)]
    suffixes = ("", "_spawn", "_fork", "_notebook")
    assert set(NAMES) == {"zeroplus", *(f"{s}{x}" for s in stages for x in suffixes)}


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_zeroplus; from lightning.pytorch.strategies import StrategyRegistry",
        "from lightning.pytorch.strategies import StrategyRegistry; import lightning_zeroplus",
    ],
    ids=["before lightning", "after lightning"],
)
def test_importing_registers_in_either_order(imports: str) -> None:
    code = (
        f"{imports}\n"
        "assert 'zeroplus_stage_3_fork' in StrategyRegistry.available_strategies()\n"
        "made = StrategyRegistry.get('zeroplus_stage_3_fork')\n"
        "print(type(made).__module__, type(made).__qualname__)\n"
        "print(made._config.stage, made._start_method)"
    )
    assert run(code).split() == ["lightning_zeroplus", "ZeroPlusStrategy", "3", "fork"]


def test_nothing_is_registered_without_the_import() -> None:
    code = (
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print([n for n in StrategyRegistry if 'zeroplus' in n])"
    )
    assert run(code).strip() == "[]"


def test_the_import_loads_neither_lightning_nor_torch() -> None:
    code = (
        "import sys, lightning_zeroplus\n"
        "print(sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"
    )
    assert run(code).strip() == "[]"


def test_lightning_is_left_as_it_was_found() -> None:
    code = (
        "import sys, lightning_zeroplus\n"
        "import lightning.pytorch.strategies as s\n"
        "print(type(s.__loader__).__name__, type(s.__spec__.loader).__name__,\n"
        "      [type(f).__name__ for f in sys.meta_path if 'Host' in type(f).__name__])"
    )
    assert run(code).strip() == "SourceFileLoader SourceFileLoader []"


def test_a_name_that_is_taken_is_left_alone() -> None:
    class Registry(dict[str, str]):
        def register(self, name: str, strategy: object, description: str, **init: object) -> None:
            self[name] = description

    registry = Registry(zeroplus="somebody else's")
    register(registry)
    assert registry["zeroplus"] == "somebody else's"
    assert registry["zeroplus_stage_1_spawn"] == "ZeroPlusStrategy(stage=1, start_method='spawn')"
