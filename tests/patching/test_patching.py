"""Patches are applied all or none, told from each other, and taken back exactly; a probe decides where they fit."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mismatch_ext import versions
from mismatch_ext.errors import PatchDriftError, PatchError, UntestedVersionWarning
from mismatch_ext.patching import Patch, active_patches, applied, apply, described, digest_of, revert, verify

TARGETS = ("greet", "Base.method", "Base.static", "Base.named", "Child.method", "Engine")


def louder(original: type) -> type:
    class Loud(original):  # type: ignore[misc, valid-type]
        def run(self) -> str:
            return f"!{super().run()}"

    return Loud


@pytest.mark.parametrize("target", TARGETS)
def test_a_symbol_is_replaced_in_its_own_kind_and_restored_to_the_very_object(upstream: Any, target: str) -> None:
    core, before = upstream.core, upstream.snapshot()
    calls: dict[str, Callable[[], str]] = {
        "greet": lambda: core.greet(),
        "Base.method": lambda: core.Base().method(),
        "Base.static": lambda: core.Base().static(),
        "Base.named": lambda: core.Base.named(),
        "Child.method": lambda: core.Child().method(),
        "Engine": lambda: core.Engine().run(),
    }
    plain = calls[target]()
    with applied(upstream.patch(f"upst.core:{target}", **{"make": louder} if target == "Engine" else {})):
        assert calls[target]() == f"!{plain}" and core.Base().method() in ("method", "!method")
        assert target != "Child.method" or core.Base().method() == "method"
    upstream.assert_same(before)


def test_blocks_nest_and_the_last_one_restores(upstream: Any) -> None:
    patch, before = upstream.patch("upst.core:greet"), upstream.snapshot()
    with pytest.raises(KeyError, match="inside"), applied(patch):
        with applied(patch, upstream.patch("upst.core:Base.method")):
            assert upstream.core.greet() == "!stock you" and len(active_patches()) == 2
        assert upstream.core.greet() == "!stock you" and upstream.core.Base().method() == "method"
        raise KeyError("inside")
    upstream.assert_same(before)


def test_the_probe_is_asked_once_and_again_where_the_symbol_has_become_another(upstream: Any) -> None:
    asked: list[Any] = []
    patch = upstream.patch("upst.core:greet", probe=lambda original: asked.append(original))
    stock = upstream.core.greet
    described(patch)
    for _ in range(3):
        with applied(patch):
            pass
    assert asked == [stock]
    upstream.core.greet = foreign = lambda: "foreign"
    with applied(patch):
        assert upstream.core.greet() == "!foreign"
    assert asked == [stock, foreign] and upstream.core.greet is foreign
    upstream.core.greet = stock


# --- what cannot be applied ---


def refuses(text: str) -> Callable[[Any], str]:
    return lambda original: text


def raises(original: Any) -> Any:
    raise ZeroDivisionError("here")


FAILURES: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "missing peer": ("upst.core:Engine.run", {"peer": "not-here"}, PatchError, "not-here is not installed"),
    "gone module": ("upst.moved:f", {}, PatchDriftError, "upst.moved:f is gone: there is no module upst.moved"),
    "gone class": ("upst.core:Motor.run", {}, PatchDriftError, "upst.core has no Motor"),
    "gone method": ("upst.core:Engine.go", {}, PatchDriftError, "Engine has no go"),
    "probe": (
        "upst.core:Engine.run",
        {"probe": refuses("it sings.")},
        PatchDriftError,
        "1.2.0.* needs: it sings. Nothing",
    ),
    "make raises": ("upst.core:Engine.run", {"make": raises}, ZeroDivisionError, "here"),
    "same slot": ("upst.core:Base.method", {}, PatchError, "both patch upst.core:Base.method"),
    "read-only": ("upst.core:Stubborn.act", {}, AttributeError, "act is read-only"),
    "parent": ("upst.core:Base", {"make": louder}, PatchError, "does not resolve to the replacement"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_nothing_stays_patched_when_the_second_of_three_fails(upstream: Any, failure: str) -> None:
    class Stubborn(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise AttributeError(f"{name} is read-only")

    upstream.core.Stubborn = Stubborn("Stubborn", (), {"act": lambda self: None})
    target, changes, error, message = FAILURES[failure]
    first, third = upstream.patch("upst.core:Base.method"), upstream.patch("upst.core:Base.named")
    before = upstream.snapshot()
    with pytest.raises(error, match=message):
        with applied(first, upstream.patch(target, name="upst/middle", **changes), third):
            raise AssertionError("entered")
    before.pop("upst.core.Stubborn", None)
    assert active_patches() == [] and upstream.core.Base().method() == "method"
    with applied(first, third):
        assert upstream.core.Base().method() == "!method"


def test_a_patch_without_probe_and_effect_is_no_patch(upstream: Any) -> None:
    with pytest.raises(PatchError, match="neither a probe nor an observed effect"):
        upstream.patch("upst.core:greet", observed="")


# --- conflicts ---


@pytest.mark.parametrize("second", ["upst.core:Base.method", "upst.core:Child.method"], ids=["same", "inherited"])
def test_one_symbol_takes_one_patch(upstream: Any, second: str) -> None:
    one, two = upstream.patch("upst.core:Base.method"), upstream.patch(second, name="upst/two")
    described(two)  # built while the symbol was stock
    with applied(one), pytest.raises(PatchError, match="patched already, by upst/base_method"), applied(two):
        raise AssertionError("entered")
    with applied(two):
        pass


def test_a_replacement_that_was_imported_by_value_is_not_patched_again(upstream: Any) -> None:
    with applied(upstream.patch("upst.core:greet")):
        upstream.load("user")
        with pytest.raises(PatchError, match="patched already, by upst/greet"):
            apply(upstream.patch("upst.user:greet", name="upst/user"))


def test_the_same_patch_with_another_handler_is_a_conflict(upstream: Any) -> None:
    patch = upstream.patch("upst.core:greet", make=answered)
    with applied(patch.calling(upper)), pytest.raises(PatchError, match="with another handler"):
        apply(patch.calling(title))


@pytest.mark.parametrize("name", ["greet", "Engine"])
def test_what_somebody_put_there_is_left_to_them_and_reported(upstream: Any, name: str) -> None:
    patch, other = (
        upstream.patch(f"upst.core:{name}", make=lambda f: lambda: f()),
        upstream.patch("upst.core:Base.static"),
    )
    stock, static = getattr(upstream.core, name), vars(upstream.core.Base)["static"]
    apply(other, patch)
    ours = getattr(upstream.core, name)
    setattr(upstream.core, name, theirs := lambda: ours())
    for ask in (active_patches, lambda: verify(patch)):
        with pytest.raises(PatchError, match=f"upst.core:{name} (was changed by somebody else|does not resolve)"):
            ask()
    with pytest.raises(PatchError, match=f"upst.core:{name} was changed by somebody else"):
        revert(other, patch)
    assert getattr(upstream.core, name) is theirs and active_patches() == []
    setattr(upstream.core, name, stock)
    assert vars(upstream.core.Base)["static"] is static


def test_verify_says_what_is_not_in_force(upstream: Any) -> None:
    patch = upstream.patch("upst.core:greet")
    with pytest.raises(PatchError, match="upst/greet is not applied"):
        verify(patch)
    with applied(patch):
        verify(patch)


# --- versions and texts warn ---


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_TOLD", set())


@pytest.mark.parametrize("supports", ["==1.1", ">=1.3,<=1.4"])
def test_a_version_that_nobody_ran_is_patched_with_one_warning(upstream: Any, untold: None, supports: str) -> None:
    patch = upstream.patch("upst.core:greet", supports=supports, probe=lambda original: None)
    with pytest.warns(UntestedVersionWarning) as told:
        for _ in range(2):
            with applied(patch):
                assert upstream.core.greet() == "!stock you"
        described(upstream.patch("upst.core:Base.method", supports=supports))
    message = f"untested with upst 1.2.0+cpu; patch upst/greet was run with {supports}; its probe holds."
    assert [str(warning.message) for warning in told] == [message]


# --- provenance ---


def answered(original: Callable[..., str], handler: Callable[[str], str]) -> Callable[..., str]:
    return lambda *args: handler(original(*args))


def upper(text: str) -> str:
    return text.upper()


def title(text: str) -> str:
    return text.title()


def added_nothing(original: Callable[..., str]) -> Callable[..., str]:
    return lambda *args: original(*args)


def add(original: Callable[..., str], settings: tuple[tuple[str, str], ...]) -> Callable[..., str]:
    return lambda *args: f"{original(*args)} {settings}"


def test_descriptions_are_the_same_before_and_while_patches_are_in_place(upstream: Any) -> None:
    patches = upstream.patch("upst.core:greet"), upstream.patch("upst.core:Base.method")
    before = described(*patches)
    with applied(*reversed(patches)) as rows:
        assert rows == active_patches() == before
    assert [row["name"] for row in rows] == ["upst/base_method", "upst/greet"]
    assert digest_of(rows) == digest_of(rows[::-1]) != digest_of(rows[:1])


def test_a_digest_changes_with_what_it_stands_for_and_not_with_prose(upstream: Any) -> None:
    def digest(target: str = "upst.core:greet", handler: Any = None, **changes: Any) -> str:
        patch = upstream.patch(target, name="upst/greet", **changes)
        return described(patch if handler is None else patch.calling(handler))[0]["digest"]

    base = digest()
    assert digest(reason="Said in other words.", supports="==1.2.0") == base
    others = {
        digest("upst.core:Base.method"),
        digest(make=added_nothing),
        digest(make=answered, handler=upper),
        digest(make=answered, handler=title),
        digest(make=add, handler=(("dtype", "float16"),)),
        digest(make=add, handler=(("dtype", "bfloat16"),)),
    }
    assert len({base, *others}) == 7


# --- orders of importing and patching, in fresh processes ---

RUN = """
import importlib, sys, types
package = types.ModuleType("mismatch_ext"); package.__path__ = [sys.argv[1]]; sys.modules["mismatch_ext"] = package
sys.path.insert(0, sys.argv[2])
from mismatch_ext.patching import Patch, apply, revert
def make(original):
    return lambda *args: f"!{original(*args)}"
PATCH = Patch(name="upst/greet", peer="upst", supports="==1.2.0", target="upst.core:greet", make=make, observed="louder",
              upstream="https://example.org", reason="-", not_covered="-", remove_when="-")
DO = {"import": lambda: importlib.import_module("upst.core"), "by_value": lambda: importlib.import_module("upst.user"),
      "patch": lambda: apply(PATCH), "revert": lambda: revert(PATCH)}
for action in sys.argv[3:]:
    DO[action]()
assert "torch" not in sys.modules, "patching has to stay importable without torch"
print(*(sys.modules[name].greet("me") if name in sys.modules else "-" for name in ("upst.core", "upst.user")), sep=" | ")
"""

# A name that was imported by value keeps what it got: patches say so in `not_covered`.
ORDERS = {
    "by_value patch": "!stock me | stock me",
    "patch by_value": "!stock me | !stock me",
    "import patch revert by_value": "stock me | stock me",
    "patch patch revert": "!stock me | -",
    "patch by_value revert": "stock me | !stock me",
}


@pytest.mark.parametrize("order", ORDERS)
def test_order(order: str, upstream_dir: Any) -> None:
    package = inspect.getfile(Patch).rpartition("/")[0]
    command = [sys.executable, "-c", RUN, package, str(upstream_dir), *order.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ORDERS[order]
