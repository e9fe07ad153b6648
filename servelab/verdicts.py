"""A verdict as text and as HTML: tables and classes only, so that it survives a sanitiser and reads without colours."""

from dataclasses import dataclass
from html import escape

from servelab.exercise import CaseVerdict, Exercise, Probe, Verdict

MAX_INPUT = 1200


@dataclass(frozen=True)
class Shown:
    """What is shown of a verdict. A grader's page leaves the probes empty: a secret challenge's values stay secret."""

    exercise: Exercise
    probes: list[Probe]
    verdict: Verdict
    printed: str = ""

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
        text = self.exercise.show(self.probes[case.failed_on].challenge)
        return text if len(text) <= MAX_INPUT else text[:MAX_INPUT] + " ..."

    @property
    def hint(self) -> str:
        case = self.verdict.first_failure
        return f"Hint {case.spec.hint} of this exercise is about this." if case and self.probes else ""

    def outcome(self, case: CaseVerdict) -> str:
        if case.passed:
            return f"held in {case.covered} {'challenge' if case.covered == 1 else 'challenges'}"
        if not self.probes:
            return "failed"
        return case.message or "no challenge reached this"


def as_text(shown: Shown) -> str:
    """The verdict for a terminal."""
    lines = [shown.headline]
    for case in shown.verdict.cases:
        lines.append(f"  {'ok  ' if case.passed else 'FAIL'}  {case.spec.name}: {shown.outcome(case)}")
    if shown.first_failure:
        lines += ["Smallest failing input:", *(f"  {line}" for line in shown.first_failure.splitlines())]
    if shown.hint:
        lines.append(shown.hint)
    if shown.verdict.note:
        lines.append(shown.verdict.note)
    if shown.printed.strip():
        lines += ["Your code printed:", shown.printed.strip()]
    return "\n".join(lines)


def as_html(shown: Shown) -> str:
    """The verdict for a notebook or a feedback page."""
    rows = "".join(
        f"<tr><td>{'&#10003; pass' if case.passed else '&#10007; fail'}</td><td>{escape(case.spec.name)}</td>"
        f"<td>{escape(shown.outcome(case))}</td></tr>"
        for case in shown.verdict.cases
    )
    head = "<tr><th>result</th><th>case</th><th>what happened</th></tr>"
    parts = [
        f"<p><strong>{escape(shown.headline)}</strong></p>",
        f'<table class="servelab-verdict"><thead>{head}</thead><tbody>{rows}</tbody></table>',
    ]
    if shown.first_failure:
        parts.append(f"<p>Smallest failing input:</p><pre>{escape(shown.first_failure)}</pre>")
    if shown.hint:
        parts.append(f"<p>{escape(shown.hint)}</p>")
    if shown.verdict.note:
        parts.append(f"<p>{escape(shown.verdict.note)}</p>")
    if shown.printed.strip():
        parts.append(f"<p>Your code printed:</p><pre>{escape(shown.printed.strip())}</pre>")
    return f'<div class="servelab">{"".join(parts)}</div>'


def paragraph(text: str) -> str:
    """One sentence as HTML."""
    return f'<div class="servelab"><p>{escape(text)}</p></div>'
