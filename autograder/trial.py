"""Does the sandbox work on this machine? Found out by trying, not by looking for a program.

A probe runs in the very sandbox that kernels get and reports what it can see and do. `grade` refuses unless everything
that must be closed is closed, and says what is in the way and how to mend it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from autograder import sandbox
from autograder.course import Course
from autograder.seccomp import filter_file
from autograder.watch import Caps
from servelab.errors import CourseError

SECONDS = 60
PROBE = """
import json, os, socket, sys
seen = {}
def closed(name, attempt):
    try:
        attempt()
    except Exception:
        seen[name] = True
    else:
        seen[name] = False
def connect():
    socket.create_connection(("192.0.2.1", 9), timeout=0.5).close()
def leave(path):
    open(path, "x").close()
    os.remove(path)  # where nothing keeps the probe out, nothing of it stays
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
closed("the network", connect)
seen["network devices"] = [name for _, name in socket.if_nameindex()] in (["lo"], [])
for name, path in json.loads(sys.argv[1]).items():
    closed(name, lambda: os.stat(path))
for name, path in (("the system", "/usr/x"), ("Python", sys.prefix + "/x"), ("servelab", sys.argv[2] + "/x")):
    closed(f"writing to {name}", lambda: leave(path))
seen["privileges"] = int(status["CapEff"], 16) == 0 and int(status["NoNewPrivs"]) == 1
seen["other processes"] = sum(name.isdigit() for name in os.listdir("/proc")) < 6
with open("/tmp/scratch", "w") as file:
    file.write("x")
import ipykernel, servelab.checking
print(json.dumps({"closed": seen, "uid": os.getuid()}))
"""


@dataclass(frozen=True)
class Trial:
    """What a trial run found. ``problem`` and ``mend`` are empty if the sandbox works."""

    works: bool
    problem: str = ""
    mend: str = ""


def try_sandbox(course: Course) -> Trial:
    """Run the probe in the sandbox."""
    if not sys.platform.startswith("linux"):
        mend = "Grade on Linux, in a virtual machine or in WSL 2; or accept the risk with --no-sandbox."
        return Trial(False, f"the sandbox needs Linux, this is {sys.platform}", mend)
    for program, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux"), ("setpriv", "util-linux")):
        if shutil.which(program) is None:
            mend = f"Install it: sudo apt-get install {package} (Fedora: sudo dnf install {package})."
            return Trial(False, f"{package} is not installed ({program} is not on the PATH)", mend)
    try:
        done = _run_probe(course)
    except subprocess.TimeoutExpired:
        return Trial(False, f"the trial run did not end within {SECONDS} s", "Try again when the machine is less busy.")
    return _read(done)


def require_sandbox(course: Course) -> None:
    """Raise `CourseError` with cause and mend unless the sandbox works."""
    trial = try_sandbox(course)
    if not trial.works:
        mend = f"{trial.mend}\nSee autograder/README.md, 'Setting up the sandbox'. --no-sandbox grades without one."
        raise CourseError(f"no submission is run without a working sandbox: {trial.problem}", mend=mend)


def _run_probe(course: Course) -> subprocess.CompletedProcess:
    uid = sandbox.own_uid()
    sockets = sandbox.make_sockets(uid)
    hidden = {
        "the solutions": course.root / "solutions",
        "the grader": course.root / "autograder",
        "the grader's home": Path.home() / ".bashrc",
        "accounts": "/etc/shadow",
    }
    argv = [
        sys.executable,
        "-c",
        PROBE,
        json.dumps({k: str(v) for k, v in hidden.items()}),
        str(course.root / "servelab"),
    ]
    with tempfile.TemporaryDirectory(prefix="sl-") as empty, filter_file() as rules:
        view = sandbox.View.of_unit("", Path(empty), sockets, Caps())
        if os.geteuid() == 0:
            sandbox.hand_over(sockets, uid)
        words = sandbox.command(view, argv, uid, rules)
        passed = () if rules is None else (rules,)
        try:
            return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, pass_fds=passed, cwd="/")
        finally:
            shutil.rmtree(sockets, ignore_errors=True)


def _read(done: subprocess.CompletedProcess) -> Trial:
    lines = done.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if done.returncode == 0 and lines else None
    except ValueError:
        found = None
    if found is None:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
        return Trial(False, f"it does not start: {said}", _mend(done.stderr))
    open_ = [name for name, is_closed in found["closed"].items() if not is_closed]
    if open_:
        return Trial(False, f"it leaves open: {', '.join(open_)}", "This is a fault of the grader; please report it.")
    return Trial(True)


def _mend(said: str) -> str:
    """What usually stands behind bubblewrap's message."""
    if "Unknown option" in said:
        return "bubblewrap 0.8 or newer is needed (Debian 12, Ubuntu 23.04, Fedora 38 or newer)."
    if _reads("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        return (
            "This Ubuntu's AppArmor keeps bubblewrap from making a user namespace. Give it a profile "
            "(sudo apt-get install apparmor-profiles and enable bwrap-userns-restrict), or: "
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return (
            "This is a container, whose seccomp profile forbids new namespaces. Start it with "
            "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined"
        )
    switches = ("/proc/sys/user/max_user_namespaces", "/proc/sys/kernel/unprivileged_userns_clone")
    if any(_reads(path) == "0" for path in switches):
        settings = "user.max_user_namespaces=15000 kernel.unprivileged_userns_clone=1"
        return f"User namespaces are switched off: sudo sysctl {settings}"
    return "Run `bwrap --ro-bind / / true` to see it alone."


def _reads(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
