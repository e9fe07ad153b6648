"""Lint, format and types of the whole repository, by the versions that the environment pins."""

import subprocess
import sys

import pytest

from servelab.paths import ROOT

TOOLS = {
    "ruff check": ("ruff", "check", "."),
    "ruff format": ("ruff", "format", "--check", "."),
    "mypy": ("mypy",),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_style(tool):
    done = subprocess.run([sys.executable, "-m", *TOOLS[tool]], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
