"""What every test needs: the environment's programs on PATH, one thread, no work folder of the user's."""

import os
import signal
import sys
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import HealthCheck, settings

from servelab import parts
from servelab.paths import find_unit, put_bin_on_path

put_bin_on_path()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a shell in the background; some tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

PART = """
calls = 0

class Box:
    def __init__(self, content):
        self.content = content

    def calls(self):
        return calls

def boxed(content):
    global calls
    calls += 1
    return Box(content)
"""


@pytest.fixture
def part_of_the_learners(monkeypatch, tmp_path) -> ModuleType:
    """`PART` as `servelab.parts` makes it from a learner's cell: a module that no other process can import."""
    monkeypatch.setattr("servelab.paths.SOLUTIONS", tmp_path)  # as in a student's bundle
    assembly = parts.Assembly(find_unit("00"))
    assembly.parts = [parts.Part("made", name="", given="", own=PART)]
    module = assembly.module("servelab.parts.made")
    monkeypatch.setitem(sys.modules, "servelab.parts.made", module)
    return module


@pytest.fixture
def same_modules():
    """A test that leaves another module in the place of one of ours would make later tests patch one that none uses."""
    before = {name: module for name, module in sys.modules.items() if name.startswith(("servelab.", "autograder."))}
    yield
    assert [name for name, module in before.items() if sys.modules.get(name) is not module] == []


@pytest.fixture(autouse=True)
def work_folder(same_modules, tmp_path_factory, monkeypatch):
    """Every test has a ``work/`` of its own; the user's is never touched."""
    folder = tmp_path_factory.mktemp("work")
    monkeypatch.setenv("SERVELAB_WORK", str(folder))
    return folder
