"""The sandbox, looked at from inside, and the refusal to grade without one."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autograder import sandbox as box
from autograder import trial
from autograder.course import Course
from autograder.seccomp import CALLS, filter_file, program
from autograder.watch import Caps, Watch
from servelab.errors import CourseError
from servelab.paths import ROOT

LOOK = """
import ctypes, errno, json, os, resource, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def denied(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0
def call(name, *args):
    return ctypes.get_errno() if getattr(libc, name)(*args) < 0 else 0
def fill(path, size):
    for n in range(size >> 26):
        with open(f"{path}/{n}", "wb") as file:
            file.write(b"x" * (1 << 26))
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({
    "uid": os.getuid(),
    "groups": os.getgroups(),
    "capabilities": [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")],
    "course": sorted(os.listdir(sys.argv[1])),
    "environment": sorted(os.environ),
    "work": os.listdir("."),
    "devices": [name for _, name in socket.if_nameindex()],
    "network": denied(lambda: socket.create_connection(("192.0.2.1", 9), 1)),
    "root": denied(lambda: os.mkdir("/new")),
    "dev": denied(lambda: open("/dev/new", "w")),
    "home": denied(lambda: open(os.path.expanduser("~/new"), "w")),
    "disk": denied(lambda: fill("/tmp", 512 << 20)),
    "shm": denied(lambda: fill("/dev/shm", 512 << 20)),
    "memory": resource.getrlimit(resource.RLIMIT_DATA)[0],
    "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
    "unshare": call("unshare", 0x10000000),
    "memfd": denied(lambda: os.memfd_create("x")),
    "localhost": socket.gethostbyname("localhost"),
}))
"""


def run_inside(tmp_path: Path, code: str, *args: str, caps: Caps | None = None) -> subprocess.CompletedProcess:
    uid = box.own_uid()
    sockets = box.make_sockets(uid)
    if os.geteuid() == 0:
        box.hand_over(sockets, uid)
    challenges = tmp_path / "challenges"
    challenges.mkdir(exist_ok=True)
    view = box.View.of_unit("", challenges, sockets, caps or Caps())
    with filter_file() as rules:
        words = box.command(view, [sys.executable, "-c", code, *args], uid, rules)
        passed = () if rules is None else (rules,)
        try:
            return subprocess.run(words, capture_output=True, text=True, timeout=60, pass_fds=passed)
        finally:
            shutil.rmtree(sockets)


@pytest.fixture(scope="module")
def inside(tmp_path_factory, sandbox) -> dict:
    os.environ["SERVELAB_TEST_SECRET"] = "x"
    done = run_inside(tmp_path_factory.mktemp("inside"), LOOK, str(ROOT))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.sandbox
class TestInside:
    def test_only_the_package_and_its_data_are_visible_of_the_course(self, inside):
        assert set(inside["course"]) <= {"servelab", "data", ".venv"}
        assert inside["work"] == []

    def test_there_is_no_network(self, inside):
        assert inside["devices"] == ["lo"]
        assert inside["network"] != 0
        assert inside["localhost"] == "127.0.0.1"  # ranks on one machine find each other

    def test_the_system_is_read_only(self, inside):
        assert inside["root"] and inside["dev"]
        assert not inside["home"]

    def test_disk_is_capped(self, inside):
        assert inside["disk"] and inside["shm"]

    def test_it_has_no_privileges(self, inside):
        assert inside["capabilities"] == [0, 0, 0, 0]

    @pytest.mark.skipif(os.geteuid() != 0, reason="a user id of its own needs root")
    def test_it_has_a_user_id_of_its_own(self, inside):
        assert inside["uid"] not in (0, 65534)
        assert inside["groups"] == []
        assert box.own_uid() != box.own_uid()

    def test_limits_hold(self, inside):
        assert (inside["memory"], inside["processes"]) == (Caps.process_memory, Caps.threads)

    @pytest.mark.skipif(program(os.uname().machine) is None, reason="no filter for this processor")
    def test_no_namespaces_and_no_uncounted_memory(self, inside):
        assert inside["unshare"] == inside["memfd"] == 38

    def test_the_environment_is_made_anew(self, inside):
        assert "SERVELAB_TEST_SECRET" not in inside["environment"]
        assert "SERVELAB_CHALLENGES" in inside["environment"]
        assert "JPY_PARENT_PID" not in inside["environment"]


@pytest.mark.sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="the limit counts a user's processes; the grader's would count too")
def test_processes_are_capped_by_the_system_too(tmp_path, sandbox):
    code = "import os, time\nn = 0\ntry:\n    while n < 100:\n        if os.fork() == 0:\n            time.sleep(9)\n"
    code += "            os._exit(0)\n        n += 1\nexcept OSError:\n    pass\nprint(n, flush=True)\nos._exit(0)"
    done = run_inside(tmp_path, code, caps=Caps(threads=20))
    assert int(done.stdout) < 20


def test_the_filter_is_well_formed():
    for machine in CALLS:
        steps = program(machine)
        assert len(steps) % 8 == 0
        jumps = [(at, steps[8 * at + 2], steps[8 * at + 3]) for at in range(len(steps) // 8)]
        assert all(at + 1 + max(yes, no) < len(steps) // 8 for at, yes, no in jumps if yes or no)
    assert program("s390x") is None


@pytest.mark.parametrize(
    ("caps", "breach"),
    [(Caps(processes=1), "processes"), (Caps(memory=1), "memory"), (Caps(sockets=4096), "bytes"), (Caps(), "")],
)
def test_the_watch_ends_what_breaks_a_cap(tmp_path, caps, breach):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    child = subprocess.Popen([sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"])
    while not psutil.Process(child.pid).children():
        time.sleep(0.01)
    watch = Watch(child.pid, caps, tmp_path, child.kill)
    try:
        time.sleep(1)
        assert breach in watch.breach
        assert bool(breach) == (child.poll() is not None)
    finally:
        watch.stop()
        for process in [*psutil.Process(child.pid).children(), child] if child.poll() is None else [child]:
            process.kill()
        child.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how many processes share a page")
def test_pages_that_processes_share_count_once(tmp_path):
    code = "import os, time\nheld = b'x' * (100 << 20)\nif all(os.fork() for _ in range(5)):\n    print(flush=True)\n"
    family = psutil.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        family.stdout.readline()
        watch = Watch(family.pid, Caps(memory=300 << 20), tmp_path, family.kill)
        watch.stop()
        assert sum(each.memory_info().rss for each in [family, *family.children()]) > watch.caps.memory
        assert watch.look() == ""
    finally:
        for process in [*family.children(), family]:
            process.kill()
        family.communicate()


class TestRefusal:
    def test_without_the_program(self, monkeypatch):
        monkeypatch.setattr(trial.shutil, "which", lambda name: None)
        with pytest.raises(CourseError, match=r"bubblewrap is not installed[\s\S]*apt-get install bubblewrap"):
            trial.require_sandbox(Course())

    def test_on_another_system(self, monkeypatch):
        monkeypatch.setattr(trial.sys, "platform", "darwin")
        with pytest.raises(CourseError, match="needs Linux"):
            trial.require_sandbox(Course())

    def test_an_installed_program_that_does_not_work(self, monkeypatch, tmp_path):
        fake = tmp_path / "bwrap"
        fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(CourseError, match="does not start: bwrap: setting up uid map"):
            trial.require_sandbox(Course())

    def test_one_that_keeps_nothing_out(self, monkeypatch, tmp_path):
        fake = tmp_path / "bwrap"
        fake.write_text(
            '#!/bin/bash\nwhile [ "$1" != "--" ]; do shift; done\nshift\n'
            'while [ "$1" != "--" ]; do shift; done\nshift\nexport PYTHONPATH=' + str(ROOT) + '\nexec "$@"\n'
        )
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        if os.geteuid() == 0:
            with pytest.raises(CourseError, match=r"it leaves open: .*the solutions"):
                trial.require_sandbox(Course())
