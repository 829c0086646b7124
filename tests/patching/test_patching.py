"""The patch engine on a made-up upstream package: exact revert, atomicity, conflicts, drift, provenance."""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
import time
from types import SimpleNamespace
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
    MARKER,
    Patch,
    PatchSet,
    active_digest,
    active_patches,
    applied,
    current_digest,
    source_digest,
)


def subclass(original: type) -> type:
    class Loud(original):  # type: ignore[misc, valid-type]
        def run(self) -> str:
            return f"!{super().run()}"

    return Loud


def unwrapped(original: Any) -> Any:
    """Replace without functools.wraps."""

    def shout(*args: Any) -> str:
        return f"!{original(*args)}"

    return shout


# --- every kind of symbol: works while applied, gone afterwards ---

KINDS = {
    "core:greet": lambda u: u.core.greet("me"),
    "core:remembered": lambda u: u.core.remembered(),
    "core:Base.method": lambda u: u.core.Child().method(),
    "core:Base.static": lambda u: u.core.Child().static(),
    "core:Base.named": lambda u: u.core.Child.named(),
    "core:Base.value": lambda u: u.core.Child().value,
    "core:Base.cached": lambda u: u.core.Child().cached,
    "core:Base.Inner.deep": lambda u: u.core.Base.Inner().deep(),
    "core:Child.method": lambda u: u.core.Child().method(),
    "core:Child.static": lambda u: u.core.Child().static(),
    "core:Child.named": lambda u: u.core.Child.named(),
    "core:Child.value": lambda u: u.core.Child().value,
    "core:Child.cached": lambda u: u.core.Child().cached,
}
STOCK = {"core:greet": "stock me", "core:Base.named": "Child", "core:Child.named": "Child"}


@pytest.mark.parametrize("target", KINDS)
def test_callable_or_descriptor_is_wrapped_and_reverted_exactly(upstream: Any, target: str) -> None:
    call = KINDS[target]
    stock = STOCK.get(target, target.rpartition(".")[2].rpartition(":")[2])
    before = upstream.snapshot()
    assert call(upstream) == stock
    with applied(upstream.patch(f"upst.{target}")):
        assert call(upstream) == f"!{stock}"
    assert call(upstream) == stock
    upstream.assert_same(before)


def test_property_keeps_its_setter_and_docstring(upstream: Any) -> None:
    with applied(upstream.patch("upst.core:Base.value")):
        thing = upstream.core.Base()
        thing.value = 5
        assert thing.new == 5
        assert upstream.core.Base.value.__doc__ == "The value."


def test_patching_a_child_leaves_its_base_alone(upstream: Any) -> None:
    with applied(upstream.patch("upst.core:Child.method")):
        assert upstream.core.Base().method() == "method"
        assert "method" in vars(upstream.core.Child)
    assert "method" not in vars(upstream.core.Child)


@pytest.mark.parametrize(("target", "old"), [("upst.core:LIMIT", 3), ("upst.core:Base.size", 7)])
def test_plain_value(upstream: Any, target: str, old: int) -> None:
    before = upstream.snapshot()
    seen = []
    with applied(upstream.patch(target, make=lambda value: seen.append(value) or value + 100)):
        assert seen == [old]
        assert upstream.core.LIMIT + upstream.core.Base.size == 110
    upstream.assert_same(before)


def test_none_is_a_value_like_any_other(upstream: Any) -> None:
    upstream.core.nothing = None
    before = upstream.snapshot()
    with applied(upstream.patch("upst.core:nothing", make=lambda value: "something")):
        assert upstream.core.nothing == "something"
    upstream.assert_same(before)


def test_class_at_home(upstream: Any) -> None:
    before = upstream.snapshot()
    patch = upstream.patch("upst.engine:Engine", make=subclass)
    for _ in range(2):  # the replacement of the first round is a subclass that may still be uncollected
        with applied(patch):
            assert upstream.engine.Engine().run() == "!stock"
        upstream.assert_same(before)


def test_class_imported_by_value_changes_only_the_importing_module(upstream: Any) -> None:
    user = upstream.load("user")
    before = upstream.snapshot()
    with applied(upstream.patch("upst.user:Engine", make=subclass, binding_only=True)):
        assert user.build() == "!stock"
        assert upstream.engine.Engine().run() == "stock"
    assert user.build() == "stock"
    upstream.assert_same(before)


def test_symbol_served_by_module_getattr(upstream: Any) -> None:
    lazy = upstream.load("lazy")
    with applied(upstream.patch("upst.lazy:late", make=subclass, binding_only=True)):
        assert lazy.late().run() == "!stock"
    assert "late" not in vars(lazy)
    assert lazy.late is upstream.engine.Engine


def test_replacement_keeps_name_and_signature_even_if_make_forgot_to(upstream: Any) -> None:
    with applied(upstream.patch("upst.core:greet", make=unwrapped)):
        assert list(inspect.signature(upstream.core.greet).parameters) == ["name"]
        assert (upstream.core.greet.__name__, upstream.core.greet.__doc__) == ("greet", "Say hello.")


def test_marker_is_on_the_replacement_only_while_applied(upstream: Any) -> None:
    for target in ("upst.core:greet", "upst.core:Base.static", "upst.core:Base.named"):
        patch = upstream.patch(target)
        with applied(patch):
            owner, attribute = upstream.core, target.partition(":")[2]
            for part in attribute.split("."):
                owner = getattr(owner, part)
            assert getattr(owner, MARKER) == patch.name
            replacement = owner
        assert not hasattr(replacement, MARKER)


def test_target_module_is_imported_when_needed(upstream: Any) -> None:
    with applied(upstream.patch("upst.user:build")):
        assert upstream.load("user").build() == "!stock"
    assert upstream.load("user").build() == "stock"


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
        allow_aliases=(__name__,),
    )
    with applied(patch):
        assert upstream.engine.Engine().run() == "!stock"


# --- drift and digests ---


@pytest.mark.parametrize("kind", ["set", "mapping"])
def test_known_digest_passes(upstream: Any, kind: str) -> None:
    digest = current_digest("upst.core:Base.named")
    known = {digest} if kind == "set" else {digest: "1.2.0"}
    with applied(upstream.patch("upst.core:Base.named", source_digests=known)):
        assert upstream.core.Base.named() == "!Base"


def test_drift_names_both_digests(upstream: Any) -> None:
    found = current_digest("upst.core:greet")
    patch = upstream.patch("upst.core:greet", source_digests={"f" * 16: "1.0", "e" * 16: "1.1"})
    expected = rf"digest {found}, but the patch was written for {'e' * 16} \(1\.1\), {'f' * 16} \(1\.0\)"
    with pytest.raises(PatchDriftError, match=expected):
        PatchSet(patch).check()


def test_foreign_monkeypatch_with_wraps_is_drift(upstream: Any) -> None:
    patch = upstream.patch("upst.core:greet", source_digests={current_digest("upst.core:greet")})
    stock = upstream.core.greet
    upstream.core.greet = functools.wraps(stock)(lambda name: f"theirs {name}")
    with pytest.raises(PatchDriftError, match="Upstream changed it, or somebody patched it"):
        PatchSet(patch).check()


@pytest.mark.parametrize("target", ["upst.core:LIMIT", "builtins:print"])
def test_digest_of_a_symbol_without_source_is_an_error(upstream: Any, target: str) -> None:
    with pytest.raises(PatchDriftError, match="no source that can be read"):
        current_digest(target)
    with pytest.raises(PatchDriftError, match="upst/pinned .*no digest to compare"):
        PatchSet(upstream.patch(target, name="upst/pinned", source_digests={"0" * 16})).check()


def test_current_digest_of_a_missing_symbol(upstream: Any) -> None:
    with pytest.raises(PatchDriftError, match="upst.core has no attribute 'gone'"):
        current_digest("upst.core:gone")


def test_source_digest_follows_the_text_and_not_the_indentation(upstream: Any) -> None:
    def method(self: Any) -> str:
        return "x"

    class Holder:
        @staticmethod
        def inner() -> str:
            return "x"

    assert source_digest(Holder.inner) == source_digest(vars(Holder)["inner"])
    assert source_digest(method) != source_digest(Holder.inner)
    assert source_digest(upstream.core.Base) != source_digest(upstream.core.Child)
    text = '@property\ndef value(self):\n    "The value."\n    return "value"'
    assert source_digest(vars(upstream.core.Base)["value"]) == hashlib.sha256(text.encode()).hexdigest()[:16]


# --- provenance ---


def test_describe_and_digest(upstream: Any) -> None:
    patches = upstream.patch("upst.core:greet"), upstream.patch("upst.core:Base.method")
    with applied(*patches) as forward:
        rows, digest = forward.describe(), forward.digest
        assert active_patches() == rows
        assert active_digest() == digest
    assert [sorted(row) for row in rows] == [["digest", "name", "peer", "target", "version"]] * 2
    assert [row["name"] for row in rows] == ["upst/base_method", "upst/greet"]
    assert [(row["target"], row["peer"], row["version"]) for row in rows] == [
        ("upst.core:Base.method", "upst", "1.2.0+cpu"),
        ("upst.core:greet", "upst", "1.2.0+cpu"),
    ]
    assert all(len(row["digest"]) == 64 for row in rows)
    with applied(*reversed(patches)) as backward:
        assert backward.digest == digest
    with applied(patches[0]) as alone:
        assert alone.digest not in (digest, rows[0]["digest"])
        assert alone.describe() == [rows[1]]


def shout(original: Any) -> Any:
    return lambda *args, **kwargs: original(*args, **kwargs).upper()


def build_make(text: Any) -> Any:
    def make(original: Any) -> Any:
        return lambda *args: f"{text}{original(*args)}"

    return make


def test_digest_changes_with_everything_it_stands_for(upstream: Any, upstream_dir: Any) -> None:
    def digest(target: str = "upst.core:greet", **changes: Any) -> str:
        with applied(upstream.patch(target, **changes)) as patches:
            return patches.digest

    base = digest()
    assert digest() == base
    assert digest(reason="Said in other words.", supports="==1.2") == base  # prose is not behaviour
    upstream.core.greet.__wrapped__ = upstream.core.Base.method  # another upstream source
    other_source = digest()
    del upstream.core.greet.__wrapped__
    metadata = upstream_dir / "upst-1.2.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.2.0+cpu", "1.1.9"))
    other_version = digest()
    metadata.write_text(metadata.read_text().replace("1.1.9", "1.2.0+cpu"))
    others = [
        other_source,
        other_version,
        digest(name="upst/renamed"),
        digest("upst.core:Base.method", name="upst/greet"),
        digest(make=shout),
        digest(make=build_make("a")),
        digest(make=build_make("b")),
    ]
    assert len({base, *others}) == 8
    assert digest() == base


def test_there_is_no_digest_of_patches_that_are_not_active(upstream: Any) -> None:
    patches = PatchSet(upstream.patch("upst.core:greet"))
    for vouch in (patches.describe, lambda: patches.digest, patches.verify):
        with pytest.raises(PatchError, match="not (active|all applied).*: upst/greet"):
            vouch()


def test_make_that_cannot_be_digested(upstream: Any) -> None:
    with applied(upstream.patch("upst.core:greet", make=build_make(SimpleNamespace()))) as patches:
        with pytest.raises(PatchError, match="closes over 'text', a SimpleNamespace"):
            _ = patches.digest
    with applied(upstream.patch("upst.core:greet", make=functools.partial(shout))) as patches:
        with pytest.raises(PatchError, match="needs the source of make"):
            _ = patches.digest


# --- declarations ---


@pytest.mark.parametrize("supports", [">=1.0,<=1.2.0", "==1.2", "==1.2.0", ">=1.0,<=1.3,!=1.1", ">=1.2.0,<=1.2.0"])
def test_closed_range(upstream: Any, supports: str) -> None:
    assert upstream.patch("upst.core:greet", supports=supports).check_version() == "1.2.0+cpu"


@pytest.mark.parametrize(
    "supports",
    ["", ">=1.0", "<=2", ">=1.0,<2", ">1.0,<=2", "~=1.2", "==1.2.*", "!=1.3", ">=1,<=2,!=1.5.*", "===1.2"],
)
def test_open_range(upstream: Any, supports: str) -> None:
    with pytest.raises(PatchError, match="must be closed at both ends"):
        upstream.patch("upst.core:greet", supports=supports)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"supports": "1.2"}, "not a PEP 440 range"),
        ({"supports": ">=1.3,<=1.2"}, "is empty: 1.3 is above 1.2"),
        ({"name": "greet"}, "must read 'peer/what_it_does'"),
        ({"target": "upst.core.greet"}, "must read 'package.module:Attribute'"),
        ({"upstream": "ask them"}, "https:// URL, not 'ask them'"),
        ({"reason": " "}, "reason is empty"),
        ({"not_covered": ""}, "not_covered is empty"),
        ({"remove_when": ""}, "remove_when is empty"),
        ({"source_digests": "0" * 16}, "set or mapping of 16-digit"),
        ({"source_digests": {"abc"}}, "set or mapping of 16-digit"),
        ({"allow_aliases": "upst.user"}, "must be a tuple, not 'upst.user'"),
        ({"target": "upst.core:Base.method", "binding_only": True}, "is a class attribute"),
    ],
)
def test_malformed_declaration(upstream: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError, match=message):
        upstream.patch(**{"target": "upst.core:greet", "name": "upst/greet"} | changes)


def test_declaration_is_frozen_hashable_and_keyword_only(upstream: Any) -> None:
    patch = upstream.patch("upst.core:greet", source_digests={"0" * 16: "1.0"})
    assert patch in {patch}
    with pytest.raises(AttributeError):
        patch.name = "upst/other"
    with pytest.raises(TypeError):
        Patch("upst/greet")  # type: ignore[call-arg, misc]
