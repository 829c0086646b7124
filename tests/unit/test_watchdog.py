"""A phase that takes too long is taken for a hang, and named; phases that go on are not."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from mismatch_ext.errors import StallError
from mismatch_ext.watchdog import Watchdog

watchdog_of = partial(Watchdog, host="verl", logs="Ray's worker logs")


def test_a_stalled_phase_is_released_then_ended() -> None:
    released, ended = threading.Event(), threading.Event()
    watchdog = watchdog_of(0.2, released.set, end=lambda code: ended.set(), grace=0.2)
    with watchdog.watching():
        watchdog.phase("waiting for nobody")
        assert released.wait(10) and ended.wait(10)
    message = watchdog.message or ""
    assert message.startswith("verl made no progress for ") and "while it was waiting for nobody (" in message
    assert "the first error above and in Ray's worker logs. " in message


def test_a_trainer_that_polls_gets_the_error_and_nothing_is_killed() -> None:
    released = threading.Event()
    watchdog = watchdog_of(0.3, released.set, end=lambda code: None, grace=0.2)
    with watchdog.watching():
        watchdog.phase("polling for rollouts")
        with pytest.raises(StallError, match="while it was polling for rollouts"):
            for _ in range(200):
                watchdog.polled()
                released.wait(0.05)
        assert not released.is_set()
        # What it does about that is watched like any phase.
        assert released.wait(10)


def test_servers_have_longer_to_start_than_a_phase_of_a_step_may_take() -> None:
    released = threading.Event()
    watchdog = watchdog_of(0.2, released.set, end=lambda code: None, grace=0.2)
    watchdog.phase("starting", at_least=600.0)
    with watchdog.watching():
        assert not released.wait(1.0)
        watchdog.phase("waiting for nobody")
        assert released.wait(10)


def test_phases_that_follow_one_another_are_no_stall() -> None:
    released = threading.Event()
    watchdog = watchdog_of(0.5, released.set, end=lambda code: None)
    with watchdog.watching():
        for number in range(8):
            watchdog.phase(f"step {number}")
            assert not released.wait(0.1)
    assert watchdog.message is None
