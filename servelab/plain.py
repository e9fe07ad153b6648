"""Plain data: what challenges and transcripts are made of, and the only way in which judges read and compare it.

Plain data is what JSON can hold, plus arrays written as ``{"dtype": ..., "shape": [...], "base64": ...}``. A transcript
comes from a process that the submission shares, so reading one trusts nothing: size, depth, dtypes and byte counts are
checked, and nothing is ever unpickled.
"""

import base64
import binascii
import json
import math
import numbers
from typing import Any

import numpy as np

DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")
MAX_BYTES = 16 << 20
MAX_DEPTH = 32
MAX_TEXT = 2000
MAX_ITEMS = 1_000_000
MAX_BITS = 1024  # of an integer; Python refuses to print much larger ones


class NotPlain(ValueError):
    """Data that is not plain, or larger or deeper than a transcript may be."""


def encode_array(array: np.ndarray) -> dict:
    """Write an array as plain data. Little-endian, C order, the same bytes on every platform."""
    array = np.asarray(array)
    name = array.dtype.name
    if name not in DTYPES:
        raise NotPlain(f"dtype {name} is not one of {', '.join(DTYPES)}")
    if array.nbytes > MAX_BYTES:
        raise NotPlain(f"an array of shape {array.shape} is larger than {MAX_BYTES} bytes")
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {"dtype": name, "shape": list(array.shape), "base64": base64.b64encode(data).decode("ascii")}


def is_array(value: Any) -> bool:
    """Whether ``value`` is an array written as plain data."""
    return isinstance(value, dict) and value.keys() == {"dtype", "shape", "base64"}


def decode_array(value: Any) -> np.ndarray:
    """Read an array written by `encode_array`. Raises `NotPlain` unless dtype, shape and byte count agree."""
    if not is_array(value):
        raise NotPlain(f"expected an array, got {type(value).__name__}")
    name, shape, encoded = value["dtype"], value["shape"], value["base64"]
    if name not in DTYPES:
        raise NotPlain(f"dtype {str(name)[:40]!r} is not allowed")
    sound = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and 0 <= n <= MAX_BYTES for n in shape)
    if not sound or not isinstance(encoded, str):
        raise NotPlain("an array's shape is a list of sizes and its bytes are base64 text")
    dtype = np.dtype(name).newbyteorder("<")
    if math.prod(shape) * dtype.itemsize > MAX_BYTES:
        raise NotPlain(f"an array of shape {shape} is larger than {MAX_BYTES} bytes")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NotPlain(f"an array's bytes are not base64: {error}") from None
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise NotPlain(f"{len(data)} bytes do not fill shape {shape} of {name}")
    try:
        return np.frombuffer(data, dtype).reshape(shape)
    except ValueError as error:  # no bytes, and sizes whose product NumPy cannot hold
        raise NotPlain(f"shape {shape} is not possible: {error}") from None


def plain(value: Any) -> Any:
    """Turn what a learner's code returned into plain data.

    Integers of any library become ``int``, tuples become lists, arrays and tensors become array records. Anything else
    is named by its type, so that a judge sees it and finds it wrong; this function never raises.
    """
    return _plain(value, 0, [MAX_ITEMS])


def _plain(value: Any, depth: int, left: list[int]) -> Any:
    """`plain` at some depth; ``left`` counts down the values that may still be written."""
    left[0] -= 1
    if left[0] < 0:
        return {"unexpected type": "more data than can be recorded"}
    try:
        if value is None or type(value) is bool:
            return value
        if isinstance(value, str):
            return text(value)
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, numbers.Integral):
            whole = int(value)
            return whole if whole.bit_length() <= MAX_BITS else {"unexpected type": "an int of too many digits"}
        if isinstance(value, numbers.Real):
            return float(value)
        if hasattr(value, "detach") and hasattr(value, "numpy"):  # a torch tensor, without importing torch
            value = value.detach().cpu()
            value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
        if isinstance(value, np.ndarray):
            return encode_array(value)
        if depth < MAX_DEPTH and isinstance(value, (list, tuple)):
            return [_plain(item, depth + 1, left) for item in value]
        if depth < MAX_DEPTH and isinstance(value, dict):
            return {text(key): _plain(item, depth + 1, left) for key, item in value.items()}
    except Exception:  # an object that lies about itself: named below
        pass
    return {"unexpected type": type_name(value)}


def text(value: Any, limit: int = MAX_TEXT) -> str:
    """``str(value)``, cut to ``limit``: a true ``str``, whatever a subclass would make of it."""
    return str.__getitem__(str(value), slice(limit))


def count_of(number: Any, noun: str) -> str:
    """A number of things in words: 1 block, 2 blocks, 3 passes."""
    return f"{number} {noun}{'' if str(number) == '1' else 'es' if noun.endswith('s') else 's'}"


def type_name(value: Any) -> str:
    """The name of a value's true type, whatever its class or metaclass pretends."""
    return type.__dict__["__name__"].__get__(type(value))[:MAX_TEXT]


def dumps(value: Any) -> str:
    """Write plain data as JSON, the same text on every run and platform."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def loads(data: str | bytes) -> Any:
    """Read plain data from JSON. Raises `NotPlain` if it is too large, too deep or not JSON."""
    if len(data) > MAX_BYTES:
        raise NotPlain(f"{len(data)} bytes of data; at most {MAX_BYTES} are read")
    try:
        value = json.loads(data, parse_constant=str)  # NaN and Infinity become text, which equals no number
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"not JSON: {str(error)[:200]}") from None
    require_plain(value)
    return value


def require_plain(value: Any) -> None:
    """Raise `NotPlain` unless ``value`` is JSON data of bounded depth (by a stack, so that depth cannot hurt)."""
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise NotPlain(f"data nested deeper than {MAX_DEPTH}")
        if isinstance(item, dict):
            if any(type(key) is not str for key in item):
                raise NotPlain("a key that is not text")
            stack.extend((child, depth + 1) for child in item.values())
        elif isinstance(item, list):
            stack.extend((child, depth + 1) for child in item)
        elif not (item is None or type(item) in (bool, int, float, str)):
            raise NotPlain(f"a value of type {type(item).__name__}")


def close(got: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Whether two plain values agree: the one comparison that judges use.

    Lists, dictionaries, text and booleans must be equal and of the same type; numbers and arrays must be finite and
    within ``atol + rtol * |expected|``, arrays of exactly the expected shape and dtype. An ``int`` where a ``float`` is
    expected is fine. Nothing broadcasts, and no lists of different lengths agree.
    """
    if is_array(expected):
        return is_array(got) and _arrays_close(got, expected, rtol, atol)
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        return type(got) is type(expected) and got == expected
    if isinstance(expected, (int, float)):
        if isinstance(got, bool) or not isinstance(got, (int, float)):
            return False
        return _finite(got) and _finite(expected) and _within(got, expected, rtol, atol)
    if isinstance(expected, list):
        same_length = isinstance(got, list) and len(got) == len(expected)
        return same_length and all(close(g, e, rtol=rtol, atol=atol) for g, e in zip(got, expected, strict=True))
    same_keys = isinstance(got, dict) and got.keys() == expected.keys()
    return same_keys and all(close(got[key], expected[key], rtol=rtol, atol=atol) for key in expected)


def told_apart(one: float, other: float, digits: int = 6) -> tuple[str, str]:
    """Two numbers as text, with as many digits as it takes to see that they differ, ``digits`` at least."""
    pairs = [(f"{one:.{count}g}", f"{other:.{count}g}") for count in range(digits, 18)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def _within(got: int | float, expected: int | float, rtol: float, atol: float) -> bool:
    """Exact where no tolerance is given: Python compares an ``int`` with a ``float`` without rounding either."""
    return got == expected or abs(got - expected) <= atol + rtol * abs(expected) > 0


def _finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _arrays_close(got: dict, expected: dict, rtol: float, atol: float) -> bool:
    try:
        got_array = decode_array(got)
    except NotPlain:
        return False
    want = decode_array(expected)
    if got_array.dtype != want.dtype or got_array.shape != want.shape:
        return False
    if not (np.isfinite(got_array).all() and np.isfinite(want).all()):
        return False
    if not (rtol or atol):
        return np.array_equal(got_array, want)  # int64 beyond 2**53 has no exact float64
    with np.errstate(over="ignore"):
        difference = np.abs(got_array.astype("float64") - want.astype("float64"))
        return bool((difference <= atol + rtol * np.abs(want.astype("float64"))).all())
