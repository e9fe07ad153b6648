"""A verdict as text and as HTML: tables and classes only, so that it survives a sanitiser and reads without colours."""

from dataclasses import dataclass
from html import escape

from servelab.exercise import CaseVerdict, Exercise, Probe, Verdict

MAX_INPUT = 6000  # the longest run's listing, so that the step that a message names is in it
MAX_MESSAGE = 600  # it quotes what the learner's code returned, which may be of any length


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
        outcome = "passed" if self.verdict.passed else "not yet right"
        return f"{self.exercise.name}: {outcome} - {passed} of {len(self.verdict.cases)} cases"

    @property
    def first_failure(self) -> str:
        """The smallest failing input, as the learner should read it; empty where it is secret or nothing failed."""
        case = self.verdict.first_failure
        if case is None or case.failed_on is None or not self.probes:
            return ""
        return _shortened(self.exercise.show(self.probes[case.failed_on].challenge), MAX_INPUT)

    @property
    def hint(self) -> str:
        """Which hint to open; none where the learner's code broke off, since no hint is about that."""
        case = self.verdict.first_failure
        if not case or not self.probes or "your code raised" in case.message or "not written yet" in case.message:
            return ""
        return f"Hint {case.hint} of this exercise is about this."

    @property
    def failing_input_title(self) -> str:
        case = self.verdict.first_failure
        return f'Smallest failing input of "{case.spec.name}":' if case else ""

    def outcome(self, case: CaseVerdict) -> str:
        if case.passed:
            return f"held for {case.covered} {'input' if case.covered == 1 else 'inputs'}"
        if not self.probes:
            return "failed"
        return _shortened(case.message, MAX_MESSAGE) or "no input reached this"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + " ..."


def as_text(shown: Shown) -> str:
    """The verdict for a terminal."""
    lines = [shown.headline]
    for case in shown.verdict.cases:
        lines.append(f"  {'ok  ' if case.passed else 'FAIL'}  {case.spec.name}: {shown.outcome(case)}")
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
        _row("td", "\N{CHECK MARK} pass" if case.passed else "\N{BALLOT X} fail", case.spec.name, shown.outcome(case))
        for case in shown.verdict.cases
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
    return "<tr>" + "".join(f'<{tag} style="text-align:left">{escape(text)}</{tag}>' for text in texts) + "</tr>"


def _listing(text: str) -> str:
    """Code or output as it is; in JupyterLab it scrolls when it is long."""
    return f'<pre style="max-height:24em;overflow:auto">{escape(text)}</pre>'


def paragraph(text: str) -> str:
    """One sentence as HTML."""
    return f'<div class="servelab"><p>{escape(text)}</p></div>'
