#!/usr/bin/env python3
"""Start the servelab course: make its environment if needed, then run `python -m servelab ...` in it.

    python3 course.py learn          (Windows: py course.py learn)

The environment is `.venv` beside this file, or the active one where that is named `servelab`, or with --here the one
of the running Python. It is made in three steps: venv, torch, the packages of requirements.lock. A stamp in it
remembers what it was made from, so a later start only reads three small files.

Only the standard library is used, and the file parses on every Python back to 2.7: an old one looks for a newer one.
All messages go to stderr, because stdout belongs to the command (`exam --json`).
"""

from __future__ import print_function

import collections
import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time

HELP = """usage: python3 course.py [--here] [--torch cpu|cuda] COMMAND ...

  learn              open the course in JupyterLab
  check UNIT         run the checks of a unit's notebook, for example: check 03
  progress           show what is done and what comes next
  restore UNIT       repair a damaged notebook; answers are kept
  doctor             look over this machine and the environment
  fetch-model        download the optional real model (93 MB)

  release OUT.zip    pack the student version                      (instructors)
  grade SUBMISSIONS  grade a folder of notebooks                   (instructors)
  build [--check]    make the notebooks from solutions/            (contributors)
  exam [UNIT]        grade the graders                             (contributors)
  test               run the tests                                 (contributors)

  --here             install into the Python that runs this, not into .venv
  --torch cpu|cuda   which build of torch to install (default: by whether there is an NVIDIA GPU)

The first start makes the environment and takes some minutes; COMMAND --help tells more.
"""

ROOT = os.path.dirname(os.path.abspath(__file__))
WINDOWS = os.name == "nt"
VERSIONS = ("3.11", "3.12", "3.13")  # the Pythons that the course runs on, the most tested first
STEPS_VERSION = 1  # raise it when the steps below change what they install
STAMP, LOCK = "servelab-stamp.json", "servelab.lock"  # both lie in the environment
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX_WINDOWS = "https://download.pytorch.org/whl/cu130"
DOWNLOAD = {"cpu": "about 0.2 GB", "cuda": "about 2.7 GB"}  # torch and its companions, as packed
DISK_GB = {"cpu": 3, "cuda": 9}  # the whole environment, unpacked, and room for the downloads
PACKAGES = {"learn": "about 130 MB", "test": "about 210 MB"}

# What pip or venv printed -> what happened and what to do. The first match counts.
CAUSES = (
    (r"No space left|Errno 28\b|not enough space on the disk", "the disk is full: free some space"),
    (r"externally-managed", "this Python belongs to the operating system: leave --here off"),
    (r"Read-only file system|Permission denied|Errno 13\b|Access is denied",
     "there is no permission to write here: move the course to a folder of your own"),
    (r"CERTIFICATE_VERIFY_FAILED|SSLError",
     "the network's certificate is not trusted: behind a company proxy, set PIP_CERT to its certificate file"),
    (r"NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|NameResolution|name resolution|getaddrinfo"
     r"|Max retries|ProxyError|ConnectionReset|Connection broken|IncompleteRead|Network is unreachable",
     "the package index cannot be reached: check the network (behind a proxy, set HTTPS_PROXY)"),
    (r"No matching distribution found for torch",
     "PyTorch has no build for this machine: it takes 64-bit Linux (glibc 2.28 or newer), 64-bit Windows or an "
     "Apple-silicon Mac with macOS 14 or newer"),
    (r"ensurepip|No module named '?venv",
     "this Python cannot make environments: install its venv module (Debian, Ubuntu: sudo apt install python3-venv)"),
)  # fmt: skip

Env = collections.namedtuple("Env", "folder python own")  # own: ours to make anew when it is broken


class Trouble(Exception):
    """One sentence for the person in front of the screen: what happened, where, what to do."""


def say(text):
    print(text, file=sys.stderr)
    sys.stderr.flush()


def explain(text):
    """The sentence for what a failed pip or venv printed, or None."""
    for pattern, sentence in CAUSES:
        if re.search(pattern, text):
            return sentence
    return None


PROBE = """
import sys, ensurepip, venv
print("%d.%d" % sys.version_info[:2] if sys.maxsize > 2**32 else "32 bit")
print(sys.executable)
"""


def output_of(command):
    """What a command prints, or None where it cannot run or fails."""
    with open(os.devnull, "r+b") as null:
        try:
            return subprocess.check_output(command, stdin=null, stderr=null).decode("utf-8", "replace")
        except (EnvironmentError, subprocess.CalledProcessError):
            return None


def able(command):
    """The path of the Python behind `command`, or None where it is unsuitable or has no venv module."""
    lines = (output_of(command + ["-c", PROBE]) or "").splitlines()
    return lines[1].strip() if len(lines) == 2 and lines[0].strip() in VERSIONS else None


def places(version):
    """Where a Python of this version may lie besides PATH, as glob patterns."""
    home = os.path.expanduser("~")
    if WINDOWS:
        programs = os.path.join(os.environ.get("LOCALAPPDATA", home), "Programs", "Python")
        yield os.path.join(programs, "Python" + version.replace(".", ""), "python.exe")
        yield os.path.join(home, ".pyenv", "pyenv-win", "versions", version + ".*", "python.exe")
        return
    pyenv = os.environ.get("PYENV_ROOT") or os.path.join(home, ".pyenv")
    yield os.path.join(pyenv, "versions", version + ".*", "bin", "python")
    yield "/Library/Frameworks/Python.framework/Versions/" + version + "/bin/python3"
    for folder in ("/usr/local/bin", "/opt/homebrew/bin", "/opt/local/bin", "/usr/bin", home + "/.local/bin"):
        yield folder + "/python" + version


def candidates():
    """Commands that may start a suitable Python, best first."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    suffix = ".exe" if WINDOWS else ""
    for version in VERSIONS:
        for folder in folders:
            yield [os.path.join(folder, "python" + version + suffix)]
        if WINDOWS:
            yield ["py", "-" + version]
        for pattern in places(version):
            for path in sorted(glob.glob(pattern)):
                yield [path]
    for folder in folders:
        for name in ("python3", "python"):
            yield [os.path.join(folder, name + suffix)]


def find_python():
    """A Python 3.11 to 3.13 of this machine that can make environments, or None."""
    for command in candidates():
        found = able(command) if command[0] == "py" or os.path.isfile(command[0]) else None
        if found:
            return found
    return None


def is_suitable():
    return "%d.%d" % sys.version_info[:2] in VERSIONS


def can_make_venv():
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


def restart_with_a_suitable_python(arguments):
    """Run this file again with a better Python; returns only on Windows, with the exit code."""
    found = find_python()
    if not found and is_suitable():
        raise Trouble("%s: %s" % (sys.executable, explain("ensurepip")))
    if not found:
        raise Trouble(
            "the course needs a 64-bit Python 3.11, 3.12 or 3.13 with its venv module, and none is found here (this is "
            "%d.%d, %s): install one from https://www.python.org/downloads/ or with your package manager"
            % (sys.version_info[:2] + (sys.executable,))
        )
    return become([found, os.path.abspath(__file__)] + arguments, dict(os.environ))


def become(command, environment):
    """Replace this process by the command; on Windows, which cannot, wait for it and return its exit code."""
    if not WINDOWS:
        os.execve(command[0], command, environment)
    child = subprocess.Popen(command, env=environment)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the child got it too, and decides
            pass


def scripts_of(folder):
    return os.path.join(folder, "Scripts" if WINDOWS else "bin")


def python_of(folder):
    """The Python of an environment (conda on Windows has it at the top)."""
    if WINDOWS and os.path.isdir(os.path.join(folder, "conda-meta")):
        return os.path.join(folder, "python.exe")
    return os.path.join(scripts_of(folder), "python.exe" if WINDOWS else "python")


def choose(here):
    """The environment to use: the running one, an active one named servelab, or .venv beside this file."""
    if here:
        if not is_suitable():
            raise Trouble(
                "--here needs Python 3.11 to 3.13, and %s is %d.%d" % ((sys.executable,) + sys.version_info[:2])
            )
        return Env(sys.prefix, sys.executable, False)
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = os.environ.get(variable, "").rstrip("/\\")
        if os.path.basename(active) == "servelab" and os.path.exists(python_of(active)):
            return Env(active, python_of(active), False)
    folder = os.path.join(ROOT, ".venv")
    return Env(folder, python_of(folder), True)


def read(name):
    try:
        with io.open(os.path.join(ROOT, name), encoding="utf-8") as file:
            return file.read()
    except (EnvironmentError, ValueError) as error:
        raise Trouble("%s cannot be read (%s): get it again, for example with `git checkout %s`" % (name, error, name))


def torch_version():
    found = re.search(r'"torch==([\d.]+)"', read("pyproject.toml"))
    if not found:
        raise Trouble("pyproject.toml names no torch version: get it again, for example with `git checkout .`")
    return found.group(1)


def digest():
    """What an environment is made from, in short."""
    text = "\n".join((str(STEPS_VERSION), ROOT, read("pyproject.toml"), read("requirements.lock")))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_stamp(env):
    try:
        with io.open(os.path.join(env.folder, STAMP), encoding="utf-8") as file:
            stamp = json.load(file)
        return stamp if isinstance(stamp, dict) else {}
    except (EnvironmentError, ValueError):
        return {}


def write_stamp(env, stamp):
    path = os.path.join(env.folder, STAMP)
    with io.open(path + ".new", "w", encoding="utf-8") as file:
        file.write(json.dumps(stamp))
    os.replace(path + ".new", path)


def is_ready(env, level, torch):
    """Whether the environment is complete for this level (`test` includes `learn`) and this build of torch."""
    stamp = read_stamp(env)
    return (
        stamp.get("digest") == digest()
        and stamp.get("folder") == env.folder
        and stamp.get("level") in (level, "test")
        and torch in (None, stamp.get("torch"))
        and os.path.exists(env.python)
    )


@contextlib.contextmanager
def locked(env):
    """One maker at a time. The system drops the lock when its holder ends, so it is never stale.

    The lock file stays: a .venv without pyvenv.cfg that has it is one of ours, interrupted early.
    """
    if not os.path.isdir(env.folder):
        os.makedirs(env.folder)
    names = os.listdir(env.folder)
    if env.own and names and not {"pyvenv.cfg", LOCK} & set(names):
        raise Trouble("%s exists and is not a Python environment: move it away, then run this again" % env.folder)
    with open(os.path.join(env.folder, LOCK), "a") as file:
        if not try_lock(file):
            say("another course.py is making %s; waiting for it" % env.folder)
        while not try_lock(file):
            time.sleep(0.2)
        yield


def try_lock(file):
    try:
        if WINDOWS:
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except EnvironmentError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)  # a file system without locks: go on
    return True


def run(command, doing, stdout=2):
    """Run a command in ROOT, its output shown; raise Trouble with the cause where it fails.

    stdout goes straight to the terminal (on 2), so that pip draws its progress bar; errors pass through here.
    """
    stderr = subprocess.STDOUT if stdout == subprocess.PIPE else subprocess.PIPE
    child = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr)
    kept = collections.deque(maxlen=200)
    try:
        for line in iter((child.stdout or child.stderr).readline, b""):
            kept.append(line.decode("utf-8", "replace"))
            sys.stderr.write(kept[-1])
            sys.stderr.flush()
        code = child.wait()
    except KeyboardInterrupt:
        stop(child)
        raise
    if code:
        last = next((text.strip() for text in reversed(kept) if text.strip()), "no message")
        raise Trouble("%s failed: %s" % (doing, explain("".join(kept)) or "exit code %d (%s)" % (code, last)))


def stop(child):
    """Ctrl-C reached the child too: give it the time to clean up."""
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def pip(env, arguments, doing):
    doing += " into " + env.folder
    run([env.python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"] + arguments, doing)


def check_disk(build):
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < DISK_GB[build]:
        raise Trouble(
            "the disk is nearly full: %s has %.1f GB free and the environment takes about %d GB; free some space, then "
            "run this again" % (ROOT, free, DISK_GB[build])
        )


def is_healthy(env):
    """Whether the environment's Python runs, is a suitable one and has pip."""
    version = output_of([env.python, "-c", "import sys, pip; print('%d.%d' % sys.version_info[:2])"])
    return (version or "").strip() in VERSIONS


def make_venv(env):
    """Step 1: a whole .venv; a half-made or moved one is emptied and made anew."""
    stamp = read_stamp(env)
    if is_healthy(env) and stamp.get("folder", env.folder) == env.folder:
        say("[1/3] environment: %s is there" % env.folder)
        return remove_torn(env)
    say("[1/3] environment: making %s with Python %d.%d (20 MB)" % ((env.folder,) + sys.version_info[:2]))
    empty(env.folder)
    run([sys.executable, "-m", "venv", env.folder], "making the environment %s" % env.folder, subprocess.PIPE)


def empty(folder):
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif name != LOCK:
            os.remove(path)


def remove_torn(env):
    """Forget packages whose installation was cut off: pip writes a package's RECORD last, and trusts the rest."""
    library = os.path.join(env.folder, "Lib") if WINDOWS else os.path.join(env.folder, "lib", "python3.*")
    for info in glob.glob(os.path.join(library, "site-packages", "*.dist-info")):
        if not os.path.exists(os.path.join(info, "RECORD")):
            shutil.rmtree(info)


def installed_torch(env):
    """(version, build) of the torch in the environment; the build of a plain version is the system's default one."""
    found = output_of([env.python, "-c", "from importlib.metadata import version; print(version('torch'))"])
    version, _, local = (found or "").strip().partition("+")
    if local:
        return version, "cpu" if local == "cpu" else "cuda"
    return version, "cuda" if sys.platform.startswith("linux") else "cpu"


def wanted_build(torch):
    """cpu or cuda: what was asked for, otherwise cuda on Linux with an NVIDIA GPU."""
    if torch == "cuda" and sys.platform == "darwin":
        raise Trouble("--torch cuda: there is no CUDA on macOS; leave the option off")
    gpu = sys.platform.startswith("linux") and "GPU" in (output_of(["nvidia-smi", "-L"]) or "")
    return torch or ("cuda" if gpu else "cpu")


def is_reachable(url):
    from urllib.request import urlopen

    try:
        urlopen(url, timeout=5).close()
        return True
    except Exception:  # whatever a proxy or a half-open network may answer
        return False


def install_torch(env, build, asked):
    """Step 2: torch, unless this version of it is there."""
    version = torch_version()
    found = installed_torch(env)
    if found[0] == version and (not asked or found[1] == build):
        say("[2/3] torch %s is there" % version)
        return
    requirement = ["torch==" + version]
    if found[0] == version:  # the other build: pip takes both for the same thing
        requirement = ["--force-reinstall", "--no-deps"] + requirement
    if sys.platform.startswith("linux") and build == "cpu":
        if is_reachable(CPU_INDEX + "/torch/"):
            say("[2/3] torch %s, the CPU build (%s)" % (version, DOWNLOAD["cpu"]))
            try:
                return pip(env, ["--no-deps", "--index-url", CPU_INDEX] + requirement, "installing torch")
            except Trouble as trouble:
                say("%s; trying the default package index" % trouble)
        say("[2/3] torch %s from the default index (%s where it holds the CUDA build)" % (version, DOWNLOAD["cuda"]))
    else:
        say("[2/3] torch %s (%s)" % (version, DOWNLOAD[build]))
    index = ["--index-url", CUDA_INDEX_WINDOWS, "--no-deps"] if WINDOWS and build == "cuda" else []
    pip(env, ["-c", "requirements.lock"] + index + requirement, "installing torch")


def install_packages(env, level):
    """Step 3: everything else, in the versions of the lock, and servelab itself as editable."""
    say("[3/3] the other packages (%s)" % PACKAGES[level])
    project = ".[test]" if level == "test" else "."
    pip(env, ["-c", "requirements.lock", "-e", project], "installing the packages of requirements.lock")


def make(env, level, torch):
    """All steps, then the stamp. What is there already is kept."""
    with locked(env):
        if is_ready(env, level, torch):  # another process made it meanwhile
            return
        if read_stamp(env).get("level") == "test":
            level = "test"
        build = wanted_build(torch)
        if installed_torch(env)[0] != torch_version():
            check_disk(build)
        if env.own:
            make_venv(env)
        elif not is_healthy(env):
            raise Trouble("the environment %s lacks pip or has no Python 3.11 to 3.13: make it anew" % env.folder)
        install_torch(env, build, asked=torch is not None)
        install_packages(env, level)
        write_stamp(env, {"digest": digest(), "folder": env.folder, "level": level, "torch": build})


def split(arguments):
    """(here, torch, the arguments for servelab); our own options may stand anywhere before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    here, torch, passed, own = False, None, [], iter(arguments[:end])
    for argument in own:
        if argument == "--here":
            here = True
        elif argument == "--torch" or argument.startswith("--torch="):
            torch = argument.partition("=")[2] or next(own, "")
            if torch not in ("cpu", "cuda"):
                raise Trouble("--torch takes cpu or cuda, not %r" % torch)
        else:
            passed.append(argument)
    return here, torch, passed + arguments[end:]


def child_environment(env):
    """The variables for the command: UTF-8, and the environment active (nbgrader starts alembic by name)."""
    result = dict(os.environ, PYTHONUTF8="1")
    result.pop("PYTHONHOME", None)
    folders = [os.path.dirname(env.python), scripts_of(env.folder), os.environ.get("PATH", os.defpath)]
    result["PATH"] = os.pathsep.join(folders)
    if os.path.exists(os.path.join(env.folder, "pyvenv.cfg")):
        result["VIRTUAL_ENV"] = env.folder
    return result


def start(arguments):
    here, torch, rest = split(arguments)
    if not rest or rest[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    env = choose(here)
    level = "test" if rest[0] in ("test", "exam") else "learn"
    if not is_ready(env, level, torch):
        if env.own and not (is_suitable() and can_make_venv()):
            return restart_with_a_suitable_python(arguments)
        make(env, level, torch)
    return become([env.python, "-m", "servelab"] + rest, child_environment(env))


def main(arguments):
    try:
        return start(arguments)
    except Trouble as trouble:
        message = str(trouble)
    except KeyboardInterrupt:
        message = "stopped; run the same command again, it goes on from here"
    except EnvironmentError as error:
        cause = explain("%s [Errno %s]" % (error.strerror, error.errno)) or error.strerror or str(error)
        message = "%s: %s" % (error.filename or ROOT, cause)
    say("course.py: " + message)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
