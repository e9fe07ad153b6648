"""What every test needs: the environment's programs on PATH, one thread, no work folder of the user's."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest

from servelab.paths import put_bin_on_path

put_bin_on_path()


@pytest.fixture(autouse=True)
def work_folder(tmp_path_factory, monkeypatch):
    """Every test has a ``work/`` of its own; the user's is never touched."""
    folder = tmp_path_factory.mktemp("work")
    monkeypatch.setenv("SERVELAB_WORK", str(folder))
    return folder
