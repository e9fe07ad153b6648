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


class NotPlain(ValueError):
    """Data that is not plain, or larger or deeper than a transcript may be."""


def encode_array(array: np.ndarray) -> dict:
    """Write an array as plain data. Little-endian, C order, the same bytes on every platform."""
    array = np.asarray(array)
    name = array.dtype.name
    if name not in DTYPES:
        raise NotPlain(f"dtype {name} is not one of {', '.join(DTYPES)}")
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {"dtype": name, "shape": list(array.shape), "base64": base64.b64encode(data).decode("ascii")}


def is_array(value: Any) -> bool:
    """Whether ``value`` is an array written as plain data."""
    return isinstance(value, dict) and value.keys() == {"dtype", "shape", "base64"}


def decode_array(value: Any) -> np.ndarray:
    """Read an array written by `encode_array`. Raises `NotPlain` unless dtype, shape and byte count agree."""
    if not is_array(value):
        raise NotPlain(f"expected an array, got {type(value).__name__}")
    name, shape, text = value["dtype"], value["shape"], value["base64"]
    if name not in DTYPES:
        raise NotPlain(f"dtype {str(name)[:40]!r} is not allowed")
    sound = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and 0 <= n <= MAX_BYTES for n in shape)
    if not sound or not isinstance(text, str):
        raise NotPlain("an array's shape is a list of sizes and its bytes are base64 text")
    dtype = np.dtype(name).newbyteorder("<")
    if math.prod(shape) * dtype.itemsize > MAX_BYTES:
        raise NotPlain(f"an array of shape {shape} is larger than {MAX_BYTES} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NotPlain(f"an array's bytes are not base64: {error}") from None
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise NotPlain(f"{len(data)} bytes do not fill shape {shape} of {name}")
    return np.frombuffer(data, dtype).reshape(shape)


def plain(value: Any, depth: int = 0) -> Any:
    """Turn what a learner's code returned into plain data.

    Integers of any library become ``int``, tuples become lists, arrays and tensors become array records. Anything else
    is named by its type, so that a judge sees it and finds it wrong; this function never raises.
    """
    try:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value)[:MAX_TEXT]
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, numbers.Real):
            return float(value)
        if hasattr(value, "detach") and hasattr(value, "numpy"):  # a torch tensor, without importing torch
            value = value.detach().cpu()
            value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
        if isinstance(value, np.ndarray):
            return encode_array(value)
        if depth < MAX_DEPTH and isinstance(value, (list, tuple)):
            return [plain(item, depth + 1) for item in value]
        if depth < MAX_DEPTH and isinstance(value, dict):
            return {str(key): plain(item, depth + 1) for key, item in value.items()}
    except Exception:  # an object that lies about itself: named below
        pass
    return {"unexpected type": type(value).__name__}


def dumps(value: Any) -> str:
    """Write plain data as JSON, the same text on every run and platform."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """Read plain data from JSON. Raises `NotPlain` if it is too large, too deep or not JSON."""
    if len(text) > MAX_BYTES:
        raise NotPlain(f"{len(text)} bytes of data; at most {MAX_BYTES} are read")
    try:
        value = json.loads(text, parse_constant=str)  # NaN and Infinity become text, which equals no number
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
        if isinstance(expected, int) and isinstance(got, float) and not rtol and not atol and not got.is_integer():
            return False
        return _finite(got) and _finite(expected) and abs(got - expected) <= atol + rtol * abs(expected)
    if isinstance(expected, list):
        same_length = isinstance(got, list) and len(got) == len(expected)
        return same_length and all(close(g, e, rtol=rtol, atol=atol) for g, e in zip(got, expected, strict=True))
    same_keys = isinstance(got, dict) and got.keys() == expected.keys()
    return same_keys and all(close(got[key], expected[key], rtol=rtol, atol=atol) for key in expected)


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
    difference = np.abs(got_array.astype("float64") - want.astype("float64"))
    return bool((difference <= atol + rtol * np.abs(want.astype("float64"))).all())
