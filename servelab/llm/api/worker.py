"""The thread that steps the engine. Nobody else calls the engine, so the engine needs no locks."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from servelab.llm.api.answer import Answer, Delta
from servelab.llm.api.errors import APIError
from servelab.llm.engine import EngineLike, NewToken
from servelab.serving import Request

log = logging.getLogger("servelab.api")


class Generation:
    """One answer under way: the engine's thread sends its deltas, a coroutine of the event loop iterates over them.

    Must be made in the event loop. Iterating raises what was sent instead of a delta.
    """

    def __init__(self, request: Request, prompt: list[int], answer: Answer):
        self.request, self.prompt, self.answer = request, prompt, answer
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Delta | Exception]()
        self._finished = False

    def send(self, item: Delta | Exception) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Delta:
        if self._finished:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        self._finished = item.finish_reason is not None
        return item


class EngineThread:
    """Runs the engine while there is work, and sleeps otherwise.

    An exception of the engine ends it: what the engine's state is then, nobody knows, and going on could give wrong
    tokens. Every unfinished request gets the error, and so does every later one. Only a ``ValueError`` of ``add``
    concerns one request alone, as it says that this request can never run.
    """

    def __init__(self, engine: EngineLike):
        self.error: Exception | None = None  # what the engine raised
        self._engine, self._live, self._empty_steps = engine, dict[str, Generation](), 0
        self._inbox, self._lock = SimpleQueue[tuple[Callable, Generation] | None](), threading.Lock()
        self._over: APIError | None = None  # the answer to everybody, once the thread has ended
        self._thread = threading.Thread(target=self._run, name="servelab engine", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Begin an answer. From any thread."""
        with self._lock:
            over = self._over
            if over is None:
                self._inbox.put((self._add, generation))
        if over is not None:
            generation.send(over)

    def cancel(self, generation: Generation) -> None:
        """Nobody wants this answer any more: free its KV. Nothing happens if it has ended. From any thread."""
        self._inbox.put((self._abort, generation))

    def close(self, timeout: float) -> bool:
        """End after the step that runs; unfinished requests get an error. False if the step takes too long."""
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        over = APIError(503, "the server shuts down", code="shutting_down")
        try:
            while self._open():
                self._step()
        except Exception as error:  # the engine is the learner's: anything may come
            self.error = error
            log.exception("The engine failed. The server answers every request with this error until it is closed.")
            over = APIError(500, f"the engine failed: {type(error).__name__}: {error}", code="engine_failed")
        finally:
            self._end(over)

    def _open(self) -> bool:
        """Do what others have asked for, and wait while there is nothing to step for. False: the server closes."""
        while True:
            try:
                message = self._inbox.get(block=not self._live)
            except Empty:
                return True
            if message is None:
                return False
            action, generation = message
            action(generation)

    def _add(self, generation: Generation) -> None:
        self._live[generation.request.id] = generation
        try:
            self._engine.add(generation.request, generation.prompt)
        except ValueError as error:
            del self._live[generation.request.id]
            generation.send(APIError(400, f"this request can never run: {error}", code="context_length_exceeded"))

    def _abort(self, generation: Generation) -> None:
        if self._live.pop(generation.request.id, None):
            self._engine.abort(generation.request.id)

    def _step(self) -> None:
        new_tokens = self._engine.step()
        for new in new_tokens:
            if new.id in self._live:
                self._push(self._live[new.id], new)
        self._empty_steps = 0 if new_tokens else self._empty_steps + 1
        # a step without a token still computes a part of a prompt, so there are not many in a row
        if self._empty_steps > sum(len(one.prompt) + one.answer.num_tokens for one in self._live.values()):
            raise RuntimeError(
                f"{self._empty_steps} steps gave no token, and {len(self._live)} requests are unfinished"
            )

    def _push(self, generation: Generation, new: NewToken) -> None:
        delta = generation.answer.push(new.token, new.finished)
        if new.finished:
            del self._live[new.id]
        elif delta.finish_reason:
            self._abort(generation)  # first, so that its KV is free when the client has its answer
        generation.send(delta)

    def _end(self, over: APIError) -> None:
        with self._lock:
            self._over = over
        while not self._inbox.empty():
            message = self._inbox.get()
            if message is not None:
                self._live.setdefault(message[1].request.id, message[1])
        for generation in list(self._live.values()):
            with contextlib.suppress(Exception):  # an engine that has failed may well fail again
                self._abort(generation)
            generation.send(over)
