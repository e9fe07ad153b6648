"""Every unit's notebook with the reference's answers in it runs from top to bottom, passes, and shows its pictures."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

from servelab.build import source_notebook
from servelab.checking import VERDICT_MIME
from servelab.notebooks import is_check
from servelab.paths import units
from servelab.repair import repair
from servelab.work import released


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.slug)
def test_a_solved_notebook_runs(unit, tmp_path):
    notebook, notes = repair(released(unit), source_notebook(unit.solution))
    assert not notes
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    client = NotebookClient(
        notebook,
        timeout=300,
        allow_errors=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(env={**env, "SERVELAB_UNATTENDED": "1"})
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        errors = [output.evalue for output in outputs if output.output_type == "error"]
        assert not errors, f"{cell.source[:80]}: {errors[0]}"
        if is_check(cell):
            assert any(
                output.data[VERDICT_MIME]["passed"] for output in outputs if VERDICT_MIME in output.get("data", {})
            )
        shown = [output.data for output in outputs if "text/plain" in output.get("data", {})]
        blind = [data for data in shown if data["text/plain"].startswith("<Figure") and "image/png" not in data]
        assert not blind, f"{cell.source[:80]}: a figure is shown as text"
    assert nbformat.validate(notebook) is None
