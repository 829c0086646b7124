"""Patches are reverted exactly, also when things go wrong, and never over what somebody else did."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mismatch_ext.errors import (
    PatchConflictError,
    PatchDriftError,
    PatchError,
    PatchVerificationError,
    PatchVersionError,
)
from mismatch_ext.patching import (
    Patch,
    PatchSet,
    active_patches,
    applied,
)
from tests.patching.replacements import subclass

# --- reverting, also when things go wrong ---


def test_reverted_when_the_block_raises(upstream: Any) -> None:
    before = upstream.snapshot()
    with pytest.raises(KeyError, match="inside"):
        with applied(upstream.patch("upst.core:greet"), upstream.patch("upst.core:Base.named")):
            raise KeyError("inside")
    upstream.assert_same(before)


def test_reverted_in_reverse_order(upstream: Any) -> None:
    log = []

    class Logging(type):
        def __setattr__(cls, name: str, value: object) -> None:
            log.append(name)
            super().__setattr__(name, value)

    upstream.core.Logged = Logging("Logged", (), {"one": lambda self: 1, "two": lambda self: 2})
    with applied(upstream.patch("upst.core:Logged.one"), upstream.patch("upst.core:Logged.two")):
        pass
    assert log == ["one", "two", "two", "one"]


def test_persistent_set(upstream: Any) -> None:
    before = upstream.snapshot()
    patches = PatchSet(upstream.patch("upst.core:greet"), upstream.patch("upst.core:Base.method"))
    patches.revert()
    assert not patches.active
    assert patches.apply() is patches
    assert patches.active
    with pytest.raises(PatchConflictError, match="applied already: upst/greet, upst/base_method"):
        patches.apply()
    assert patches.active
    patches.revert()
    assert not patches.active
    upstream.assert_same(before)
    patches.apply()
    assert upstream.core.greet("me") == "!stock me"
    patches.revert()
    upstream.assert_same(before)


def test_empty_set(upstream: Any) -> None:
    with applied() as patches:
        assert patches.active
        assert patches.describe() == []


def failing_patches(upstream: Any) -> dict[str, tuple[Patch, type[Exception], str]]:
    """Build one second patch for every way in which applying can fail."""

    def raises(_: Any) -> Any:
        raise ZeroDivisionError("in make")

    def no_engine() -> bool:
        raise LookupError("no engine")

    class Stubborn(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise AttributeError(f"{name} is read-only")

    upstream.engine.Stubborn = Stubborn("Stubborn", (), {"act": lambda self: None})
    upstream.engine.number = 3
    middle = functools.partial(upstream.patch, name="upst/middle")
    run = "upst.engine:Engine.run"
    loaded = upstream.load("consumer")
    assert loaded.greet is upstream.core.greet
    return {
        "range": (middle(run, supports="==1.1"), PatchVersionError, r"upst 1\.2\.0\+cpu .* range ==1\.1"),
        "missing peer": (middle(run, peer="not-here"), PatchVersionError, "not-here is not installed"),
        "gone module": (middle("upst.moved:f"), PatchDriftError, r"upst 1\.2\.0\+cpu.*upst\.moved:f is gone"),
        "gone package": (middle("upst_moved.core:f"), PatchDriftError, "no module 'upst_moved'"),
        "gone class": (
            middle("upst.engine:Motor.run"),
            PatchDriftError,
            r"upst\.engine has no attribute 'Motor'",
        ),
        "gone method": (
            middle("upst.engine:Engine.go"),
            PatchDriftError,
            r"Engine:?.* has no attribute 'go'",
        ),
        "digest": (middle(run, source_digests={"0" * 16}), PatchDriftError, "has digest"),
        "alias": (middle("upst.core:greet"), PatchConflictError, r"held by value in upst\.consumer:greet"),
        "same slot": (
            middle("upst.core:Base.method"),
            PatchConflictError,
            "both patch upst.core:Base.method",
        ),
        "make raises": (middle(run, make=raises), PatchError, r"ZeroDivisionError\('in make'\)"),
        "make no-op": (middle(run, make=lambda f: f), PatchVerificationError, "returned the original"),
        "make None": (middle(run, make=lambda f: None), PatchVerificationError, "stay callable"),
        "read-only": (middle("upst.engine:Stubborn.act"), PatchError, "cannot be written: act is read-only"),
        "not a class": (middle("upst.engine:number.real"), PatchError, "upst.engine.number in .* is a int"),
        "verify raises": (
            middle(run, verify=no_engine),
            PatchVerificationError,
            r"LookupError\('no engine'\)",
        ),
        "verify False": (middle(run, verify=lambda: False), PatchVerificationError, "returned False"),
    }


FAILURES = (
    "range",
    "missing peer",
    "gone module",
    "gone package",
    "gone class",
    "gone method",
    "digest",
    "alias",
    "same slot",
    "make raises",
    "make no-op",
    "make None",
    "read-only",
    "not a class",
    "verify raises",
    "verify False",
)


def test_every_failure_has_a_case(upstream: Any) -> None:
    assert tuple(failing_patches(upstream)) == FAILURES


@pytest.mark.parametrize("failure", FAILURES)
def test_nothing_stays_patched_when_the_second_of_three_fails(upstream: Any, failure: str) -> None:
    bad, error, message = failing_patches(upstream)[failure]
    before = upstream.snapshot()
    entered = False
    with pytest.raises(error, match=message) as caught:
        with applied(upstream.patch("upst.core:Base.method"), bad, upstream.patch("upst.core:Base.named")):
            entered = True
    assert not entered
    assert type(caught.value) is error
    assert "upst/middle" in str(caught.value)
    upstream.assert_same(before)
    assert active_patches() == []
    with applied(upstream.patch("upst.core:Base.method")):  # and the engine is still in order
        assert upstream.core.Base().method() == "!method"


def test_nothing_is_written_before_all_checks_and_makes_are_done(upstream: Any) -> None:
    seen = []

    def look(original: Any) -> Any:
        seen.append((upstream.core.greet("me"), upstream.core.Base().method()))
        return lambda *args: original(*args)

    with applied(upstream.patch("upst.core:greet", make=look), upstream.patch("upst.core:Base.method", make=look)):
        pass
    assert seen == [("stock me", "method")] * 2


def test_verify_sees_all_patches_applied_and_true_passes(upstream: Any) -> None:
    def both() -> bool:
        return upstream.core.greet("me") == "!stock me" and upstream.core.Base().method() == "!method"

    with applied(upstream.patch("upst.core:greet", verify=both), upstream.patch("upst.core:Base.method")) as patches:
        patches.verify()


def test_interrupt_while_verifying_restores_everything(upstream: Any) -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    before = upstream.snapshot()
    with pytest.raises(KeyboardInterrupt):
        PatchSet(upstream.patch("upst.core:greet", verify=interrupt)).apply()
    upstream.assert_same(before)


def test_import_error_inside_the_target_module_is_not_mistaken_for_drift(upstream: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere") as caught:
        PatchSet(upstream.patch("upst.broken:f")).apply()
    assert "while importing upst.broken for upst.broken:f" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("builtins:dict.get", "immutable built-in type"),
        ("upst.core:Base.__doc__", "data descriptor of type"),
        ("upst.core:Base.__new__", "Python cannot undo setting __new__"),
    ],
)
def test_symbols_that_cannot_be_restored_exactly_are_refused(upstream: Any, target: str, message: str) -> None:
    before = upstream.snapshot()
    with pytest.raises(PatchError, match=message):
        PatchSet(upstream.patch(target, name="upst/refused")).check()
    upstream.assert_same(before)


# --- somebody else ---


def test_foreign_repatch_is_left_alone_and_the_others_are_reverted(upstream: Any) -> None:
    before = upstream.snapshot()
    targets = ("upst.core:Base.method", "upst.core:greet", "upst.core:Base.named")
    patches = PatchSet(*(upstream.patch(target) for target in targets)).apply()
    ours = upstream.core.greet
    upstream.core.greet = theirs = lambda name: f"theirs {name}"
    assert not patches.active
    with pytest.raises(PatchVerificationError, match="upst/greet .* does not resolve to the replacement"):
        patches.verify()
    with pytest.raises(PatchConflictError, match=r"upst/greet \(upst 1.2.0\+cpu\): upst.core:greet was changed"):
        active_patches()

    with pytest.raises(PatchConflictError, match="upst.core:greet was changed by somebody else") as caught:
        patches.revert()
    assert "Base" not in str(caught.value)
    assert upstream.core.greet is theirs
    assert (upstream.core.Base().method(), upstream.core.Base.named()) == ("method", "Base")

    # Their patch may still call ours, so the symbol counts as patched until ours is back and taken out.
    with pytest.raises(PatchConflictError, match="patched already"):
        PatchSet(upstream.patch("upst.core:greet")).apply()
    upstream.core.greet = ours
    assert not patches.active
    with pytest.raises(PatchError, match="not all applied"):
        patches.verify()
    patches.revert()
    upstream.assert_same(before)


def test_foreign_restore_of_the_stock_symbol_is_noticed_too(upstream: Any) -> None:
    stock = upstream.core.greet
    patches = PatchSet(upstream.patch("upst.core:greet")).apply()
    ours = upstream.core.greet
    upstream.core.greet = stock
    with pytest.raises(PatchConflictError, match="was changed by somebody else"):
        patches.revert()
    upstream.core.greet = ours
    patches.revert()
    assert upstream.core.greet is stock


def test_conflict_at_exit_keeps_the_blocks_own_exception(upstream: Any) -> None:
    with pytest.raises(PatchConflictError) as caught:
        with applied(upstream.patch("upst.core:greet")) as patches:
            ours = upstream.core.greet
            del upstream.core.greet
            raise KeyError("inside")
    assert isinstance(caught.value.__context__, KeyError)
    upstream.core.greet = ours
    patches.revert()


def test_failing_apply_reports_what_it_could_not_restore(upstream: Any) -> None:
    stolen = {}

    def steal() -> bool:
        stolen["ours"], upstream.core.greet = upstream.core.greet, None
        return False

    patch = upstream.patch("upst.core:greet", verify=steal)
    patches = PatchSet(patch, upstream.patch("upst.core:Base.method"))
    with pytest.raises(PatchVerificationError) as caught:
        patches.apply()
    assert "upst.core:greet was changed by somebody else" in caught.value.__notes__[0]
    assert upstream.core.Base().method() == "method"
    assert upstream.core.greet is None
    assert not patches.active
    upstream.core.greet = stolen["ours"]
    patches.revert()
    assert upstream.core.greet("me") == "stock me"


def test_parent_replaced_by_the_same_set_is_noticed(upstream: Any) -> None:
    before = upstream.snapshot()
    patches = [upstream.patch("upst.engine:Engine", make=subclass), upstream.patch("upst.engine:Engine.run")]
    with pytest.raises(PatchVerificationError, match="one of its parents"):
        PatchSet(*patches).apply()
    upstream.assert_same(before)
