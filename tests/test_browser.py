"""A learner's session in a real browser: JupyterLab opens, cells run, verdicts and sliders show."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import nbformat
import pytest

from servelab.build import notebook_text, source_notebook
from servelab.paths import find_unit
from servelab.repair import repair
from servelab.work import bring_up_to_date, released

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
    pytest.mark.skipif(os.name != "posix", reason="driven on Linux and macOS only"),
]
TOKEN = "a-token-for-the-test"
LAUNCH = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
SLOW = 180_000  # ms; a loaded machine starts kernels slowly


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A work folder in which units 00 and 03 are solved, as a learner would have them."""
    folder = tmp_path_factory.mktemp("browser-work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVELAB_WORK", str(folder))
        bring_up_to_date()
        for number in ("00", "03"):
            unit = find_unit(number)
            solved, _ = repair(released(unit), source_notebook(unit.solution))
            unit.work.write_text(notebook_text(solved), encoding="utf-8")
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    return folder


@pytest.fixture(scope="module")
def server(work):
    """`servelab learn` as a learner starts it; yields its address."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "servelab", "learn", "--no-browser", "--port", str(port)]
    env = {**os.environ, "SERVELAB_WORK": str(work), "JUPYTERLAB_SETTINGS_DIR": str(work / "settings")}
    env.pop("MPLBACKEND", None)  # the tests' own; a learner's kernel draws inline
    with open(work / "server.log", "wb") as log:
        process = subprocess.Popen([*command, f"--IdentityProvider.token={TOKEN}"], env=env, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(lambda: _answers(f"{address}/api?token={TOKEN}"), 90, "the server did not come up")
        yield address
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def page(server):
    """One browser page; started once, since that is what costs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=LAUNCH)
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(SLOW)
        page.add_locator_handler(page.locator(".jp-Dialog"), _accept)
        yield page
        browser.close()


def _accept(dialog) -> None:
    """Do what a dialog proposes, as a person would; on a loaded machine one may ask for a kernel, or report a delay."""
    print("a dialog was accepted:", dialog.inner_text().replace("\n", " "))
    dialog.locator("button.jp-mod-accept").click()


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False


def _wait(holds, seconds: float, message: str, page=None) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            _shoot(page, "failure")
            pytest.fail(message)
        page.wait_for_timeout(300) if page else time.sleep(0.3)


def _run_all(page, server: str, slug: str) -> None:
    page.goto(f"{server}/lab/tree/{slug}/{slug}.ipynb?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    prompt = page.locator(".jp-InputArea-prompt", has_text="1]:").or_(
        page.locator(".jp-InputArea-prompt", has_text="*")
    )
    for _ in range(3):  # JupyterLab drops the command while it is still connecting to the kernel
        page.click(".lm-MenuBar-itemLabel:text-is('Run')")
        page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
        page.wait_for_timeout(5_000)
        if prompt.count():
            return


def _progress(work: Path, exercise: str) -> dict:
    path = work / ".servelab" / "progress" / f"{exercise}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _shoot(page, name: str) -> None:
    """Keep a screenshot where $SERVELAB_SCREENSHOTS says, for a person to look at."""
    folder = os.environ.get("SERVELAB_SCREENSHOTS")
    if folder and page:
        page.screenshot(path=str(Path(folder, f"{name}.png")))


def test_start_page_opens_and_its_checks_pass(page, server, work):
    _run_all(page, server, "00_start_here")
    _wait(lambda: _progress(work, "start_here.reflection"), 120, "the checks did not run", page)
    verdict = page.locator("table.servelab-verdict").first
    verdict.scroll_into_view_if_needed()
    _shoot(page, "00_verdict")
    assert "one full batch" in verdict.inner_text()
    assert _progress(work, "start_here.slot_utilisation")["fraction"] == 1


def test_a_wrong_answer_shows_the_smallest_failing_input(page, server, work):
    unit = find_unit("00")
    path = work / unit.slug / f"{unit.slug}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    cell = next(cell for cell in notebook.cells if cell.id == "slot-utilisation")
    cell.source = cell.source.replace("max(batch)", "min(batch)")
    path.write_text(notebook_text(notebook), encoding="utf-8")
    (work / ".servelab" / "progress" / "start_here.reflection.json").unlink(missing_ok=True)
    _run_all(page, server, unit.slug)
    failure = page.locator("text=Smallest failing input").first
    failure.wait_for()
    failure.scroll_into_view_if_needed()
    _shoot(page, "00_failure")
    output = page.locator(".jp-Cell-outputArea", has_text="Smallest failing input").first.inner_text()
    assert "slot_utilisation([3, 1], batch_size=2)" in output
    assert "CheckFailed" in output and "Traceback" not in output


def test_paged_kv_shows_its_pictures_and_a_slider_that_moves(page, server, work):
    _run_all(page, server, "03_paged_kv")
    _wait(lambda: _progress(work, "paged_kv.reflection"), 240, "the checks did not run", page)
    slider = page.locator(".widget-slider .noUi-handle, .widget-slider [role=slider]").first
    slider.scroll_into_view_if_needed()
    area = page.locator(".jp-Cell-outputArea", has=page.locator(".widget-slider")).first
    area.locator("img").wait_for()
    before = area.inner_html()
    _shoot(page, "03_slider_before")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    _wait(lambda: area.inner_html() != before, 60, "the slider moved nothing", page)
    page.wait_for_timeout(1500)
    _shoot(page, "03_slider_after")
    failed = [path.stem for path in (work / ".servelab" / "progress").glob("paged_kv.*.json")]
    assert all(_progress(work, name)["fraction"] == 1 for name in failed)
