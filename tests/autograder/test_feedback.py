"""What is shown of a submission runs nothing and hides nothing, in feedback and in formgrader."""

import nbformat
import pytest
from nbconvert.exporters import HTMLExporter
from traitlets.config import Config

from autograder.feedback import clean, markdown
from autograder.settings import configure

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    "[x](javascript:alert(1))",
    "<div onclick=alert(1) style='position:fixed'>x</div>",
    "<iframe src=//evil></iframe>",
    "<style>body{display:none}</style>",
    "<form action=//evil><input name=score></form>",
    "<svg><script>alert(1)</script></svg>",
    "```html\n<script>alert(1)</script>\n```",
]
LIVE = (
    "<script",
    "<img",
    "<iframe",
    "<style",
    "<form",
    "<input",
    "<svg",
    " onclick=",
    "javascript:alert(1)'",
    "<div style",
)


@pytest.mark.parametrize("source", HOSTILE)
def test_markdown_is_clean(source):
    html = markdown(source)
    assert not any(tag in html for tag in LIVE)
    assert 'href="javascript' not in html


def test_code_formulas_and_tables_stay_readable():
    html = markdown(
        "`a < b` and **b** and $x<y$\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n<details><summary>Hint</summary>h</details>"
    )
    assert "<code>a &lt; b</code>" in html
    assert all(tag in html for tag in ("<table>", "<td>1</td>", "<details>", "<summary>Hint</summary>", "<strong>"))
    assert "&amp;lt;" not in html


def test_nbgraders_exporters_take_these_filters():
    config = Config()
    configure(config)
    output = nbformat.v4.new_output("display_data", {"text/html": HOSTILE[0] + "<table><tr><td>1</td></tr></table>"})
    cells = [nbformat.v4.new_markdown_cell("answer " + HOSTILE[0]), nbformat.v4.new_code_cell("1", outputs=[output])]
    for template in ("classic", "lab"):
        exporter = HTMLExporter(config=config, template_name=template)
        page, _ = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=cells))
        assert "<script>alert(1)" not in page
        assert "<td>1</td>" in page


def test_clean_takes_anything():
    assert clean(b"<b>x</b>\xff") == "<b>x</b>\ufffd"
    assert clean(7) == "7"
