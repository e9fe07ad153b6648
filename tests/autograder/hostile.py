"""A class of hostile and unlucky submissions to the toy unit: what each does, and the points that it deserves.

Every one of them earned points, lost other students' points or stopped the batch with stock nbgrader.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import nbformat

LIMITS = """
c = get_config()
c.SandboxedExecute.timeout = 12
c.SandboxedExecute.max_output = 2 * 2**20
c.SandboxedExecute.memory = 1000 * 2**20
c.SandboxedExecute.processes = 24
c.SandboxedExecute.iopub_timeout = 10
"""
RIGHT = {
    "double": "def double(n):\n    return 2 * n",
    "running_total": (
        "class RunningTotal:\n    def __init__(self):\n        self.total = 0\n\n"
        "    def add(self, n):\n        self.total += n\n        return self.total"
    ),
}
WRONG = {"double": "def double(n):\n    return n", "running_total": "class RunningTotal:\n    add = lambda self, n: -1"}


@dataclass(frozen=True)
class Submission:
    """One student: code for the two solution cells, an edit of the notebook, and the scores deserved."""

    student: str
    double: float
    running_total: float
    answers: dict[str, str] = field(default_factory=dict)
    edit: Callable[[nbformat.NotebookNode], object] = lambda nb: nb
    incident: str = ""  # text that the record of the run must hold
    quiet: bool = False  # the record must hold nothing: the code found everything closed, and raised nothing


def attack(name: str, code: str, **kwargs) -> Submission:
    """Code in front of two wrong answers: deserves nothing."""
    return Submission(name, 0, 0, {**WRONG, "double": f"{code}\n{WRONG['double']}"}, **kwargs)


def killer(name: str, double: str, **kwargs) -> Submission:
    """A first answer that ends or blocks the kernel before a right second one: the second counts."""
    return Submission(name, 0, 6, {**RIGHT, "double": double}, **kwargs)


def unlucky(name: str, edit: Callable, *, double: float = 4, running_total: float = 6) -> Submission:
    """Right answers in a notebook that was damaged on the way."""
    return Submission(name, double, running_total, RIGHT, edit)


def cell(nb: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    return next(cell for cell in nb.cells if cell.metadata.get("nbgrader", {}).get("grade_id") == name)


def marked(nb: nbformat.NotebookNode, name: str, **values) -> None:
    cell(nb, name).metadata.nbgrader.update(values)


def without(nb: nbformat.NotebookNode, *names: str) -> None:
    nb.cells = [c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade_id") not in names]


def stripped(nb: nbformat.NotebookNode) -> None:
    for each in nb.cells:
        each.metadata.pop("nbgrader", None)


def doubled(nb: nbformat.NotebookNode) -> None:
    nb.cells.append(nbformat.from_dict(cell(nb, "double")))
    nb.cells.append(nbformat.from_dict(cell(nb, "double-check")))


def retyped(nb: nbformat.NotebookNode) -> None:
    index = nb.cells.index(cell(nb, "double-check"))
    old = nb.cells[index]
    nb.cells[index] = nbformat.v4.new_markdown_cell(old.source, metadata=old.metadata)


def edited_check(nb: nbformat.NotebookNode) -> None:
    cell(nb, "double-check").source = "4.0"
    cell(nb, "running-total-check").source = "pass"


def truncated(nb: nbformat.NotebookNode) -> str:
    text = json.dumps(nb)
    return text[: text.index("running-total") - 40]


TAMPERED = """
import os, sys
def tamper():
    for path in (sys.modules["servelab.checking"].__file__, sys.prefix + "/x", "/etc/passwd", "/usr/lib/x"):
        try:
            open(path, "w").write("raise SystemExit")
        except OSError:
            continue
        raise RuntimeError(f"{path} can be written")
tamper()
"""
READS = """
import glob, os, pathlib, servelab, sqlite3
root = pathlib.Path(servelab.__file__).parent.parent
try:
    exec((root / "solutions" / "90_toy.py").read_text())
except OSError:
    pass
seen = glob.glob(str(root / "autograder" / "**"), recursive=True) + glob.glob(str(root / "solutions" / "**"))
seen += glob.glob("/home/*") + glob.glob("/root/.[a-oq-z]*") + glob.glob("**/*.ipynb", recursive=True)
try:
    base = sqlite3.connect(root / "autograder" / "gradebook.db")
    base.execute("update grade set manual_score = 4")
    base.commit()
except Exception:
    pass
assert not [path for path in seen if os.path.lexists(path)]
"""
NETWORK = """
import socket
for family, address in ((socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_INET, ("127.0.0.1", 22))):
    try:
        socket.create_connection(address, timeout=1)
    except OSError:
        continue
    raise RuntimeError("the network is open")
"""
FORGED = """
from IPython.display import display
import json
MIME = "application/vnd.servelab.transcript+json"
def forge(recorded):
    payload = {"exercise": "toy.double", "version": "0", "recorded": recorded}
    display({MIME: payload, "text/plain": ""}, raw=True)
"""
FORGED_MESSAGES = """
kernel = get_ipython().kernel
def double(n):
    for content in ({"data": "x", "metadata": 7}, {"data": {"text/plain": {}}, "transient": "x"}, [], {"text": 7}):
        for kind in ("display_data", "execute_result", "stream", "error", "status", "comm_open"):
            kernel.session.send(kernel.iopub_socket, kind, content, parent=kernel.get_parent())
    return n
"""
REWRITES = """
import threading, time
from IPython.display import display, update_display
import servelab.checking as checking
MIME = checking.TRANSCRIPT_MIME
def show(bundle):
    display(bundle, raw=True, display_id="t")
checking._display = show
def rewrite():
    for _ in range(100):
        time.sleep(0.02)
        update_display({MIME: {"exercise": "toy.double"}}, raw=True, display_id="t")
threading.Thread(target=rewrite).start()
"""
NOISY = """
import os, sys, warnings
def double(n):
    print("noise")
    print("noise", file=sys.stderr)
    warnings.warn("noise")
    os.write(2, b"noise from below")
    return 2 * n
"""
SUBMISSIONS = [
    Submission("a00-right", 4, 6, RIGHT),
    Submission("a00-wrong", 0, 0, WRONG),
    Submission("a00-untouched", 0, 0),
    Submission(
        "a01-always-equal",
        0,
        6,
        {
            **RIGHT,
            "double": (
                "class Equal(int):\n    __eq__ = lambda self, other: True\n    __hash__ = None\n"
                "    __sub__ = __rsub__ = lambda self, other: 0\ndef double(n):\n    return Equal(n)"
            ),
        },
    ),
    attack(
        "a02-patched-judges",
        (
            "import numpy, servelab.plain, servelab.exercise, servelab.exercises.toy.double as d\n"
            "numpy.allclose = servelab.plain.close = d.close = lambda *a, **k: True\nd.judge = lambda *a: []\n"
            "servelab.exercise.judge = lambda *a: None"
        ),
    ),
    attack("a03-patched-builtins", "import builtins\nbuiltins.isinstance = builtins.all = lambda *a: True"),
    killer("a04-os-exit", "import os\ndef double(n):\n    os._exit(0)", incident="double-check ended the kernel"),
    killer("a04-exit-on-import", "import os\nos._exit(1)\ndef double(n): ...", incident="cell double ended the kernel"),
    killer("a05-sys-exit", "import sys\ndef double(n):\n    sys.exit()"),
    killer("a05-exit", "exit()\ndef double(n): ...", incident="called exit()"),
    killer(
        "a06-endless-loop",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\ndef double(n):\n    if n > 99:\n"
        "        while True:\n            pass\n    return 2 * n",
        incident="ran longer than",
    ),
    killer(
        "a07-fork-bomb",
        "import os, time\ndef double(n):\n    for _ in range(60):\n        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "            os._exit(0)\n    time.sleep(5)\n    return 2 * n",
        incident="more than 24 processes",
    ),
    killer("a08-memory", "def double(n):\n    return 2 * n + 0 * len(bytearray(8 << 30))"),
    killer("a08-memory-in-the-cell", "kept = bytearray(8 << 30)", incident="ran out of memory"),
    killer(
        "a08-memory-watched",
        "import time\ndef double(n):\n    waste = b'x' * (1200 << 20)\n    time.sleep(5)\n    return 2 * n",
        incident="of memory",
    ),
    Submission(
        "a09-output-flood",
        4,
        6,
        RIGHT,
        lambda nb: nb.cells.insert(3, nbformat.v4.new_code_cell("for _ in range(10**7):\n    print('x' * 2000)")),
        incident="MiB of output",
    ),
    Submission(
        "a09-one-line",
        4,
        6,
        RIGHT,
        lambda nb: nb.cells.insert(3, nbformat.v4.new_code_cell("print('x' * (150 << 20))")),
        incident="the kernel was restarted",
    ),
    Submission(
        "a09-forged-messages",
        0,
        6,
        {**RIGHT, "double": FORGED_MESSAGES},
    ),
    attack("a10-reads-and-writes-files", READS, quiet=True),
    attack("a10-network", NETWORK, quiet=True),
    unlucky("a12-deleted-checks", lambda nb: without(nb, "double-check", "running-total-check")),
    unlucky("a12-deleted-answer-and-check", lambda nb: without(nb, "double", "double-check"), double=0),
    unlucky("a13-points", lambda nb: marked(nb, "double-check", points=1000)),
    Submission("a13-edited-check", 0, 0, WRONG, edited_check),
    unlucky("a13-grade-false", lambda nb: marked(nb, "double-check", grade=False)),
    unlucky("a13-solution-true", lambda nb: marked(nb, "double-check", solution=True)),
    unlucky("a13-retyped", retyped),
    unlucky("a13-stripped", stripped),
    unlucky("a14-duplicated", doubled),
    unlucky("a15-kernelspec", lambda nb: nb.metadata.update(kernelspec={"name": "bash", "display_name": "bash"})),
    attack(
        "a16-custom-exception",
        (
            "get_ipython().set_custom_exc((BaseException,), lambda *a, **k: None)\n"
            "get_ipython().showtraceback = lambda *a, **k: None"
        ),
    ),
    attack("a16-input-transformer", "get_ipython().input_transformers_post.append(lambda lines: ['4.0\\n'])"),
    attack(
        "a16-ast-transformer",
        (
            "import ast\nclass Nothing(ast.NodeTransformer):\n    def visit_Module(self, node):\n"
            "        return ast.parse('4.0')\nget_ipython().ast_transformers.append(Nothing())"
        ),
    ),
    attack(
        "a16-do-execute",
        (
            "kernel = get_ipython().kernel\nasync def do_execute(*a, **k):\n"
            "    return {'status': 'ok', 'execution_count': 1, 'payload': [], 'user_expressions': {}}\n"
            "kernel.do_execute = do_execute"
        ),
    ),
    attack(
        "a17-settrace",
        (
            "import sys, threading\ndef trace(frame, event, arg):\n    frame.f_locals.update(passed=True)\n"
            "    return trace\n"
            "sys.settrace(trace)\nthreading.settrace(trace)"
        ),
    ),
    attack(
        "a18-fake-modules",
        (
            "import sys, types\nfake = types.ModuleType('servelab.checking')\nfake.check = lambda *a: print('passed')\n"
            "sys.modules['servelab.checking'] = fake\nimport __main__\n__main__.check = fake.check"
        ),
    ),
    Submission(
        "a19-frame-peek",
        0,
        6,
        {
            **RIGHT,
            "double": (
                "import sys\ndef double(n):\n    frame = sys._getframe()\n    while frame:\n"
                "        for name in ('expected', 'probe', 'probes'):\n            if name in frame.f_locals:\n"
                "                return frame.f_locals[name]\n        frame = frame.f_back\n    return n"
            ),
        },
    ),
    attack(
        "a20-forged-results",
        (
            "hook = get_ipython().displayhook\nfor value in (4.0, float('nan'), -1.0, 1e9, float('inf')):\n"
            "    hook(value)\n"
            "def double(n):\n    for value in (float('nan'), 4.0, -1.0, 1e9):\n        hook(value)\n    return n\n"
            "keep = double"
        ),
    ),
    Submission(
        "a20-second-transcript",
        0,
        6,
        {**RIGHT, "double": (FORGED + "def double(n):\n    forge('[]')\n    return 2 * n")},
    ),
    Submission(
        "a20-deep-transcript",
        0,
        6,
        {
            **RIGHT,
            "double": (
                FORGED
                + "import servelab.checking as c\nfirst = c._display\ndef show(bundle):\n    c._display = first\n"
                "    forge('[' * 200000)\nc._display = show\ndef double(n):\n    return 2 * n"
            ),
        },
    ),
    Submission("a20-nan", 0, 6, {**RIGHT, "double": "def double(n):\n    return float('nan')"}),
    attack("a21-tampered-package", TAMPERED, quiet=True),
    killer("a24-segfault", "import ctypes\ndef double(n):\n    ctypes.string_at(0)", incident="ended the kernel"),
    Submission(
        "a25-clear-output",
        4,
        6,
        {
            **RIGHT,
            "double": (
                "from IPython.display import clear_output\n"
                "get_ipython().events.register('post_run_cell', lambda *a: clear_output())\n" + RIGHT["double"]
            ),
        },
    ),
    unlucky(
        "a26-schema-version", lambda nb: [marked(nb, name, schema_version=99) for name in ("double", "double-check")]
    ),
    unlucky("a27-truncated", truncated, running_total=0),
    unlucky("a27-not-a-notebook", lambda nb: "this is not JSON", double=0, running_total=0),
    Submission("a28-honest-noise", 4, 6, {**RIGHT, "double": NOISY}),
    Submission("a29-rewrites-outputs", 4, 6, {**RIGHT, "double": REWRITES + RIGHT["double"]}),
    attack(
        "a29-left-behind",
        (
            "import os, subprocess, sys\nif os.fork() == 0:\n    os.setsid()\n"
            "    subprocess.run(['sleep', '86417'])\n    os._exit(0)"
        ),
    ),
    Submission(
        "x1-script", 0, 0, {**WRONG, "opinion": "Fine.<script>alert(41)</script> <img src=x onerror=alert(42)>"}
    ),
    Submission(
        "x2-tells-secrets",
        0,
        0,
        {
            **WRONG,
            "double": (
                "def double(n):\n    raise ValueError(f'secret {n}')\n"
                "import glob\nraise ValueError('secret ' + open(glob.glob('/challenges/*double*')[0]).read())"
            ),
        },
    ),
    Submission("zz-right-and-last", 4, 6, RIGHT),
]
