"""How long does grading a class take, next to stock ``nbgrader autograde`` on the same notebooks?

    python benchmarks/grading.py [--unit 03] [--submissions 20] [--jobs N] [--json]

Makes submissions out of a unit's release (every second one right, the others with one answer missing) and grades them
twice in one run: with ``servelab grade`` (sandbox, secret challenges, feedback, report) and with nbgrader as it comes
(one process, no sandbox, public challenges, no feedback). Exits 1 if ours takes more than half of stock's wall time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from servelab.build import SOURCE  # noqa: E402
from servelab.notebooks import is_solution  # noqa: E402
from servelab.paths import Unit, find_unit  # noqa: E402

TARGET = 0.5
STATE = ("submitted", "autograded", "feedback", "transcripts", "secret", "gradebook.db*", "earlier", "aside", "source")
STOCK = """
c = get_config()
c.CourseDirectory.course_id = "stock"
c.Execute.timeout = 120
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit", default="03")
    parser.add_argument("--submissions", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    unit = find_unit(args.unit)
    with tempfile.TemporaryDirectory(prefix="servelab-bench-") as folder:
        collected = make_submissions(unit, Path(folder, "collected"), args.submissions)
        ours = time_ours(Path(folder, "ours"), collected, args.jobs)
        stock = time_stock(Path(folder, "stock"), collected, unit, course=Path(folder, "ours"))
    ratio = ours / stock
    result = {"unit": unit.slug, "submissions": args.submissions, "jobs": args.jobs, "cores": os.cpu_count()}
    result |= {"ours_s": round(ours, 1), "stock_s": round(stock, 1), "ratio": round(ratio, 3), "target": TARGET}
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{unit.slug}, {args.submissions} submissions: servelab grade {ours:.1f} s with {args.jobs} jobs,")
        print(f"stock nbgrader autograde {stock:.1f} s: ratio {ratio:.2f} (target: at most {TARGET})")
    return 0 if ratio <= TARGET else 1


def make_submissions(unit: Unit, folder: Path, number: int) -> Path:
    """Right answers from the instructor's notebook into the release; every second student leaves one out."""
    right = nbformat.read(SOURCE / unit.slug / f"{unit.slug}.ipynb", as_version=4)
    answers = {cell.id: cell.source for cell in right.cells if is_solution(cell) and cell.cell_type == "code"}
    for student in range(number):
        nb = nbformat.read(unit.release, as_version=4)
        left_out = list(answers)[student // 2 % len(answers)] if student % 2 else ""
        for cell in nb.cells:
            if cell.id in answers and cell.id != left_out:
                cell.source = answers[cell.id]
        path = folder / f"student{student:02}" / unit.slug / f"{unit.slug}.ipynb"
        path.parent.mkdir(parents=True)
        nbformat.write(nb, path)
    return folder


def environment(root: Path) -> dict[str, str]:
    path = f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SERVELAB")}
    return {**kept, "PATH": path, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def timed(command: list[str], root: Path) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return time.perf_counter() - start


def time_ours(root: Path, collected: Path, jobs: int) -> float:
    """Wall time of the whole command on a copy of the course without any state, challenges made before."""
    for name in ("servelab", "data", "notebooks", "solutions"):
        shutil.copytree(REPO / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPO / "autograder", root / "autograder", ignore=shutil.ignore_patterns("__pycache__", *STATE))
    shutil.copy(REPO / "nbgrader_config.py", root)
    timed([sys.executable, "-m", "compileall", "-q", "servelab", "autograder"], root)
    first = shutil.copytree(next(iter(sorted(collected.iterdir()))), root.with_name("first") / "student00")
    grade = [sys.executable, "-m", "servelab", "grade", "--jobs", str(jobs), "--json"]
    timed([*grade, str(first.parent)], root)
    return timed([*grade, str(collected)], root)


def time_stock(root: Path, collected: Path, unit: Unit, course: Path) -> float:
    """Wall time of ``nbgrader autograde`` alone, with its own configuration."""
    shutil.copytree(collected, root / "submitted")
    (root / "nbgrader_config.py").write_text(STOCK)
    source = root / "source" / unit.slug / f"{unit.slug}.ipynb"
    source.parent.mkdir(parents=True)
    shutil.copy(SOURCE / unit.slug / f"{unit.slug}.ipynb", source)
    nbgrader, start = str(Path(sys.prefix, "bin", "nbgrader")), 0.0
    for command in ("generate_assignment", "autograde"):
        start = time.perf_counter()
        env = environment(course)  # the same copy of the package
        done = subprocess.run([nbgrader, command, unit.slug], cwd=root, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"stock nbgrader {command} failed:\n{done.stderr[-4000:]}")
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
