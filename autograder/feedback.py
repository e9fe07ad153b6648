"""How nbgrader's pages show a submission: HTML cleaned after Markdown is rendered, in feedback and in formgrader.

nbgrader's own templates clean outputs but not Markdown cells, so that a script in an answer would run in the
instructor's formgrader, where grades can be changed.
"""

import bleach  # type: ignore[import-untyped]
from jinja2 import BytecodeCache, Environment
from jinja2.bccache import Bucket
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown import markdown2html

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
BLOCKS = ("p", "br", "hr", "div", "pre", "blockquote", "ul", "ol", "li", "dl", "dt", "dd", "details", "summary")
TABLES = ("table", "caption", "thead", "tbody", "tr", "th", "td")
WORDS = ("a", "abbr", "b", "code", "del", "em", "i", "kbd", "s", "span", "strong", "sub", "sup")
ATTRIBUTES = {"*": ["class", "id"], "a": ["href", "title"], "abbr": ["title"], "td": ["align"], "th": ["align"]}


def clean(html: object) -> str:
    """HTML without anything that runs, loads or hides: no script, style, image, form or event handler."""
    text = html.decode(errors="replace") if isinstance(html, bytes) else str(html)
    return bleach.clean(text, tags=[*HEADINGS, *BLOCKS, *TABLES, *WORDS], attributes=ATTRIBUTES, strip_comments=True)


def markdown(source: str) -> str:
    """Render Markdown, then clean it: the other order would garble ``<`` and ``&`` in code and formulas."""
    return clean(markdown2html(source))


class _Kept(BytecodeCache):
    """Compiled templates for the life of the process: compiling them costs more than filling them in."""

    compiled: dict[str, bytes]

    def __init__(self) -> None:
        self.compiled = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self.compiled:
            bucket.bytecode_from_string(self.compiled[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self.compiled[bucket.key] = bucket.bytecode_to_string()


_KEPT = _Kept()


class FeedbackExporter(HTMLExporter):
    """nbconvert's HTMLExporter, with templates compiled once a process instead of once a student."""

    @property
    def environment(self) -> Environment:
        environment = super().environment
        environment.bytecode_cache = environment.bytecode_cache or _KEPT
        return environment
