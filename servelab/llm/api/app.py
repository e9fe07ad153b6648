"""The ASGI application: routes, and what becomes of one request."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from servelab import serving
from servelab.llm.api.answer import Answer, Delta
from servelab.llm.api.errors import APIError
from servelab.llm.api.fields import check_model, unknown_model
from servelab.llm.api.wire import CHAT, COMPLETIONS, Endpoint, Wrapper, encode
from servelab.llm.api.worker import EngineThread, Generation
from servelab.llm.tokenizer import Tokenizer

MAX_BODY = 4 << 20  # bytes
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class JSON(Response):
    """A response with a JSON body."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode(content)


class API:
    """The routes.

    Parameters
    ----------
    worker : EngineThread
        Where answers come from.
    tokenizer : Tokenizer
        Of the engine's model.
    model : str
        The model's name.
    max_model_len : int
        The most tokens of a prompt and its answer.
    """

    def __init__(self, worker: EngineThread, tokenizer: Tokenizer, model: str, max_model_len: int):
        self.worker, self.tokenizer, self.model, self.max_model_len = worker, tokenizer, model, max_model_len
        self.numbers, self.created = itertools.count(), int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.one_model),
            Route("/v1/completions", partial(self.generate, COMPLETIONS), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.generate, CHAT), methods=["POST"]),
        ]
        handlers = {APIError: refuse, HTTPException: no_route, ClientDisconnect: nobody, Exception: fail}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def models(self, request: Request) -> Response:
        return JSON({"object": "list", "data": [self.card()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["model"] != self.model:
            raise unknown_model(request.path_params["model"], self.model)
        return JSON(self.card())

    def card(self) -> dict:
        own = {"id": self.model, "object": "model", "created": self.created, "owned_by": "servelab"}
        return own | {"max_model_len": self.max_model_len}

    async def generate(self, endpoint: Endpoint, request: Request) -> "Reply":
        body = await read_json(request)
        check_model(body, self.model)
        ask = endpoint.read(body, self.tokenizer, self.max_model_len)
        id = f"{endpoint.prefix}-{next(self.numbers)}"
        asked = serving.Request(id, len(ask.prompt), ask.max_tokens, arrival=time.monotonic())
        generation = Generation(asked, ask.prompt, Answer(self.tokenizer, ask.stop))
        return Reply(self.worker, generation, Wrapper(endpoint, ask, id, self.model, int(time.time())))


class Reply:
    """The response to one request, an ASGI application of its own: it notices when the client hangs up."""

    def __init__(self, worker: EngineThread, generation: Generation, wrapper: Wrapper):
        self.worker, self.generation, self.wrapper = worker, generation, wrapper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.worker.submit(self.generation)
        watch = asyncio.create_task(self._watch(receive))
        try:
            with contextlib.suppress(ClientDisconnect):
                first = await anext(self.generation)  # an error before the first token still has its own status
                if self.wrapper.ask.stream:
                    await self._stream(first, send)
                else:
                    await (await self._whole(first))(scope, receive, send)
        finally:
            watch.cancel()
            self.worker.cancel(self.generation)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.generation.send(ClientDisconnect())

    async def _whole(self, delta: Delta) -> Response:
        text = delta.text
        async for delta in self.generation:
            text += delta.text
        return JSON(self.wrapper.answer(text, delta))

    async def _stream(self, first: Delta, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in EVENTS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self.wrapper.events(self._after(first)):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _after(self, first: Delta) -> AsyncIterator[Delta]:
        yield first
        async for delta in self.generation:
            yield delta


async def read_json(request: Request) -> dict:
    """The request's body, a JSON object."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise APIError(413, f"the body has more than {MAX_BODY} bytes")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise APIError(400, "the body must be a JSON object")
    return value


async def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return JSON(error.body(), error.status)


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = APIError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").body()
    return JSON(body, error.status_code, error.headers)


async def nobody(request: Request, error: Exception) -> Response:
    """The client hung up before its request was complete; this goes nowhere."""
    return Response(status_code=400)


async def fail(request: Request, error: Exception) -> Response:
    """A fault of the server's own; its traceback is logged by the server below."""
    return JSON(APIError(500, f"the server failed: {type(error).__name__}: {error}").body(), 500)
