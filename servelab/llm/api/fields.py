"""What a request may say. What would change the answer and is not built is refused, never ignored.

Each field has a reader: a function of the JSON value and of its name in error messages. ``null`` means absent.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from servelab.llm.api.errors import APIError, invalid
from servelab.llm.tokenizer import Tokenizer

Reader = Callable[[Any, str], Any]
DEFAULT_COMPLETION = 16  # tokens, as the OpenAI API has it; a chat's answer may fill the context
MAX_STOPS, MAX_STOP_LENGTH = 4, 256


@dataclass(frozen=True)
class Ask:
    """One request, understood.

    Parameters
    ----------
    prompt : list of int
        Token ids, at least one.
    max_tokens : int
        The most tokens of the answer.
    stop : tuple of str
        The answer ends before the first of these.
    stream, include_usage : bool
        Whether the answer is sent as it comes, and whether its last event counts the tokens.
    """

    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


def shown(value: Any) -> str:
    """A JSON value in an error message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:60]


def of_type(kind: type | tuple[type, ...], name: str) -> Reader:
    """A value of a Python type; true and false are no numbers."""

    def read(value: Any, param: str) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise invalid(f"{param} must be {name}, not {shown(value)}", param, "invalid_type")
        return value

    return read


flag, text, listing = of_type(bool, "true or false"), of_type(str, "a string"), of_type(list, "a list")
whole, number, mapping = of_type(int, "an integer"), of_type((int, float), "a number"), of_type(dict, "an object")


def only(allowed: Any, why: str) -> Reader:
    """One value; another one is understood and refused."""

    def read(value: Any, param: str) -> Any:
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            only_this = (
                f"{param} must be absent" if allowed is None else f"{param} must be {json.dumps(allowed)} or absent"
            )
            raise invalid(f"{only_this}: {why}", param, "unsupported_value")
        return value

    return read


def count(value: Any, param: str) -> int:
    if whole(value, param) < 1:
        raise invalid(f"{param} must be at least 1, not {value}", param)
    return value


def stops(value: Any, param: str) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(text(stop, param) for stop in listing(value, param))
    if len(found) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in found):
        raise invalid(f"{param} must be up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", param)
    return found


def stream_options(value: Any, param: str) -> dict:
    return read_object(mapping(value, param), {"include_usage": flag}, f"{param}.")


def prompt(value: Any, param: str) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise invalid(f"{param} must be one string or one list of token ids", param)


def role(value: Any, param: str) -> str:
    if value not in ("system", "user", "assistant"):
        raise invalid(f'{param} must be "system", "user" or "assistant", not {shown(value)}', param)
    return value


def content(value: Any, param: str) -> str:
    if isinstance(value, str):
        return value
    parts = [read_object(mapping(part, param), PART, f"{param}.") for part in listing(value, param)]
    return "".join(required(part, "text", f"{param}.") for part in parts)


def messages(value: Any, param: str) -> list[dict[str, str]]:
    if not listing(value, param):
        raise invalid(f"{param} must hold at least one message", param)
    found = []
    for number, message in enumerate(value):
        place = f"{param}[{number}]"
        fields = read_object(mapping(message, place), MESSAGE, f"{place}.")
        found.append({name: required(fields, name, f"{place}.") for name in ("role", "content")})
    return found


GREEDY = "this engine is greedy, it takes the likeliest token"
NOT_BUILT = "this server has no such thing"
PART = {"type": only("text", "the model reads text"), "text": text}
MESSAGE = {"role": role, "content": content, "name": text}
COMMON: dict[str, Reader] = {
    "model": text,
    "max_tokens": count,
    "stop": stops,
    "stream": flag,
    "stream_options": stream_options,
    "temperature": only(0, GREEDY),
    "presence_penalty": only(0, GREEDY),
    "frequency_penalty": only(0, GREEDY),
    "logit_bias": only({}, GREEDY),
    "n": only(1, "a greedy engine has one answer"),
    # these make no difference to the likeliest token
    "top_p": number,
    "seed": whole,
    "user": text,
}
COMPLETION = COMMON | {
    "prompt": prompt,
    "best_of": only(1, "a greedy engine has one answer"),
    "echo": only(False, NOT_BUILT),
    "logprobs": only(None, NOT_BUILT),
    "suffix": only(None, NOT_BUILT),
}
CHAT = COMMON | {
    "messages": messages,
    "max_completion_tokens": count,
    "logprobs": only(False, NOT_BUILT),
    "top_logprobs": only(None, NOT_BUILT),
    "tools": only([], NOT_BUILT),
    "response_format": only({"type": "text"}, NOT_BUILT),
}


def read_object(value: dict, readers: Mapping[str, Reader], path: str = "") -> dict:
    """The fields of an object that are there."""
    found = {}
    for name, part in value.items():
        if part is None:
            continue
        if name not in readers:
            raise invalid(f"unknown field: {path}{name}", f"{path}{name}", "unknown_parameter")
        found[name] = readers[name](part, f"{path}{name}")
    return found


def required(fields: dict, name: str, path: str = "") -> Any:
    """A field that has to be there."""
    if name not in fields:
        raise invalid(f"{path}{name} is missing", f"{path}{name}", "missing_required_parameter")
    return fields[name]


def read_completion(body: dict, tokenizer: Tokenizer, max_model_len: int) -> Ask:
    """A request to /v1/completions.

    Raises
    ------
    APIError
        With the field at fault.
    """
    fields = read_object(body, COMPLETION)
    tokens = required(fields, "prompt")
    if isinstance(tokens, str):
        tokens = tokenizer.encode(tokens)
    elif not all(0 <= token < len(tokenizer.pieces) for token in tokens):
        raise invalid(f"prompt: a token id must be from 0 to {len(tokenizer.pieces) - 1}", "prompt")
    return _ask(fields, "prompt", tokens, max_model_len, DEFAULT_COMPLETION)


def read_chat(body: dict, tokenizer: Tokenizer, max_model_len: int) -> Ask:
    """A request to /v1/chat/completions. Raises like `read_completion`."""
    fields = read_object(body, CHAT)
    if "max_completion_tokens" in fields:
        if "max_tokens" in fields:
            raise invalid("max_tokens is the old name of max_completion_tokens: give one of them", "max_tokens")
        fields["max_tokens"] = fields["max_completion_tokens"]
    tokens = tokenizer.apply_chat_template(required(fields, "messages"))
    return _ask(fields, "messages", tokens, max_model_len, max_model_len)


def _ask(fields: dict, source: str, tokens: list[int], max_model_len: int, default: int) -> Ask:
    if not tokens:
        raise invalid(f"{source} gives no token", source)
    if "stream_options" in fields and not fields.get("stream"):
        raise invalid("stream_options needs stream to be true", "stream_options")
    room = max_model_len - len(tokens)
    max_tokens = fields.get("max_tokens", max(1, min(default, room)))
    if max_tokens > room:
        problem = f"the prompt has {len(tokens)} tokens and up to {max_tokens} are asked for"
        param = "max_tokens" if room > 0 else source
        raise invalid(f"the context holds {max_model_len} tokens; {problem}", param, "context_length_exceeded")
    usage = fields.get("stream_options", {}).get("include_usage", False)
    return Ask(tokens, max_tokens, fields.get("stop", ()), fields.get("stream", False), usage)


def check_model(body: dict, model: str) -> None:
    """Raises `APIError` unless the request is for the model that is served."""
    asked = required(read_object({"model": body.get("model")}, COMMON), "model")
    if asked != model:
        raise unknown_model(asked, model)


def unknown_model(asked: str, model: str) -> APIError:
    return APIError(404, f"there is no model {shown(asked)} here, but {shown(model)}", "model", "model_not_found")
