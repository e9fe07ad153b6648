"""``servelab release OUT.zip``: what an instructor hands to students, without solutions, tests and grading."""

import argparse
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from servelab.build import build_unit
from servelab.errors import CourseError
from servelab.paths import ROOT, units

FILES = ("course.py", "pyproject.toml", "requirements.lock", "environment.yml", "README.md", "LICENSE")
FOLDERS = ("servelab", "notebooks", "data")
FULL_ONLY = re.compile(rb"<!-- full course only -->.*?<!-- end of full course only -->\n\n", re.DOTALL)  # of the README
LEFT_OUT = ("__pycache__", ".ipynb_checkpoints", ".DS_Store")
STAMP = (2026, 1, 1, 0, 0, 0)  # a fixed date, so that the same course gives the same bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT.zip")


def run(args: argparse.Namespace) -> int:
    """Write the student bundle; refuses when what is built is stale."""
    stale = [path for unit in units() for path in build_unit(unit, write=False)]
    if stale:
        raise CourseError("what is built is stale", where=str(stale[0]), mend="Run: servelab build")
    if args.out.suffix != ".zip":
        raise CourseError(f"{args.out.name!r} does not end in .zip", mend="Name the file to write, e.g. course.zip")
    content = bundle_bytes()
    try:
        with open(args.out, "xb") as file:
            file.write(content)
    except FileExistsError:
        raise CourseError("exists already", where=str(args.out), mend="Name another file or remove it first.") from None
    except OSError as error:
        raise CourseError(f"cannot be written: {error.strerror}", where=str(args.out)) from None
    print(f"{args.out}: {len(units())} units, without solutions")
    return 0


def bundle_bytes() -> bytes:
    """The whole zip, made before the first byte is written, so that no half of it is handed out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for path in bundled_files():
            info = zipfile.ZipInfo(f"servelab/{path.relative_to(ROOT).as_posix()}", STAMP)
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3  # Unix, also when it is made on Windows
            bundle.writestr(info, _content(path))
    return buffer.getvalue()


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CourseError(f"cannot be read: {error.strerror}", where=str(path), mend="Use a full copy.") from None
    return FULL_ONLY.sub(b"", content) if path == ROOT / "README.md" else content


def bundled_files() -> Iterator[Path]:
    """Every file of the student bundle, in a stable order."""
    yield from (ROOT / name for name in FILES)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and not {*path.relative_to(ROOT).parts} & {*LEFT_OUT}:
                yield path
