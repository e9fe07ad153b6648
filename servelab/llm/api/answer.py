"""From the tokens of an answer to its text: characters whole, stop strings kept back."""

from collections.abc import Sequence
from dataclasses import dataclass

from servelab.llm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Delta:
    """What one more token has added to an answer.

    Parameters
    ----------
    text : str
        What can be shown now; often nothing.
    finish_reason : str, optional
        Of the last one: "stop" after the end-of-sequence token or a stop string, otherwise "length".
    num_tokens : int
        Tokens of the answer until now.
    """

    text: str
    finish_reason: str | None
    num_tokens: int


class Answer:
    """The text of one answer while it comes.

    Text that may become a stop string is kept back until that is decided. The stop string that is complete first ends
    the answer, so the text does not depend on where tokens begin and end.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._stream, self._eos, self._stop = tokenizer.stream(), tokenizer.eos_token_id, stop
        self._kept, self.num_tokens = "", 0

    def push(self, token: int, finished: bool) -> Delta:
        """One more token; ``finished`` says that it is the last. O(text kept back x stop strings)."""
        self.num_tokens += 1
        text = self._kept + self._stream.push(token) + (self._stream.finish() if finished else "")
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            return Delta(text[: min(ends)[1]], "stop", self.num_tokens)
        if finished:
            return Delta(text, "stop" if token == self._eos else "length", self.num_tokens)
        sure = len(text) - self._undecided(text)
        self._kept = text[sure:]
        return Delta(text[:sure], None, self.num_tokens)

    def _undecided(self, text: str) -> int:
        """The length of the longest end of ``text`` with which a stop string begins."""
        beginnings = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(beginnings, default=0)
