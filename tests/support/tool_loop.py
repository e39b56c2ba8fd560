"""A script for a model with calls to two tools, for clients with agent loops."""

from __future__ import annotations

import json
from typing import Any


def call(name: str, **arguments: Any) -> str:
    """Return a call as Qwen's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


QUESTION = "What is 6 times 7, plus 1?"
ANSWER = "It is 43."
PARALLEL = "What are 2 times 3 and 2 plus 3?"
BOTH = "They are 6 and 5."
DIRECT = "Hello?"
GREETING = "Hello."

SCRIPT = [
    (QUESTION, "I multiply first.\n" + call("multiply", a=6, b=7)),
    ("42", call("add", a=42, b=1)),
    ("43", ANSWER),
    (PARALLEL, call("multiply", a=2, b=3) + "\n" + call("add", a=2, b=3)),
    (DIRECT, GREETING),
    ("5", BOTH),
]
"""Two turns with a call each, or one turn with two calls. The last cue is add(2, 3)."""

_NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}

FUNCTIONS: list[dict[str, Any]] = [
    {"name": "multiply", "description": "Multiply two numbers.", "parameters": _NUMBERS},
    {"name": "add", "description": "Add two numbers.", "parameters": _NUMBERS},
]
"""The tools, in OpenAI's form of a function."""


def compute(name: str, arguments: str | dict[str, int]) -> str:
    """Run a call to the script's tools; the arguments may be JSON."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    a, b = given["a"], given["b"]
    return str({"multiply": a * b, "add": a + b}[name])
