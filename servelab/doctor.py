"""``servelab doctor``: look at this machine and say what works, what does not, and how to mend it."""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from servelab.paths import NOTEBOOKS, units, work_dir

NEEDED = ("torch", "numpy", "matplotlib", "ipywidgets", "jupyterlab", "nbgrader", "jupytext")
ROOM = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``ok`` None means: not needed, but good to know."""

    what: str
    ok: bool | None
    detail: str
    mend: str = ""


def machine() -> dict:
    """What the course can use here: Python, cores, memory (GiB), torch and GPUs."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "torch": torch.__version__,
        "gpus": gpus,
    }


def examine() -> list[Finding]:
    """Every finding, in the order in which a person would want to read them."""
    looks: tuple[Callable[[], Finding], ...]
    looks = (_python, _packages, _torch, _ranks, _built, _work, _disk, _real_model, _sandbox)
    return [look() for look in looks]


def _python() -> Finding:
    right = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding(
        "Python", right, f"{platform.python_version()} at {sys.executable}", "" if right else "Use 3.11 to 3.13."
    )


def _packages() -> Finding:
    missing = []
    for name in NEEDED:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    detail = f"missing: {', '.join(missing)}" if missing else f"{len(NEEDED)} found"
    return Finding("packages", not missing, detail, "Run: python3 course.py learn" if missing else "")


def _torch() -> Finding:
    try:
        found = machine()
    except Exception as error:  # a broken torch fails in many ways; all of them mean the same to the user
        mend = "Remove .venv and run: python3 course.py learn"
        return Finding("torch", False, f"cannot be imported: {type(error).__name__}: {error}", mend)
    gpus = ", ".join(found["gpus"]) or "no CUDA GPU; the course runs on the CPU"
    return Finding("torch", True, f"{found['torch']}; {gpus}; {found['cores']} cores, {found['memory_gib']} GiB")


def _ranks() -> Finding:
    """Two processes that communicate, as the units on parallelism start them."""
    try:
        from servelab.ranks import Cluster

        seconds = Cluster(2, backend="gloo", timeout=30).run(_meet).seconds
    except Exception as error:  # whatever stops them is the finding
        mend = "Real ranks need connections within this machine (loopback). Simulated ranks work without them."
        return Finding("ranks", False, f"{type(error).__name__}: {str(error).splitlines()[0]}", mend)
    return Finding("ranks", True, f"2 processes met over gloo, in {seconds * 1e3:.0f} ms")


def _meet() -> None:
    import torch.distributed

    torch.distributed.barrier()


def _built() -> Finding:
    missing = [unit.slug for unit in units() if not unit.release.exists()]
    detail = f"missing in {NOTEBOOKS}: {', '.join(missing)}" if missing else f"{len(units())} units"
    return Finding("notebooks", not missing, detail, "Run: servelab build" if missing else "")


def _work() -> Finding:
    place = _work_place()
    right = place.is_dir() and os.access(place, os.W_OK)
    mend = "" if right else f"{place} is not a folder that can be written to; set SERVELAB_WORK to another one."
    return Finding("work folder", right, str(work_dir()), mend)


def _work_place() -> Path:
    """The work folder, or the nearest one above it that is there already."""
    return next(path for path in (work_dir().absolute(), *work_dir().absolute().parents) if path.exists())


def _disk() -> Finding:
    free = shutil.disk_usage(_work_place()).free
    mend = "" if free > ROOM else "Free at least 1 GiB, or notebooks cannot be saved."
    return Finding("free disk", free > ROOM, f"{free / 2**30:.1f} GiB", mend)


def _real_model() -> Finding:
    """The course does without it."""
    from servelab import fetch

    problem = fetch.problem()
    if problem:
        return Finding("real model", None, f"{problem}; the tiny model takes its place", f"{fetch.MEND} (93 MB)")
    return Finding("real model", True, str(fetch.model_path()))


def _sandbox() -> Finding:
    """Only instructors need it, so a missing one is no fault."""
    try:
        from autograder.course import Course
        from autograder.trial import try_sandbox
    except ModuleNotFoundError as error:
        absent = (error.name or "").startswith("autograder")
        return Finding(
            "grading sandbox", None, "not part of this copy of the course" if absent else f"not here: {error}"
        )
    trial = try_sandbox(Course())
    if not trial.works:
        return Finding("grading sandbox", None, f"not here, needed only to grade a class: {trial.problem}", trial.mend)
    return Finding("grading sandbox", True, "works")


def run(args: argparse.Namespace) -> int:
    """Print the findings; exit code 1 if something that a learner needs is wrong."""
    findings = examine()
    if args.json:
        print(json.dumps([vars(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            mark = {True: "ok  ", False: "FAIL", None: "note"}[finding.ok]
            print(f"{mark}  {finding.what}: {finding.detail}")
            if finding.mend:
                print(f"      {finding.mend}")
    return 1 if any(finding.ok is False for finding in findings) else 0
