"""The endpoint as a server in this process: one thread for HTTP, one for the engine."""

import atexit
import logging
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from servelab.errors import CourseError
from servelab.llm.api.app import API
from servelab.llm.api.worker import EngineThread
from servelab.llm.engine import EngineLike
from servelab.llm.tokenizer import Tokenizer

GRACE = 3  # seconds for the step that runs, then as many for clients that do not read their answers
log = logging.getLogger("servelab.api")


class Server:
    """A running endpoint. Use it in a ``with`` statement, or call `close`.

    Attributes
    ----------
    url : str
        Where it listens, such as ``http://127.0.0.1:8000``. The base URL of an `openai` client is this and ``/v1``.
    port : int
        The port of it.
    """

    def __init__(
        self, engine: EngineLike, tokenizer: Tokenizer, *, model: str, host: str, port: int, max_model_len: int
    ):
        try:
            listener = socket.create_server((host, port))
        except OSError as error:
            mend = "Close the server that has it, or give port=0 for a free one."
            raise CourseError(f"cannot listen on {host}, port {port}: {error.strerror}", mend=mend) from None
        self.port: int = listener.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self._worker = EngineThread(engine)
        app = API(self._worker, tokenizer, model, max_model_len).app()
        self._http = uvicorn.Server(_config(app))
        self._thread = threading.Thread(target=self._http.run, args=([listener],), name="servelab http", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def error(self) -> Exception | None:
        """What the engine raised, if it failed. The server then answers every request with an error."""
        return self._worker.error

    def close(self) -> None:
        """End streams and other unfinished requests with an error, join the threads, release the port."""
        if not self._worker.close(GRACE):
            log.error("A step of the engine takes more than %d s; its thread is left behind.", GRACE)
        self._http.should_exit = True
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _config(app: ASGIApp) -> uvicorn.Config:
    """Plain HTTP/1.1, and a log of faults only."""
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=GRACE,
    )


def serve_api(
    engine: EngineLike,
    tokenizer: Tokenizer,
    *,
    model: str = "tiny",
    host: str = "127.0.0.1",
    port: int = 0,
    max_model_len: int = 1024,
) -> Server:
    """Serve an engine in the background, to clients of the OpenAI API. The defaults are those of the tiny model.

    Parameters
    ----------
    engine : EngineLike
        Nobody else may call it until the server is closed.
    tokenizer : Tokenizer
        Of the engine's model.
    model : str
        The name by which clients ask for the model.
    host : str
        The address to listen on. There is no access control, so keep it within this machine.
    port : int
        0 takes a free one.
    max_model_len : int
        The most tokens of a prompt and its answer, at most what the model and the engine's KV memory can hold.

    Returns
    -------
    Server
        Already running.

    Raises
    ------
    CourseError
        If the port is taken.

    Examples
    --------
    >>> with serve_api(engine, tokenizer, model="tiny") as server:  # doctest: +SKIP
    ...     print(server.url)
    """
    return Server(engine, tokenizer, model=model, host=host, port=port, max_model_len=max_model_len)
