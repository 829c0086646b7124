"""Apply patches to other people's packages, all or none, and take them back exactly.

    import the target → look it up → ask the probe → build the replacement → write → verify → restore

Nothing is written before every patch of a set was probed and built. A patch's version range only warns: its
probe decides, and what shows its effect while it runs. The patches are declared in `mismatch_ext.patches`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any

from mismatch_ext.errors import PatchDriftError, PatchError
from mismatch_ext.versions import in_range, installed, warn_untested

MARKER = "__mismatch_patch__"
"""Attribute of every replacement; its value is the name of the patch."""

_MISSING: Any = object()  # no such entry, because None may be one
_LOCK = threading.RLock()  # never held while a target is imported, which takes locks of its own


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replacement of one upstream symbol; declaring it changes nothing. It has a probe or an observed effect, or both."""

    name: str  # "peer/what_it_does", unique in the process
    peer: str  # key of `versions.PEERS`, or a distribution name
    supports: str  # versions that it was run with, a PEP 440 range; others run with a warning
    target: str  # "package.module:Attribute.path"; a module's by-value import is a symbol of that module
    # Gets the original, unpacked from a static or class method, and the handler if there is one; returns a new object that
    # wraps it, for a class a subclass.
    make: Callable[..., Any]
    upstream: str  # URL of the upstream issue, pull request or source line
    reason: str  # what breaks without the patch
    not_covered: str  # what it does not reach, such as objects that were built before it was applied
    remove_when: str  # when it can be deleted
    observed: str = ""  # what shows while it runs that it does its work, and where
    # Gets the original before anything is written; returns None if it behaves as needed, else a sentence that says what it
    # did.
    probe: Callable[[Any], str | None] | None = None
    # What the replacement calls or adds (`calling`). The patch's digest holds a function's or class's name, a tuple's
    # values.
    handler: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.probe is None and not self.observed:
            raise PatchError(f"{self.name} has neither a probe nor an observed effect. Give it one of the two.")

    def calling(self, handler: Any) -> Patch:
        """Return the same patch with a handler."""
        return replace(self, handler=handler)


@dataclass(kw_only=True, eq=False)
class _Place:
    """A patch that was probed and built: where it goes, what was there, and how many blocks hold it in place."""

    patch: Patch
    version: str
    owner: Any
    attribute: str
    own_entry: Any  # the owner's own raw entry, MISSING if it inherits the symbol
    raw: Any  # the raw entry, wherever it was found
    original: Any
    entry: Any  # the replacement, in the original's kind of descriptor
    users: int = 0

    @property
    def in_force(self) -> bool:
        return vars(self.owner).get(self.attribute, _MISSING) is self.entry

    def write(self) -> None:
        setattr(self.owner, self.attribute, self.entry)

    def restore(self) -> bool:
        """Put back what was there; return False if somebody else's replacement is there, which is left alone."""
        if not self.in_force:
            return vars(self.owner).get(self.attribute, _MISSING) is self.own_entry
        if self.own_entry is _MISSING:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.own_entry)
        return True

    @cached_property
    def description(self) -> dict[str, str]:
        patch, handler = self.patch, self.patch.handler
        if handler is not None and not isinstance(handler, tuple):
            named = handler if hasattr(handler, "__qualname__") else type(handler)
            handler = f"{named.__module__}.{named.__qualname__}"
        row = {"name": patch.name, "target": patch.target, "peer": patch.peer, "version": self.version}
        return row | {"digest": _sha256([*row.values(), _text(self.original), _text(patch.make), repr(handler)])}


# By the patch's name. A place stays after its patch is taken back, so that each is probed and built once.
_PLACES: dict[str, _Place] = {}


@contextmanager
def applied(*patches: Patch) -> Iterator[list[dict[str, str]]]:
    """Keep patches in place for a block, and yield their descriptions; blocks may nest and end in any order, in all threads."""
    apply(*patches)
    try:
        yield _by_name(_PLACES[patch.name].description for patch in patches)
    finally:
        revert(*patches)


def apply(*patches: Patch) -> None:
    """Put patches in place until `revert`, all or none; one that is there is held once more. Raises PatchError."""
    for patch in patches:
        _import(patch)
    with _LOCK:
        places = [_ready(patch) for patch in patches]
        _refuse_two_on_one_symbol(places)
        started: list[_Place] = []
        try:
            for place in places:
                if not place.users:
                    started.append(place)
                    place.write()
            for place in started:
                _verify(place)
        except BaseException:
            for place in reversed(started):
                place.restore()
            raise
        for place in places:
            place.users += 1


def revert(*patches: Patch) -> None:
    """Let go of patches; raises PatchError if somebody else replaced a symbol, which is left alone."""
    lost = []
    with _LOCK:
        for patch in reversed(patches):
            place = _PLACES[patch.name]
            place.users -= 1
            if not place.users and not place.restore():
                lost.append(place)
    if lost:
        raise PatchError(" ".join(map(_describe_lost, lost)))


def verify(*patches: Patch) -> None:
    """Raise PatchError if a patch is not applied, or its target does not resolve to its replacement."""
    with _LOCK:
        for patch in patches:
            place = _PLACES.get(patch.name)
            if place is None or not place.users:
                raise PatchError(f"{patch.name} is not applied. Apply it before its effect is needed.")
            _verify(place)


def described(*patches: Patch) -> list[dict[str, str]]:
    """Return name, target, peer, version and digest of each patch, sorted by name, whether applied yet or not."""
    for patch in patches:
        _import(patch)
    with _LOCK:
        return _by_name(_ready(patch).description for patch in patches)


def active_patches() -> list[dict[str, str]]:
    """Describe every patch that is in place in this process; raises PatchError if somebody else replaced a patched symbol."""
    with _LOCK:
        places = [place for place in _PLACES.values() if place.users]
        if lost := [place for place in places if not place.in_force]:
            raise PatchError(" ".join(map(_describe_lost, lost)))
        return _by_name(place.description for place in places)


def digest_of(rows: list[dict[str, str]]) -> str:
    """Return one digest of described patches; processes with the same patches have the same one."""
    return _sha256([row["digest"] for row in _by_name(rows)])


def _import(patch: Patch) -> None:
    module = patch.target.partition(":")[0]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise _gone(patch, f"there is no module {error.name}") from error
        raise


def _ready(patch: Patch) -> _Place:
    """Return the place of a patch: the one in force or built earlier, unless its symbol has become another since."""
    owner, attribute = _look_up(patch)
    raw = _raw(owner, attribute)
    earlier = _PLACES.get(patch.name)
    if earlier is not None and earlier.owner is owner and earlier.patch == patch:
        if raw is (earlier.entry if earlier.users else earlier.raw):
            return earlier
    if earlier is not None and earlier.users:
        raise PatchError(f"{patch.name} is applied already, with another handler or on an object that is gone.")
    _PLACES[patch.name] = _build(patch, owner, attribute, raw)
    return _PLACES[patch.name]


def _look_up(patch: Patch) -> tuple[Any, str]:
    """Return the module or class that a target is an attribute of, and the attribute's name."""
    module, _, path = patch.target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for parent in parents:
        if not hasattr(owner, parent):
            raise _gone(patch, f"{owner.__name__} has no {parent}")
        owner = getattr(owner, parent)
    return owner, attribute


def _raw(owner: Any, attribute: str) -> Any:
    """Return the raw entry that an attribute comes from, because `getattr` takes static and class methods out of theirs."""
    if isinstance(owner, ModuleType):
        return getattr(owner, attribute, _MISSING)  # a lazy module may serve it by `__getattr__`
    return next((vars(cls)[attribute] for cls in owner.__mro__ if attribute in vars(cls)), _MISSING)


def _build(patch: Patch, owner: Any, attribute: str, raw: Any) -> _Place:
    """Probe the original and make its replacement."""
    version = installed(patch.peer)
    if version is None:
        raise PatchError(f"{patch.name}: {patch.peer} is not installed. Install {patch.peer} {patch.supports}.")
    if raw is _MISSING:
        raise _gone(patch, f"{owner.__name__} has no {attribute}")
    original = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
    if (other := getattr(original, "__dict__", {}).get(MARKER)) is not None:
        raise PatchError(f"{patch.name}: {patch.target} is patched already, by {other}. Revert that one first.")
    if patch.probe is not None and (seen := _probed(patch, original)) is not None:
        raise PatchDriftError(
            f"{patch.name}: {patch.target} of {patch.peer} {version} does not do what the patch needs: {seen} Nothing was "
            f"patched. Install {patch.peer} {patch.supports}; the patch is not needed when: {patch.remove_when}"
        )
    _warn_of_what_nobody_ran(patch, version)
    replacement = patch.make(original) if patch.handler is None else patch.make(original, patch.handler)
    if isinstance(replacement, FunctionType | type):
        setattr(replacement, MARKER, patch.name)
    return _Place(
        patch=patch,
        version=version,
        owner=owner,
        attribute=attribute,
        own_entry=vars(owner).get(attribute, _MISSING),
        raw=raw,
        original=original,
        entry=replacement if original is raw else type(raw)(replacement),
    )


def _probed(patch: Patch, original: Any) -> str | None:
    assert patch.probe is not None
    try:
        return patch.probe(original)
    except Exception as error:  # noqa: BLE001 - whatever upstream raises where it is called
        return f"its probe raised {error!r}."


def _warn_of_what_nobody_ran(patch: Patch, version: str) -> None:
    holds = patch.observed if patch.probe is None else "its probe holds"
    if not in_range(version, patch.supports):
        warn_untested({patch.peer: version}, f"patch {patch.name} was run with {patch.supports}; {holds}")


def _refuse_two_on_one_symbol(places: list[_Place]) -> None:
    taken: dict[tuple[int, str], _Place] = {}
    for place in places:  # a symbol that is patched already has the marker
        other = taken.setdefault((id(place.owner), place.attribute), place)
        if other is not place:
            raise PatchError(
                f"{other.patch.name} and {place.patch.name} both patch {place.patch.target}. One symbol takes one patch."
            )


def _verify(place: _Place) -> None:
    if _look_up(place.patch)[0] is not place.owner or not place.in_force:
        raise PatchError(
            f"{place.patch.name}: {place.patch.target} does not resolve to the replacement. Another patch or a reload changed it."
        )


def _gone(patch: Patch, what: str) -> PatchDriftError:
    return PatchDriftError(f"{patch.name}: {patch.target} is gone: {what}. Install {patch.peer} {patch.supports}.")


def _describe_lost(place: _Place) -> str:
    return (
        f"{place.patch.name}: {place.patch.target} was changed by somebody else after it was patched. It was left as it is, and "
        "may still call the replacement."
    )


def _by_name(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(rows, key=lambda row: row["name"])


def _text(value: Any) -> str:
    """Return the source of a function or class without the wrappers around it."""
    try:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(value))).rstrip("\n")
    except (OSError, TypeError):
        return "no source"


def _sha256(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
