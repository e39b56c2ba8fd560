"""The cache of grammars: its size is bounded, and two that are told the same hold the same."""

from __future__ import annotations

from weft.serving.engine.grammar.cache import LruCache


def held(recent: LruCache[str], keys: str = "abcd") -> set[str]:
    """Which of the keys it has; in the end, they have been used in their order."""
    return {key for key in keys if recent.get(key) is not None}


def test_sizes_are_bounded_and_what_was_used_last_stays() -> None:
    recent = LruCache[str](10)
    for key in "abc":
        recent.put(key, key, 3)
    assert held(recent) == {"a", "b", "c"}
    assert recent.get("a") == "a"
    recent.put("d", "d", 4)
    assert held(recent) == {"a", "c", "d"}
    recent.put("b", "b", 8)
    assert held(recent) == {"b"}


def test_what_is_put_in_again_counts_once() -> None:
    recent = LruCache[str](10)
    recent.put("a", "old", 6)
    recent.put("b", "b", 3)
    recent.put("a", "new", 7)
    assert held(recent) == {"a", "b"}
    assert recent.get("a") == "new"


def test_the_last_stays_however_large() -> None:
    recent = LruCache[str](10)
    recent.put("a", "a", 1)
    recent.put("b", "b", 99)
    assert held(recent) == {"b"}
    recent.put("c", "c", 1)
    assert held(recent) == {"c"}
