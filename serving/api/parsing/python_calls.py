"""Calls as Python writes them: `[f(x=1), g(y="z")]`."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Collection


def python_calls(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """Names and arguments (JSON) of a list of calls; None if the text is no such list.

    Args:
        text: a Python expression, of which nothing is executed.
        names: functions that can be called.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" is text to us
            node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(node, ast.List) or not node.elts:
        return None
    calls = [_call(element) for element in node.elts]
    if any(call is None or call[0] not in names for call in calls):
        return None
    return [call for call in calls if call is not None]


def _call(node: ast.expr) -> tuple[str, str] | None:
    if not isinstance(node, ast.Call) or node.args or not all(k.arg for k in node.keywords):
        return None
    try:
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        return ast.unparse(node.func), json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None
