"""The trace reader against good, odd and broken files; the synthetic traces against their published statistics."""

import importlib.util
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from servelab.errors import CourseError
from servelab.paths import DATA, ROOT
from servelab.traces import SKIPPED_KEPT, Request, Trace, read_azure_csv, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"
LATER = "2023-11-16 18:15:50.9951690,396,109"
REAL = Path(ROOT).parent / "shared" / "traces"

PUBLISHED = {
    "conv": {
        "n": 19_366,
        "rate_per_s": 5.53,
        "gap_cv": 1.09,
        "prompt_tokens": (207, 1020, 2734, 4142, 14050),
        "output_tokens": (54, 129, 424, 601, 1000),
    },
    "code": {
        "n": 8_819,
        "rate_per_s": 2.57,
        "gap_cv": 13.2,
        "prompt_tokens": (147, 1469, 5188, 7436, 7437),
        "output_tokens": (7, 13, 55, 251, 1899),
    },
}


@pytest.fixture
def write(tmp_path):
    """Writes a trace file from bytes, or from lines, and returns its path."""

    def write(*lines, data=None, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes("\n".join([*lines, ""]).encode() if data is None else data)
        return path

    return write


def error_of(path, **options):
    with pytest.raises(CourseError) as caught:
        read_azure_csv(path, **options)
    return caught.value


# Good files


def test_reads_requests_with_arrivals_from_the_first(write):
    trace = read_azure_csv(write(HEADER, ROW, LATER, name="mine.csv"))
    assert trace.name == "mine"
    assert trace.requests == (Request(0.0, 374, 44), Request(4.314579, 396, 109))
    assert (trace.skipped, trace.num_skipped, trace.num_out_of_order, trace.report()) == ((), 0, 0, "")
    assert len(trace) == 2 and list(trace) == list(trace.requests)


@pytest.mark.parametrize(
    "data",
    [
        f"{HEADER}\r\n{ROW}\r\n{LATER}\r\n",
        f"{HEADER}\r{ROW}\r{LATER}\r",
        f"\ufeff{HEADER}\n{ROW}\n{LATER}\n",
        f"\ufeff{HEADER}\r\n{ROW}\r\n{LATER}",
        f"{HEADER}\n{ROW}\n{LATER}",
        f"{HEADER}\n{ROW}\n{LATER}\n\n\n  \n",
        f"{HEADER}\n\n{ROW}\n\n{LATER}\n",
        '"TIMESTAMP","ContextTokens","GeneratedTokens"\n'
        '"2023-11-16 18:15:46.6805900","374","44"\n"2023-11-16 18:15:50.9951690","396","109"\n',
        "TIMESTAMP, ContextTokens, GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900, 374, 44\n2023-11-16 18:15:50.9951690 ,396 ,109 \n",
    ],
    ids=["crlf", "cr", "bom", "bom-crlf-no-newline", "no-newline", "blank-end", "blank-middle", "quoted", "spaces"],
)
def test_line_ends_marks_blanks_and_quotes_do_not_matter(write, data):
    trace = read_azure_csv(write(data=data.encode()))
    assert trace.requests == (Request(0.0, 374, 44), Request(4.314579, 396, 109))
    assert trace.report() == ""


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("2023-11-16 18:15:47.6805900", 1.0),
        ("2023-11-16 18:15:47.6805900+00:00", 1.0),
        ("2023-11-16 18:15:47.680590+00:00", 1.0),
        ("2023-11-16T18:15:47.6805900Z", 1.0),
        ("2023-11-16 20:15:47.6805900+02:00", 1.0),
        ("2023-11-16 12:45:47.6805900-0530", 1.0),
        ("2023-11-16 18:15:48", 1.31941),
        ("2023-11-16 18:15:46.6805901", 1e-7),
        ("2023-11-16 18:15:46.680590001", 1e-9),
        ("2023-11-17 18:15:46.68059", 86_400.0),
        ("2024-02-29 18:15:46.68059", 86_400.0 * 105),
    ],
)
def test_timestamp_forms(write, stamp, seconds):
    trace = read_azure_csv(write(HEADER, ROW, f"{stamp},1,1"))
    assert trace.report() == ""
    assert trace.requests[1].arrival == seconds


def test_a_single_request_is_a_trace(write):
    trace = read_azure_csv(write(HEADER, ROW))
    assert trace.requests == (Request(0.0, 374, 44),)
    summary = trace.describe()
    assert summary["duration_s"] == 0
    assert math.isnan(summary["rate_per_s"]) and math.isnan(summary["gap_cv"])
    assert set(summary["prompt_tokens"].values()) == {374}


def test_rows_out_of_time_order_are_sorted_and_reported(write):
    stamps = [3, 1, 2, 3, 0, 4]
    path = write(HEADER, *(f"2023-11-16 18:15:0{s}.0000000,{9 - i},1" for i, s in enumerate(stamps)))
    trace = read_azure_csv(path)
    assert [request.arrival for request in trace] == [0, 1, 2, 3, 3, 4]
    assert [request.prompt_tokens for request in trace] == [5, 8, 7, 9, 6, 4], "ties keep the file's order"
    assert trace.num_out_of_order == 3
    assert trace.report() == "trace: 3 rows out of time order, sorted"


# Bad rows


BAD_ROWS = {
    "two-columns": ("2023-11-16 18:15:47.0000000,374", "3 columns", "2 columns"),
    "four-columns": (ROW + ",5", "3 columns", "4 columns"),
    "one-column": ("nonsense", "3 columns", "1 column: 'nonsense'"),
    "semicolons": (ROW.replace(",", ";"), "3 columns", "1 column"),
    "stray-quote": ('"' + ROW, "3 columns", "1 column"),
    "huge-field": ("x" * 200_000, "3 columns", "1 column"),
    "float-prompt": ("2023-11-16 18:15:47.0000000,374.0,44", "ContextTokens as an integer", "'374.0'"),
    "word-output": ("2023-11-16 18:15:47.0000000,374,many", "GeneratedTokens as an integer", "'many'"),
    "empty-prompt": ("2023-11-16 18:15:47.0000000,,44", "ContextTokens as an integer", "''"),
    "empty-output": ("2023-11-16 18:15:47.0000000,374,", "GeneratedTokens as an integer", "''"),
    "underscore": ("2023-11-16 18:15:47.0000000,3_74,44", "ContextTokens as an integer", "'3_74'"),
    "other-digits": ("2023-11-16 18:15:47.0000000,\u0663,44", "ContextTokens as an integer", "'\u0663'"),
    "negative-prompt": ("2023-11-16 18:15:47.0000000,-1,44", "ContextTokens as an integer from 1", "'-1'"),
    "negative-output": ("2023-11-16 18:15:47.0000000,374,-44", "GeneratedTokens as an integer from 1", "'-44'"),
    "zero-prompt": ("2023-11-16 18:15:47.0000000,0,44", "ContextTokens as an integer from 1", "'0'"),
    "zero-output": ("2023-11-16 18:15:47.0000000,374,0", "GeneratedTokens as an integer from 1", "'0'"),
    "zeros-output": ("2023-11-16 18:15:47.0000000,374,000", "GeneratedTokens as an integer from 1", "'000'"),
    "huge-output": ("2023-11-16 18:15:47.0000000,374," + "9" * 5000, "GeneratedTokens as an integer", "'999"),
    "ten-digit-output": ("2023-11-16 18:15:47.0000000,374,1000000000", "from 1 to 999999999", "'1000000000'"),
    "nan-output": ("2023-11-16 18:15:47.0000000,374,nan", "GeneratedTokens as an integer", "'nan'"),
    "no-timestamp": (",374,44", "TIMESTAMP as 2023-11-16", "''"),
    "only-commas": (",,", "TIMESTAMP as 2023-11-16", "''"),
    "word-timestamp": ("yesterday,374,44", "TIMESTAMP as 2023-11-16", "'yesterday'"),
    "seconds-timestamp": ("1700158546.68,374,44", "TIMESTAMP as 2023-11-16", "'1700158546.68'"),
    "day-only": ("2023-11-16,374,44", "TIMESTAMP as 2023-11-16 18:15:46", "'2023-11-16'"),
    "american-date": ("11/16/2023 18:15:46,374,44", "TIMESTAMP as 2023-11-16", "'11/16/2023"),
    "month-13": ("2023-13-16 18:15:46.0000000,374,44", "valid date and time", "month must be in 1..12"),
    "30-february": ("2023-02-30 18:15:46.0000000,374,44", "valid date and time", "'2023-02-30"),
    "hour-25": ("2023-11-16 25:15:46.0000000,374,44", "valid date and time", "hour must be in 0..23"),
    "year-0": ("0000-11-16 18:15:46.0000000,374,44", "valid date and time", "'0000-"),
    "ten-digits": ("2023-11-16 18:15:46.0123456789,374,44", "TIMESTAMP as 2023-11-16", "0123456789"),
    "half-offset": ("2023-11-16 18:15:46.0000000+,374,44", "TIMESTAMP as 2023-11-16", "+'"),
    "day-offset": ("2023-11-16 18:15:46.0000000+24:00,374,44", "TIMESTAMP as 2023-11-16", "+24:00'"),
    "header-again": (HEADER, "TIMESTAMP as 2023-11-16", "'TIMESTAMP'"),
}


@pytest.mark.parametrize(("row", "expected", "found"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_skipped_and_reported(write, row, expected, found):
    trace = read_azure_csv(write(HEADER, ROW, row, LATER))
    assert trace.requests == (Request(0.0, 374, 44), Request(4.314579, 396, 109))
    (skipped,) = trace.skipped
    assert trace.num_skipped == 1
    assert skipped.line == 3
    assert expected in skipped.expected
    assert found in skipped.found
    assert len(str(skipped)) < 200, "a long row is cut"
    assert trace.report().splitlines() == ["trace: 1 row skipped", f"  {skipped}"]


@pytest.mark.parametrize("row", [row for row, _, _ in BAD_ROWS.values()], ids=BAD_ROWS)
def test_a_file_of_bad_rows_only_is_an_error_at_the_first(write, row):
    path = write(HEADER, row, row)
    error = error_of(path)
    assert error.where == f"{path}, line 2"
    assert "2 rows skipped" in error.problem and "expected" in error.problem and "found" in error.problem
    assert HEADER in error.mend


def test_the_first_skipped_rows_are_kept_and_all_are_counted(write):
    trace = read_azure_csv(write(HEADER, *["bad"] * 12, ROW))
    assert [row.line for row in trace.skipped] == list(range(2, 2 + SKIPPED_KEPT))
    assert trace.num_skipped == 12
    assert trace.report().splitlines()[0] == "trace: 12 rows skipped"
    assert trace.report().splitlines()[-1] == f"  and {12 - SKIPPED_KEPT} more"


def test_line_numbers_count_blank_lines(write):
    trace = read_azure_csv(write(data=f"{HEADER}\r\n\r\n{ROW}\r\n\r\nbad\r\n".encode()))
    assert trace.skipped[0].line == 5


def test_only_line_ends_end_a_line(write):
    """str.splitlines would split at these too, and every later line number would be wrong."""
    trace = read_azure_csv(write(HEADER, "a\x0bb\x0cc\x1cd\x85e\u2028f", "bad", ROW))
    assert [row.line for row in trace.skipped] == [2, 3]


def test_the_earliest_request_that_is_used_arrives_at_zero(write):
    trace = read_azure_csv(write(HEADER, "2023-11-16 18:00:00.0000000,5,0", ROW, LATER))
    assert [request.arrival for request in trace] == [0.0, 4.314579]


# Files that cannot be used


@pytest.mark.parametrize(
    ("first", "found"),
    [
        ("timestamp,prompt,output", "'timestamp,prompt,output'"),
        ("TIMESTAMP,GeneratedTokens,ContextTokens", "'TIMESTAMP,GeneratedTokens,ContextTokens'"),
        ("TIMESTAMP,ContextTokens", "'TIMESTAMP,ContextTokens'"),
        (HEADER + ",Extra", "Extra'"),
        (HEADER.replace(",", ";"), "'TIMESTAMP;ContextTokens;GeneratedTokens'"),
        (ROW, f"'{ROW}'"),
        ("", "''"),
        ("x" * 200_000, "x...'"),
    ],
    ids=["other", "swapped", "short", "long", "semicolons", "missing", "blank", "huge"],
)
def test_a_wrong_header_is_an_error(write, first, found):
    path = write(first, ROW)
    error = error_of(path)
    assert error.where == f"{path}, line 1"
    assert f"expected the header {HEADER}" in error.problem and found in error.problem
    assert ROW in error.mend
    assert len(str(error)) < 600


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_an_empty_file_is_an_error(write, data):
    path = write(data=data)
    error = error_of(path)
    assert error.where == f"{path}, line 1"
    assert "found an empty file" in error.problem and HEADER in error.mend


@pytest.mark.parametrize("data", [f"{HEADER}\n", HEADER, f"{HEADER}\r\n\r\n"])
def test_a_header_alone_is_an_error(write, data):
    path = write(data=data.encode())
    error = error_of(path)
    assert error.where == f"{path}, line 2"
    assert "expected rows below the header, found none" in error.problem


def test_a_missing_file_names_the_course_traces(tmp_path):
    path = tmp_path / "absent.csv"
    error = error_of(path)
    assert error.where == str(path)
    assert "no such file" in error.problem
    assert "conv, code" in error.mend


@pytest.mark.parametrize("name", ["cnov", "Conv", "conv "])
def test_a_misspelt_name_names_the_course_traces(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CourseError, match="no such file") as caught:
        read_trace(name)
    assert "conv, code" in caught.value.mend


def test_a_folder_is_an_error(tmp_path, monkeypatch):
    assert "found a folder" in error_of(tmp_path).problem
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CourseError, match="found a folder"):
        read_trace("")


@pytest.mark.parametrize("name", ["a\0b.csv", "n" * 5000 + ".csv"], ids=["nul", "long"])
def test_an_impossible_path_is_an_error(name):
    assert error_of(name).mend


def test_a_file_below_a_file_is_an_error(write):
    assert error_of(write(HEADER, ROW) / "trace.csv").mend


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="file modes do not stop this user")
def test_an_unreadable_file_is_an_error(write):
    path = write(HEADER, ROW)
    path.chmod(0)
    assert "cannot read the file" in error_of(path).problem


@pytest.mark.parametrize(
    ("data", "line", "found"),
    [
        (f"{HEADER}\n{ROW}\n".encode() + b"\xff\xfe\n", 3, "0xff"),
        (f"{HEADER}\n{ROW}\n".encode("utf-16"), 1, "0xff"),
        (f"{HEADER}\nn\u00e9,1,1\n".encode("latin-1"), 2, "0xe9"),
        (f"{HEADER}\n{ROW}\ncut \u20ac".encode()[:-1], 3, "0xe2"),
        (b"\x1f\x8b\x08\x00" + bytes(40), 1, "0x8b"),
        (f"{HEADER}\n{ROW}\n".encode("utf-16-le"), 1, "NUL"),
        (f"{HEADER}\n{ROW}\n".encode() + bytes(8), 3, "NUL"),
    ],
    ids=["bytes", "utf-16", "latin-1", "cut-short", "gzip", "utf-16-le", "zeros"],
)
def test_a_file_that_is_not_utf8_text_is_an_error(write, data, line, found):
    path = write(data=data)
    error = error_of(path)
    assert error.where == f"{path}, line {line}"
    assert "text, found" in error.problem and found in error.problem
    assert "UTF-8" in error.mend


def test_random_damage_is_an_error_or_a_report_never_a_traceback(tmp_path):
    """Each of 400 files has a few bytes changed, removed or doubled."""
    rng = random.Random(1)
    good = "\n".join([HEADER, *[ROW, LATER] * 5, ""]).encode()
    path = tmp_path / "damaged.csv"
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 2)] = bytes(rng.choices(b'",\r\n 0-9\xc3\x00+:.Zx', k=rng.randint(0, 3)))
        path.write_bytes(data)
        try:
            trace = read_azure_csv(path)
        except CourseError as error:
            assert error.where and error.mend
            continue
        assert all(r.arrival >= 0 and r.prompt_tokens > 0 and r.output_tokens > 0 for r in trace)
        assert [r.arrival for r in trace] == sorted(r.arrival for r in trace)


# Part of a trace, and its summary


def test_max_requests_keeps_the_earliest_and_reports_on_the_whole_file(write):
    path = write(HEADER, LATER, ROW, "bad")
    trace = read_azure_csv(path, max_requests=1)
    assert trace.requests == (Request(0.0, 374, 44),)
    assert (trace.num_skipped, trace.num_out_of_order) == (1, 1)
    assert len(read_azure_csv(path, max_requests=100)) == 2
    assert read_trace(path, max_requests=1) == trace


@pytest.mark.parametrize("n", [0, -1, 1.5, 2.0, True, "3", None])
def test_a_number_of_requests_is_an_integer_of_at_least_one(write, n):
    path = write(HEADER, ROW)
    with pytest.raises(CourseError, match="n: expected an integer of at least 1, found"):
        read_azure_csv(path).head(n)
    if n is not None:
        assert "max_requests" in error_of(path, max_requests=n).problem


def test_head_is_a_trace():
    trace = read_trace("code")
    assert trace.head(10).requests == trace.requests[:10]
    assert trace.head(10**9) == trace


def test_describe_counts_as_numpy_does():
    numpy = pytest.importorskip("numpy")
    rng = random.Random(3)
    arrivals = sorted(rng.random() * 100 for _ in range(137))
    trace = Trace("x", tuple(Request(t, rng.randint(1, 900), rng.randint(1, 90)) for t in arrivals))
    summary = trace.describe()
    gaps = numpy.diff(arrivals)
    assert summary["n"] == 137
    assert summary["duration_s"] == pytest.approx(arrivals[-1] - arrivals[0])
    assert summary["rate_per_s"] == pytest.approx(1 / gaps.mean())
    assert summary["gap_cv"] == pytest.approx(gaps.std() / gaps.mean())
    for column in ("prompt_tokens", "output_tokens"):
        values = [getattr(request, column) for request in trace]
        expected = numpy.quantile(values, [0.1, 0.5, 0.9, 0.99, 1])
        assert list(summary[column].values()) == pytest.approx(expected.tolist())


def test_describe_of_no_requests_or_of_one_instant():
    empty = Trace("x", ()).describe()
    assert empty["n"] == 0 and empty["duration_s"] == 0
    assert math.isnan(empty["prompt_tokens"]["p50"]) and math.isnan(empty["rate_per_s"])
    burst = Trace("x", (Request(0.0, 1, 1),) * 5).describe()
    assert math.isnan(burst["rate_per_s"]) and math.isnan(burst["gap_cv"])


def test_data_are_frozen():
    trace = read_trace("code")
    with pytest.raises(FrozenInstanceError):
        trace.name = "other"
    with pytest.raises(FrozenInstanceError):
        trace.requests[0].arrival = 1.0
    assert hash(trace.requests[0]) == hash(
        Request(0.0, trace.requests[0].prompt_tokens, trace.requests[0].output_tokens)
    )


# Cost


def test_twenty_thousand_rows_take_well_under_a_second(write):
    rows = [f"2023-11-16 18:{i // 60 % 60:02}:{i % 60:02}.{i:07},{i % 4000 + 1},{i % 500 + 1}" for i in range(20_000)]
    path = write(HEADER, *rows)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        assert len(read_azure_csv(path)) == 20_000
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.6


def test_reading_imports_neither_torch_nor_numpy_nor_pandas():
    code = (
        "import sys; from servelab.traces import read_trace; read_trace('conv').describe(); "
        "print([m for m in ('torch', 'numpy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The course's own traces


@pytest.fixture(scope="module")
def make_traces():
    spec = importlib.util.spec_from_file_location("make_traces", DATA / "make_traces.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_script_makes_the_committed_bytes(tmp_path):
    subprocess.run([sys.executable, DATA / "make_traces.py", tmp_path], cwd=tmp_path, capture_output=True, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.csv", "conv.csv"]
    for name in ("conv", "code"):
        assert (tmp_path / f"{name}.csv").read_bytes() == (DATA / "traces" / f"{name}.csv").read_bytes()


def test_no_value_lies_where_another_platform_could_round_it_otherwise(make_traces, monkeypatch):
    """log and power may differ in the last bits (relative 1e-15) between platforms; every half is much farther away."""
    nearest = math.inf

    def watched_round(x):
        nonlocal nearest
        nearest = min(nearest, abs(x % 1 - 0.5) / max(x, 1.0))
        return round(x)

    monkeypatch.setattr(make_traces, "round", watched_round, raising=False)
    for recipe in make_traces.RECIPES.values():
        make_traces.build(recipe)
    assert 1e-12 < nearest < 1


def test_the_traces_are_small():
    assert sum(path.stat().st_size for path in (DATA / "traces").iterdir()) < 600_000


@pytest.mark.parametrize(("name", "n"), [("conv", 10_000), ("code", 2_000)])
def test_the_traces_follow_the_published_statistics(name, n):
    """Lengths within 1 %, rate within 0.5 %, CV of the gaps within 2 %."""
    trace, published = read_trace(name), PUBLISHED[name]
    summary = trace.describe()
    assert trace.name == name and trace.report() == ""
    assert summary["n"] == n
    assert summary["rate_per_s"] == pytest.approx(published["rate_per_s"], rel=0.005)
    assert summary["gap_cv"] == pytest.approx(published["gap_cv"], rel=0.02)
    for column in ("prompt_tokens", "output_tokens"):
        assert list(summary[column].values()) == pytest.approx(published[column], rel=0.01)


LOG_MOMENTS = {"conv": ((6.63, 0.99), (5.02, 0.86)), "code": ((7.00, 1.36), (2.79, 0.85))}


@pytest.mark.parametrize("name", LOG_MOMENTS)
def test_the_lengths_spread_as_published_between_the_quantiles(name):
    """Mean and standard deviation of the logarithms within 0.15: a check that is not built in."""
    trace = read_trace(name)
    for column, (mean, deviation) in zip(("prompt_tokens", "output_tokens"), LOG_MOMENTS[name], strict=True):
        logs = [math.log(getattr(request, column)) for request in trace]
        centre = math.fsum(logs) / len(logs)
        spread = math.sqrt(math.fsum((x - centre) ** 2 for x in logs) / len(logs))
        assert (centre, spread) == pytest.approx((mean, deviation), abs=0.15)


@pytest.mark.parametrize("name", ["conv", "code"])
def test_prompt_output_and_arrival_are_independent(name):
    """Correlations of ranks stay within 3.5 standard errors, 3.5 / sqrt(n)."""
    trace = read_trace(name)
    gaps = [b.arrival - a.arrival for a, b in zip(trace.requests, trace.requests[1:], strict=False)]
    prompts = [request.prompt_tokens for request in trace][1:]
    outputs = [request.output_tokens for request in trace][1:]
    for x, y in ((prompts, outputs), (prompts, gaps), (outputs, gaps)):
        assert abs(_rank_correlation(x, y)) < 3.5 / math.sqrt(len(x))


def _rank_correlation(x, y):
    ranks = [dict(zip(sorted(range(len(v)), key=v.__getitem__), range(len(v)), strict=True)) for v in (x, y)]
    a, b = ([rank[i] for i in range(len(x))] for rank in ranks)
    mean = (len(a) - 1) / 2
    return sum((i - mean) * (j - mean) for i, j in zip(a, b, strict=True)) / sum((i - mean) ** 2 for i in a)


def _per_window(trace, seconds):
    counts = [0] * (int(trace.requests[-1].arrival // seconds) + 1)
    for request in trace:
        counts[int(request.arrival // seconds)] += 1
    return counts


def test_conv_drifts_slowly_and_code_bursts():
    by_minute = _per_window(read_trace("conv"), 60)[:-1]
    assert 1.5 < max(by_minute) / min(by_minute) < 4
    by_ten_seconds = _per_window(read_trace("code"), 10)
    assert max(by_ten_seconds) > 60 and by_ten_seconds.count(0) > len(by_ten_seconds) / 3


# The real traces, where they are at hand


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_azure_traces(name):
    path = REAL / f"AzureLLMInferenceTrace_{name}.csv"
    if not path.is_file():
        pytest.skip(f"the real trace {path.name} is not at hand (it is not part of the course)")
    trace, published = read_azure_csv(path), PUBLISHED[name]
    summary = trace.describe()
    assert (len(trace), trace.report()) == (published["n"], "")
    assert summary["rate_per_s"] == pytest.approx(published["rate_per_s"], abs=0.005)
    assert summary["gap_cv"] == pytest.approx(published["gap_cv"], rel=0.005)
    for column in ("prompt_tokens", "output_tokens"):
        assert list(summary[column].values()) == pytest.approx(published[column], abs=0.6)
