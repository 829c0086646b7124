"""Patches against each other, and against names that hold the stock object."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mismatch_ext.errors import (
    PatchConflictError,
    PatchDriftError,
)
from mismatch_ext.patching import (
    PatchSet,
    applied,
)
from tests.patching.replacements import subclass

# --- our own patches against each other ---


def test_same_name_twice_in_one_set(upstream: Any) -> None:
    patch = upstream.patch("upst.core:greet")
    with pytest.raises(PatchConflictError, match="more than once in one set: upst/greet"):
        PatchSet(patch, patch)


def test_nested_same_patch(upstream: Any) -> None:
    patch = upstream.patch("upst.core:greet")
    with applied(patch):
        with pytest.raises(PatchConflictError, match="patched already by the same patch"):
            with applied(patch):
                raise AssertionError
        assert upstream.core.greet("me") == "!stock me"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("upst.core:Base.method", "upst.core:Base.method"),
        ("upst.core:Base.method", "upst.core:Child.method"),  # the second would wrap the first
        ("upst.core:Child.method", "upst.core:Base.method"),  # the first would go on calling the stock one
    ],
)
def test_one_symbol_takes_one_patch_across_sets_and_within_one(upstream: Any, first: str, second: str) -> None:
    before = upstream.snapshot()
    patches = upstream.patch(first, name="upst/first"), upstream.patch(second, name="upst/second")
    with applied(patches[0]):
        with pytest.raises(PatchConflictError, match="patched already, by upst/first"):
            PatchSet(patches[1]).apply()
    with pytest.raises(PatchConflictError, match="upst/(first|second)"):
        PatchSet(*patches).apply()
    upstream.assert_same(before)


def test_inherited_plain_value_takes_one_patch_too(upstream: Any) -> None:
    with applied(upstream.patch("upst.core:Base.size", make=lambda size: 8)):
        with pytest.raises(PatchConflictError, match="patched already, by upst/base_size"):
            PatchSet(upstream.patch("upst.core:Child.size", make=lambda size: 9)).apply()


def test_by_value_import_of_a_live_replacement_cannot_be_patched(upstream: Any) -> None:
    with applied(upstream.patch("upst.engine:Engine", make=subclass, allow_aliases=("upst.user",))):
        upstream.load("user")
        with pytest.raises(PatchConflictError, match="patched already, by upst/engine"):
            PatchSet(upstream.patch("upst.user:Engine", name="upst/b", make=subclass, binding_only=True)).apply()


def test_siblings_that_inherit_the_same_method_do_not_conflict(upstream: Any) -> None:
    core = upstream.core
    core.Other = type("Other", (core.Base,), {"__module__": "upst.core"})
    with applied(upstream.patch("upst.core:Child.method"), upstream.patch("upst.core:Other.method")):
        assert (core.Child().method(), core.Other().method(), core.Base().method()) == (
            "!method",
            "!method",
            "method",
        )


def test_one_object_cannot_replace_two_symbols(upstream: Any) -> None:
    def shared(*_: Any) -> str:
        return "shared"

    patches = [upstream.patch(t, make=lambda f: shared) for t in ("upst.core:greet", "upst.core:Base.method")]
    with pytest.raises(PatchConflictError, match="has to build a new one"):
        PatchSet(*patches).apply()


def test_equal_plain_values_can_replace_two_symbols(upstream: Any) -> None:
    with applied(*(upstream.patch(t, make=lambda f: 1) for t in ("upst.core:LIMIT", "upst.core:Base.size"))):
        assert (upstream.core.LIMIT, upstream.core.Base.size) == (1, 1)


def test_threads_cannot_apply_the_same_patch_twice(upstream: Any) -> None:
    def slow(original: Any) -> Any:
        time.sleep(0.02)  # without the lock every thread would be past the checks by now
        return lambda *args: original(*args)

    barrier, outcomes = threading.Barrier(6), []
    sets = [PatchSet(upstream.patch("upst.core:greet", make=slow)) for _ in range(6)]

    def work(patches: PatchSet) -> None:
        barrier.wait()
        try:
            patches.apply()
            outcomes.append("applied")
        except PatchConflictError as error:
            outcomes.append(str(error).partition(": ")[2])

    threads = [threading.Thread(target=work, args=(patches,)) for patches in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for patches in sets:
        patches.revert()
    # The later ones find the patch in their checks, before they call make.
    refused = "upst.core:greet is patched already by the same patch."
    assert sorted(outcomes) == ["applied"] + [refused] * 5


# --- by-value holders ---


def test_module_that_imported_by_value_is_named(upstream: Any) -> None:
    upstream.load("consumer")
    upstream.core.also = upstream.core.greet
    with pytest.raises(PatchConflictError, match=r"in upst\.consumer:greet, upst\.core:also, which"):
        PatchSet(upstream.patch("upst.core:greet")).check()


@pytest.mark.parametrize("allowed", ["upst.consumer", "upst.consumer:greet"])
def test_allowed_alias_keeps_the_stock_object(upstream: Any, allowed: str) -> None:
    consumer = upstream.load("consumer")
    with applied(upstream.patch("upst.core:greet", allow_aliases=(allowed,))):
        assert (upstream.core.greet("me"), consumer.greet("me")) == ("!stock me", "stock me")


def test_alias_that_the_same_set_patches_is_no_conflict(upstream: Any) -> None:
    consumer = upstream.load("consumer")
    before = upstream.snapshot()
    with applied(upstream.patch("upst.core:greet"), upstream.patch("upst.consumer:greet", name="upst/consumer")):
        assert (upstream.core.greet("me"), consumer.greet("me")) == ("!stock me", "!stock me")
    upstream.assert_same(before)


def test_by_value_target_without_binding_only_is_told_about_it(upstream: Any) -> None:
    upstream.load("user")
    with pytest.raises(PatchConflictError, match=r"upst\.engine:Engine.*Set binding_only"):
        PatchSet(upstream.patch("upst.user:Engine", make=subclass)).check()


def test_binding_only_is_refused_where_the_object_is_defined(upstream: Any) -> None:
    with pytest.raises(PatchDriftError, match="imported from elsewhere, but it is defined there"):
        PatchSet(upstream.patch("upst.engine:Engine", make=subclass, binding_only=True)).check()


def test_class_with_existing_subclasses_is_refused(upstream: Any) -> None:
    with pytest.raises(PatchConflictError, match=r"held by value in upst\.core:Child"):
        PatchSet(upstream.patch("upst.core:Base", make=subclass)).check()


def test_second_name_of_a_method_is_an_alias(upstream: Any) -> None:
    upstream.core.Base.__call__ = upstream.core.Base.method
    with pytest.raises(PatchConflictError, match=r"held by value in upst\.core:Base\.__call__"):
        PatchSet(upstream.patch("upst.core:Base.method")).check()
    with applied(upstream.patch("upst.core:Base.method"), upstream.patch("upst.core:Base.__call__", name="upst/b")):
        assert (upstream.core.Base()(), upstream.core.Base().method()) == ("!method", "!method")


def test_plain_values_have_no_aliases(upstream: Any) -> None:
    upstream.engine.LIMIT = upstream.core.LIMIT
    with applied(upstream.patch("upst.core:LIMIT", make=lambda value: 4)):
        assert upstream.engine.LIMIT == 3


def test_import_by_value_while_patched_is_reported_at_revert(upstream: Any) -> None:
    patches = PatchSet(upstream.patch("upst.core:greet"), upstream.patch("upst.core:Base.method")).apply()
    consumer = upstream.load("consumer")
    with pytest.raises(PatchConflictError, match=r"was restored, but upst\.consumer:greet imported the replacement"):
        patches.revert()
    assert (upstream.core.greet("me"), upstream.core.Base().method()) == ("stock me", "method")
    assert consumer.greet("me") == "!stock me"
    patches.revert()  # nothing is left to do


def test_name_that_held_the_replacement_before_is_not_reported(upstream: Any) -> None:
    upstream.engine.prepared = subclass(upstream.engine.Engine)
    patch = upstream.patch(
        "upst.engine:Engine",
        make=lambda cls: upstream.engine.prepared,
        allow_aliases=(subclass.__module__,),
    )
    with applied(patch):
        assert upstream.engine.Engine().run() == "!stock"
