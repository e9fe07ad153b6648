"""How text is wrapped on its way to the client: one object, or a stream of server-sent events.

Source of the event format: the HTML standard, section 9.2, "Server-sent events".
"""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from servelab.llm.api.answer import Delta
from servelab.llm.api.errors import APIError
from servelab.llm.api.fields import Ask, read_chat, read_completion

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Endpoint:
    """What differs between completions and chat completions.

    Parameters
    ----------
    prefix : str
        Ids begin with it.
    object, chunk : str
        The type of an answer, and of a part of one.
    read : callable
        Request's body, tokenizer and ``max_model_len`` to `Ask`.
    whole, part : callable
        Text to the fields of a choice, in an answer and in a part of one.
    opening : dict, optional
        The fields of the choice in a part before all text.
    """

    prefix: str
    object: str
    chunk: str
    read: Callable[..., Ask]
    whole: Callable[[str], dict]
    part: Callable[[str], dict]
    opening: dict | None = None


COMPLETIONS = Endpoint(
    prefix="cmpl",
    object="text_completion",
    chunk="text_completion",
    read=read_completion,
    whole=lambda text: {"text": text},
    part=lambda text: {"text": text},
)
CHAT = Endpoint(
    prefix="chatcmpl",
    object="chat.completion",
    chunk="chat.completion.chunk",
    read=read_chat,
    whole=lambda text: {"message": {"role": "assistant", "content": text}},
    part=lambda text: {"delta": {"content": text} if text else {}},
    opening={"delta": {"role": "assistant", "content": ""}},
)


@dataclass(frozen=True)
class Wrapper:
    """Wraps the text of one answer."""

    endpoint: Endpoint
    ask: Ask
    id: str
    model: str
    created: int

    def answer(self, text: str, last: Delta) -> dict:
        """The whole answer; ``last`` is its last delta."""
        choice = self._choice(self.endpoint.whole(text), last.finish_reason)
        return self._object(self.endpoint.object, [choice]) | self._usage(last)

    async def chunks(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[dict]:
        """The answer in parts, as its deltas come."""
        no_usage = {"usage": None} if self.ask.include_usage else {}
        if self.endpoint.opening:
            yield self._object(self.endpoint.chunk, [self._choice(self.endpoint.opening, None)]) | no_usage
        async for delta in deltas:
            if delta.text or delta.finish_reason:
                choice = self._choice(self.endpoint.part(delta.text), delta.finish_reason)
                yield self._object(self.endpoint.chunk, [choice]) | no_usage
        if self.ask.include_usage:
            yield self._object(self.endpoint.chunk, []) | self._usage(delta)

    async def events(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[bytes]:
        """The parts as events. An error ends them without the closing mark, so no client takes a part for the whole."""
        try:
            async for chunk in self.chunks(deltas):
                yield event(chunk)
            yield DONE
        except APIError as error:
            yield event(error.body())

    def _object(self, kind: str, choices: list[dict]) -> dict:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, fields: dict, finish_reason: str | None) -> dict:
        return {"index": 0} | fields | {"logprobs": None, "finish_reason": finish_reason}

    def _usage(self, last: Delta) -> dict:
        prompt, answer = len(self.ask.prompt), last.num_tokens
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}}


def encode(value: object) -> bytes:
    """JSON; half a surrogate pair, which a client may send and an error may quote, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def event(value: object) -> bytes:
    """JSON as one event."""
    return b"data: " + encode(value) + b"\n\n"
