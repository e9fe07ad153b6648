"""Plain data: nothing hostile gets in, nothing odd makes it raise, and `close` grants nothing."""

import contextlib
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servelab import plain
from servelab.plain import NotPlain, close, decode_array, encode_array, loads

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def record(dtype="float32", shape=(1,), encoded="AAAAAA=="):
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "base64": encoded}


@given(JSON)
def test_json_survives_a_round_trip_and_equals_itself(value):
    again = loads(plain.dumps(plain.plain(value)))
    assert again == value
    assert close(again, value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nope",
        "[1,]",
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 34 + "]" * 34,
        b"\xff\xfe\xfa",
        b"\x80",
        "9" * 5000,
        '"' + "x" * plain.MAX_BYTES + '"',
    ],
    ids=lambda text: repr(text[:12]),
)
def test_loads_refuses(text):
    with pytest.raises(NotPlain):
        loads(text)


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_loads_raises_nothing_else(text):
    with contextlib.suppress(NotPlain):
        plain.require_plain(loads(text))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_equals_no_number(text):
    assert not close(loads(text), math.inf)
    assert not close(loads(text), 0, atol=1e308)


@pytest.mark.parametrize("value", [{1: 2}, {"a": (1, 2)}, [object()], b"bytes", np.float64(1.0), {1, 2}])
def test_require_plain_refuses_what_json_does_not_write(value):
    with pytest.raises(NotPlain):
        plain.require_plain(value)


DTYPES = st.sampled_from(plain.DTYPES)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(DTYPES, SHAPES, st.randoms(use_true_random=False))
def test_arrays_survive_a_round_trip(dtype, shape, random):
    array = np.array([random.randint(0, 1) for _ in range(math.prod(shape))]).astype(dtype).reshape(shape)
    again = decode_array(loads(plain.dumps(encode_array(array))))
    assert again.shape == array.shape and again.dtype == array.dtype
    assert close(encode_array(again), encode_array(array))


def test_arrays_are_the_same_bytes_in_any_order():
    array = np.arange(6, dtype="int32").reshape(2, 3)
    assert encode_array(array) == encode_array(np.asfortranarray(array)) == encode_array(array.astype(">i4"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"dtype": "float32"},
        record() | {"extra": 1},
        record(dtype="object"),
        record(dtype="complex64"),
        record(dtype="<f4"),
        record(dtype=["float32"]),
        record(dtype=None),
        record(shape=5),
        record(shape="1"),
        record(shape=(-1,)),
        record(shape=(-1, -1)),
        record(shape=(True,)),
        record(shape=(1.0,)),
        record(shape=(None,)),
        record(shape=(2,)),
        record(shape=()) | {"base64": ""},
        record(shape=(1,) * 9),
        record(shape=(2**62, 4)),
        record(shape=(2**24, 2**24, 2**24)),
        record(shape=(0, 2**24, 2**24, 2**24), encoded=""),
        record(shape=(10**400,)),
        record(encoded=None),
        record(encoded=b"AAAAAA=="),
        record(encoded="AAAAAA"),
        record(encoded="AAAA AA=="),
        record(encoded="\N{SNOWMAN}" * 8),
        record(encoded="!" * 8),
        record(encoded="A" * 4000),
    ],
    ids=repr,
)
def test_decode_array_refuses(value):
    with pytest.raises(NotPlain):
        decode_array(value)
    assert not close(value, encode_array(np.zeros(1, "float32")))


@given(st.fixed_dictionaries({"dtype": JSON | DTYPES, "shape": JSON | st.lists(st.integers()), "base64": JSON}))
def test_decode_array_raises_nothing_else(value):
    with contextlib.suppress(NotPlain):
        decode_array(value)


def test_an_array_that_is_too_large_is_not_written():
    with pytest.raises(NotPlain):
        encode_array(np.zeros(plain.MAX_BYTES + 1, "int8"))
    assert plain.plain(np.zeros(plain.MAX_BYTES + 1, "int8")) == {"unexpected type": "ndarray"}


def test_plain_of_what_learners_return():
    value = (np.int64(3), np.float32(0.5), np.bool_(True), torch.tensor(2), {4: "four", (1, 2): None}, True, 7)
    got = plain.plain(value)
    assert got[:3] == [3, 0.5, True] and [type(item) for item in got[:3]] == [int, float, bool]
    assert decode_array(got[3]) == 2
    assert got[4:] == [{"4": "four", "(1, 2)": None}, True, 7]


def test_plain_of_tensors():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    assert decode_array(plain.plain(weight)).tolist() == [1.0, 2.0]
    assert plain.plain(torch.ones(2, dtype=torch.bfloat16)) == plain.plain(torch.ones(2))
    assert plain.plain(torch.ones(2, dtype=torch.complex64)) == {"unexpected type": "ndarray"}
    assert plain.plain(torch.ones(2, 3).T)["shape"] == [3, 2]


class PretendsToBe:
    def __init__(self, kind):
        self.kind = kind

    @property
    def __class__(self):
        return self.kind


class Raises:
    def __getattribute__(self, name):
        raise RuntimeError(name)


class ShyMeta(type):
    @property
    def __name__(cls):
        raise RuntimeError("no name")


class Shy(metaclass=ShyMeta):
    pass


class Subtle(str):
    def __str__(self):
        return self

    def __getitem__(self, key):
        return object()


def endless():
    cycle = []
    cycle.append(cycle)
    return cycle


def doubling():
    value = []
    for _ in range(30):
        value = [value, value]
    return value


HOSTILE = [
    *map(PretendsToBe, (bool, int, float, str, list, dict, np.ndarray, np.bool_, type(None))),
    Raises(),
    Shy(),
    Subtle("text"),
    {Raises(): 1},
    {Shy(): Shy()},
    endless(),
    doubling(),
    [0] * (plain.MAX_ITEMS + 5),
    "x" * 10**7,
    10**6000,
    -(10**6000),
    float("nan"),
    2**1024,
    1j,
    b"bytes",
    {1, 2},
    object,
    len,
    np.array([object()]),
    np.array(["text"]),
    np.datetime64("2026-01-01"),
    (item for item in range(3)),
    torch.device("cpu"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_plain_never_raises_and_is_always_json(number):
    text = plain.dumps(plain.plain(HOSTILE[number]))
    assert len(text) < plain.MAX_BYTES * 3
    json.loads(text)


def test_plain_keeps_a_bool_apart_from_an_int():
    assert plain.plain(PretendsToBe(bool)) == {"unexpected type": "PretendsToBe"}
    assert plain.plain(np.bool_(False)) is False


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (True, 1),
        (1, True),
        (False, 0),
        (None, 0),
        (None, False),
        ("1", 1),
        (1, "1"),
        (1, None),
        ([1, 2], [1, 2, 3]),
        ([1, 2, 3], [1, 2]),
        ([], [[]]),
        ([1], 1),
        (1, [1]),
        ({"a": 1}, {}),
        ({}, {"a": 1}),
        ({"a": 1}, {"b": 1}),
        ([], {}),
        ({}, []),
        (2.5, 2),
        (2**53 + 1, 2**53),
        (float(2**53), 2**53 + 1),
        (math.nan, math.nan),
        (math.inf, math.inf),
        (10**400, 10**400),
        (10**400, 1.0),
        (1.0, 10**400),
        ("nan", math.nan),
    ],
)
def test_close_says_no(got, expected):
    assert not close(got, expected)


@pytest.mark.parametrize(
    ("got", "expected", "tolerance"),
    [
        (1, 1.0, {}),
        (1.0, 1, {}),
        (1.1, 1, {"atol": 0.2}),
        (99, 100.0, {"rtol": 0.01}),
        (-99, -100, {"rtol": 0.01}),
        ([1, {"a": None}], [1, {"a": None}], {}),
        (10**300, 10**300, {}),
    ],
)
def test_close_says_yes(got, expected, tolerance):
    assert close(got, expected, **tolerance)


def test_tolerance_is_relative_to_what_was_expected():
    assert not close(100, 99, rtol=0.01) and close(99, 100, rtol=0.01)
    assert not close(1e-9, 0, rtol=0.5)


@given(JSON, JSON)
def test_close_never_raises(got, expected):
    assert close(got, expected) in (True, False)
    assert close(got, expected, rtol=0.1, atol=1.0) in (True, False)


def arrays(*values):
    return [encode_array(np.asarray(value)) for value in values]


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (np.zeros(3, "float32"), np.zeros(3, "float64")),
        (np.zeros(3, "int32"), np.zeros(3, "int64")),
        (np.zeros(3, "bool"), np.zeros(3, "uint8")),
        (np.zeros(1), np.zeros(3)),
        (np.zeros((1, 3)), np.zeros(3)),
        (np.zeros((3, 1)), np.zeros((1, 3))),
        (np.zeros(()), np.zeros(1)),
        (np.zeros(0), np.zeros((0, 1))),
        (np.full(2, np.nan), np.full(2, np.nan)),
        (np.full(2, np.inf), np.full(2, np.inf)),
        (np.array([1.0, np.nan]), np.array([1.0, 1.0])),
        (np.array([2**53 + 1]), np.array([2**53])),
        (np.array([1e308]), np.array([-1e308])),
    ],
)
def test_close_says_no_to_arrays(got, expected):
    assert not close(*arrays(got, expected))


@pytest.mark.filterwarnings("error")
def test_close_of_arrays_warns_of_nothing():
    assert not close(*arrays(np.array([1e308]), np.array([-1e308])), atol=1.0)
    assert close(*arrays(np.array([1.0, -2.0]), np.array([1.1, -2.1])), atol=0.2)
    assert close(*arrays(np.zeros((0, 3)), np.zeros((0, 3))))


def test_an_array_is_not_its_list():
    (array,) = arrays([1, 2])
    assert not close([1, 2], array) and not close(array, [1, 2])
    assert not close(array, {"dtype": "int64", "shape": [2]})


@settings(max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8), st.integers(0, 7))
def test_one_changed_element_is_noticed(values, index):
    want = np.array(values, "float32")
    got = want.copy()
    got[index % len(values)] += 1 + abs(got[index % len(values)])
    assert close(*arrays(want, want)) and not close(*arrays(got, want), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (18, 9.0, ("18", "9")),
        (5.119771e-05, 5.119772e-05, ("5.119771e-05", "5.119772e-05")),
        (1 / 3, math.nextafter(1 / 3, 1), ("0.3333333333333333", "0.3333333333333334")),
        (1.5, 1.5, ("1.5", "1.5")),
        (1.0, math.nan, ("1", "nan")),
    ],
)
def test_two_numbers_have_the_digits_that_tell_them_apart(one, other, texts):
    assert plain.told_apart(one, other) == texts
