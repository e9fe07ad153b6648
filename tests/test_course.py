"""course.py: it parses on old Pythons, makes and mends the environment, and says in one sentence what went wrong.

No test installs anything: `sys.executable` is a stub that makes stub environments and logs what it was asked to do.
"""

import ast
import errno
import glob
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "course.py"
needs_posix = pytest.mark.skipif(os.name == "nt", reason="stub programs are shebang scripts")

STUB = """#!{python}
import json, os, shutil, sys
here, asked = {folder!r}, " ".join(sys.argv[1:])
with open(os.path.join(here, "log"), "a") as log:
    log.write(asked + "\\n")
with open(os.path.join(here, "plan")) as plan:
    rules = json.load(plan)
for words, code, out, err in rules:
    if words in asked:
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
torch = os.path.join(here, "torch")
if "-m venv" in asked:
    scripts = os.path.join(sys.argv[-1], "bin")
    os.makedirs(scripts)
    shutil.copy(__file__, os.path.join(scripts, "python"))
    open(os.path.join(sys.argv[-1], "pyvenv.cfg"), "w").close()
elif "version('torch')" in asked:
    print(open(torch).read())
elif "-m pip install" in asked and "torch==" in asked:
    with open(torch, "w") as file:
        file.write("2.13.0+cpu" if "--index-url" in asked or "darwin" in here else "2.13.0")
elif "import sys, pip" in asked:
    print("3.12")
elif "-m servelab" in asked:
    names = ("PATH", "PYTHONUTF8", "VIRTUAL_ENV", "PYTHONHOME", "PIP_INDEX_URL")
    print(json.dumps([sys.argv[1:], os.getcwd(), dict((n, os.environ.get(n)) for n in names)]))
"""


def load(path=COURSE):
    spec = importlib.util.spec_from_file_location("course_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sandbox:
    """A course folder with stub programs; `start` runs course.py's main in this process."""

    def __init__(self, folder, monkeypatch):
        self.root, self.stubs = folder / "course", folder / "stubs"
        self.venv = self.root / ".venv"
        self.root.mkdir()
        self.stubs.mkdir()
        for name in ("course.py", "pyproject.toml", "requirements.lock"):
            shutil.copy(ROOT / name, self.root / name)
        self.plan()
        self.python = self.stubs / "python"
        self.python.write_text(STUB.format(python=sys.executable, folder=str(self.stubs)))
        self.python.chmod(0o755)
        self.course = load(self.root / "course.py")
        self.became = []
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "executable", str(self.python))
        monkeypatch.setattr(self.course, "become", lambda command, environment: self.became.append(command) or 0)
        monkeypatch.setattr(self.course, "is_reachable", lambda url: True)
        monkeypatch.setattr(self.course.shutil, "disk_usage", lambda folder: disk(1e12))

    def plan(self, *rules):
        """Rules (words in the command line, exit code, stdout, stderr) that go before the stub's own ways."""
        (self.stubs / "plan").write_text(json.dumps(rules))

    def start(self, *arguments):
        return self.course.main(list(arguments))

    def steps(self):
        """What was made since the last call: venv, torch, packages."""
        log = self.stubs / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("")
        done = [line for line in lines if "-m venv" in line or "-m pip install" in line]
        return ["venv" if "venv /" in d else "torch" if "torch==" in d else "packages" for d in done]

    def asked(self, words):
        return [line for line in (self.stubs / "log").read_text().splitlines() if words in line]


def disk(free):
    return namedtuple("usage", "total used free")(2 * free, free, free)


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    return Sandbox(tmp_path, monkeypatch)


def complaint(capfd):
    """The one sentence that a failed start ends with; there must be no traceback."""
    text = capfd.readouterr().err
    assert "Traceback (most recent call last)" not in text
    last = text.strip().splitlines()[-1]
    assert last.startswith("course.py: ")
    return last


# Old Pythons


def test_parses_on_old_pythons():
    source = COURSE.read_bytes()
    source.decode("ascii")  # Python 2.7 takes nothing else without a coding line
    tree = ast.parse(source, feature_version=(3, 4))
    for node in ast.walk(tree):
        assert not isinstance(node, (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal))
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            assert node.returns is None and not arguments.kwonlyargs and not arguments.posonlyargs
            assert all(argument.annotation is None for argument in arguments.args)
        if isinstance(node, ast.Raise):
            assert node.cause is None  # `raise ... from` is a syntax error in Python 2.7
        if isinstance(node, ast.Call):
            assert sum(isinstance(argument, ast.Starred) for argument in node.args) <= 1
    assert tree.body[1].module == "__future__"


def test_imports_the_standard_library_only():
    for node in ast.walk(ast.parse(COURSE.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


def old_pythons():
    found = {name: shutil.which(name) for name in ("python2.7", "python3.6", "python3.8", "python3.9")}
    for path in glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin/python")):
        found[Path(path).parts[-3]] = path
    works = {}
    for name, path in found.items():
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            works[name] = path
    return works


def test_real_old_pythons_show_the_help_and_find_a_newer_one(tmp_path):
    pythons = old_pythons()
    if not pythons:
        pytest.skip("no other Python on this machine")
    shutil.copy(COURSE, tmp_path)
    for path in pythons.values():
        shown = subprocess.run([path, str(tmp_path / "course.py")], capture_output=True, text=True, check=False)
        assert (shown.returncode, shown.stderr) == (0, "") and "learn" in shown.stdout
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import course; print(course.find_python())"
        found = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        assert found.returncode == 0 and os.path.exists(found.stdout.strip())


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_needs_no_environment(tmp_path, arguments):
    shutil.copy(COURSE, tmp_path)
    shown = subprocess.run(
        [sys.executable, str(tmp_path / "course.py"), *arguments], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0 and os.listdir(tmp_path) == ["course.py"]
    for command in ["learn", "check", "progress", "restore", "doctor", "release", "grade", "build", "exam", "test"]:
        assert "\n  " + command in shown.stdout


# Finding a Python


@pytest.fixture
def only_path(tmp_path, monkeypatch):
    """Only a fake PATH of two folders counts; returns (course, put a fake Python there)."""
    course = load()
    folders = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setattr(course, "places", lambda version: [])

    def put(folder, name, says, code=0):
        folders[folder].mkdir(exist_ok=True)
        path = folders[folder] / name
        path.write_text(f"#!/bin/sh\nprintf '{says}\\n'\nexit {code}\n")
        path.chmod(0o755)

    return course, put


@needs_posix
def test_finds_a_suitable_python_on_path(only_path):
    course, put = only_path
    put(0, "python3.11", "pyenv: python3.11: command not found", code=127)
    put(0, "python3", r"3.9\n/old/python3")
    put(1, "python3.12", r"3.12\n/good/python3.12")
    put(1, "python", r"3.11\n/other/python")
    assert course.find_python() == "/good/python3.12"


@needs_posix
def test_takes_a_python_without_a_version_in_its_name(only_path):
    course, put = only_path
    put(0, "python3", r"3.14\n/new/python3")
    put(1, "python", r"3.11\n/good/python")
    assert course.find_python() == "/good/python"


@needs_posix
@pytest.mark.parametrize("says", [r"3.10\n/x", r"3.14\n/x", r"2.7\n/x", r"32 bit\n/x", "nonsense"])
def test_unsuitable_pythons_are_not_found(only_path, says):
    course, put = only_path
    put(0, "python3", says)
    assert course.find_python() is None


@needs_posix
def test_a_python_without_venv_is_passed_over(only_path):
    course, put = only_path
    put(0, "python3.11", "", code=1)  # the probe imports ensurepip and venv
    put(1, "python3.12", r"3.12\n/good/python3.12")
    assert course.find_python() == "/good/python3.12"


def test_pyenv_versions_are_found(tmp_path, monkeypatch):
    course = load()
    python = tmp_path / "versions" / "3.12.9" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(course, "able", lambda command: command[0] if command[0] == str(python) else None)
    assert course.find_python() == str(python)


def test_windows_asks_the_py_launcher(monkeypatch):
    course = load()
    monkeypatch.setattr(course, "WINDOWS", True)
    monkeypatch.setenv("PATH", "")
    answers = {"py -3.12": "3.12\r\nC:\\Python312\\python.exe\r\n"}
    monkeypatch.setattr(course, "output_of", lambda command: answers.get(" ".join(command[:2])))
    assert course.find_python() == "C:\\Python312\\python.exe"


def test_an_unsuitable_python_starts_a_suitable_one(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox.course, "is_suitable", lambda: False)
    monkeypatch.setattr(sandbox.course, "find_python", lambda: "/good/python")
    assert sandbox.start("check", "03", "--torch", "cpu") == 0
    assert sandbox.became == [["/good/python", str(sandbox.root / "course.py"), "check", "03", "--torch", "cpu"]]


def test_no_suitable_python_at_all(sandbox, monkeypatch, capfd):
    monkeypatch.setattr(sandbox.course, "is_suitable", lambda: False)
    monkeypatch.setattr(sandbox.course, "find_python", lambda: None)
    assert sandbox.start("learn") == 1
    assert "3.11, 3.12 or 3.13" in complaint(capfd)
    assert not sandbox.venv.exists()


# The steps and the stamp


@needs_posix
def test_first_start_makes_everything_and_the_second_nothing(sandbox, capfd):
    assert sandbox.start("doctor", "--json") == 0
    assert sandbox.steps() == ["venv", "torch", "packages"]
    shown = capfd.readouterr()
    assert shown.out == ""  # stdout belongs to the command
    assert [line[:5] for line in shown.err.splitlines() if line.startswith("[")] == ["[1/3]", "[2/3]", "[3/3]"]
    assert sandbox.start("doctor", "--json") == 0
    assert sandbox.steps() == [] and capfd.readouterr().err == ""
    assert sandbox.became == [[str(sandbox.venv / "bin" / "python"), "-m", "servelab", "doctor", "--json"]] * 2


@needs_posix
def test_test_level_includes_learn(sandbox):
    sandbox.start("learn")
    sandbox.steps()
    sandbox.start("test")
    assert "-e .[test]" in sandbox.asked("-e")[0]
    assert sandbox.steps() == ["packages"]
    sandbox.start("learn")
    sandbox.start("exam")
    assert sandbox.steps() == []


@needs_posix
def test_the_test_level_survives_an_upgrade(sandbox):
    sandbox.start("test")
    (sandbox.root / "requirements.lock").write_text("numpy==2.4.6\n")
    sandbox.steps()
    sandbox.start("learn")
    assert "-e .[test]" in sandbox.asked("-e")[0]


@needs_posix
@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_changed_file_installs_again(sandbox, name):
    sandbox.start("learn")
    sandbox.steps()
    with (sandbox.root / name).open("a") as file:
        file.write("\n# changed\n")
    sandbox.start("learn")
    assert sandbox.steps() == ["packages"]


@needs_posix
@pytest.mark.parametrize("stamp", ["", "[]", "{", "null"])
def test_a_damaged_stamp_installs_again(sandbox, stamp):
    sandbox.start("learn")
    sandbox.steps()
    (sandbox.venv / "servelab-stamp.json").write_text(stamp)
    assert sandbox.start("learn") == 0
    assert sandbox.steps() == ["packages"]


@needs_posix
def test_a_moved_course_gets_a_new_environment(sandbox, tmp_path, monkeypatch):
    sandbox.start("learn")
    sandbox.steps()
    sandbox.root.rename(tmp_path / "moved")
    monkeypatch.setattr(sandbox.course, "ROOT", str(tmp_path / "moved"))
    assert sandbox.start("learn") == 0
    assert sandbox.steps()[0] == "venv"


def test_an_unreadable_lock_is_named(sandbox, capfd):
    (sandbox.root / "requirements.lock").unlink()
    assert sandbox.start("learn") == 1
    assert "requirements.lock cannot be read" in complaint(capfd)
    (sandbox.root / "requirements.lock").write_bytes(b"\xff\xfe\x00")
    assert sandbox.start("learn") == 1
    assert "requirements.lock cannot be read" in complaint(capfd)


# Half-made and foreign environments


@needs_posix
@pytest.mark.parametrize("damage", ["no python", "dead python", "no pip", "old python", "lock file only", "empty"])
def test_a_half_made_environment_is_made_anew(sandbox, damage):
    scripts = sandbox.venv / "bin"
    scripts.mkdir(parents=True)
    (sandbox.venv / "pyvenv.cfg").touch()
    python = scripts / "python"
    if damage == "dead python":
        python.symlink_to(sandbox.root / "gone")
    elif damage in ("no pip", "old python"):
        python.write_text("#!/bin/sh\n" + ("exit 1" if damage == "no pip" else "echo 3.9") + "\n")
        python.chmod(0o755)
    elif damage == "lock file only":
        shutil.rmtree(sandbox.venv)
        sandbox.venv.mkdir()
        (sandbox.venv / "servelab.lock").touch()
    elif damage == "empty":
        shutil.rmtree(sandbox.venv)
        sandbox.venv.mkdir()
    assert sandbox.start("learn") == 0
    assert sandbox.steps() == ["venv", "torch", "packages"]


@needs_posix
def test_a_python_that_vanished_after_the_stamp_is_noticed(sandbox):
    sandbox.start("learn")
    sandbox.steps()
    (sandbox.venv / "bin" / "python").unlink()
    assert sandbox.start("learn") == 0
    assert sandbox.steps()[0] == "venv"


@needs_posix
def test_an_interrupted_install_goes_on(sandbox, capfd):
    sandbox.plan(["requirements.lock -e", 1, "", "ERROR: something odd\n"])
    assert sandbox.start("learn") == 1
    assert "something odd" in complaint(capfd)
    assert sandbox.steps() == ["venv", "torch", "packages"]
    sandbox.plan()
    assert sandbox.start("learn") == 0
    assert sandbox.steps() == ["packages"]


@needs_posix
def test_a_package_that_was_cut_off_is_forgotten(sandbox):
    sandbox.start("learn")
    library = sandbox.venv / "lib" / "python3.12" / "site-packages"
    for name in ("torn-1.dist-info", "whole-1.dist-info"):
        (library / name).mkdir(parents=True)
        (library / name / "METADATA").touch()
    (library / "whole-1.dist-info" / "RECORD").touch()
    (sandbox.venv / "servelab-stamp.json").unlink()
    sandbox.start("learn")
    assert [path.name for path in library.iterdir()] == ["whole-1.dist-info"]


def test_a_foreign_folder_is_kept(sandbox, capfd):
    sandbox.venv.mkdir()
    (sandbox.venv / "thesis.tex").write_text("dear")
    assert sandbox.start("learn") == 1
    assert "is not a Python environment" in complaint(capfd)
    assert os.listdir(sandbox.venv) == ["thesis.tex"]


# What can go wrong outside


@needs_posix
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_no_venv_module(sandbox, capfd, stream):
    text = "The virtual environment was not created successfully because ensurepip is not available.\n"
    sandbox.plan(["-m venv", 1, text if stream == "stdout" else "", text if stream == "stderr" else ""])
    assert sandbox.start("learn") == 1
    assert "apt install python3-venv" in complaint(capfd)
    sandbox.plan()
    assert sandbox.start("learn") == 0  # nothing in the way of the next try


@pytest.mark.parametrize("other", ["/good/python", None])
def test_no_venv_module_looks_for_another_python(sandbox, monkeypatch, capfd, other):
    monkeypatch.setattr(sandbox.course, "can_make_venv", lambda: False)
    monkeypatch.setattr(sandbox.course, "find_python", lambda: other)
    assert sandbox.start("learn") == (0 if other else 1)
    if other:
        assert sandbox.became[0][0] == other
    else:
        assert "apt install python3-venv" in complaint(capfd)


def test_a_full_disk_is_seen_before(sandbox, monkeypatch, capfd):
    monkeypatch.setattr(sandbox.course.shutil, "disk_usage", lambda folder: disk(1e9))
    assert sandbox.start("learn") == 1
    assert "1.0 GB free" in complaint(capfd)
    assert sandbox.steps() == []


@needs_posix
@pytest.mark.parametrize(
    "output, words",
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "disk is full"),
        ("OSError: [WinError 112] There is not enough space on the disk\n", "disk is full"),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(': Failed to establish "
            "a new connection: [Errno -3] Temporary failure in name resolution')': /simple/torch/\n"
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)\n"
            "ERROR: No matching distribution found for torch==2.13.0\n",
            "index cannot be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0\n", "no build for this machine"),
        ("ERROR: [Errno 13] Permission denied: '/x'\nCheck the permissions.\n", "no permission"),
        ("ssl.SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED\n", "PIP_CERT"),
        ("error: externally-managed-environment\n", "leave --here off"),
        ("ERROR: the moon is in the wrong phase\n", "exit code 1 (ERROR: the moon is in the wrong phase)"),
    ],
)
def test_the_causes_of_a_failed_pip(sandbox, capfd, output, words):
    sandbox.plan(["-m pip install", 1, "", output])
    assert sandbox.start("learn") == 1
    assert words in complaint(capfd)
    assert not (sandbox.venv / "servelab-stamp.json").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written(sandbox, monkeypatch, capfd, number):
    def refuse(folder):
        raise OSError(number, os.strerror(number), folder)

    monkeypatch.setattr(sandbox.course.os, "makedirs", refuse)
    assert sandbox.start("learn") == 1
    said = complaint(capfd)
    assert ("disk is full" if number == errno.ENOSPC else "no permission") in said and str(sandbox.venv) in said


@needs_posix
def test_control_c(sandbox, monkeypatch, capfd):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox.course, "install_torch", interrupt)
    assert sandbox.start("learn") == 1
    assert "run the same command again" in complaint(capfd)


@needs_posix
def test_two_starts_at_once_make_it_once(sandbox):
    slow = sandbox.course.install_packages
    sandbox.course.install_packages = lambda *arguments: (time.sleep(0.5), slow(*arguments))
    threads = [threading.Thread(target=sandbox.start, args=("learn",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sandbox.steps() == ["venv", "torch", "packages"]
    assert len(sandbox.became) == 3


@needs_posix
def test_a_killed_maker_leaves_no_lock(sandbox):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import course\n"
        "with course.locked(course.choose(False)): os._exit(9)\n"
    )
    real = os.path.join(sys.prefix, "bin", "python")
    assert subprocess.run([real, "-c", code, str(sandbox.root)], check=False).returncode == 9
    assert (sandbox.venv / "servelab.lock").exists()
    assert sandbox.start("learn") == 0


# Which torch


@pytest.fixture
def torch_step(sandbox, monkeypatch):
    """Run step 2 on a pretended system; returns the pip command lines."""

    def step(system="linux", gpu=False, torch=None, there="", reachable=True):
        course = sandbox.course
        commands = []
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(course, "WINDOWS", system == "win32")
        monkeypatch.setattr(course, "is_reachable", lambda url: reachable)
        monkeypatch.setattr(course, "output_of", lambda command: there if "-c" in command else "GPU 0" if gpu else None)
        monkeypatch.setattr(course, "pip", lambda env, arguments, doing: commands.append(" ".join(arguments)))
        course.install_torch(course.choose(False), course.wanted_build(torch), torch is not None)
        return commands

    return step


CPU = "--no-deps --index-url https://download.pytorch.org/whl/cpu"


def test_linux_without_a_gpu_takes_the_cpu_build(torch_step):
    assert torch_step() == [CPU + " torch==2.13.0"]
    assert torch_step(gpu=True, torch="cpu") == [CPU + " torch==2.13.0"]


def test_the_default_index_serves_everyone_else(torch_step):
    default = ["-c requirements.lock torch==2.13.0"]
    assert torch_step(reachable=False) == default
    assert torch_step(gpu=True) == default
    assert torch_step(torch="cuda") == default
    assert torch_step(system="darwin") == default
    assert torch_step(system="win32", gpu=True) == default


def test_windows_cuda_has_its_own_index(torch_step):
    (command,) = torch_step(system="win32", torch="cuda")
    assert "--index-url https://download.pytorch.org/whl/cu" in command


def test_a_torch_that_is_there_is_kept(torch_step):
    assert torch_step(there="2.13.0+cpu\n") == []
    assert torch_step(there="2.13.0\n", gpu=True) == []
    assert torch_step(there="2.12.0\n", gpu=True) != []


def test_another_build_is_put_in_its_place(torch_step):
    assert torch_step(there="2.13.0+cpu", torch="cpu") == []
    assert torch_step(there="2.13.0", torch="cpu") == [CPU + " --force-reinstall --no-deps torch==2.13.0"]
    assert "--force-reinstall" in torch_step(there="2.13.0+cpu", torch="cuda")[0]


@needs_posix
def test_a_failing_cpu_index_falls_back(sandbox, monkeypatch, capfd):
    monkeypatch.setattr(sys, "platform", "linux")
    sandbox.plan(["--index-url", 1, "", "ERROR: 503\n"], ["nvidia-smi", 1, "", ""])
    assert sandbox.start("learn", "--torch", "cpu") == 0
    assert len(sandbox.asked("torch==2.13.0")) == 2
    assert "trying the default package index" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--torch", "tpu", "learn"], ["--torch=", "learn"], ["learn", "--torch"]])
def test_wrong_torch_option(sandbox, capfd, arguments):
    assert sandbox.start(*arguments) == 1
    assert "--torch takes cpu or cuda" in complaint(capfd)


def test_no_cuda_on_macos(sandbox, monkeypatch, capfd):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sandbox.start("learn", "--torch", "cuda") == 1
    assert "macOS" in complaint(capfd)


# Which environment, and what the command gets


def test_options_pass_through_but_ours():
    split = load().split
    assert split(["--here", "grade", "x", "--torch=cpu", "--jobs", "2"]) == (True, "cpu", ["grade", "x", "--jobs", "2"])
    assert split(["test", "--", "--here", "-k", "a"]) == (False, None, ["test", "--", "--here", "-k", "a"])


@needs_posix
@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
@pytest.mark.parametrize("name", ["servelab", "base"])
def test_an_active_environment_is_used_when_named_servelab(sandbox, tmp_path, monkeypatch, variable, name):
    python = tmp_path / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    shutil.copy(sandbox.python, python)
    monkeypatch.setenv(variable, str(tmp_path / name))
    assert sandbox.start("learn") == 0
    assert sandbox.became[0][0] == str(python if name == "servelab" else sandbox.venv / "bin" / "python")
    assert sandbox.steps() == ["torch", "packages"] if name == "servelab" else ["venv", "torch", "packages"]
    assert sandbox.venv.exists() == (name == "base")


@needs_posix
def test_a_broken_active_environment_is_not_touched(sandbox, tmp_path, monkeypatch, capfd):
    python = tmp_path / "servelab" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "servelab"))
    assert sandbox.start("learn") == 1
    assert "lacks pip" in complaint(capfd)
    assert python.exists()


@needs_posix
def test_here_uses_the_running_python(sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    assert sandbox.start("learn", "--here") == 0
    assert sandbox.steps() == ["torch", "packages"]
    assert sandbox.became == [[str(sandbox.python), "-m", "servelab", "learn"]]
    assert not sandbox.venv.exists()


def test_here_needs_a_suitable_python(sandbox, monkeypatch, capfd):
    monkeypatch.setattr(sandbox.course, "is_suitable", lambda: False)
    assert sandbox.start("learn", "--here") == 1
    assert "--here needs Python 3.11 to 3.13" in complaint(capfd)


def test_windows_paths(tmp_path, monkeypatch):
    course = load()
    monkeypatch.setattr(course, "WINDOWS", True)
    venv, conda = tmp_path / ".venv", tmp_path / "conda"
    (conda / "conda-meta").mkdir(parents=True)
    assert course.python_of(str(venv)) == str(venv / "Scripts" / "python.exe")
    assert course.python_of(str(conda)) == str(conda / "python.exe")
    env = course.Env(str(venv), course.python_of(str(venv)), True)
    assert course.child_environment(env)["PATH"].startswith(str(venv / "Scripts"))


def test_windows_passes_the_exit_code(monkeypatch):
    course = load()
    monkeypatch.setattr(course, "WINDOWS", True)
    assert course.become([sys.executable, "-c", "raise SystemExit(7)"], dict(os.environ)) == 7


@needs_posix
def test_the_command_gets_the_environment(sandbox, tmp_path, monkeypatch):
    """The real thing, from another folder and with another Python's variables, on a finished (stub) environment."""
    assert sandbox.start("learn") == 0
    real = os.path.join(sys.prefix, "bin", "python")
    environment = dict(os.environ, PIP_INDEX_URL="https://mirror.example/simple", PATH="/somewhere")
    shown = subprocess.run(
        [real, str(sandbox.root / "course.py"), "check", "03", "--json"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, check=True,
    )  # fmt: skip
    arguments, folder, variables = json.loads(shown.stdout)
    assert shown.stderr == ""
    assert arguments == ["-m", "servelab", "check", "03", "--json"]
    assert folder == str(tmp_path)
    assert variables["PYTHONUTF8"] == "1" and variables["VIRTUAL_ENV"] == str(sandbox.venv)
    assert variables["PATH"].split(os.pathsep)[0] == str(sandbox.venv / "bin")
    assert variables["PATH"].endswith("/somewhere")
    assert variables["PIP_INDEX_URL"] == "https://mirror.example/simple"


@needs_posix
def test_pythonhome_does_not_reach_the_command(sandbox, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    assert "PYTHONHOME" not in sandbox.course.child_environment(sandbox.course.choose(False))


@needs_posix
def test_a_second_start_is_cheap(sandbox):
    """Nothing but three small files is read: no subprocess, no network module."""
    sandbox.start("learn")
    sandbox.steps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        began = time.perf_counter()
        assert sandbox.start("learn") == 0
        assert time.perf_counter() - began < 2
    code = "import sys; sys.path.insert(0, sys.argv[1]); import course; print(*sys.modules)"
    real = os.path.join(sys.prefix, "bin", "python")
    loaded = subprocess.run([real, "-S", "-c", code, str(ROOT)], capture_output=True, text=True, check=True).stdout
    assert not {"ssl", "urllib.request", "asyncio", "argparse", "venv", "ensurepip"} & set(loaded.split())
