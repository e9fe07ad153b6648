"""pyproject.toml, requirements.lock, environment.yml and course.py name the same environment."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
CONDA = (ROOT / "environment.yml").read_text(encoding="utf-8")
# every companion of torch's CUDA build on the package index
TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")


def name_of(requirement):
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def direct():
    yield from PROJECT["project"]["dependencies"]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        yield from extra


def pins():
    lines = (line.partition(";")[0].strip() for line in LOCK.splitlines())
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_pin_is_exact():
    for line in LOCK.splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(r"[a-z0-9-]+==[0-9][A-Za-z0-9.]*( ; [^;]+)?", line), line


def test_every_package_is_pinned_once():
    names = [name_of(line) for line in LOCK.splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names))


def test_every_direct_dependency_is_pinned():
    assert {name_of(requirement) for requirement in direct()} - {"torch"} <= set(pins())


def test_versions_stand_in_the_lock_only():
    """nbgrader is named exactly in pyproject.toml too: the autograder hangs on its hooks."""
    for requirement in direct():
        name = name_of(requirement)
        assert name == "torch" or requirement in (name, f"nbgrader=={pins()['nbgrader']}")
    (build,) = PROJECT["build-system"]["requires"]
    assert build == "setuptools==" + pins()["setuptools"]


def test_torch_and_its_companions_are_not_in_the_lock():
    assert not [name for name in pins() if TORCH.match(name)]
    assert "torch" in PROJECT["tool"]["uv"]["pip"]["no-emit-package"]


def test_torch_is_named_in_one_place():
    (torch,) = [requirement for requirement in direct() if name_of(requirement) == "torch"]
    version = re.fullmatch(r"torch==([\d.]+)", torch)[1]
    for name in ("course.py", "environment.yml"):
        assert version not in (ROOT / name).read_text(encoding="utf-8")
    assert "- -e ." in CONDA  # conda users get it from pyproject.toml
    assert metadata.version("torch").partition("+")[0] == version


def test_every_direct_dependency_says_why():
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r'    "[a-z0-9-]+(==[\d.]+)?",', line):
            above = next(text for text in reversed(lines[:number]) if not re.fullmatch(r'    "[^"]+",', text))
            assert above.startswith("    # "), line


def test_lock_says_how_it_is_made():
    header = [line for line in LOCK.splitlines() if line.startswith("#")]
    assert any("uv pip compile pyproject.toml --output-file requirements.lock" in line for line in header)


def test_conda_environment():
    assert CONDA.split("name: ")[1].splitlines()[0] == "servelab"  # course.py uses an active one of this name
    assert "- python=3.11\n" in CONDA
    assert "- -c requirements.lock" in CONDA
    assert "==" not in CONDA


def test_python_range_agrees_with_course():
    source = (ROOT / "course.py").read_text(encoding="utf-8")
    assert PROJECT["project"]["requires-python"] == ">=3.11,<3.14"
    assert 'VERSIONS = ("3.11", "3.12", "3.13")' in source


def test_course_reads_the_torch_version_from_pyproject():
    assert len(re.findall(r'"torch==[\d.]+"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))) == 1


def test_the_running_environment_is_the_locked_one():
    """Guards against a pin that was raised without an install; a foreign environment is not judged."""
    try:
        metadata.version("servelab")
    except metadata.PackageNotFoundError:
        pytest.skip("servelab is not installed in this environment")
    wrong = {}
    for name, version in pins().items():
        try:
            if metadata.version(name) != version:
                wrong[name] = (metadata.version(name), version)
        except metadata.PackageNotFoundError:
            pass  # of another platform
    assert not wrong
