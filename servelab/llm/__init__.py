"""A small language model, written to be read: a Llama-style decoder whose KV memory and communicator are arguments."""

from servelab.llm.model import LLM, LLMConfig, load, save

__all__ = ["LLM", "LLMConfig", "load", "save"]
