"""nbgrader's configuration, in one place: for `grade`'s workers and for nbgrader commands run by hand."""

import os
import sys
from pathlib import Path
from typing import Any

from autograder.course import Course

ROOT_FILE = "nbgrader_config.py"


def configure(c: Any, course: Course | None = None) -> None:
    """Fill in a traitlets ``Config``."""
    course = course or Course()
    os.environ["PATH"] = f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ.get('PATH', '')}"  # alembic is run by name
    directory = c.CourseDirectory
    directory.course_id = "servelab"
    directory.root = str(course.root)
    directory.db_url = course.db_url
    state = course.state.relative_to(course.root)
    for step in ("source", "submitted", "autograded", "feedback", "solution", "source_with_tests"):
        setattr(directory, f"{step}_directory", str(state / step))
    directory.release_directory = "notebooks"
    directory.include = ["*.ipynb", "timestamp.txt"]
    _pipeline(c)
    c.SandboxedExecute.sandboxed = course.sandbox
    c.HTMLExporter.sanitize_html = True
    c.HTMLExporter.filters = {
        "markdown2html": "autograder.feedback.markdown",
        "clean_html": "autograder.feedback.clean",
    }
    c.GenerateFeedback.exporter_class = "autograder.feedback.FeedbackExporter"


def load(course: Course) -> Any:
    """The configuration that nbgrader run by hand at the course's root has, with what `grade` was asked for.

    What an instructor adds to the file at the root, e.g. another ``SandboxedExecute.timeout``, holds for both.
    """
    from traitlets.config import Config, PyFileConfigLoader

    config = Config()
    if (course.root / ROOT_FILE).exists():
        config = PyFileConfigLoader(ROOT_FILE, path=str(course.root)).load_config()
    else:
        configure(config, course)
    config.CourseDirectory.db_url = course.db_url
    config.SandboxedExecute.sandboxed = course.sandbox
    return config


def _pipeline(c: Any) -> None:
    """The Gate first, Execute in the sandbox, the Judge behind it; all else as in stock nbgrader."""
    from nbconvert.preprocessors import ClearMetadataPreprocessor
    from nbgrader import preprocessors as stock

    from autograder.execute import SandboxedExecute
    from autograder.gate import Gate, TolerantExporter
    from autograder.gradebook import before_submission
    from autograder.judging import Judge

    c.Autograde.exporter_class = TolerantExporter
    c.Autograde.pre_convert_hook = before_submission
    c.Autograde.sanitize_preprocessors = [
        Gate,
        stock.ClearOutput,
        stock.DeduplicateIds,
        stock.OverwriteKernelspec,
        stock.OverwriteCells,
        stock.CheckCellMetadata,
    ]
    c.Autograde.autograde_preprocessors = [
        SandboxedExecute,
        Judge,
        stock.IgnorePattern,
        ClearMetadataPreprocessor,
        stock.LimitOutput,
        stock.SaveAutoGrades,
        stock.AssignLatePenalties,
        stock.CheckCellMetadata,
    ]
