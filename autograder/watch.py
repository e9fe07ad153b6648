"""Caps on what a kernel may use, and the watch that ends it beyond them.

Limits of the operating system are per process; without cgroups nothing adds them up. A thread in the grader does:
memory and number of all processes of the sandbox, and the size of the one folder that it shares with the grader.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 1 << 20
PERIOD = 0.25  # seconds


@dataclass(frozen=True)
class Caps:
    """In bytes, seconds and numbers. The first group is for all processes together, the second for each."""

    memory: int = 4096 * MIB
    processes: int = 64
    disk: int = 256 * MIB  # of each of the two memory file systems
    sockets: int = 8 * MIB

    process_memory: int = 3072 * MIB
    file: int = 128 * MIB
    threads: int = 512  # of the kernel's user, where it has one of its own
    open_files: int = 1024
    cpu_seconds: int = 1800


class Watch:
    """Looks at a process and all of its descendants until stopped; calls ``end`` on the first breach."""

    def __init__(self, pid: int, caps: Caps, folder: Path, end: Callable[[], None]):
        self.caps, self.folder, self.end = caps, folder, end
        self.breach = ""
        self._stopped = threading.Event()
        self._process = psutil.Process(pid)
        threading.Thread(target=self._run, daemon=True, name="servelab-watch").start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self.breach and not self._stopped.wait(PERIOD):
            try:
                self.breach = self.look()
            except psutil.NoSuchProcess:
                return
            if self.breach:
                self.end()

    def look(self) -> str:
        """What is beyond its cap now, in words; empty if nothing is."""
        processes = [self._process, *self._process.children(recursive=True)]
        if len(processes) > self.caps.processes:
            return f"more than {self.caps.processes} processes"
        if sum(map(_resident, processes)) > self.caps.memory and sum(map(_own, processes)) > self.caps.memory:
            return f"more than {self.caps.memory // MIB} MiB of memory"
        if _size(self.folder) > self.caps.sockets:
            return "too many bytes in the folder of its sockets"
        return ""


def _resident(process: psutil.Process) -> int:
    """Bytes of memory that a process uses: quick to ask, but forked processes each count the pages that they share."""
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def _own(process: psutil.Process) -> int:
    """The same with each shared page divided by its number of users, where the system tells."""
    try:
        return process.memory_full_info().pss
    except (psutil.AccessDenied, AttributeError):  # AttributeError: not on this system
        return _resident(process)
    except psutil.Error:
        return 0


def _size(folder: Path) -> int:
    """Bytes of a flat folder, each file counted as at least one block, so that empty files count too."""
    try:
        with os.scandir(folder) as entries:
            return sum(max(entry.stat(follow_symlinks=False).st_size, 4096) for entry in entries)
    except OSError:
        return 0
