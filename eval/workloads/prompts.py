"""Texts measured in a model's own tokens: cutting documents, prompts of an exact length."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from eval.workloads import WorkloadError
from eval.workloads.traces import Arrival

_FILLER = " a"
# Texts of blocks that prompts share: requests have numbers of their own below.
BLOCK_INDEX = 1 << 32
_MAX_REPAIRS = 64

BlockEnd = tuple[int, int]  # a block, and the token of the prompt that it ends before


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], /) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model folder or hub id, the one its server uses."""
    from transformers import AutoTokenizer

    # Documents may be longer than the model's context before they are cut: no warning then.
    tokenizer: Any = AutoTokenizer.from_pretrained(model, model_max_length=sys.maxsize)
    return tokenizer  # type: ignore[no-any-return]


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Length of a prompt as the server counts it: with the tokens a model puts in front."""
    return len(tokenizer.encode(text))


def cut_to_tokens(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """The longest start of `text` whose own tokens, cut at `max_tokens`, give whole characters."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) <= max_tokens:
        return text
    # A cut inside a multi-byte character decodes to a replacement character at the end.
    return tokenizer.decode(tokens[:max_tokens]).rstrip("\ufffd")


def part_of_tokens(tokenizer: Tokenizer, text: str, part: int, num_tokens: int) -> str:
    """The `part`-th stretch (from 0) of `num_tokens` tokens; only the first may be shorter.

    Empty where the text has no such stretch.
    """
    if part == 0:
        return cut_to_tokens(tokenizer, text, num_tokens)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stretch = tokens[part * num_tokens : (part + 1) * num_tokens]
    # A cut inside a multi-byte character decodes to replacement characters at both ends.
    return tokenizer.decode(stretch).strip("\ufffd") if len(stretch) == num_tokens else ""


class SyntheticText:
    """Makes texts of an exact token count from words of the tokenizer's vocabulary.

    Texts of different `index` start with different words as long as the vocabulary has
    words left, so no two share a prefix beyond the model's own first token unless a shared
    start is asked for. Equal seed and arguments give equal texts.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._words = _vocabulary_words(tokenizer)
        random.Random(seed).shuffle(self._words)

    def text(self, index: int, num_tokens: int, *, shared_start: str = "") -> str:
        """A text of exactly `num_tokens` tokens, counted with the model's first token.

        Errors: `WorkloadError` when the start alone is longer or the tokenizer has no text
        of that length.
        """
        return self._fitted(self.words(index, num_tokens + 1), num_tokens, shared_start)

    def words(self, index: int, num_words: int) -> list[str]:
        """What the text of that index begins with, where each word is a token."""
        rng = random.Random(f"{self._seed}/{index}")
        first = self._words[index % len(self._words)]
        return [first, *rng.choices(self._words, k=num_words - 1)][:num_words]

    def count(self, text: str) -> int:
        """Its tokens, with the model's first token."""
        return count_tokens(self._tokenizer, text)

    def _fitted(self, words: list[str], num_tokens: int, start: str) -> str:
        """Drop and add words until the count fits: not every word is one token everywhere."""
        count = self.count(start)
        num_words = num_tokens - count
        tail = ""
        for _ in range(_MAX_REPAIRS):
            if not 0 <= num_words <= len(words):
                break
            text = start + "".join(words[:num_words]) + tail
            excess = self.count(text) - num_tokens
            if excess == 0:
                return text
            if excess < 0:
                tail += _FILLER * -excess
            else:
                num_words, tail = num_words - excess, ""
        raise WorkloadError(
            f"no text of {num_tokens} tokens was found (its given start has {count}); "
            "ask for more tokens"
        )


class TracePrompts:
    """Prompts for the requests of a trace: equal blocks are equal texts, all others differ."""

    def __init__(self, texts: SyntheticText) -> None:
        self._texts = texts
        self._starts: dict[tuple[int, ...], str] = {}

    def text(self, index: int, one: Arrival, *, shared_start: str = "") -> str:
        """The prompt of a request; `index`: a number of its own. Errors: see `SyntheticText`.

        `shared_start`: what all prompts begin with, before their blocks; part of their lengths.
        """
        if not one.blocks:
            return self._texts.text(index, one.prompt_tokens, shared_start=shared_start)
        start_tokens = self._texts.count(shared_start)
        ends = list(_block_ends(one, start_tokens if shared_start else 0))
        text = shared_start + "".join(self._words(ends, start_tokens))
        if self._texts.count(text) == one.prompt_tokens:
            return text
        # Rare: words are not always one token. Counted block by block, long prompts take seconds.
        return self._counted(one, ends, shared_start)

    def _words(self, ends: Sequence[BlockEnd], start_tokens: int) -> Iterator[str]:
        """The words of each block, as long as it has tokens."""
        for block, end in ends:
            if end > start_tokens:
                yield from self._texts.words(BLOCK_INDEX + block, end - start_tokens)
                start_tokens = end

    def _counted(self, one: Arrival, ends: Sequence[BlockEnd], start: str) -> str:
        for place, (_, end) in enumerate(ends[:-1], 1):
            start = self._start(one.blocks[:place], end, start)
        return self._block(ends[-1][0], one.prompt_tokens, start)

    def _start(self, blocks: tuple[int, ...], num_tokens: int, start: str) -> str:
        if blocks not in self._starts:
            self._starts[blocks] = self._block(blocks[-1], num_tokens, start)
        return self._starts[blocks]

    def _block(self, block: int, num_tokens: int, start: str) -> str:
        return self._texts.text(BLOCK_INDEX + block, num_tokens, shared_start=start)


def _block_ends(one: Arrival, offset: int) -> Iterator[BlockEnd]:
    """The blocks of a prompt, and where in it each ends; the last with the prompt."""
    for place, block in enumerate(one.blocks, 1):
        end = offset + round(place * one.block_tokens)
        if place == len(one.blocks) or end >= one.prompt_tokens:
            yield block, one.prompt_tokens
            return
        yield block, end


def _vocabulary_words(tokenizer: Tokenizer) -> list[str]:
    """Words of letters with a space in front that are a single token, in a fixed order."""
    vocabulary = sorted(tokenizer.get_vocab().values())
    texts = (tokenizer.decode([token]) for token in vocabulary)
    words = {
        " " + text.strip()
        for text in texts
        if len(text.strip()) > 2 and text.strip().isascii() and text.strip().isalpha()
    }
    single = [
        word for word in sorted(words) if len(tokenizer.encode(word, add_special_tokens=False)) == 1
    ]
    if not single:
        raise WorkloadError("the tokenizer has no token that is a word of letters")
    return single
