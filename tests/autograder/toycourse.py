"""A toy course in a folder of its own, and what tests do with it: hand in, grade, look."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat

REPO = Path(__file__).resolve().parents[2]
TOY = Path(__file__).with_name("toy")
UNIT = "90_toy"


@dataclass(frozen=True)
class Toy:
    """A whole course with one small unit, in a temporary folder."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / "autograder"

    @property
    def release(self) -> nbformat.NotebookNode:
        return nbformat.read(self.root / "notebooks" / UNIT / f"{UNIT}.ipynb", as_version=4)

    def answered(self, **answers: str) -> nbformat.NotebookNode:
        """The released notebook with solution cells filled in; names are grade_ids with underscores."""
        nb = self.release
        for cell in nb.cells:
            name = cell.metadata.get("nbgrader", {}).get("grade_id", "").replace("-", "_")
            cell.source = answers.get(name, cell.source)
        return nb

    def run(self, *args: str, check: int | None = None, **variables: str) -> subprocess.CompletedProcess:
        """Run a module of this course as a program."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("SERVELAB")}
        env |= {"PYTHONPATH": str(self.root), "PATH": f"{Path(sys.prefix, 'bin')}:{env['PATH']}", **variables}
        command = [sys.executable, "-m", *args]
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=600)
        assert check is None or done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def grade(self, source: Path, *args: str, check: int = 0) -> dict:
        """``servelab grade --json``: its summary."""
        return json.loads(self.run("servelab", "grade", str(source), "--json", *args, check=check).stdout)

    def record(self, student: str) -> dict:
        return json.loads((self.state / "transcripts" / UNIT / student / "record.json").read_text())

    def feedback(self, student: str) -> str:
        return (self.state / "feedback" / student / UNIT / f"{UNIT}.html").read_text()


def make_toy(root: Path) -> Toy:
    """Copy the two packages, put the toy unit in, build it."""
    no_units = shutil.ignore_patterns("__pycache__", "paged_kv", "start_here", "[a-z]*_kv", "plots")
    shutil.copytree(REPO / "servelab", root / "servelab", ignore=no_units)
    state = (
        "submitted",
        "autograded",
        "feedback",
        "transcripts",
        "secret",
        "source",
        "gradebook.db*",
        "earlier",
        "aside",
    )
    shutil.copytree(REPO / "autograder", root / "autograder", ignore=shutil.ignore_patterns("__pycache__", *state))
    shutil.copy(REPO / "nbgrader_config.py", root)
    for name in ("data", "notebooks", "solutions"):
        (root / name).mkdir()
    shutil.copy(TOY / f"{UNIT}.py", root / "solutions")
    exercises = root / "servelab" / "exercises" / "toy"
    exercises.mkdir()
    (exercises / "__init__.py").write_text("")
    for path in TOY.glob("[a-z]*.py"):
        shutil.copy(path, exercises)
    toy = Toy(root)
    toy.run("servelab", "build", check=0)
    return toy
