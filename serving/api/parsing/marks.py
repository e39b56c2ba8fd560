"""Looking for a mark in a text that grows."""

from __future__ import annotations


def split_at(text: str, mark: str) -> tuple[str, str, str | None]:
    """Look for a mark, of which the text may have only a beginning yet.

    Returns:
        What is certainly before the mark, the whitespace between that and the mark, and what
        follows it. Without the mark there is nothing to follow (None), and the second is what has
        to wait for more: whitespace, and what may become the mark.
    """
    at = text.find(mark)
    if at >= 0:
        before = text[:at].rstrip()
        return before, text[len(before) : at], text[at + len(mark) :]
    begun = max((k for k in range(len(mark)) if text.endswith(mark[:k])), default=0)
    before = text[: len(text) - begun].rstrip()
    return before, text[len(before) :], None
