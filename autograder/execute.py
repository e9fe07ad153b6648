"""Run a submission in a sandboxed kernel, cell by cell, so that one bad cell costs only its own exercise.

A cell that runs too long, ends the kernel, floods the output or breaks a cap is a *killer*: its kernel is ended, a new
one replays the earlier cells without checks and without killers, and the run goes on behind it. Restarts and total time
are bounded. Of every cell's output only transcripts are kept, frozen when the cell has finished.
"""

import asyncio
import builtins
import copy
import time
from typing import Any

from jupyter_core.utils import ensure_event_loop
from nbclient.client import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbgrader.preprocessors import Execute
from traitlets import Bool, Enum, Integer

from autograder import secret
from autograder.course import Course
from autograder.needed import needed
from autograder.sandbox import SandboxManager, manager_for
from autograder.transcripts import MIME
from autograder.watch import MIB, Caps
from servelab.errors import CourseError
from servelab.notebooks import grade_id, is_check

FREE = ("display_data", "execute_result", "stream", "error", "status", "execute_input")


class Killer(Exception):
    """A cell after which the kernel cannot be used any more; its text says why."""


class OutOfTime(Exception):
    """The notebook's restarts or its total time are used up; its text says which."""


class SandboxedExecute(Execute):
    """nbgrader's Execute, with the sandbox, killers, replay and bounded output."""

    km: SandboxManager | None

    timeout = Integer(60, help="Seconds for one cell.").tag(config=True)
    notebook_timeout = Integer(600, help="Seconds for one notebook, replays included.").tag(config=True)
    max_restarts = Integer(5, help="Kernels that one notebook may lose.").tag(config=True)
    max_output = Integer(32 * MIB, help="Bytes of output of one cell.").tag(config=True)
    memory = Integer(Caps.memory, help="Bytes of memory of a kernel and its children together.").tag(config=True)
    processes = Integer(Caps.processes, help="Processes of a kernel, itself included.").tag(config=True)
    disk = Integer(Caps.disk, help="Bytes that can be written to /tmp, and again to /dev/shm.").tag(config=True)
    sandboxed = Bool(True, help="False runs submissions as the grader; every report is marked then.").tag(config=True)
    startup_timeout = Integer(120).tag(config=True)
    iopub_timeout = Integer(60).tag(config=True)
    interrupt_on_timeout = Bool(False)
    store_widget_state = Bool(False)
    record_timing = Bool(False)
    shutdown_kernel = Enum(["graceful", "immediate"], default_value="immediate").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: Any = None, km: Any = None) -> tuple[NotebookNode, Any]:
        NotebookClient.__init__(self, nb, km)
        self.resources, self.unit = resources, resources["nbgrader"]["assignment"]
        self.course = Course()
        secret.prepare(self.course, self.unit)
        self.done: list[int] = []  # cells that a new kernel has to replay
        self.restarts, self.deadline, self.started = 0, time.monotonic() + self.notebook_timeout, time.monotonic()
        self.incidents: list[str] = []
        self.timeout_func = self._seconds_left
        frozen: dict[int, list] = {}
        try:
            for index in sorted(needed(nb.cells, self.course.release(self.unit).cells)):
                frozen[index] = self._step(index)
        except OutOfTime as end:
            self.incidents.append(str(end))
        finally:
            self._stop()
        for index, cell in enumerate(nb.cells):
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = frozen.get(index, []), None
        resources["servelab"] = {
            "incidents": self.incidents,
            "sandboxed": self.sandboxed,
            "seconds": round(time.monotonic() - self.started, 1),
        }
        return nb, resources

    def _step(self, index: int) -> list:
        """Run one cell; what it leaves is a copy that no later message can reach."""
        cell = self.nb.cells[index]
        self._ensure_kernel()
        try:
            self._run_cell(index)
        except Killer as killer:
            self._lose_kernel(index, killer)
            return []
        if not is_check(cell):
            self.done.append(index)
            self._note_error(cell)
        return copy.deepcopy(cell.outputs) if is_check(cell) else []

    def _ensure_kernel(self) -> None:
        """A kernel in the state that the cells so far have left, as far as that can be had."""
        while self.kc is None:
            self._start()
            for index in list(self.done):
                try:
                    self._run_cell(index)
                except Killer as killer:
                    self.done.remove(index)
                    self._lose_kernel(index, killer)
                    break

    def _run_cell(self, index: int) -> None:
        self.size, self.flooded, self.asked_exit = 0, False, False
        if time.monotonic() > self.deadline:
            raise OutOfTime(f"the notebook ran longer than {self.notebook_timeout} s; the rest was not run")
        limit = self._seconds_left()
        try:
            self.execute_cell(self.nb.cells[index], index)
        except CellTimeoutError:
            raise Killer(f"ran longer than {limit} s") from None
        except DeadKernelError:
            raise Killer(self._cause_of_death()) from None
        except Exception as error:  # messages that no kernel sends: code in it has forged them
            self.log.exception("cell %s", index)
            raise Killer(f"sent what cannot be read ({type(error).__name__})") from error
        if self.asked_exit:
            raise Killer("called exit()")
        if any(output.get("ename") == "MemoryError" for output in self.nb.cells[index].outputs):
            raise Killer("ran out of memory")  # which it may still hold: what comes after must not pay for it

    def _cause_of_death(self) -> str:
        breach = self.km.box.breach if self.km and self.km.provisioner else ""
        if self.flooded:
            return f"wrote more than {self.max_output // MIB} MiB of output"
        return f"used {breach}" if breach else "ended the kernel"

    def _lose_kernel(self, index: int, killer: Killer) -> None:
        cell = self.nb.cells[index]
        name = grade_id(cell) or f"number {index + 1}"
        self.incidents.append(f"cell {name} {killer}; the kernel was restarted without it")
        self.restarts += 1
        self._stop()
        if self.restarts > self.max_restarts:
            raise OutOfTime(f"{self.restarts} kernels were lost; the rest was not run")

    def _note_error(self, cell: NotebookNode) -> None:
        """Name the error that a solution cell ended with: its type only, for its text is the submission's own."""
        names = [output.get("ename") for output in cell.outputs if output.output_type == "error"]
        if names and grade_id(cell):
            error = getattr(builtins, str(names[0]), None)
            known = isinstance(error, type) and issubclass(error, BaseException)
            self.incidents.append(f"cell {grade_id(cell)} ended with {names[0] if known else 'an error'}")

    def _seconds_left(self, cell: NotebookNode | None = None) -> int:
        return max(1, min(self.timeout, int(self.deadline - time.monotonic()) + 1))

    def _start(self) -> None:
        caps = Caps(memory=self.memory, processes=self.processes, disk=self.disk)
        challenges = str(secret.challenges_folder(self.course, self.unit))
        settings = {"unit": self.unit, "challenges": challenges, "sandboxed": self.sandboxed, "caps": caps}
        for last in (False, True):
            self.km = manager_for(settings)
            try:
                self.start_new_kernel()
                self.start_new_kernel_client()
                self.km.box.lock()
                return
            except Exception as error:
                self._stop()
                if last:
                    raise CourseError(f"no kernel could be started: {error}") from error

    def _stop(self) -> None:
        """End the kernel with everything that it started, and drop what still waits for its messages."""
        if self.km is not None:
            if self.km.provisioner is not None:
                self.km.box.kill_now()
            self._cleanup_kernel()
        self.km, self.kc = None, None
        loop = ensure_event_loop()
        if loop.is_running():  # called from a server, e.g. formgrader's: the tasks in its loop are not ours
            return
        waiting = [task for task in asyncio.all_tasks(loop) if not task.done()]
        for task in waiting:
            task.cancel()
        if waiting:
            loop.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))

    def process_message(self, msg: dict, cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        """Count every message; let none rewrite or clear what is already recorded; keep only what is needed."""
        content = msg["content"]
        self.size += _bytes_in(content)
        if self.size > self.max_output:
            self.flooded = True
            if self.km is not None:
                self.km.box.kill_now()
        kind = msg["msg_type"]
        if self.flooded or kind not in FREE:
            return None
        if kind in ("display_data", "execute_result"):
            data = {MIME: content["data"][MIME]} if MIME in content.get("data", {}) else {}
            if not (data and is_check(cell)):
                return None
            content.update(data=data, transient={}, metadata={})
        elif kind == "stream":
            return None
        elif kind == "error":
            content.update(evalue="", traceback=[])
        return super().process_message(msg, cell, cell_index)

    def on_cell_executed(self, **kwargs: Any) -> None:
        payload = kwargs["execute_reply"]["content"].get("payload") or []
        self.asked_exit = any(isinstance(item, dict) and item.get("source") == "ask_exit" for item in payload)


def _bytes_in(value: Any) -> int:
    """About how many bytes a message's content takes as text."""
    stack, total = [value], 0
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
            total += sum(len(str(key)) for key in item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        else:
            total += len(item) if isinstance(item, (str, bytes)) else 8
    return total
