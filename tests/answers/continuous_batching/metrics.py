"""Named answers to `continuous_batching.metrics`."""

import math
import statistics

import numpy as np

from servelab.answers import right, wrong

NAMES = ("ttft", "e2e", "itl", "tpot", "percentile", "throughput", "goodput")


def using(reference, **changes):
    """The seven functions, some of them replaced."""
    return tuple(changes.get(name) or getattr(reference, name) for name in NAMES)


def attained(reference, meets, pick=max, share=None):
    """A goodput: a rate passes if ``meets`` says so of its requests' latencies and limits."""

    def goodput(runs, ttft_slo, tpot_slo, gpus=1):
        passing = []
        for rate, timings in runs.items():
            pairs = [(reference.ttft(t), reference.tpot(t)) for t in timings]
            if meets(pairs, ttft_slo, tpot_slo):
                passing.append(rate)
        return pick(passing) / gpus if passing else 0.0

    return using(reference, goodput=goodput)


def share_of(pairs, test):
    return sum(test(first, gap) for first, gap in pairs) / len(pairs)


@right("by hand, with integers for the share")
def by_hand(reference):
    def percentile(values, p):
        ordered = sorted(values)
        place = (len(ordered) - 1) * p / 100
        below = min(int(place), len(ordered) - 1)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] * (1 - (place - below)) + ordered[above] * (place - below)

    def tpot(timing):
        if len(timing.token_times) < 2:
            return None
        return statistics.fmean(np.diff(timing.token_times).tolist())

    def goodput(runs, ttft_slo, tpot_slo, gpus=1):
        best = 0
        for rate, timings in runs.items():
            failed = 0
            for timing in timings:
                gap = tpot(timing)
                failed += timing.token_times[0] - timing.arrival > ttft_slo or (gap is not None and gap > tpot_slo)
            if 10 * failed <= len(timings):
                best = max(best, rate)
        return best / gpus

    return using(reference, percentile=percentile, tpot=tpot, goodput=goodput)


@right("with numpy arrays and floats")
def with_numpy(reference):
    def throughput(timings):
        ends = np.array([t.token_times[-1] for t in timings])
        starts = np.array([t.arrival for t in timings])
        return np.float64(np.array([len(t.token_times) for t in timings]).sum()) / (ends.max() - starts.min())

    return using(
        reference,
        ttft=lambda timing: np.float64(timing.token_times[0]) - timing.arrival,
        itl=lambda timing: np.diff(np.array(timing.token_times)),
        percentile=lambda values, p: np.quantile(np.array(values), p / 100),
        throughput=throughput,
    )


@right("gaps from a generator, rates from above")
def generator(reference):
    def gaps(timing):
        for index in range(1, len(timing.token_times)):
            yield timing.token_times[index] - timing.token_times[index - 1]

    def goodput(runs, ttft_slo, tpot_slo, gpus=1):
        for rate in sorted(runs, reverse=True):
            met = [
                t
                for t in runs[rate]
                if t.token_times[0] - t.arrival <= ttft_slo and all(g <= tpot_slo for g in [reference.tpot(t)] if g)
            ]
            if len(met) / len(runs[rate]) >= 0.9:
                return rate / gpus
        return 0.0

    return using(reference, itl=gaps, goodput=goodput)


@wrong("TTFT from the admission", case="TTFT from the arrival")
def ttft_from_admission(reference):
    return using(reference, ttft=lambda timing: timing.token_times[0] - timing.admitted)


@wrong("TTFT as the queueing time", case="TTFT from the arrival")
def queueing(reference):
    return using(reference, ttft=lambda timing: timing.admitted - timing.arrival)


@wrong("TTFT up to the second token", case="TTFT from the arrival")
def second_token(reference):
    return using(reference, ttft=lambda timing: timing.token_times[:2][-1] - timing.arrival)


@wrong("E2E from the admission", case="E2E from the arrival to the last token")
def e2e_from_admission(reference):
    return using(reference, e2e=lambda timing: timing.token_times[-1] - timing.admitted)


@wrong("E2E without the wait for the first token", case="E2E from the arrival to the last token")
def decode_only(reference):
    return using(reference, e2e=lambda timing: timing.token_times[-1] - timing.token_times[0])


@wrong("ITL as the mean", case="ITL is every gap")
def itl_mean(reference):
    return using(reference, itl=lambda timing: reference.tpot(timing) or 0.0)


@wrong("ITL with the first token's wait", case="ITL is every gap")
def itl_with_first(reference):
    return using(reference, itl=lambda timing: [reference.ttft(timing), *reference.itl(timing)])


@wrong("ITL from the first token each time", case="ITL is every gap")
def itl_from_first(reference):
    return using(reference, itl=lambda timing: [t - timing.token_times[0] for t in timing.token_times[1:]])


@wrong("ITL sorted", case="ITL is every gap")
def itl_sorted(reference):
    return using(reference, itl=lambda timing: sorted(reference.itl(timing)))


@wrong("TPOT with the first token", case="TPOT leaves the first token out")
def tpot_with_first(reference):
    def tpot(timing):
        n = len(timing.token_times)
        return reference.e2e(timing) / n if n > 1 else None

    return using(reference, tpot=tpot)


@wrong("TPOT divided by n", case="TPOT leaves the first token out")
def tpot_by_n(reference):
    def tpot(timing):
        n = len(timing.token_times)
        return (reference.e2e(timing) - reference.ttft(timing)) / n if n > 1 else None

    return using(reference, tpot=tpot)


@wrong("TPOT as the median gap", case="TPOT leaves the first token out")
def tpot_median(reference):
    return using(
        reference, tpot=lambda timing: statistics.median(reference.itl(timing)) if reference.itl(timing) else None
    )


@wrong("TPOT from the admission", case="TPOT leaves the first token out")
def tpot_from_admission(reference):
    def tpot(timing):
        n = len(timing.token_times)
        return (timing.token_times[-1] - timing.admitted) / (n - 1) if n > 1 else None

    return using(reference, tpot=tpot)


@wrong("TPOT of one token is 0", case="an answer of one token has no TPOT")
def tpot_zero(reference):
    return using(reference, tpot=lambda timing: reference.tpot(timing) or 0.0)


@wrong("TPOT of one token divides by zero", case="an answer of one token has no TPOT")
def tpot_crash(reference):
    def tpot(timing):
        return (reference.e2e(timing) - reference.ttft(timing)) / (len(timing.token_times) - 1)

    return using(reference, tpot=tpot)


@wrong("TPOT of one token is its E2E", case="an answer of one token has no TPOT")
def tpot_e2e(reference):
    def tpot(timing):
        gap = reference.tpot(timing)
        return reference.e2e(timing) if gap is None else gap

    return using(reference, tpot=tpot)


@wrong("TPOT of one token is NaN", case="an answer of one token has no TPOT")
def tpot_nan(reference):
    def tpot(timing):
        gap = reference.tpot(timing)
        return math.nan if gap is None else gap

    return using(reference, tpot=tpot)


@wrong("answers of one token meet no limit", case="goodput: one token breaks no limit on TPOT")
def lone_fails(reference):
    def meets(pairs, first_limit, gap_limit):
        return share_of(pairs, lambda first, gap: first <= first_limit and gap is not None and gap <= gap_limit) >= 0.9

    return attained(reference, meets)


@wrong("answers of one token are left out of the goodput", case="goodput: one token breaks no limit on TPOT")
def lone_left_out(reference):
    def meets(pairs, first_limit, gap_limit):
        pairs = [pair for pair in pairs if pair[1] is not None]
        good = [first <= first_limit and gap <= gap_limit for first, gap in pairs]
        return bool(good) and sum(good) >= 0.9 * len(good)

    return attained(reference, meets)


@wrong("nearest rank", case="percentiles between two values")
def nearest_rank(reference):
    return using(reference, percentile=lambda values, p: sorted(values)[max(0, math.ceil(p / 100 * len(values)) - 1)])


@wrong("the place rounded", case="percentiles between two values")
def rounded_place(reference):
    return using(reference, percentile=lambda values, p: sorted(values)[round(p / 100 * (len(values) - 1))])


@wrong("of n values instead of n - 1 gaps", case="percentiles between two values")
def place_of_n(reference):
    def percentile(values, p):
        return float(np.percentile(values, p, method="weibull"))

    return using(reference, percentile=percentile)


@wrong("not sorted", case="percentiles between two values")
def not_sorted(reference):
    return using(
        reference, percentile=lambda values, p: np.interp(p / 100 * (len(values) - 1), range(len(values)), values)
    )


@wrong("p from 0 to 1", case="percentiles between two values")
def as_quantile(reference):
    return using(reference, percentile=lambda values, p: float(np.percentile(values, p / 100)))


@wrong("throughput over the time in which requests run", case="throughput: tokens of answers over the whole run")
def busy_time(reference):
    def throughput(timings):
        spans = sorted((t.admitted, t.token_times[-1]) for t in timings)
        busy, end = 0.0, -math.inf
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return sum(len(t.token_times) for t in timings) / busy

    return using(reference, throughput=throughput)


@wrong("throughput: the mean of the requests' own speeds", case="throughput: tokens of answers over the whole run")
def mean_of_speeds(reference):
    return using(
        reference,
        throughput=lambda timings: sum(len(t.token_times) / reference.e2e(t) for t in timings) / len(timings),
    )


@wrong("throughput in requests", case="throughput: tokens of answers over the whole run")
def in_requests(reference):
    def throughput(timings):
        tokens = sum(len(t.token_times) for t in timings)
        return reference.throughput(timings) * len(timings) / tokens

    return using(reference, throughput=throughput)


@wrong("throughput up to the last arrival", case="throughput: tokens of answers over the whole run")
def until_last_arrival(reference):
    def throughput(timings):
        window = max(t.arrival for t in timings) - min(t.arrival for t in timings)
        return sum(len(t.token_times) for t in timings) / (window or 1.0)

    return using(reference, throughput=throughput)


@wrong("throughput over the clock from 0", case="throughput: tokens of answers over the whole run")
def from_zero(reference):
    def throughput(timings):
        return sum(len(t.token_times) for t in timings) / max(t.token_times[-1] for t in timings)

    return using(reference, throughput=throughput)


@wrong("throughput: the list taken to be in order", case="throughput: tokens of answers over the whole run")
def taken_in_order(reference):
    def throughput(timings):
        tokens = sum(len(t.token_times) for t in timings)
        return tokens / (timings[-1].token_times[-1] - timings[0].arrival)

    return using(reference, throughput=throughput)


@wrong("throughput without the first tokens", case="throughput: tokens of answers over the whole run")
def without_first(reference):
    def throughput(timings):
        tokens = sum(len(t.token_times) for t in timings)
        return reference.throughput(timings) * (tokens - len(timings)) / tokens

    return using(reference, throughput=throughput)


@wrong("goodput by the means", case="goodput: 90 % meet both limits")
def by_means(reference):
    def meets(pairs, first_limit, gap_limit):
        gaps = [gap for _, gap in pairs if gap is not None]
        return statistics.fmean(first for first, _ in pairs) <= first_limit and (
            not gaps or statistics.fmean(gaps) <= gap_limit
        )

    return attained(reference, meets)


@wrong("goodput: each limit met by 90 % of its own", case="goodput: 90 % meet both limits")
def apart(reference):
    def meets(pairs, first_limit, gap_limit):
        firsts = share_of(pairs, lambda first, gap: first <= first_limit)
        return min(firsts, share_of(pairs, lambda first, gap: (gap or 0) <= gap_limit)) >= 0.9

    return attained(reference, meets)


@wrong("goodput: either limit is enough", case="goodput: 90 % meet both limits")
def either(reference):
    def meets(pairs, first_limit, gap_limit):
        return share_of(pairs, lambda first, gap: first <= first_limit or (gap or 0) <= gap_limit) >= 0.9

    return attained(reference, meets)


@wrong("goodput: all must meet them", case="goodput: 90 % meet both limits")
def all_must(reference):
    def meets(pairs, first_limit, gap_limit):
        return share_of(pairs, lambda first, gap: first <= first_limit and (gap or 0) <= gap_limit) == 1

    return attained(reference, meets)


@wrong("goodput: more than 90 %", case="goodput: 90 % meet both limits")
def more_than(reference):
    def meets(pairs, first_limit, gap_limit):
        return share_of(pairs, lambda first, gap: first <= first_limit and (gap or 0) <= gap_limit) > 0.9

    return attained(reference, meets)


def rounded_share(passes):
    """A wrong goodput whose rate passes if ``passes(met, n)`` says so."""

    def make(reference):
        def meets(pairs, first_limit, gap_limit):
            met = sum(first <= first_limit and (gap or 0) <= gap_limit for first, gap in pairs)
            return passes(met, len(pairs))

        return attained(reference, meets)

    return make


@wrong("goodput: 90 % of the requests, rounded down", case="goodput: 90 % meet both limits")
@rounded_share
def rounded_down(met, n):
    return met >= int(0.9 * n)


@wrong("goodput: 90 % of the requests, rounded", case="goodput: 90 % meet both limits")
@rounded_share
def rounded_number(met, n):
    return met >= round(0.9 * n)


@wrong("goodput: the share rounded to tenths", case="goodput: 90 % meet both limits")
@rounded_share
def rounded_to_tenths(met, n):
    return round(met / n, 1) >= 0.9


@wrong("goodput: the share rounded to percents", case="goodput: 90 % meet both limits")
@rounded_share
def rounded_to_percents(met, n):
    return round(100 * met / n) >= 90


@wrong("goodput: at most 1 - 0.9 of them fail, in floats", case="goodput: 90 % meet both limits")
@rounded_share
def floats_of_the_rest(met, n):
    return (n - met) / n <= 1 - 0.9


@wrong("goodput: the limit itself is too long", case="goodput: 90 % meet both limits")
def below(reference):
    def meets(pairs, first_limit, gap_limit):
        return share_of(pairs, lambda first, gap: first < first_limit and (gap or 0) < gap_limit) >= 0.9

    return attained(reference, meets)


@wrong("goodput: no gap may be longer than the limit on TPOT", case="goodput: 90 % meet both limits")
def every_gap(reference):
    def goodput(runs, ttft_slo, tpot_slo, gpus=1):
        def meets(timing):
            return reference.ttft(timing) <= ttft_slo and all(gap <= tpot_slo for gap in reference.itl(timing))

        passing = [rate for rate, timings in runs.items() if sum(map(meets, timings)) >= 0.9 * len(timings)]
        return max(passing, default=0) / gpus

    return using(reference, goodput=goodput)


@wrong("goodput up to the first rate that fails", case="goodput: highest rate, per GPU")
def until_one_fails(reference):
    def goodput(runs, ttft_slo, tpot_slo, gpus=1):
        best = 0
        for rate in sorted(runs):
            if not reference.goodput({rate: runs[rate]}, ttft_slo, tpot_slo):
                break
            best = rate
        return best / gpus

    return using(reference, goodput=goodput)


@wrong("goodput: the last rate in the grid that passes", case="goodput: highest rate, per GPU")
def last_passing(reference):
    def meets(pairs, first_limit, gap_limit):
        return share_of(pairs, lambda first, gap: first <= first_limit and (gap or 0) <= gap_limit) >= 0.9

    return attained(reference, meets, pick=lambda passing: passing[-1])


@wrong("goodput of all GPUs together", case="goodput: highest rate, per GPU")
def all_gpus(reference):
    return using(reference, goodput=lambda runs, first, gap, gpus=1: reference.goodput(runs, first, gap))


@wrong("goodput: the rate times the share that passes", case="goodput: 90 % meet both limits")
def times_share(reference):
    def goodput(runs, ttft_slo, tpot_slo, gpus=1):
        best = 0.0
        for rate, timings in runs.items():
            good = [reference.ttft(t) <= ttft_slo and (reference.tpot(t) or 0) <= tpot_slo for t in timings]
            best = max(best, rate * sum(good) / len(good))
        return best / gpus

    return using(reference, goodput=goodput)


@wrong("a percentile that sorts the caller's list", case="leaves its input alone")
def sorts_in_place(reference):
    def percentile(values, p):
        values.sort()
        return reference.percentile(values, p)

    return using(reference, percentile=percentile)


@wrong("a goodput that takes rates out of the grid", case="leaves its input alone")
def takes_out(reference):
    def goodput(runs, ttft_slo, tpot_slo, gpus=1):
        best = 0
        while runs:
            rate, timings = runs.popitem()
            best = max(best, reference.goodput({rate: timings}, ttft_slo, tpot_slo))
        return best / gpus

    return using(reference, goodput=goodput)


@wrong("a throughput that sorts the requests", case="leaves its input alone")
def sorts_requests(reference):
    def throughput(timings):
        timings.sort(key=lambda t: t.arrival)
        return reference.throughput(timings)

    return using(reference, throughput=throughput)
