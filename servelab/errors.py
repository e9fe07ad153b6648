"""The one way in which servelab reports bad input: what happened, where, and how to mend it."""


class CourseError(Exception):
    """Bad input or a broken installation; the command line prints it as one paragraph, without a traceback.

    Parameters
    ----------
    problem : str
        What is wrong, with the value that was found.
    where : str
        The file, line, cell or option that it was found in. May be empty.
    mend : str
        What the user can do about it. May be empty.
    """

    is_report = True  # shown whole by a check

    def __init__(self, problem: str, *, where: str = "", mend: str = ""):
        super().__init__(problem, where, mend)
        self.problem, self.where, self.mend = problem, where, mend

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a cell: the message alone, the traceback would be ours and not the learner's."""
        return [f"CourseError: {self}"]

    def __str__(self) -> str:
        head = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{head}\n{self.mend}" if self.mend else head
