"""Parts for the grammars of calls and thoughts: formats in structural tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Format = dict[str, Any]


def literal(text: str, tokens: Mapping[str, int]) -> Format:
    """Return the format for a text. A mark that is a special token becomes that token.

    No model writes such a mark as plain text.
    """
    marks = sorted(tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return sequence(
        *(
            {"type": "token", "token": tokens[part]}
            if part in tokens
            else {"type": "const_string", "value": part}
            for part in parts
            if part
        )
    )


def regex(pattern: str) -> Format:
    """Return the format for a text that matches an expression."""
    return {"type": "regex", "pattern": pattern}


def sequence(*parts: Format) -> Format:
    """Return the format for several parts in this order; empty ones are left out."""
    elements: list[Format] = []
    for part in parts:
        elements += part["elements"] if part["type"] == "sequence" else [part]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def either(*options: Format) -> Format:
    """Return the format for a choice between options."""
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def optional(part: Format) -> Format:
    """Return the format for an optional part."""
    return {"type": "optional", "content": part}


def star(part: Format) -> Format:
    """Return the format for zero or more parts."""
    return {"type": "star", "content": part}
