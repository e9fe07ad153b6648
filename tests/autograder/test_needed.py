"""A graded run leaves out given cells that only show something, and nothing that an answer could depend on."""

import nbformat
import pytest

from autograder.needed import names_of, needed


def code(source, name="", tags=(), cell_id=""):
    mark = {"nbgrader": {"grade_id": name, "solution": True}} if name else {}
    cell = nbformat.v4.new_code_cell(source, metadata={**mark, "tags": list(tags)})
    cell.id = cell_id or name or "given-" + str(abs(hash(source)))[:8]
    return cell


RELEASE = [
    code("from servelab.checking import check"),
    code("import math", tags=["export"]),
    code("def f(x): ...", "f"),
    code("import matplotlib.pyplot as plt\nshown = f(1)\nplt.plot(shown)", cell_id="show"),
    code("check('toy.f', f)", "f-check"),
    code("print(shown)", cell_id="again"),
]


def run_of(**changes):
    """The cells that are run when some are changed, by their place."""
    cells = [nbformat.from_dict(cell) for cell in RELEASE]
    for index, source in changes.items():
        cells[int(index[1:])].source = source
    return needed(cells, RELEASE)


def test_pictures_are_left_out():
    assert run_of() == {0, 1, 2, 4}


def test_what_an_answer_uses_is_run():
    assert run_of(c2="def f(x): return plt.colors(x)") == {0, 1, 2, 3, 4}
    assert run_of(c5="print(shown + 1)") == {0, 1, 2, 3, 4, 5}


def test_a_cell_that_the_student_changed_is_run():
    assert 3 in run_of(c3="shown = 2")


@pytest.mark.parametrize(
    "source",
    [
        "f = eval('shown')",
        "f = globals().get",
        "%time f(1)",
        "!ls",
        "def f(x:",
        "from math import *",
        "get_ipython()",
        "f = Out[1]",
    ],
)
def test_everything_is_run_where_names_cannot_be_told(source):
    assert run_of(c2=source) == {0, 1, 2, 3, 4, 5}


def test_own_cells_are_run():
    cells = [*RELEASE, code("mine = 1", cell_id="mine")]
    assert needed(cells, RELEASE) == {0, 1, 2, 4, 6}


@pytest.mark.parametrize(
    ("source", "bound"),
    [
        ("import a.b as c, d.e", {"c", "d"}),
        ("from x import y", {"y"}),
        ("for i, (j, *k) in z: pass", {"i", "j", "k"}),
        ("with o() as p, q() as (r, s): pass", {"p", "r", "s"}),
        ("try: pass\nexcept E as e: pass", {"e"}),
        ("if (w := 1): pass", {"w"}),
        ("match v:\n    case [a, *b]: pass\n    case c: pass", {"a", "b", "c"}),
        ("def f():\n    global g\n    g = 1", {"f", "g"}),
        ("class A: x = 1", {"A"}),
        ("def f(a):\n    b = a\n    return [c for c in b]", {"f"}),
        ("a.b = c[0] = 1", set()),
        ("for _ in range(3): 'In a loop, Out of names'", {"_"}),
    ],
)
def test_bound_names(source, bound):
    assert names_of(source).bound == bound


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("def f(a):\n    b = a\n    return [c + d for c in b]", {"d"}),
        ("class A(B):\n    def g(self, x=y): return z.w(self)", {"B", "y", "z"}),
        ("def outer():\n    n = 1\n    def inner(): return n + m\n    return inner", {"m"}),
    ],
)
def test_used_names(source, used):
    assert names_of(source).used == used
