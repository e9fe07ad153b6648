"""What goes wrong on ranks. Each message names ranks, calls and the lines of the learner's cells."""


class RankError(Exception):
    """A rank raised, or died: the root cause first, labelled with its rank, cell and line; the other ranks after it.

    Attributes
    ----------
    rank : int or None
        The rank that raised, if one did.
    cause : BaseException or None
        What it raised, where this process still has it (simulated ranks).
    is_report : bool
        Tells `check` to show all lines of the message: `servelab.exercise`.
    """

    is_report = True
    rank: int | None = None
    cause: BaseException | None = None

    def _render_traceback_(self) -> list[str]:
        """What IPython prints instead of the frames of the harness."""
        return [f"{type(self).__name__}: {self}"]


class DeadlockError(RankError):
    """No unfinished rank can go on: which rank waits for what, from whom, and where."""


class MismatchError(RankError):
    """Ranks of one group are in different collectives, or the two sides of a message differ in size or dtype."""


class BufferChangedError(RankError):
    """A send buffer was changed before ``wait()``: gloo and NCCL would send anything, silently."""


class UnwaitedError(RankError):
    """A rank returned with an isend, irecv or asynchronous collective that it never waited for: gloo may drop it."""


class RankTimeoutError(RankError):
    """The run took longer than it was given. After it, `check` tries no further input (`servelab.exercise`)."""

    never_ends = True


class RankInterruptError(RankError, KeyboardInterrupt):
    """The user interrupted the run; the message says where each rank was."""
