"""The command line: what it understands, how it refuses, and that JupyterLab really opens."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from servelab import cli, work
from servelab.cli import main
from servelab.errors import CourseError
from servelab.paths import ROOT, find_unit, units

COMMANDS = (
    "learn",
    "check",
    "progress",
    "restore",
    "doctor",
    "fetch-model",
    "release",
    "grade",
    "build",
    "exam",
    "test",
)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^ +{command}\s", out, re.MULTILINE), command


def test_no_command_is_wrong_use(capsys):
    assert main([]) == 2
    assert "usage: servelab" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["nothing"], ["check", "--nothing"], ["restore"], ["progress", "00"], ["learn", "--port", "x"], ["-x"]]
)
def test_wrong_use_is_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "usage: servelab" in capsys.readouterr().err


def test_errors_name_the_mend(capsys):
    assert main(["check", "77"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("servelab: there is no unit '77'\nUnits: 00 (start_here)")


@pytest.mark.parametrize("text", ["00", "0", "start_here", "00_start_here"])
def test_names_of_a_unit(text):
    assert find_unit(text).slug == "00_start_here"


@pytest.mark.parametrize("text", ["", "000", "start", "0_start_here", "../00_start_here"])
def test_what_names_no_unit(text):
    with pytest.raises(CourseError, match="there is no unit"):
        find_unit(text)


def test_stopping_is_not_an_error(monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "command_progress", stop)
    assert main(["progress"]) == 130
    assert capsys.readouterr().err == "servelab: stopped\n"


def test_restore(capsys):
    assert main(["restore", "00"]) == 0
    assert "new copy" in capsys.readouterr().out
    assert main(["restore", "start_here"]) == 0
    assert "backups" in capsys.readouterr().out


@pytest.fixture
def started(monkeypatch):
    """The command that `learn` or `test` would start."""
    commands = []
    monkeypatch.setattr(work, "_run", lambda command: commands.append(command) or 7)
    monkeypatch.setattr(cli.subprocess, "call", lambda command, cwd: commands.append(command) or 7)
    return commands


def test_learn_opens_the_start_page_and_passes_options_on(started, work_folder, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")  # what the user has set stays
    assert main(["learn", "--port", "8899", "--ServerApp.token=x", "--ip", "0.0.0.0"]) == 7
    (command,) = started
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={work_folder}" in command
    assert "--LabApp.default_url=/lab/tree/00_start_here/00_start_here.ipynb" in command
    assert "--port=8899" in command and "--no-browser" not in command
    assert command[-3:] == ["--ServerApp.token=x", "--ip", "0.0.0.0"] and os.environ["GOMP_SPINCOUNT"] == "5"
    for unit in units():
        assert unit.work.exists() == unit.release.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no root user here")
@pytest.mark.parametrize("user, words, times", [(0, [], 1), (0, ["--allow-root"], 1), (1000, [], 0)])
def test_learn_as_root(started, monkeypatch, user, words, times):
    """Jupyter refuses to run as root unless told; in a container one often is."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    main(["learn", "--no-browser", *words])
    assert started[0].count("--allow-root") == times
    assert "--no-browser" in started[0]


@pytest.mark.parametrize("words", [[], ["-x", "-k", "repair or work", "tests/test_cli.py", "--lf"], ["-n", "2"]])
def test_test_passes_everything_to_pytest(started, words):
    assert main(["test", *words]) == 7
    assert started == [[sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadfile", *words]]


def test_commands_that_a_bundle_lacks(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    assert main(["test"]) == 2
    assert "not part of this copy" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "autograder", None)
    monkeypatch.setitem(sys.modules, "autograder.command", None)
    assert main(["grade", "submissions"]) == 2
    assert "'grade' is not part of this copy" in capsys.readouterr().err


def test_a_missing_package_is_not_hidden(monkeypatch):
    """Only a command that is absent is refused softly; one that cannot be imported says why."""
    monkeypatch.setitem(sys.modules, "nbformat", None)
    for name in ("servelab.build", "servelab.work"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="nbformat"):
        main(["build", "--check"])


def test_as_a_module():
    command = [sys.executable, "-m", "servelab", "progress", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["00_start_here"][0]["points"] == 85


def test_no_command_loads_torch_or_nbgrader_for_nothing():
    """`servelab --help` and `progress` answer at once: nothing slow is imported for them."""
    code = "import sys; from servelab.cli import main; main(['progress', '--json']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert not {"torch", "nbgrader", "nbclient", "matplotlib"} & set(re.findall(r"'([\w.]+)'", done.stdout))


def test_learn_really_opens_jupyterlab(work_folder):
    """Started as a learner would, JupyterLab answers with the start page's notebook, and stops when told to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--no-browser", "--port", str(port), "--ServerApp.token=", "--ServerApp.port_retries=0"]
    command = [sys.executable, "-m", "servelab", "learn", *options]
    log = work_folder / "log"
    folders = {f"JUPYTER_{kind}_DIR": str(work_folder / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    with log.open("wb") as file:
        server = subprocess.Popen(command, cwd=ROOT, env=os.environ | folders, stdout=file, stderr=file)
    try:
        page = fetch(server, f"http://127.0.0.1:{port}/lab", log)
        assert b"JupyterLab" in page
        notebook = fetch(server, f"http://127.0.0.1:{port}/api/contents/00_start_here/00_start_here.ipynb", log)
        assert json.loads(notebook)["content"]["cells"][0]["source"].startswith("# 00 Start here")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def fetch(server, address, log):
    """The page, as soon as the server answers."""
    while True:
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return answer.read()
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, log.read_text(encoding="utf-8", errors="replace")
            time.sleep(0.2)
