"""Files stay small enough to be read at one sitting."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 420
MOST_EXAMPLE_LINES = 80


def test_no_file_of_the_package_is_longer_than_420_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / "lightning_zeroplus").rglob("*.py")
    }
    assert lengths
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_every_example_has_at_most_80_lines() -> None:
    lengths = {
        path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").iterdir()
    }
    assert {name: n for name, n in lengths.items() if n > MOST_EXAMPLE_LINES} == {}
