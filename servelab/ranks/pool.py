"""Processes that can become ranks.

On Linux a fork server has imported torch once and forks a fresh process for each rank of each run, in milliseconds. On
macOS and Windows a process has to import torch itself, for seconds: there the processes of a run that ended well are
kept for the next one.
"""

import atexit
import contextlib
import multiprocessing
import pickle
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
KEPT = ("spawn",)  # methods whose processes are dear enough to be kept for the next run
PRELOAD = [
    "torch",
    "servelab.ranks.worker",
    "torch.fx.experimental.symbolic_shapes",  # the first backward() imports it, in 0.3 s
]

_idle: list["Member"] = []
_lock = threading.Lock()


class Member:
    """A process that waits for a job, and the pipe to it."""

    def __init__(self, method: str):
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        self.method = method
        ours, theirs = context.Pipe()
        self.pipe: Connection = ours
        self.process: BaseProcess = context.Process(target=_live, args=(theirs,), daemon=True)
        try:
            with _hidden_main():
                self.process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it is dead: whoever reads the pipe sees that
            self.pipe.send_bytes(pickle.dumps(message))

    def exit_code(self) -> int | None:
        """How the process ended, once its pipe is at its end."""
        self.process.join(5)
        return self.process.exitcode


def _live(pipe: Connection) -> None:
    """What a new process runs. Imports torch only here, where the fork server has done it already."""
    from servelab.ranks.worker import serve

    serve(pipe)


def hire(count: int, method: str) -> list[Member]:
    """``count`` processes: idle ones of this start method first, new ones after them."""
    members: list[Member] = []
    with _lock:
        for member in [member for member in _idle if member.method == method][:count]:
            _idle.remove(member)
            members.append(member)
    members, dead = [m for m in members if m.process.is_alive()], [m for m in members if not m.process.is_alive()]
    dismiss(dead)
    try:
        while len(members) < count:
            with _uninterrupted(method):
                members.append(Member(method))
    except BaseException:
        dismiss(members)
        raise
    return members


def keep(members: Sequence[Member]) -> None:
    """Let processes wait for the next run."""
    with _lock:
        _idle.extend(members)


def dismiss(members: Sequence[Member]) -> None:
    """End processes, at once and whatever they are doing."""
    for member in members:
        member.process.kill()
    for member in members:
        member.process.join()
        member.pipe.close()
        member.process.close()


@atexit.register
def dismiss_idle() -> None:
    """End the processes that wait for a next run."""
    with _lock:
        members, _idle[:] = list(_idle), []
    dismiss(members)


@contextlib.contextmanager
def _uninterrupted(method: str) -> Iterator[None]:
    """Hold an interrupt back while a process is spawned, for milliseconds: half a start would leave a zombie.

    A half-started child of the fork server ends by itself, and the server sees to it.
    """
    before = signal.getsignal(signal.SIGINT)
    if method != "spawn" or before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running the learner's script once more in each new process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
