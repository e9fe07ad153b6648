"""An OpenAI-compatible endpoint over an engine: /v1/models, /v1/completions and /v1/chat/completions.

A request takes this way: `app` reads it (`fields`), hands its prompt to the engine's thread (`worker`), which turns
tokens into text (`answer`); the text goes back as one object or as a stream of events (`wire`).

Source: the OpenAI API reference, "Completions" and "Chat"; what the `openai` client makes of an answer.
"""

from servelab.llm.api.server import Server, serve_api

__all__ = ["Server", "serve_api"]
