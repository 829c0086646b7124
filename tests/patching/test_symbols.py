"""Patches of a made-up upstream package: every kind of symbol works while applied and is itself again afterwards."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from mismatch_ext.patching import (
    MARKER,
    applied,
)
from tests.patching.replacements import subclass, unwrapped

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
