"""Listings that a verdict shows, to paste into a cell: they run to their end although some lines must raise."""

import ast

from servelab.exercise import describe_error

IF_RAISED = "if it raises: "  # in a line's comment: what to do then


def walk(names: dict, text: str) -> None:
    """Run a listing line by line; print what each line gave or raised, and go on.

    Parameters
    ----------
    names : dict
        The global names among which it runs: ``globals()`` of a notebook.
    text : str
        One statement a line. What stands in its comment behind `IF_RAISED` runs if it raises.
    """
    for line in text.strip().splitlines():
        code, _, note = line.partition("  # ")
        raised, outcome = _run_line(names, code)
        print(f"{line}  -> {outcome}" if outcome else line)
        otherwise = note.partition(IF_RAISED)[2]
        if raised and otherwise:
            print(f"{otherwise}  -> {_run_line(names, otherwise)[1]}")


def _run_line(names: dict, code: str) -> tuple[bool, str]:
    """Whether a line raised, and what came of it, in words; nothing about a line that only names an object."""
    made = ast.parse(code).body[0]
    try:
        if isinstance(made, ast.Expr):
            return False, repr(eval(code, names))
        exec(code, names)
        target = made.targets[0] if isinstance(made, ast.Assign) else getattr(made, "target", None)
        text = repr(eval(ast.unparse(target), names)) if target else ""
    except Exception as error:  # the learner's code, so any error
        return True, f"raised {describe_error(error)}"
    return False, "" if text.startswith("<") else text
