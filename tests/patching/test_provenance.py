"""What a patch says of itself: drift and digests of its target, its own digest, its declaration."""

from __future__ import annotations

import functools
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_ext.errors import (
    PatchDriftError,
    PatchError,
)
from mismatch_ext.patching import (
    PatchSet,
    active_patches,
    applied,
    current_digest,
    digest_of,
    source_digest,
)

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
        assert digest_of(rows[::-1]) == digest
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
