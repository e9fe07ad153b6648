"""What unit 01's checks share: a challenge is one call of one function, with cards written as their fields."""

from collections.abc import Callable
from dataclasses import fields, replace
from math import lcm
from random import Random
from typing import Any

from servelab.cards import HardwareCard, Layout, ModelCard, model_card, model_names
from servelab.exercise import Case, describe_error
from servelab.plain import close, is_array, plain

KINDS: dict[str, type] = {"model": ModelCard, "gpu": HardwareCard, "layout": Layout}
LARGEST = 1e200  # of which a ratio is said
TOLERANCE = 1e-11  # of a result that is no whole number; less than a byte of the largest here
MLA: dict[str, Any] = {
    "kv_lora_rank": 90,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 21,
    "v_head_dim": 18,
}
MOE: dict[str, Any] = {"num_experts": 11, "experts_per_token": 3, "expert_size": 36}
TINY = ModelCard(
    name="tiny",
    num_layers=3,
    hidden_size=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    intermediate_size=100,
    vocab_size=210,
)
"""Small, and with head_dim other than hidden_size / num_heads."""


def tiny(**changes: Any) -> ModelCard:
    """The tiny card with other fields."""
    return replace(TINY, **changes)


def drawn(rng: Random, **changes: Any) -> ModelCard:
    """A dense card of odd sizes."""
    kv, per_group = rng.choice((1, 2, 3, 4, 8)), rng.choice((1, 2, 3, 7))
    sizes = {
        "num_layers": rng.randint(2, 99),
        "hidden_size": rng.randint(3, 60) * 17,
        "num_heads": kv * per_group,
        "num_kv_heads": kv,
        "head_dim": rng.choice((48, 64, 80, 112, 160)),
        "intermediate_size": rng.randint(40, 900) * 3,
        "vocab_size": rng.randint(1_000, 200_000),
    }
    return replace(TINY, name="drawn", **(sizes | changes))


def all_models() -> list[ModelCard]:
    """The course's cards, without their sources."""
    return [replace(model_card(name), source="") for name in model_names()]


def layout(cards: int = 1, **splits: int) -> Layout:
    """The layout with these splits, over at least so many cards and no fewer than the splits need.

    Split tokens use the cards of a head split, as second copies would. Each stage has its layers' experts.
    """
    made = replace(Layout(), **split_fields(splits))
    groups = made.split_heads * made.split_layers * made.split_requests
    return replace(made, cards=lcm(cards, groups, made.split_layers * made.split_experts))


def split_fields(splits: dict[str, int]) -> dict[str, Any]:
    """The fields of a layout, from the ends of their names."""
    return {f"split_{name}": count for name, count in splits.items()}


def call(case: str, function: str, **arguments: Any) -> dict:
    """A challenge: the case that it tests, the function, and the arguments as plain data."""
    written = {name: _fields(value) if name in KINDS else value for name, value in arguments.items()}
    return {"case": case, "function": function, "arguments": written}


def _fields(card: Any) -> dict:
    """A card's fields, without those at their defaults."""
    values = {f.name: getattr(card, f.name) for f in fields(card)}
    return {f.name: values[f.name] for f in fields(card) if values[f.name] != f.default and f.name != "source"}


def _build(name: str, value: Any) -> Any:
    return KINDS[name](**value) if name in KINDS else value


def drive(challenge: dict, **functions: Callable) -> dict:
    """Call the function once; what it returned or raised."""
    arguments = {name: _build(name, value) for name, value in challenge["arguments"].items()}
    try:
        return {"returned": plain(functions[challenge["function"]](**arguments)), "error": None}
    except ValueError as error:
        return {"returned": None, "error": "ValueError", "says": describe_error(error)}
    except NotImplementedError:
        raise
    except Exception as error:
        return {"returned": None, "error": describe_error(error)}


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every value is determined: whole numbers exactly, others to eleven digits."""
    problem = _problem(transcript, expected)
    return [Case(challenge["case"], not problem, problem)]


def _problem(transcript: dict, expected: dict) -> str:
    if expected["error"]:
        got = transcript["error"] or _number(transcript["returned"])
        return "" if transcript["error"] == expected["error"] else f"expected {expected['error']}, got {got}"
    if transcript["error"]:
        return f"your code raised {transcript.get('says', transcript['error'])}"
    got, want = transcript["returned"], expected["returned"]
    if isinstance(want, dict):
        return _differing(got, want)
    return "" if agree(got, want) else f"{_expected(got, want)}{_ratio(got, want)}"


def _expected(got: Any, want: Any) -> str:
    """Both values, with more digits where nine do not tell them apart."""
    alike = _number(got) == _number(want)
    return f"expected {want!r}, got {got!r}" if alike else f"expected {_number(want)}, got {_number(got)}"


def agree(got: Any, want: Any) -> bool:
    """Whether two numbers are the same: exactly where a whole number is wanted. A flag is 0 or 1."""
    return close(int(got) if isinstance(got, bool) else got, want, rtol=TOLERANCE if isinstance(want, float) else 0)


def _differing(got: Any, want: dict) -> str:
    """The first entry of a dictionary that differs."""
    if not isinstance(got, dict) or "unexpected type" in got or is_array(got):
        return f"expected a dictionary, got {_number(got)}"
    if got.keys() != want.keys():
        return _keys(got, want)
    wrong = [name for name, value in want.items() if not agree(got[name], value)]
    return f"{wrong[0]}: {_expected(got[wrong[0]], want[wrong[0]])}" if wrong else ""


def _keys(got: dict, want: dict) -> str:
    """Which keys are missing, and which are too many."""
    missing, extra = [key for key in want if key not in got], [str(key)[:40] for key in got if key not in want]
    found = ("missing: ", missing), ("not asked for: ", extra[:6])
    return "keys of the dictionary: " + "; ".join(say + ", ".join(keys) for say, keys in found if keys)


def _number(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,}"[:200] if isinstance(value, int) else f"{value:,.9g}"
    if isinstance(value, dict) and "unexpected type" in value:
        return f"an object of type {str(value['unexpected type'])[:40]}"
    if is_array(value):
        return f"an array of shape {str(value['shape'])[:40]}"
    return repr(value)[:200]


def _ratio(got: Any, want: Any) -> str:
    """How many times too large or too small; often that alone says what was forgotten."""
    if isinstance(got, bool) or not isinstance(got, (int, float)) or not got or not want or abs(got) > LARGEST:
        return ""
    ratio = got / want
    digits = next((digits for digits in (4, 6, 8, 10) if float(f"{ratio:.{digits}g}") != 1), 13)
    return f" ({ratio:.{digits}g} times it)"


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    lines, words = [], []
    for name, value in challenge["arguments"].items():
        if name in KINDS:
            inside = ", ".join(f"{field}={text!r}" for field, text in value.items())
            lines.append(f"{name} = {KINDS[name].__name__}({inside})")
        words.append(f"{name}={name if name in KINDS else repr(value)}")
    return "\n".join([*lines, f"{challenge['function']}({', '.join(words)})"])
