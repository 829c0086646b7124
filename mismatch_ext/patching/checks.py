"""Check a set of patches before the first write: the result is a plan, or an error that says why there is none."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mismatch_ext.errors import PatchConflictError, PatchDriftError, PatchError, PatchVerificationError
from mismatch_ext.patching.aliases import class_holders, find_holders, is_named_callable
from mismatch_ext.patching.patch import Patch
from mismatch_ext.patching.symbols import MISSING, Slot, import_target_module, locate


@dataclass(kw_only=True, eq=False)
class Entry:
    """One patch on one slot, from check to revert.

    Args:
        patch: What to apply.
        slot: Where to apply it, and what was there before.
        version: Installed version of the peer.
        replacement: What `make` returned.
        new_entry: What is written: the replacement inside the original's kind of descriptor.
        own_names: Names that held the replacement before it was applied, such as the patch's own file.
        previous_marker: Marker that the replacement carried before it was applied, or MISSING.
    """

    patch: Patch
    slot: Slot
    version: str
    replacement: Any = MISSING
    new_entry: Any = MISSING
    own_names: frozenset[str] = frozenset()
    previous_marker: Any = MISSING

    @property
    def context(self) -> str:
        """The patch and its peer's version, for error messages."""
        return _context(self.patch, self.version)

    @property
    def in_place(self) -> bool:
        """True while the slot holds the replacement."""
        return self.new_entry is not MISSING and self.slot.current_entry() is self.new_entry

    @property
    def importable(self) -> bool:
        """True when other modules can take the replacement by value under its name."""
        return isinstance(self.slot.owner, ModuleType) and is_named_callable(self.replacement)

    def not_allowed(self, names: list[str]) -> list[str]:
        """Sort names and drop those in the patch's `allow_aliases`."""
        allowed = self.patch.allow_aliases
        return sorted(name for name in names if name not in allowed and name.partition(":")[0] not in allowed)


LIVE: dict[str, Entry] = {}
"""Applied patches of this process by name; only read and written under the engine's lock."""

_OUR_CLASSES: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that `make` returned: after a revert they stay subclasses of the original until collected."""


def _context(patch: Patch, version: str) -> str:
    return f"{patch.name} ({patch.peer} {version})"


def prepare(patches: tuple[Patch, ...]) -> list[str]:
    """Check every version, then import every target; takes no lock, because imports take locks of their own."""
    versions = [patch.check_version() for patch in patches]
    for patch, version in zip(patches, versions, strict=True):
        import_target_module(patch.target, _context(patch, version))
    return versions


def plan(patches: tuple[Patch, ...], versions: list[str]) -> list[Entry]:
    """Resolve every target and run every check."""
    entries = []
    for patch, version in zip(patches, versions, strict=True):
        context = _context(patch, version)
        if patch.name in LIVE:
            raise PatchConflictError(f"{context}: {patch.target} is patched already by the same patch.")
        slot = locate(patch.target, context)
        _check_free(slot, context)
        patch.check_source(slot, context)
        _check_binding(patch, slot, context)
        entries.append(Entry(patch=patch, slot=slot, version=version))
    _check_overlap(entries)
    _check_aliases(entries)
    return entries


def _check_free(slot: Slot, context: str) -> None:
    """Refuse a slot that holds, inherits or imported a replacement of ours."""
    for live in LIVE.values():
        ours = is_named_callable(live.replacement) and slot.original is live.replacement
        if ours or slot.key in (live.slot.key, live.slot.definer_key) or slot.definer_key == live.slot.key:
            raise PatchConflictError(
                f"{context}: {slot.target} is patched already, by {live.patch.name} on {live.slot.target}. "
                "One symbol takes one patch; revert the other first."
            )


def _check_binding(patch: Patch, slot: Slot, context: str) -> None:
    if patch.binding_only and getattr(slot.raw, "__module__", None) == slot.owner.__name__:
        raise PatchDriftError(
            f"{context}: binding_only says that {patch.target} is imported from elsewhere, but it is defined "
            "there. Drop binding_only, so that its other importers are checked."
        )


def _check_overlap(entries: list[Entry]) -> None:
    """Refuse two patches that write one slot, and a patch that wraps what another patch replaces."""
    writers: dict[tuple[int, str], Entry] = {}
    for entry in entries:
        other = writers.setdefault(entry.slot.key, entry)
        if other is not entry:
            raise PatchConflictError(
                f"{other.patch.name} and {entry.patch.name} both patch {entry.slot.target}. One symbol takes one patch."
            )
    for entry in entries:
        base = writers.get(entry.slot.definer_key, entry)
        if base is not entry:
            raise PatchConflictError(
                f"{entry.patch.name}: {entry.slot.target} is inherited from {base.slot.target}, which "
                f"{base.patch.name} patches in the same set. Patch the base class only."
            )


def _check_aliases(entries: list[Entry]) -> None:
    """Refuse functions and classes that other loaded code holds by value and would go on using unpatched.

    A holder is allowed if the same set patches it too, if `allow_aliases` names it, or if the patch is `binding_only`.
    """
    patched = {entry.slot.key for entry in entries}
    found = find_holders([entry.slot.raw for entry in entries])
    for entry in entries:
        raw = entry.slot.raw
        if isinstance(entry.slot.owner, type):
            holders, derived = class_holders(entry.slot), []
        elif entry.patch.binding_only or not is_named_callable(raw):
            continue
        else:
            holders, derived = found[id(raw)], _subclasses(raw)
        stale = [holder.name for holder in holders if holder.key not in patched]
        stale = entry.not_allowed(stale + derived)
        if stale:
            raise PatchConflictError(
                f"{entry.context}: {entry.patch.target} is held by value in {', '.join(stale)}, which would "
                "keep the stock object. Apply the patch before these are imported, patch them in the same "
                "set, or list them in allow_aliases. Set binding_only if only this module's own use is to "
                "change."
            )


def _subclasses(value: Any) -> list[str]:
    """Name the classes derived from a class, without our own replacements."""
    if not isinstance(value, type):
        return []
    derived: list[type] = type.__subclasses__(value)
    return [f"{cls.__module__}:{cls.__qualname__}" for cls in derived if cls not in _OUR_CLASSES]


def build(entries: list[Entry]) -> None:
    """Call every `make`, and put each result into the same kind of descriptor as its original."""
    taken = [live.replacement for live in LIVE.values()]
    for entry in entries:
        entry.replacement = _make(entry)
        if is_named_callable(entry.replacement) and any(entry.replacement is other for other in taken):
            raise PatchConflictError(
                f"{entry.context}: make returned an object that another patch has put in place; it has to "
                "build a new one."
            )
        taken.append(entry.replacement)
        entry.new_entry = entry.slot.rewrap(entry.replacement)
        if isinstance(entry.replacement, type):
            _OUR_CLASSES.add(entry.replacement)
    importable = [entry for entry in entries if entry.importable]
    found = find_holders([entry.replacement for entry in importable])
    for entry in importable:
        entry.own_names = frozenset(holder.name for holder in found[id(entry.replacement)])


def _make(entry: Entry) -> Any:
    original = entry.slot.original
    target = entry.patch.target
    try:
        replacement = entry.patch.build(original)
    except PatchError:
        raise
    except Exception as error:
        raise PatchError(f"{entry.context}: make raised {error!r} for {target}.") from error
    if replacement is original:
        raise PatchVerificationError(f"{entry.context}: make returned the original of {target} itself.")
    if callable(original) and not callable(replacement):
        raise PatchVerificationError(
            f"{entry.context}: make returned {replacement!r} for {target}, which has to stay callable."
        )
    return replacement
