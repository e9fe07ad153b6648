"""Output of ranks, line by line, so that lines of different ranks do not mix and each says whose it is."""

import io
from collections.abc import Callable
from typing import Any, TextIO


class Lines(io.TextIOBase):
    """A text stream that hands on whole lines; `flush` hands on what has no end yet."""

    encoding = "utf-8"

    def __init__(self, hand_on: Callable[[str], Any]):
        self.hand_on, self.rest = hand_on, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.hand_on(line)
        return len(text)

    def flush(self) -> None:
        rest, self.rest = self.rest, ""
        if rest:
            self.hand_on(rest)


def labelled(stream: TextIO, rank: int) -> Lines:
    """What a rank writes to ``stream``, with ``[rank 2] `` in front of each line."""
    return Lines(lambda line: stream.write(f"[rank {rank}] {line}\n"))  # in one: ranks may share a terminal
