"""Cleaning of text that comes from outside: users, files and model replies."""

from __future__ import annotations

import re
import unicodedata

_SPACE = re.compile(r"\s+")


def mend_unicode(text: str) -> str:
    """Return `text` with surrogate pairs joined and each lone surrogate as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clean_text(text: str) -> str:
    """Return `text` mended and without control characters other than tab and line ends."""
    kept = (c for c in mend_unicode(text) if c in "\t\n\r" or unicodedata.category(c) != "Cc")
    return "".join(kept)


def clean_line(text: str) -> str:
    """Return `text` cleaned and on one line, runs of white space as one space."""
    return _SPACE.sub(" ", clean_text(text)).strip()
