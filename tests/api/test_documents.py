"""What the README and the docs show is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = re.compile(r"<!-- runnable -->\n```python\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def programs() -> list[object]:
    return [
        pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, code in enumerate(RUNNABLE.findall(page.read_text()))
    ]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("code", programs())
def test_code_marked_as_runnable_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_shows_a_runnable_example() -> None:
    shown = RUNNABLE.findall((ROOT / "README.md").read_text())
    assert len(shown) == 1
    assert len([line for line in shown[0].splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_python_shown_parses(page: Path) -> None:
    for code in PYTHON.findall(page.read_text()):
        compile(code, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_table_of_contents() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    entries = re.findall(r"^([\w./*-]+)$", index, re.MULTILINE)
    listed = {path.resolve() for entry in entries for path in docs.glob(f"{entry}.md")}
    pages = {path.resolve() for path in docs.rglob("*.md")} - {(docs / "index.md").resolve()}
    assert pages - listed == set()
