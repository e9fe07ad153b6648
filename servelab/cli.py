"""The ``servelab`` command: one subcommand a module, imported only when it is asked for."""

import argparse
import importlib
import subprocess
import sys

from servelab.errors import CourseError
from servelab.paths import ROOT


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 right, 1 a check failed, 2 wrong use or bad input."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser(argv)
    args, rest = parser.parse_known_args(argv)
    if rest and not hasattr(args, "rest"):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    args.rest = rest
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return args.run(args)
    except CourseError as error:
        print(f"servelab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("servelab: stopped", file=sys.stderr)
        return 130


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="servelab", description="A course on LLM serving, with graded exercises.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_learner(commands)
    _add_from_module(commands, argv, "fetch-model", "servelab.fetch", "download the optional real model (93 MB)")
    _add_from_module(commands, argv, "release", "servelab.bundle", "instructor: zip the student version of the course")
    _add_from_module(commands, argv, "grade", "autograder.command", "instructor: grade a folder or zip of notebooks")
    _add_from_module(commands, argv, "build", "servelab.build", "contributor: rebuild notebooks/ and data/expected/")
    _add_from_module(commands, argv, "exam", "servelab.exam", "contributor: prove the judges (the kill table)")
    test = commands.add_parser("test", help="contributor: run all tests (further arguments go to pytest)")
    test.set_defaults(run=_test, rest=[])
    return parser


def _add_learner(commands) -> None:
    learn = commands.add_parser("learn", help="open JupyterLab on your copy of the course, in work/")
    learn.add_argument("--no-browser", action="store_true", help="only start the server")
    learn.add_argument("--port", type=int, help="the server's port")
    learn.set_defaults(run=_lazily("servelab.work", "command_learn"), rest=[])
    check = commands.add_parser("check", help="run the checks of a unit (all units without one)")
    check.add_argument("unit", nargs="?")
    check.add_argument("--json", action="store_true")
    check.set_defaults(run=_lazily("servelab.work", "command_check"))
    progress = commands.add_parser("progress", help="show where every unit stands")
    progress.add_argument("--json", action="store_true")
    progress.set_defaults(run=_lazily("servelab.work", "command_progress"))
    restore = commands.add_parser("restore", help="repair a damaged notebook, answers kept")
    restore.add_argument("unit")
    restore.set_defaults(run=_lazily("servelab.work", "command_restore"))
    doctor = commands.add_parser("doctor", help="look at this machine and say what would not work")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=_lazily("servelab.doctor", "run"))


def _lazily(module: str, function: str):
    return lambda args: getattr(importlib.import_module(module), function)(args)


def _add_from_module(commands, argv: list[str], name: str, module: str, text: str) -> None:
    """A command whose module defines its arguments; imported only when this command is the one given."""
    parser = commands.add_parser(name, help=text)
    if next((word for word in argv if not word.startswith("-")), None) == name:
        try:
            importlib.import_module(module).add_arguments(parser)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            message = f"the command {name!r} is not part of this copy of the course"
            # `rest` takes whatever was meant for the command, so that the refusal is what is read
            parser.set_defaults(run=_refuse(message, "Use a full copy of the repository."), rest=[])
            return
    parser.set_defaults(run=_lazily(module, "run"))


def _refuse(problem: str, mend: str):
    def run(args: argparse.Namespace) -> int:
        raise CourseError(problem, mend=mend)

    return run


def _test(args: argparse.Namespace) -> int:
    if not (ROOT / "tests").is_dir():
        raise CourseError(
            "the tests are not part of this copy of the course", mend="Use a full copy of the repository."
        )
    workers = ["-n", "auto", "--dist", "loadfile"]  # `course.py test -n 0` runs everything in one process
    return subprocess.call([sys.executable, "-m", "pytest", *workers, *args.rest], cwd=ROOT)
