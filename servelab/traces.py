"""Request traces: when requests arrive, how long their prompts are, and how many tokens they generate.

One reader for the public Azure LLM inference format, used for the course's own synthetic traces (``conv`` and ``code``)
and for a learner's file. A trace from a production system has bad rows: they are skipped, counted and shown.
"""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from servelab.errors import CourseError
from servelab.paths import DATA

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TRACES = {name: DATA / "traces" / f"{name}.csv" for name in ("conv", "code")}
SKIPPED_KEPT = 5
"""How many skipped rows a trace keeps to show; it counts all of them."""

_EXAMPLE = "2023-11-16 18:15:46.6805900,374,44"
_MEND = f"A trace is UTF-8 text: the header {','.join(HEADER)}, then rows such as {_EXAMPLE}."
_STAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:\.([0-9]{1,9}))?(?: ?(?:Z|([+-])([01][0-9]|2[0-3]):?([0-5][0-9])))?"
)
_COUNT = re.compile(r"[0-9]{1,9}")
_EPOCH = datetime(1970, 1, 1)
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Parameters
    ----------
    arrival : float
        Seconds since the trace's first request.
    prompt_tokens : int
        Tokens of the prompt, at least 1.
    output_tokens : int
        Tokens generated, at least 1.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class SkippedRow:
    """A row that is not a request: its line in the file (from 1), what was expected there and what was found."""

    line: int
    expected: str
    found: str

    def __str__(self) -> str:
        return f"line {self.line}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, and what the reader had to leave out or put right.

    Parameters
    ----------
    name : str
        The file's name without its ending.
    requests : tuple of Request
        In order of arrival; requests with the same arrival stay in the file's order.
    skipped : tuple of SkippedRow
        The first few rows that were left out.
    num_skipped : int
        How many rows were left out in all.
    num_out_of_order : int
        How many rows were earlier than a row above them, and so were moved by sorting.
    """

    name: str
    requests: tuple[Request, ...]
    skipped: tuple[SkippedRow, ...] = ()
    num_skipped: int = 0
    num_out_of_order: int = 0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def head(self, n: int) -> "Trace":
        """The ``n`` earliest requests (all of them where there are fewer), with the same report.

        Raises
        ------
        CourseError
            When ``n`` is not an integer of at least 1.
        """
        return replace(self, requests=self.requests[: _positive(n, "n")])

    def describe(self) -> dict[str, Any]:
        """A summary in numbers.

        Returns
        -------
        dict
            ``n``; ``duration_s``, from the first arrival to the last; ``rate_per_s``, gaps over duration;
            ``gap_cv``, the gaps' standard deviation over their mean (1 for Poisson arrivals); ``prompt_tokens`` and
            ``output_tokens``, each with ``p10``, ``p50``, ``p90``, ``p99`` and ``max``. NaN where there is no answer.
        """
        gaps = [b.arrival - a.arrival for a, b in zip(self.requests, self.requests[1:], strict=False)]
        duration = math.fsum(gaps)
        return {
            "n": len(self),
            "duration_s": duration,
            "rate_per_s": len(gaps) / duration if duration else math.nan,
            "gap_cv": _cv(gaps),
            "prompt_tokens": _quantiles([request.prompt_tokens for request in self]),
            "output_tokens": _quantiles([request.output_tokens for request in self]),
        }

    def report(self) -> str:
        """What the reader left out or put right, one fact a line; empty when there was nothing."""
        lines = [f"{self.name}: {_rows(self.num_skipped)} skipped"] if self.num_skipped else []
        lines += [f"  {row}" for row in self.skipped]
        if self.num_skipped > len(self.skipped):
            lines.append(f"  and {self.num_skipped - len(self.skipped)} more")
        if self.num_out_of_order:
            lines.append(f"{self.name}: {_rows(self.num_out_of_order)} out of time order, sorted")
        return "\n".join(lines)


def read_trace(name_or_path: str | Path, *, max_requests: int | None = None) -> Trace:
    """Read one of the course's traces, or a file in the Azure format.

    Parameters
    ----------
    name_or_path : str or Path
        ``"conv"`` (10,000 chat requests, smooth arrivals) or ``"code"`` (2,000 completion requests, heavy bursts): the
        course's synthetic traces. Anything else is a path.
    max_requests : int, optional
        Keep only the earliest ones.

    Raises
    ------
    CourseError
        As for `read_azure_csv`.
    """
    own = TRACES.get(name_or_path) if isinstance(name_or_path, str) else None
    return read_azure_csv(own or name_or_path, max_requests=max_requests)


def read_azure_csv(path: str | Path, *, max_requests: int | None = None) -> Trace:
    """Read a trace in the public Azure LLM inference format (``TIMESTAMP,ContextTokens,GeneratedTokens``).

    Timestamps have up to nine fractional digits and may have an offset (without one: UTC). Rows out of time order are
    sorted. A row that is not a request is skipped; see `Trace.report`. O(n log n) in the rows.

    Parameters
    ----------
    path : str or Path
        The file; ``~`` is the home folder.
    max_requests : int, optional
        Keep only the earliest ones. The report is still about the whole file.

    Raises
    ------
    CourseError
        When the file cannot be read as UTF-8 text, when its header is another one, or when no row is a request.
    """
    limit = None if max_requests is None else _positive(max_requests, "max_requests")
    path = Path(path)
    lines = _read_text(path).removesuffix("\n").split("\n")
    _check_header(path, lines[0])
    rows, skipped = _parse_rows(lines)
    if not rows:
        raise _nothing_usable(path, skipped)
    trace = Trace(
        name=path.stem,
        requests=_requests(rows),
        skipped=tuple(skipped[:SKIPPED_KEPT]),
        num_skipped=len(skipped),
        num_out_of_order=_num_out_of_order([row[0] for row in rows]),
    )
    return trace if limit is None else trace.head(limit)


def _read_text(path: Path) -> str:
    """The file's text, with ``\\n`` at every line's end and without a byte-order mark."""
    data = _read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"found the byte 0x{data[error.start]:02x}"
        raise CourseError(f"expected UTF-8 text, {found}", where=f"{path}, line {line}", mend=_MEND) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise CourseError("expected text, found a NUL byte", where=f"{path}, line {line}", mend=_MEND)
    if not text.strip():
        raise CourseError("expected a header and rows, found an empty file", where=f"{path}, line 1", mend=_MEND)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_bytes(path: Path) -> bytes:
    try:
        path = path.expanduser()
        if path.is_dir():
            raise CourseError("expected a file, found a folder", where=f"{path}", mend="Name a CSV file in it.")
        return path.read_bytes()
    except FileNotFoundError:
        mend = f"Check the path, or use one of the course's own traces: {', '.join(TRACES)}."
        raise CourseError("expected a trace, found no such file", where=f"{path}", mend=mend) from None
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CourseError(f"cannot read the file: {reason}", where=f"{path}", mend="Check the path.") from None


def _check_header(path: Path, line: str) -> None:
    if tuple(_fields(line)) != HEADER:
        problem = f"expected the header {','.join(HEADER)}, found {_shown(line)}"
        raise CourseError(problem, where=f"{path}, line 1", mend=_MEND)


def _parse_rows(lines: Sequence[str]) -> tuple[list[tuple[int, int, int]], list[SkippedRow]]:
    """The usable rows below the header as (nanoseconds, prompt tokens, output tokens), and the others."""
    rows, skipped = [], []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            rows.append(_parse_row(_fields(line), line))
        except _BadRow as bad:
            skipped.append(SkippedRow(number, *bad.args))
    return rows, skipped


class _BadRow(Exception):
    """A row that is not a request: what was expected, what was found."""


def _fields(line: str) -> list[str]:
    """One line's fields. Line by line, so that a stray quote spoils one row and not all rows below it."""
    try:
        return [field.strip() for field in next(csv.reader([line]), [])]
    except csv.Error:
        return [line]


def _parse_row(fields: list[str], line: str) -> tuple[int, int, int]:
    if len(fields) != len(HEADER):
        columns = f"{len(fields)} column" + ("s" if len(fields) != 1 else "")
        raise _BadRow(f"{len(HEADER)} columns", f"{columns}: {_shown(line)}")
    stamp, prompt, output = fields
    return _nanoseconds(stamp), _count(prompt, HEADER[1]), _count(output, HEADER[2])


def _nanoseconds(text: str) -> int:
    """A timestamp as nanoseconds since 1970 (UTC): an integer, as a float of that size is 0.2 us coarse."""
    match = _STAMP.fullmatch(text)
    if not match:
        raise _BadRow(f"{HEADER[0]} as {_EXAMPLE.partition(',')[0]}", _shown(text))
    day, clock, fraction, sign, hours, minutes = match.groups()
    try:
        since = datetime.fromisoformat(f"{day} {clock}") - _EPOCH
    except ValueError as error:
        raise _BadRow(f"{HEADER[0]} with a valid date and time", f"{_shown(text)} ({error})") from None
    if sign:
        offset = timedelta(hours=int(hours), minutes=int(minutes))
        since = since - offset if sign == "+" else since + offset
    return (since.days * 86_400 + since.seconds) * _NANOSECONDS + int((fraction or "0").ljust(9, "0"))


def _count(text: str, column: str) -> int:
    if not _COUNT.fullmatch(text) or int(text) == 0:
        raise _BadRow(f"{column} as an integer from 1 to 999999999", _shown(text))
    return int(text)


def _requests(rows: list[tuple[int, int, int]]) -> tuple[Request, ...]:
    ordered = sorted(rows, key=lambda row: row[0])
    start = ordered[0][0]
    return tuple(Request((time - start) / _NANOSECONDS, prompt, output) for time, prompt, output in ordered)


def _num_out_of_order(times: Sequence[int]) -> int:
    latest, count = times[0], 0
    for time in times:
        count += time < latest
        latest = max(latest, time)
    return count


def _nothing_usable(path: Path, skipped: Sequence[SkippedRow]) -> CourseError:
    if not skipped:
        return CourseError("expected rows below the header, found none", where=f"{path}, line 2", mend=_MEND)
    first = skipped[0]
    problem = f"no row is a request ({_rows(len(skipped))} skipped); expected {first.expected}, found {first.found}"
    return CourseError(problem, where=f"{path}, line {first.line}", mend=_MEND)


def _positive(value: int, name: str) -> int:
    if type(value) is not int or value < 1:
        raise CourseError(f"{name}: expected an integer of at least 1, found {value!r}", mend="Ask for 1 or more.")
    return value


def _quantiles(values: Sequence[int]) -> dict[str, float]:
    ordered = sorted(values)
    levels = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: _quantile(ordered, level) for name, level in levels.items()}


def _quantile(ordered: Sequence[int], level: float) -> float:
    """Linear between the two nearest order statistics, as ``numpy.quantile`` does by default."""
    if not ordered:
        return math.nan
    position = level * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _cv(gaps: Sequence[float]) -> float:
    """Standard deviation over mean; NaN without gaps or when all arrive at once."""
    mean = math.fsum(gaps) / len(gaps) if gaps else 0.0
    if not mean:
        return math.nan
    return math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def _rows(n: int) -> str:
    return "1 row" if n == 1 else f"{n} rows"


def _shown(text: str, limit: int = 60) -> str:
    """``text`` as it can be printed in a message: quoted, and cut when long."""
    return repr(text if len(text) <= limit else text[:limit] + "...")
