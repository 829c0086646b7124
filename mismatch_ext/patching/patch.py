"""The declaration of one patch: what it changes, for which versions, why, and when it can be deleted."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from mismatch_ext.errors import PatchDriftError, PatchError, PatchVersionError
from mismatch_ext.patching.sources import DIGEST_LENGTH, qualified_name, source_digest
from mismatch_ext.patching.symbols import Slot
from mismatch_ext.versions import PEERS, in_range, installed

MARKER = "__mismatch_patch__"
"""Attribute that every replacement carries while it is applied; its value is the name of the patch."""

ANY_VERSION = "any"
"""Value of `supports` for a patch that can only refuse."""

_NAME = re.compile(r"[a-z0-9_]+/[a-z0-9_]+")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")
_PROSE = ("reason", "not_covered", "remove_when")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replacement of one upstream symbol; declaring it changes nothing.

    Args:
        name: "peer/what_it_does", unique in the process, for example "trl/colocate_engine_dtype".
        peer: Key of `versions.PEERS`, or a distribution name; the version of that package is checked.
        supports: PEP 440 range that includes both ends: ">=1.16.0,<=1.16.2" or "==1.16.0"; "!=" may cut out
            versions; `ANY_VERSION` goes with `refuses`. Other versions that the peer accepts (`versions.Peer`) are patched only
            if digests or a probe show that the symbol has not changed.
        target: "package.module:Attribute.path" of the symbol. For an object that a module imported by value,
            name the importing module and set `binding_only`.
        make: Called with the original before anything is patched; returns a new object that wraps it.
            For a staticmethod, classmethod, property (its getter) or cached_property it gets the function
            inside, and the descriptor is rebuilt around its result. For a class it should return a subclass. If `make` has a
            second parameter, it gets the handler there.
        upstream: URL of the upstream issue, pull request or source line.
        reason: What breaks without the patch.
        not_covered: What the patch does not reach.
        remove_when: Condition under which the patch can be deleted.
        source_digests: Digests of the upstream source that the patch was written for, from `current_digest`;
            a mapping may say which version each belongs to. When empty, the version range and the probe are checked. A digest
            for a symbol without readable source (a value, a built-in) is an error.
        probe: Called with the original before anything is patched; returns None if the patch fits, otherwise a text that says
            why it does not. Use it for what a digest cannot show: that upstream still calls this symbol.
        verify: Called once everything is applied; if it raises or returns False, everything is rolled back.
        allow_aliases: "module" or "module:attribute" names that may keep the stock object.
        binding_only: The target is one module's by-value import, and only that module's use of it changes.
            The module that defines the object and its other importers stay unpatched on purpose.
        refuses: The replacement either raises or calls the original, and does nothing else, so it may be applied to any version.
        handler: The function that the replacement calls, set by `calling`; a `make` must not close over it. Its qualified name
            is part of the digest.

    Raises:
        PatchError: A field is malformed, or the range is open.
    """

    name: str
    peer: str
    supports: str
    target: str
    make: Callable[..., Any]
    upstream: str
    reason: str
    not_covered: str
    remove_when: str
    source_digests: Mapping[str, str] | Set[str] = field(default=frozenset(), hash=False)
    probe: Callable[[Any], str | None] | None = None
    verify: Callable[[], bool | None] | None = None
    allow_aliases: tuple[str, ...] = ()
    binding_only: bool = False
    refuses: bool = False
    handler: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise PatchError(f"Patch name {self.name!r} must read 'peer/what_it_does' in lower case.")
        if not _TARGET.fullmatch(self.target):
            raise PatchError(f"{self.name}: target {self.target!r} must read 'package.module:Attribute'.")
        if not self.upstream.startswith("https://"):
            raise PatchError(f"{self.name}: upstream must be an https:// URL, not {self.upstream!r}.")
        for prose in _PROSE:
            if not getattr(self, prose).strip():
                raise PatchError(f"{self.name}: {prose} is empty; every patch has to say it.")
        if not isinstance(self.source_digests, (Mapping, Set)) or not all(
            _DIGEST.fullmatch(digest) for digest in self.source_digests
        ):
            raise PatchError(
                f"{self.name}: source_digests must be a set or mapping of {DIGEST_LENGTH}-digit hexadecimal "
                f"digests as current_digest({self.target!r}) returns them, not {self.source_digests!r}."
            )
        if not isinstance(self.allow_aliases, tuple):
            raise PatchError(f"{self.name}: allow_aliases must be a tuple, not {self.allow_aliases!r}.")
        if self.binding_only and "." in self.target.partition(":")[2]:
            raise PatchError(
                f"{self.name}: binding_only is for a module's by-value import; {self.target} is a class attribute."
            )
        if self.refuses != (self.supports == ANY_VERSION):
            raise PatchError(
                f"{self.name}: supports={ANY_VERSION!r} and refuses=True go together: only a patch that refuses and does nothing "
                "else may be put on versions that nobody ran."
            )
        if not self.refuses:
            _require_closed(self.name, self.supports)
        if self.handler is not None:
            qualified_name(self.handler)
            if not self.takes_handler:
                raise PatchError(
                    f"{self.name}: make takes no handler, so that {self.handler!r} would never be called. Give make a second "
                    "parameter."
                )

    @property
    def takes_handler(self) -> bool:
        """Whether `make` takes a handler as well as the original."""
        try:
            parameters = inspect.signature(self.make).parameters.values()
        except ValueError:  # a built-in without a signature
            return False
        return (
            sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 1
        )

    def calling(self, handler: Any) -> Patch:
        """Return the same patch with a handler, which its replacement calls.

        Args:
            handler: A function or class at the top of a module, a method, or an object of such a class.

        Raises:
            PatchError: The handler's name does not identify it, or `make` takes no handler.
        """
        return replace(self, handler=handler)

    def build(self, original: Any) -> Any:
        """Return the replacement for an original.

        Raises:
            PatchError: The handler is missing.
        """
        if self.handler is not None:
            return self.make(original, self.handler)
        if self.takes_handler:
            raise PatchError(
                f"{self.name}: its replacement calls a handler, and has none; apply `calling(handler)` of it."
            )
        return self.make(original)

    def check_version(self) -> str:
        """Return the installed version of the peer.

        Raises:
            PatchVersionError: The peer is not installed, or its version is outside the range.
        """
        version = installed(self.peer)
        if version is None:
            raise PatchVersionError(
                f"{self.name}: {self.peer} is not installed; this patch supports {self.peer} "
                f"{self.supports}. Nothing was patched."
            )
        if self.refuses:
            return version
        told = bool(self.source_digests) or self.probe is not None
        # Only versions newer than the range may pass: its lower end and its exclusions were found by running.
        upper = [part.version for part in SpecifierSet(self.supports) if part.operator in ("<=", "==")]
        newer = in_range(version, ",".join(f">{most}" for most in upper))
        open_ = told and newer and self.peer in PEERS and PEERS[self.peer].open and PEERS[self.peer].accepts(version)
        if not in_range(version, self.supports) and not open_:
            raise PatchVersionError(
                f"{self.name}: {self.peer} {version} is outside the supported range {self.supports}. Nothing "
                f"was patched. Install a version in that range. The patch is not needed when: "
                f"{self.remove_when}"
            )
        return version

    def check_source(self, slot: Slot, context: str) -> None:
        """Ask the patch's probe about the symbol, and compare the symbol's source with the known digests.

        Raises:
            PatchDriftError: The probe found a change, the source changed, or digests were given for a symbol without source.
        """
        if self.probe is not None and (change := self.probe(slot.original)) is not None:
            raise PatchDriftError(
                f"{context}: {self.target} is not what the patch was written for: {change} Upstream changed it, or somebody "
                "patched it. Nothing was patched."
            )
        if not self.source_digests:
            return
        try:
            found = source_digest(slot.original)
        except PatchDriftError as error:
            raise PatchDriftError(
                f"{context}: {self.target} has no digest to compare: {error} Drop source_digests, and let "
                "supports name the tested versions only. Nothing was patched."
            ) from error
        if found not in self.source_digests:
            raise PatchDriftError(
                f"{context}: the source of {self.target} has digest {found}, but the patch was written for "
                f"{_name_digests(self.source_digests)}. Upstream changed it, or somebody patched it. Read "
                "what is there now, then add its digest. Nothing was patched."
            )


def _name_digests(digests: Mapping[str, str] | Set[str]) -> str:
    if isinstance(digests, Mapping):
        return ", ".join(f"{digest} ({digests[digest]})" for digest in sorted(digests))
    return ", ".join(sorted(digests))


def _require_closed(name: str, supports: str) -> None:
    """Refuse a range that includes versions that nobody has seen."""
    try:
        specifiers = list(SpecifierSet(supports))
    except InvalidSpecifier as error:
        raise PatchError(f"{name}: supports {supports!r} is not a PEP 440 range: {error}.") from error
    bounds = {op: [s.version for s in specifiers if s.operator == op] for op in (">=", "<=", "==", "!=")}
    # Wildcards, "~=", "<" and ">" would admit releases that do not exist yet, or exclude the tested end.
    known = all(s.operator in bounds and not s.version.endswith(".*") for s in specifiers)
    if not known or not (bounds["=="] or (bounds[">="] and bounds["<="])):
        raise PatchError(
            f"{name}: supports {supports!r} must be closed at both ends, with '>=' and '<=' or with '==' and "
            "a full version, for example '>=1.16.0,<=1.16.2'."
        )
    lower = max(Version(v) for v in bounds[">="] + bounds["=="])
    upper = min(Version(v) for v in bounds["<="] + bounds["=="])
    if lower > upper:
        raise PatchError(f"{name}: supports {supports!r} is empty: {lower} is above {upper}.")
