"""The documentation builds without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
def test_the_docs_build_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    folders = ["-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "html")]
    done = subprocess.run([*command, *folders], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "reference" / "strategy.html").is_file()
