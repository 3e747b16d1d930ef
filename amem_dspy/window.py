"""Windows over a text that is longer than an embedding model reads at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

MOST_WINDOWS = 16
_OVERLAP = 1 / 8
# A piece from the middle of a text may split into a few tokens more than it had in its place.
_SLACK = 4
# Some tokenizers take quadratic time over one very long word, so a text goes to them in blocks.
_BLOCK = 8192
_WORD = 1000


def windows(text: str, tokenizer: Any, room: int) -> list[str]:
    """Return the pieces of a text that the model reads one by one; one piece where it fits.

    Pieces overlap by an eighth and begin and end at token borders, so that any script works. A text
    of more than `MOST_WINDOWS` pieces is read in that many, spread evenly from its first token to
    its last.

    Args:
        text: Any text without lone surrogates.
        tokenizer: A tokenizer of transformers that knows where its tokens stand.
        room: Tokens that the model reads, without its special ones.
    """
    size = room - _SLACK
    spans = _spans(text, tokenizer) if size > 0 else []
    if len(spans) <= room:
        return [_bounded(text)]
    last = len(spans) - size
    steps = min(MOST_WINDOWS - 1, math.ceil(last / (size * (1 - _OVERLAP))))
    starts = [last * step // steps for step in range(steps + 1)]
    return [_bounded(text[spans[start][0] : spans[start + size - 1][1]]) for start in starts]


def _spans(text: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Return where each token begins and ends in the text."""
    blocks = list(_blocks(text))
    encoded = tokenizer(
        [block for _, block in blocks],
        add_special_tokens=False,
        truncation=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    return [
        (place + begin, place + end)
        for (place, _), spans in zip(blocks, encoded["offset_mapping"], strict=True)
        for begin, end in spans
    ]


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Cut a text into blocks, each with its place: at white space, or inside an endless word."""
    start = 0
    while True:
        end = start + _BLOCK
        space = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))
        if end < len(text) and space > 0:
            end = space
        yield start, text[start:end]
        if end >= len(text):
            return
        start = end


def _bounded(text: str) -> str:
    """Return a piece of few tokens in bounded length: shorter white space and endless words."""
    return text if len(text) <= _BLOCK else " ".join(word[:_WORD] for word in text.split())
