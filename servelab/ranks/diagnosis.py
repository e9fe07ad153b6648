"""What an error on ranks says: the root cause first, each rank labelled, with the lines of the learner's cells."""

import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import perf_counter

from servelab.ranks import errors, shipping
from servelab.ranks.errors import RankError
from servelab.ranks.flight import Post, Snapshot
from servelab.ranks.job import Failure
from servelab.ranks.matching import Board, mismatch, ranks_of
from servelab.ranks.shipping import Frame

SIGNALS = {
    "SIGABRT": "C++ code gave up; gloo does so when a message does not fit the buffer that it arrives in",
    "SIGKILL": "ended from outside, most often because the machine ran out of memory",
    "SIGSEGV": "compiled code touched memory that is not its own",
    "SIGBUS": "compiled code touched memory that is not there; a full disk or /dev/shm does that",
    "SIGILL": "the processor does not know an instruction of a compiled library",
    "SIGTERM": "asked to end from outside",
}
VICTIM = re.compile(
    r"onnection (closed|reset|refused)|[Pp]air closure|[Bb]roken pipe|Socket (closed|Timeout)|remote process"
)
CRASH_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that the others follow from: a death first, then the earliest that is no broken connection."""
    return min(failures, key=lambda failure: (bool(failure.kind), bool(VICTIM.search(failure.message)), failure.when))


def failure_report(cause: Failure, failures: Iterable[Failure], stopped: str) -> str:
    """The text of a `RankError`.

    Parameters
    ----------
    cause : Failure
        Comes first, with its frames.
    failures : iterable of Failure
        All of them; the others get a line each.
    stopped : str
        Where the ranks were that had not failed.
    """
    lines = [f"rank {cause.rank}{_what(cause)}", shipping.show(cause.frames, "    ")]
    same: dict[str, list[int]] = {}
    for other in sorted(failures, key=lambda failure: failure.rank):
        if other.rank != cause.rank:
            text = " lost its connection to another rank" if VICTIM.search(other.message) else _what(other)
            same.setdefault(text.split("\n")[0], []).append(other.rank)
    lines += [f"  {ranks_of(ranks)}{text}" for text, ranks in same.items()]
    return "\n".join(filter(None, [*lines, stopped]))


def _what(failure: Failure) -> str:
    verb = f" raised {failure.kind}" if failure.kind else " died"
    if failure.kind and named_error(failure.kind) is not RankError:
        verb = ""  # the error's own class says it
    return f"{verb}: {failure.message}" if failure.message else verb


def named_error(kind: str) -> type[RankError]:
    """The class of `servelab.ranks.errors` that a rank raised, `RankError` for any other class."""
    found = getattr(errors, kind, RankError) if kind else RankError
    return found if isinstance(found, type) and issubclass(found, RankError) else RankError


def why_stalled(board: Board, waiting: Iterable[int], report: Callable[[Iterable[int]], str]) -> RankError | None:
    """What is wrong with ranks of which all that are unfinished are ``waiting``; None if one of them can go on.

    ``report`` says where some ranks are; it is asked only if something is wrong.
    """
    wrong, waiting = mismatch(board.posts), list(waiting)
    if wrong:
        return errors.MismatchError(f"{wrong}\n{report(waiting)}")
    if waiting and board.stuck(waiting):
        return errors.DeadlockError(f"deadlock: no unfinished rank can go on\n{report(board.snapshots)}")
    return None


def whereabouts(board: Board, stacks: Mapping[int, list[Frame]], asked: Iterable[int]) -> str:
    """Where some ranks are and what they wait for, two lines or more for each."""
    lines = []
    for rank in sorted(asked):
        snapshot = board.snapshots[rank]
        lines.append(f"  rank {rank}: {_doing(board, snapshot, rank in stacks)}")
        known = stacks.get(rank) or ([shipping.frame(*snapshot.current.where)] if snapshot.current else [])
        lines.append(shipping.show(known, "    "))
    return "\n".join(filter(None, [*lines, *board.unmatched()]))


def _doing(board: Board, snapshot: Snapshot, answers: bool) -> str:
    if snapshot.state == "finished":
        return "has finished"
    if snapshot.state == "starting":
        return "is starting"
    if snapshot.state == "blocked" and snapshot.current:
        seconds = perf_counter() - snapshot.since
        return f"waits for {seconds:.1f} s in {snapshot.current}{_reason(board, snapshot.current)}"
    if not answers:
        return "does not answer: it is in compiled code that lets no other Python thread run"
    return "is running" if snapshot.state == "running" else "waits"


def _reason(board: Board, post: Post) -> str:
    """Whose side of a call has not been posted."""
    missing = board.missing(post)
    if not missing:
        return ": every side is posted, the data is under way"
    if post.kind == "collective":
        return f": {ranks_of(missing)} {'has' if len(missing) == 1 else 'have'} not called it"
    verb = "received" if post.kind == "send" else "sent"
    return f": {ranks_of(missing)} {'has' if len(missing) == 1 else 'have'} {verb} nothing that matches"


def death(rank: int, exit_code: int | None, errors: Path, current: Post | None) -> Failure:
    """What there is to say about a process that died: signal, meaning, last words, the learner's line."""
    text = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else ""
    message = _exit_in_words(exit_code)
    if current:
        message += f"; it was in {current}"
    words = [line.strip() for line in text.split("Fatal Python error")[0].splitlines() if line.strip()]
    message += "".join(f"\n    | {line[-160:]}" for line in words[-3:])
    frames = crash_frames(text) or ([shipping.frame(*current.where)] if current else [])
    return Failure(rank, "", message, frames, perf_counter())


def _exit_in_words(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        hexadecimal = f" (0x{exit_code:X})" if exit_code and sys.platform == "win32" else ""
        return f"its process ended with exit code {exit_code}{hexadecimal}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        return f"killed by signal {-exit_code}"
    return f"killed by {name}" + (f" ({SIGNALS[name]})" if name in SIGNALS else "")


def crash_frames(text: str) -> list[Frame]:
    """The learner's lines in what faulthandler wrote, outermost first."""
    found = [match.groups() for match in map(CRASH_FRAME.match, text.splitlines()) if match]
    own = [(file, int(line), function) for file, line, function in found if not shipping.foreign(file)]
    return [shipping.frame(*frame) for frame in reversed(own)]
