"""Text to token ids and back, for the tiny model and for the real one.

A token stands for a run of bytes, and a character may need several tokens. So text is put together as bytes, and a
stream holds back a character until its last byte is there.

Sources: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016), for byte-pair encoding;
Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2, for its form over bytes.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

CONTROL = 3  # GGUF's type of a token that no text contains
START, END = "<|im_start|>", "<|im_end|>"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer(ABC):
    """What serving needs of a tokenizer.

    Attributes
    ----------
    pieces : sequence of bytes
        What each token stands for; a control token stands for nothing.
    eos_token_id : int
        The token that ends an answer.
    """

    pieces: Sequence[bytes]
    eos_token_id: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of plain text. No text gives a control token, so nobody can write one into a prompt."""

    @abstractmethod
    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model's answer begins."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")

    def stream(self) -> "TextStream":
        """A decoder for the tokens of one answer, as they come."""
        return TextStream(self.pieces)


class TextStream:
    """Decodes one token after another; all that it returned, put together, is what `Tokenizer.decode` returns."""

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces, self._decoder = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes; often none, and never a part of one. O(bytes of the token)."""
        return self._decoder.decode(self._pieces[token])

    def finish(self) -> str:
        """What is left when the answer ends: U+FFFD if it stops within a character, otherwise nothing."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """The tiny model's: a byte is a token, and the byte 0 ends an answer."""

    pieces = (b"", *(bytes([byte]) for byte in range(1, 256)))
    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; U+0000, whose byte would end the answer, becomes U+FFFD as in decoding."""
        return list(text.replace("\0", "\ufffd").encode("utf-8", "replace"))

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """The tiny model knows no roles: it continues the messages as paragraphs."""
        return self.encode("".join(f"{message['content']}\n\n" for message in messages))


class BPETokenizer(Tokenizer):
    """Byte-level BPE with ChatML, out of the lists that a GGUF file holds.

    Parameters
    ----------
    tokens : sequence of str
        The vocabulary, each byte written as a printable character (`byte_characters`).
    merges : sequence of str
        Pairs to join, most frequent first, each as two tokens with a blank between.
    types : sequence of int
        Each token's type in GGUF; 3 is a control token.
    eos_token_id : int
        The token that ends an answer.
    """

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], eos_token_id: int):
        from tokenizers import Tokenizer as Fast
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel, Digits
        from tokenizers.pre_tokenizers import Sequence as Chain

        self.vocabulary = {token: number for number, token in enumerate(tokens)}
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        self._fast = Fast(BPE(vocab=self.vocabulary, merges=pairs))
        # the model was trained on digits one by one; its control tokens are not made known, so text cannot name them
        self._fast.pre_tokenizer = Chain([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        self.pieces = tuple(
            b"" if kind == CONTROL else bytes(byte_of[character] for character in token)
            for token, kind in zip(tokens, types, strict=True)
        )
        self.eos_token_id = eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text. Bytes that the vocabulary lacks, of a few control characters, are left out."""
        return self._fast.encode(text.encode("utf-8", "replace").decode()).ids

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """ChatML: each message between a start and an end token, with the model's system prompt where none is given."""
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": SYSTEM}, *messages]
        start, end, newline = self.vocabulary[START], self.vocabulary[END], self.encode("\n")
        tokens = []
        for message in messages:
            tokens += [start, *self.encode(f"{message['role']}\n{message['content']}"), end, *newline]
        return [*tokens, start, *self.encode("assistant\n")]


def byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself if it is visible, else the next from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(0x100 + hidden.index(byte)) for byte in range(256)]
