"""Real ranks from a script, from a notebook's kernel and under torchrun; what is left when such a program is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 60  # seconds for what takes two to five on a quiet machine
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals, and no torchrun over nodes")


@pytest.fixture
def script(tmp_path):
    """Writes a Python file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def eventually(condition) -> bool:
    """Whether a condition comes true within `PATIENCE` seconds."""
    until = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(condition())


def gone(pids) -> bool:
    """Whether none of these processes runs any more; one that nobody has asked how it ended may be left."""
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


# Scripts

WITHOUT_GUARD = """
    import os
    from servelab.ranks import Cluster

    print("top level")

    def rank():
        import torch.distributed as dist
        return dist.get_rank(), os.getpid()

    first, again = (Cluster(1, backend="gloo", start_method="spawn").run(rank).values for _ in range(2))
    assert first == again
    print(first[0][1])
"""


def test_a_script_needs_no_main_guard_and_leaves_no_process(script):
    command = [sys.executable, script(WITHOUT_GUARD)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    first, pid = done.stdout.splitlines()
    assert first == "top level" and done.stderr == ""
    assert eventually(lambda: gone([int(pid)]))


KILLED = """
    import os
    import time
    from servelab.ranks import Cluster

    def rank():
        print("at", os.getpid(), flush=True)
        time.sleep(1000)

    Cluster(1, backend="gloo", start_method="spawn").run(rank)
"""


@posix
def test_a_killed_program_leaves_no_rank_and_no_file(script, tmp_path):
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    program = subprocess.Popen([sys.executable, script(KILLED)], env=environment, stdout=subprocess.PIPE, text=True)
    rank = int(program.stdout.readline().split()[-1])
    family = {rank, *(child.pid for child in psutil.Process(program.pid).children(recursive=True))}
    assert list(tmp_path.glob("servelab-ranks-*"))
    program.kill()
    program.wait()
    program.stdout.close()
    assert eventually(lambda: gone(family))
    assert eventually(lambda: not list(tmp_path.glob("servelab-ranks-*")))


# Notebooks

FUNCTIONS = """
import time
import torch
import torch.distributed as dist
from torch.distributed import recv
from servelab.ranks import Cluster

def crossed(tensor):
    half = tensor / 2
    recv(half, 1 - dist.get_rank())

def fails(layer):
    if dist.get_rank() == 1:
        raise KeyError("layer 3")

def long():
    if dist.get_rank() == 0:
        recv(torch.ones(1), 1)
    print("at work")
    while True:
        pass

FACTOR = 2

class Shard:
    def scaled(self):
        return FACTOR * 10
"""
RUN = "Cluster(2, backend='gloo', stall={stall}, timeout=1000).run({function}, *{arguments})"
SHARDS = """
scaled = Shard.scaled
shard, _ = Cluster(2, backend="gloo").run(Shard).values
FACTOR = 3
print(type(shard) is Shard, Shard.scaled is scaled, shard.scaled())
"""


class Interrupting(NotebookClient):
    """Interrupts the kernel as JupyterLab does, once a rank says that it is at work; the second time it kills it."""

    family: frozenset[int] = frozenset()  # the processes of the kernel when it was killed

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "stream" and "[rank 1] at work" in msg["content"]["text"]:
            kernel = self.km.provisioner.pid
            if cell_index < len(self.nb.cells) - 1:
                os.killpg(os.getpgid(kernel), signal.SIGINT)
            else:
                self.family = frozenset(child.pid for child in psutil.Process(kernel).children(recursive=True))
                os.kill(kernel, signal.SIGKILL)
        return super().process_message(msg, cell, cell_index)


class Ran(NamedTuple):
    shown: list[str]  # what a reader sees below each cell, without colours
    family: frozenset[int]
    folder: Path  # for temporary files


@pytest.fixture(scope="module")
def notebook(tmp_path_factory) -> Ran:
    """A notebook that runs functions on ranks, until its kernel is killed."""
    runs = [("fails", 0.3, "[0]"), ("crossed", 0.3, "[torch.ones(2)]"), ("long", 1000, "[]")]
    cells = ["'another cell first'", FUNCTIONS.strip()]
    cells += [RUN.format(function=name, stall=stall, arguments=arguments) for name, stall, arguments in runs]
    cells += [SHARDS.strip(), cells[-1]]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client, folder = Interrupting(nb, timeout=PATIENCE, allow_errors=True), tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DeadKernelError):
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("TMPDIR", str(folder))
        client.execute()
    texts = ["\n".join(o.get("text") or "\n".join(o.get("traceback", ())) for o in cell.outputs) for cell in nb.cells]
    return Ran([re.sub(r"\x1b\[[0-9;]*m", "", text) for text in texts], client.family, folder)


@posix
def test_an_error_names_the_rank_the_cell_and_the_line(notebook):
    shown = notebook.shown[2]
    assert shown.startswith("RankError: rank 1 raised KeyError: 'layer 3'\n    Cell In[2], line 13, in fails\n")
    assert 'raise KeyError("layer 3")' in shown and "processes.py" not in shown


@posix
def test_a_deadlock_names_the_cell_and_the_line(notebook):
    assert "DeadlockError: deadlock: no unfinished rank can go on" in notebook.shown[3]
    assert "Cell In[2], line 9, in crossed\n        recv(half, 1 - dist.get_rank())" in notebook.shown[3]


@posix
def test_an_interrupt_ends_the_cell_with_a_report(notebook):
    assert "RankInterruptError: interrupted" in notebook.shown[4]
    assert "  rank 0: " in notebook.shown[4] and "  rank 1: is running\n    Cell In[2], line " in notebook.shown[4]


@posix
def test_the_classes_of_a_notebook_stay_what_they_are(notebook):
    assert notebook.shown[5] == "True True 30\n"


@posix
def test_a_killed_kernel_leaves_no_rank_and_no_file(notebook):
    assert len(notebook.family) >= 3  # the fork server and two ranks: one waits in gloo, one computes
    assert eventually(lambda: gone(notebook.family))
    assert eventually(lambda: not list(notebook.folder.glob("servelab-ranks-*")))


# torchrun

JOB = """
    import os
    import torch
    import torch.distributed as dist
    from torch.distributed import send
    from servelab.ranks import Cluster, span

    def ring(scale):
        rank, size = dist.get_rank(), dist.get_world_size()
        mine, theirs = torch.full((3,), scale * rank), torch.empty(3)
        with span("fill"):
            theirs.zero_()
        if rank % 2:
            dist.recv(theirs, (rank - 1) % size)
            send(mine, (rank + 1) % size)
        else:
            send(mine, (rank + 1) % size)
            dist.recv(theirs, (rank - 1) % size)
        dist.all_reduce(theirs)
        print("sum", theirs[0].item())
        return theirs[0].item()

    class Shard:
        def scaled(self):
            return FACTOR

    def shard(given):
        return given

    cluster = Cluster(4, timeout=20, backend="gloo")
    scaled, FACTOR = Shard.scaled, 1
    shards = cluster.run(shard, Shard()).values
    FACTOR = 2
    assert Shard.scaled is scaled and [shard.scaled() for shard in shards] == [2] * 4
    assert all(type(shard) is Shard for shard in shards)
    run = cluster.run(ring, 2.0)
    again = cluster.run(ring, 1.0)

    def line(*words):  # in one write: two ranks share the pipe
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())

    line("values", *run.values, *again.values, *(run.sent(rank) for rank in range(4)))
    line("kinds", *(event.kind for event in run.of_rank(3)), *(event.kind for event in run.of_rank(0)))
"""

STUCK = """
    import torch
    import torch.distributed as dist
    from servelab.ranks import Cluster

    def fine():
        dist.barrier()

    def dead():
        rank, t = dist.get_rank(), torch.zeros(4)
        if rank < 2:
            dist.recv(t, 1 - rank)
        elif rank == 2:
            dist.all_reduce(t)

    cluster = Cluster(4, timeout=600, backend="gloo")
    cluster.run(fine)
    cluster.run(dead)
"""


def free_port() -> int:
    """A port that is free now; nothing can promise that it stays so, hence `nodes` tries again with another one."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Ended(NamedTuple):
    stdout: str
    stderr: str
    returncode: int


def nodes(program: Path, tries: int = 3) -> list[Ended]:
    """Run a program as a torchrun job of two nodes with two ranks each, both on this machine."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*command, "--node-rank", str(node), str(program)], env=environment, **pipes)
        for node in (0, 1)
    ]
    try:
        done = [Ended(*process.communicate(timeout=2 * PATIENCE), process.returncode) for process in started]
    finally:
        for process in started:
            process.terminate()  # not kill: it has ranks to end
            process.wait(PATIENCE)
    taken = any("EADDRINUSE" in node.stderr or "address already in use" in node.stderr for node in done)
    return nodes(program, tries - 1) if taken and tries > 1 else done


@posix
def test_the_same_file_runs_as_two_nodes_under_torchrun(script):
    done = nodes(script(JOB))
    assert [node.returncode for node in done] == [0, 0], done[0].stderr + done[1].stderr
    lines = [line for node in done for line in node.stdout.splitlines()]
    assert lines.count("values 12.0 12.0 12.0 12.0 6.0 6.0 6.0 6.0 12 12 12 12") == 4  # every rank has the whole record
    assert lines.count("kinds compute recv send collective compute send recv collective") == 4
    assert sorted(line for line in lines if line.startswith("[rank 3]")) == ["[rank 3] sum 12.0", "[rank 3] sum 6.0"]


@posix
def test_a_deadlock_under_torchrun_is_told_on_every_node(script):
    for node in nodes(script(STUCK)):
        assert node.returncode == 1
        assert "DeadlockError: deadlock: no unfinished rank can go on" in node.stderr, node.stderr
        assert (
            "rank 0: waits for" in node.stderr and "in recv(src=1, tag=0, (4,) float32): rank 1 has sent" in node.stderr
        )
        assert "ranks 0, 1 and 3 have not called it" in node.stderr and "rank 3: has finished" in node.stderr
        assert "dist.recv(t, 1 - rank)" in node.stderr and "timed out" not in node.stderr.lower()
