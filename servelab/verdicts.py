"""A verdict as text and as HTML: tables and classes only, so that it survives a sanitiser and reads without colours."""

from dataclasses import dataclass
from html import escape

from servelab.exercise import CaseVerdict, Exercise, Probe, Verdict

MAX_INPUT = 6000  # the longest run's listing, so that the step that a message names is in it
MAX_MESSAGE = 600  # it quotes what the learner's code returned, which may be of any length
HTML_MARKS = ("\N{CHECK MARK} pass", "\N{BALLOT X} fail", "not judged")
MAX_REPEATED = 60  # characters of a message that several cases share
MAX_REPORT = 2200  # of several lines: an error's own (`servelab.exercise`), and what a judge says in front of it


@dataclass(frozen=True)
class Shown:
    """What is shown of a verdict. A grader's page leaves the probes empty: a secret challenge's values stay secret."""

    exercise: Exercise
    probes: list[Probe]
    verdict: Verdict
    printed: str = ""  # while the first failing input was run

    @property
    def headline(self) -> str:
        passed = sum(case.passed for case in self.verdict.cases)
        rest = f", {self.verdict.unjudged} not judged" if self.verdict.unjudged else ""
        cases = f"{passed} of {len(self.verdict.cases)} cases"
        outcome = f"passed - {cases}" if self.verdict.passed else f"not yet right - {cases} passed{rest}"
        return f"{self.exercise.name}: {outcome}"

    @property
    def first_failure(self) -> str:
        """The smallest failing input, as the learner should read it; empty where it is secret or nothing failed."""
        case = self.verdict.first_failure
        if case is None or case.failed_on is None or not self.probes:
            return ""
        return _shortened(self.exercise.show(self.probes[case.failed_on].challenge), MAX_INPUT)

    @property
    def hint(self) -> str:
        """Which hint to open; where the learner's code broke off, only one that the judge chose for this failure."""
        case = self.verdict.first_failure
        if not case or not self.probes:
            return ""
        if case.failure_hint is None and ("your code raised" in case.message or "not written yet" in case.message):
            return ""
        return f"Hint {case.hint} of this exercise is about this." if case.hint else ""

    @property
    def failing_input_title(self) -> str:
        case = self.verdict.first_failure
        return f'Smallest failing input of "{case.spec.name}":' if case else ""

    def outcome(self, case: CaseVerdict) -> str:
        """What happened; of a message of several lines the first only, except for the first failure."""
        if case.passed:
            return f"held for {case.covered} {'input' if case.covered == 1 else 'inputs'}"
        if not self.probes:
            return "failed"
        head, newline, _ = case.message.partition("\n")
        same = next(other for other in self.verdict.cases if other.message.partition("\n")[0] == head)
        if newline and case is self.verdict.first_failure:
            return _shortened(case.message, MAX_REPORT)
        if same is not case and len(case.message) > MAX_REPEATED:
            return f'as for "{same.spec.name}"'
        return _shortened(head, MAX_MESSAGE) or "no input reached this"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + " ..."


def _mark(case: CaseVerdict, passed: str, failed: str, unjudged: str) -> str:
    """One of three words for what came of a case."""
    return passed if case.passed else failed if case.judged else unjudged


def as_text(shown: Shown) -> str:
    """The verdict for a terminal."""
    lines = [shown.headline]
    for case in shown.verdict.cases:
        outcome = shown.outcome(case).replace("\n", "\n        ")
        lines.append(f"  {_mark(case, 'ok  ', 'FAIL', 'not judged')}  {case.spec.name}: {outcome}")
    if shown.first_failure:
        lines += [shown.failing_input_title, *(f"  {line}" for line in shown.first_failure.splitlines())]
    if shown.hint:
        lines.append(shown.hint)
    if shown.verdict.note:
        lines.append(shown.verdict.note)
    if shown.printed.strip():
        lines += ["Your code printed, on this input:", shown.printed.strip()]
    return "\n".join(lines)


def as_html(shown: Shown) -> str:
    """The verdict for a notebook or a feedback page."""
    rows = "".join(
        _row("td", _mark(case, *HTML_MARKS), case.spec.name, shown.outcome(case)) for case in shown.verdict.cases
    )
    head = _row("th", "result", "case", "what happened")
    parts = [
        f"<p><strong>{escape(shown.headline)}</strong></p>",
        f'<table class="servelab-verdict"><thead>{head}</thead><tbody>{rows}</tbody></table>',
    ]
    if shown.first_failure:
        parts.append(f"<p>{escape(shown.failing_input_title)}</p>{_listing(shown.first_failure)}")
    if shown.hint:
        parts.append(f"<p>{escape(shown.hint)}</p>")
    if shown.verdict.note:
        parts.append(f"<p>{escape(shown.verdict.note)}</p>")
    if shown.printed.strip():
        parts.append(f"<p>Your code printed, on this input:</p>{_listing(shown.printed.strip())}")
    return f'<div class="servelab">{"".join(parts)}</div>'


def _row(tag: str, *texts: str) -> str:
    """A table row; the alignment is for JupyterLab, and a sanitiser may drop it."""
    return "<tr>" + "".join(f'<{tag} style="text-align:left">{_cell(text)}</{tag}>' for text in texts) + "</tr>"


def _cell(text: str) -> str:
    """A sentence, and below it the lines of a report, if there are any."""
    first, newline, report = text.partition("\n")
    return escape(first) + (_listing(report) if newline else "")


def _listing(text: str) -> str:
    """Code or output as it is; in JupyterLab it scrolls when it is long."""
    return f'<pre style="max-height:24em;overflow:auto">{escape(text)}</pre>'


def paragraph(text: str) -> str:
    """One sentence as HTML."""
    return f'<div class="servelab"><p>{escape(text)}</p></div>'
