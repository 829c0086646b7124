"""Patches that come and go within a training step: as checked, as visible and as exactly reverted as those that stay."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mismatch_ext.errors import PatchConflictError, PatchDriftError, PatchError, PatchVerificationError
from mismatch_ext.patching import MARKER, active_patches, applied, described, digest_of, swapped
from tests.patching.conftest import bang


def names() -> list[str]:
    return [row["name"] for row in active_patches()]


def test_a_swapped_patch_is_in_place_and_named_for_the_time_of_the_block_alone(upstream: Any) -> None:
    patches = upstream.patch("upst.core:greet"), upstream.patch("upst.core:Base.named")
    before = upstream.snapshot()
    for _ in range(3):
        with swapped(*patches):
            assert upstream.core.greet() == "!stock you" and upstream.core.Base.named() == "!Base"
            assert getattr(upstream.core.greet, MARKER) == "upst/greet"
            inside = active_patches()
        upstream.assert_same(before)
        assert active_patches() == []
    with applied(*patches) as stay:
        assert described(*patches) == stay.describe() == inside
    assert described(*patches) == inside  # and before it is in place, as a run's header says it
    assert digest_of(inside) == digest_of(inside[::-1]) != digest_of(inside[:1])


def test_all_is_checked_when_the_symbol_is_another_and_once_otherwise(upstream: Any) -> None:
    asked: list[Any] = []
    patch = upstream.patch("upst.core:greet", probe=lambda original: asked.append(original))
    stock = upstream.core.greet
    for _ in range(3):
        with swapped(patch):
            pass
    assert asked == [stock]
    upstream.core.greet = bang(stock)
    with swapped(patch):
        assert upstream.core.greet() == "!!stock you"
    assert len(asked) == 2
    refusing = upstream.patch("upst.core:greet", probe=lambda original: "it is another.")
    with pytest.raises(PatchDriftError, match="it is another"), swapped(refusing):
        raise AssertionError("entered")
    upstream.core.greet = stock


def test_its_own_check_counts_when_it_is_first_put_in_place(upstream: Any) -> None:
    before = upstream.snapshot()
    useless = upstream.patch("upst.core:greet", verify=lambda: False)
    with pytest.raises(PatchVerificationError), swapped(upstream.patch("upst.core:Base.method"), useless):
        raise AssertionError("entered")
    upstream.assert_same(before)


def test_a_reloaded_module_is_patched_where_it_is_now(upstream: Any) -> None:
    patch = upstream.patch("upst.core:Base.method")
    with swapped(patch):
        pass
    old = upstream.core.Base
    upstream.core.Base = type("Base", (), {"method": lambda self: "new"})
    with swapped(patch):
        assert upstream.core.Base().method() == "!new" and old().method() == "method"
    upstream.core.Base = old


def test_blocks_of_several_threads_end_in_any_order(upstream: Any) -> None:
    patch = upstream.patch("upst.core:greet")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with swapped(patch):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with swapped(patch):
        thread.start()
        assert entered.wait(10)
    assert upstream.core.greet() == "!stock you"  # wrapped once, and still: the other block goes on
    leave.set()
    thread.join()
    assert upstream.core.greet() == "stock you" and active_patches() == []


def test_a_patch_that_is_applied_stays_applied_after_a_block(upstream: Any) -> None:
    patch = upstream.patch("upst.core:greet")
    with applied(patch):
        with swapped(patch):
            assert upstream.core.greet() == "!stock you"
        assert names() == ["upst/greet"] and upstream.core.greet() == "!stock you"
    assert upstream.core.greet() == "stock you"


def test_another_patch_of_the_symbol_is_a_conflict_both_ways(upstream: Any) -> None:
    one, two = upstream.patch("upst.core:greet"), upstream.patch("upst.core:greet", name="upst/other")
    with swapped(one):
        with pytest.raises(PatchConflictError, match="patched already, by upst/greet"), applied(two):
            raise AssertionError("entered")
        with pytest.raises(PatchConflictError, match="patched already, by upst/greet"), swapped(two):
            raise AssertionError("entered")


def test_a_symbol_that_somebody_replaced_in_the_block_is_left_to_them_and_reported(upstream: Any) -> None:
    patch, stock = upstream.patch("upst.core:greet"), upstream.core.greet
    with pytest.raises(PatchConflictError, match="upst.core:greet was changed by somebody else"), swapped(patch):
        ours = upstream.core.greet
        upstream.core.greet = foreign = bang(ours)
    assert upstream.core.greet is foreign
    with pytest.raises(PatchConflictError, match="patched already"), swapped(patch):
        raise AssertionError("entered")
    upstream.core.greet = ours
    with swapped(patch):  # theirs is gone, so that ours can be taken away
        pass
    assert upstream.core.greet is stock and active_patches() == []


# --- handlers ---


def answered(original: Callable[..., str], handler: Callable[[str], str]) -> Callable[..., str]:
    @functools.wraps(original)
    def wrapper(*args: Any) -> str:
        return handler(original(*args))

    return wrapper


def upper(text: str) -> str:
    return text.upper()


def title(text: str) -> str:
    return text.title()


class Adds:
    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, text: str) -> str:
        return text + self.text

    def before(self, text: str) -> str:
        return self.text + text


def test_a_replacement_calls_its_handler_whose_name_is_in_the_digest(upstream: Any) -> None:
    patch = upstream.patch("upst.core:greet", make=answered)
    digests = []
    for handler, said in (
        (upper, "STOCK YOU"),
        (title, "Stock You"),
        (Adds("?"), "stock you?"),
        (Adds("?").before, "?stock you"),
    ):
        with applied(patch.calling(handler)) as patches:
            assert upstream.core.greet() == said
            digests.append(patches.digest)
        assert described(patch.calling(handler))[0]["digest"] == patches_digest(patch.calling(handler))
    assert len(set(digests)) == 4
    # By its name, not by what it holds: two processes of a run have two such objects.
    assert patches_digest(patch.calling(Adds("?"))) == patches_digest(patch.calling(Adds("!")))


def patches_digest(patch: Any) -> str:
    with applied(patch) as patches:
        return patches.describe()[0]["digest"]


@pytest.mark.parametrize("handler", [lambda text: text, functools.partial(upper), len])
def test_a_handler_whose_name_tells_nothing_is_refused(upstream: Any, handler: Any) -> None:
    with pytest.raises(PatchError, match="no handler of a patch"):
        upstream.patch("upst.core:greet", make=answered).calling(handler)


def test_a_handler_is_given_exactly_where_make_takes_one(upstream: Any) -> None:
    with pytest.raises(PatchError, match="make takes no handler"):
        upstream.patch("upst.core:greet").calling(upper)
    before = upstream.snapshot()
    with (
        pytest.raises(PatchError, match="calls a handler, and has none"),
        applied(upstream.patch("upst.core:greet", make=answered)),
    ):
        raise AssertionError("entered")
    upstream.assert_same(before)


# --- refusals ---


def test_only_a_patch_that_refuses_is_put_on_any_version(upstream: Any) -> None:
    for changes in ({"supports": "any"}, {"refuses": True}):
        with pytest.raises(PatchError, match="go together"):
            upstream.patch("upst.core:greet", **changes)
    with applied(upstream.patch("upst.core:greet", supports="any", refuses=True)):
        assert upstream.core.greet() == "!stock you"
