"""When clients that were turned away are told to come again."""

from __future__ import annotations

from weft.serving.engine.retry_after import FinishRate


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_follows_the_rate_at_which_requests_finish() -> None:
    clock = Clock()
    pace = FinishRate(clock)
    for _ in range(20):
        pace.began()
    for _ in range(10):
        clock.now += 5.0
        pace.ended()
    assert pace.retry_after() == 5
    clock.now += 15.0  # none ends: it gets slower
    assert pace.retry_after() == 7


def test_clients_are_told_one_time_after_the_other_but_not_for_ever() -> None:
    clock = Clock()
    pace = FinishRate(clock)
    for _ in range(6):
        pace.began()
    for _ in range(2):
        clock.now += 3.0
        pace.ended()
    assert [pace.retry_after() for _ in range(6)] == [3, 6, 9, 12, 12, 12]
    clock.now += 12.0  # they have come; what has not ended since counts, too
    assert pace.retry_after() == 9


def test_before_any_has_finished_it_is_as_long_again() -> None:
    clock = Clock()
    pace = FinishRate(clock)
    assert pace.retry_after() == 1
    pace.began()
    clock.now += 7.0
    assert pace.retry_after() == 7


def test_of_many_of_which_none_has_finished_all_are_done_after_as_long_again() -> None:
    clock = Clock()
    pace = FinishRate(clock)
    for _ in range(100):
        pace.began()
    clock.now += 50.0
    assert [pace.retry_after() for _ in range(300)][::99] == [1, 50, 50, 50]


def test_idle_time_does_not_count() -> None:
    clock = Clock()
    pace = FinishRate(clock)
    pace.began()
    clock.now += 1.0
    pace.ended()
    clock.now += 3600.0
    pace.began()
    clock.now += 2.0
    assert pace.retry_after() == 2


def test_only_the_last_ends_count() -> None:
    clock = Clock()
    pace = FinishRate(clock)
    for seconds in (100.0, 2.0):
        for _ in range(100):
            pace.began()
            pace.began()
            clock.now += seconds
            pace.ended()
    assert pace.retry_after() == 2
