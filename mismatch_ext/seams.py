"""What this package relies on in its peers, which features need it, and the table of `mismatch-ext compat`.

A seam claims that names exist and take the parameters that we give them, and says what shows at run time that they still do what
we need. Modules that are loaded are inspected. Others are only looked for, unless they are to be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_ext.errors import PeerVersionError, SeamError
from mismatch_ext.versions import PEERS, accepted, installed, known_wrong, on_cpu_build

ALL = "monitor"
"""The feature that every block asks for."""

FEATURES = (
    *(ALL, "monitor.weight_sync"),
    *("precision", "lr", "kl", "correction", "sampling_mask", "routing.R2", "routing.R3"),
)

_NAMES = (
    "found: all modules are there. Their names are checked when a run starts, or now by --import.",
    "holds: all names are there and take the parameters that we give them. What they do is checked when a run starts.",
)
_BESIDE = (
    "Each feature for itself: settings, models, and sections that do not go together are checked when a run starts."
)


@dataclass(frozen=True)
class Claim:
    """A module, class, function or class attribute exists: "package.module:Attribute.path", or a module."""

    target: str
    params: tuple[str, ...] = ()  # first parameters of the function, without `self`

    def change(self, importing: bool = False) -> str | None:
        """Return None if the claim holds, otherwise a sentence that says what was found instead."""
        name, _, path = self.target.partition(":")
        if name not in sys.modules:
            if not importing:
                return None if _is_there(name) else f"there is no module {name}."
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - whatever a peer's module raises where it does not fit its environment
                return f"importing {name} raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        value: Any = sys.modules[name]
        for part in path.split(".") if path else ():
            if not hasattr(value, part):
                fields = {
                    field
                    for kind in getattr(value, "__mro__", ())
                    for field in kind.__dict__.get("__annotations__", ())
                }
                return None if part in fields else f"{self.target} is not there."
            value = getattr(value, part)
        if not self.params:
            return None
        parameters = tuple(name for name in inspect.signature(value).parameters if name != "self")
        if parameters[: len(self.params)] == self.params:
            return None
        return f"{self.target} takes ({', '.join(parameters)}), not {', '.join(self.params)}."


def exists(target: str, *params: str) -> Claim:
    """Claim that a target exists and, if parameters are named, that these are its first ones."""
    return Claim(target, params)


@dataclass(frozen=True, kw_only=True, eq=False)
class Seam:
    """One place in a peer that this package relies on."""

    name: str  # "peer/what", unique
    # of the block that need it (`MismatchConfig.features`): a section, or a mode such as "routing.R3"
    features: tuple[str, ...]
    what: str  # what it is used for
    claims: tuple[Claim, ...]  # what must exist
    checked: str  # what shows at run time that it does what we need
    upstream: str  # where the peer documents or defines it
    where: tuple[str, ...] = ()  # circumstances that must all hold, such as "vllm", "cpu" or the name of a trainer

    @property
    def peer(self) -> str:
        """The key of `PEERS`."""
        return self.name.partition("/")[0]

    def needed_by(self, features: Iterable[str], using: Iterable[str]) -> tuple[str, ...]:
        """Return those features that need this seam in these circumstances."""
        if not set(self.where) <= set(using):
            return ()
        return tuple(
            name for name in features if any(f"{name}.".startswith(f"{needing}.") for needing in self.features)
        )

    def change(self, importing: bool = False) -> str | None:
        """Return None if all claims hold, otherwise what was found instead."""
        return " ".join(change for claim in self.claims if (change := claim.change(importing))) or None


def read_seams(hooks: Iterable[Mapping[str, Any]], sources: Mapping[str, str]) -> tuple[Seam, ...]:
    """Return the hooks of an adapter's upstream.toml as seams.

    Args:
        hooks: What is below `[[hook]]`.
        sources: Address of each peer's source, which a hook's `file` is relative to.
    """
    return tuple(
        Seam(
            name=hook["name"],
            features=tuple(hook.get("features", [ALL])),
            what=hook["what"],
            claims=tuple(map(_claim, hook["names"])),
            checked=hook["checked"],
            upstream=sources[hook["name"].partition("/")[0]] + hook["file"],
            where=tuple(hook.get("where", ())),
        )
        for hook in hooks
    )


def _claim(name: str) -> Claim:
    """Read "module:Attribute.path(first, parameters)"."""
    target, _, params = name.rstrip(")").partition("(")
    return exists(target, *filter(None, params.split(", ")))


@dataclass(frozen=True)
class Refusal:
    """A feature that a host refuses by name in some circumstances."""

    where: tuple[str, ...]  # as in `Seam.where`
    feature: str
    why: str  # in whole sentences, with what to do


@dataclass(frozen=True)
class Host:
    """A way to run a block: its name in the table, the peers that it takes, and its circumstances, as in `Seam.where`."""

    name: str
    peers: tuple[str, ...]
    using: frozenset[str]


def examine(seams: Iterable[Seam], features: Sequence[str], using: Iterable[str]) -> int:
    """Check the seams that features need in these circumstances, and return their number; raises SeamError for changed ones."""
    needed = [(seam, needing) for seam in seams if (needing := seam.needed_by(features, using))]
    lost = [(seam, needing, change) for seam, needing in needed if (change := seam.change()) is not None]
    if not lost:
        return len(needed)
    changes = [
        f"{named(needing)}: {seam.peer} {installed(seam.peer)} has changed {seam.name}, which is used for {seam.what}: {change} "
        f"See {seam.upstream}."
        for seam, needing, change in lost
    ]
    install = " ".join(
        f"{peer}=={PEERS[peer].nearest(installed(peer))}" for peer in dict.fromkeys(seam.peer for seam, *_ in lost)
    )
    sections = dict.fromkeys(feature.partition(".")[0] for _, needing, _ in lost for feature in needing)
    remove = f"Remove {' and '.join(sections)} from the block, or install" if ALL not in sections else "Install"
    raise SeamError(
        f"{' '.join(changes)} {remove} a version that was run (pip install {install}). Nothing was started."
    )


def named(features: Sequence[str]) -> str:
    """Return the block's keys that switch features on, as text."""
    if ALL in features:
        return "the mismatch block"
    return " and ".join(
        f"mismatch.routing.mode={feature.removeprefix('routing.')!r}"
        if feature.startswith("routing.")
        else f"mismatch.{feature}"
        for feature in features
    )


def survey(
    seams: Sequence[Seam], refusals: Sequence[Refusal], hosts: Iterable[Host], *, importing: bool = False
) -> dict[str, Any]:
    """Return the state of an environment as JSON-able data; `importing` imports the modules, instead of only looking for them."""
    here = [seam for seam in seams if installed(seam.peer) is not None]
    changes = {seam.name: seam.change(importing) for seam in here}
    peers = {}
    for name, peer in PEERS.items():
        version = installed(name)
        of_peer = {seam.name: changes[seam.name] for seam in here if seam.peer == name}
        wrong = () if version is None else known_wrong(name, version, ("cpu",) if on_cpu_build() else ())
        held = [seam for seam, change in of_peer.items() if change is None]
        changed = {seam: change for seam, change in of_peer.items() if change is not None}
        reasons = [f"{fault.feature or 'all'}: {fault.reason}" for fault in wrong]
        peers[name] = {
            "version": version,
            "state": peer.state(version),
            "held": held,
            "changed": changed,
            "known_wrong": reasons,
        }
    table: dict[str, dict[str, str | None]] = {}
    for host in hosts:
        lacking = [peer for peer in host.peers if installed(peer) is None]
        if lacking:
            table[host.name] = {"not_installed": lacking[0]}
        else:
            table[host.name] = {feature: _reason(host, feature, here, changes, refusals) for feature in FEATURES}
    return {
        "release": installed("mismatch-ext"),
        "imported": importing,
        "peers": peers,
        "hosts": table,
        "notes": {},  # by host and feature, what is to be said of one that works
    }


def _reason(
    host: Host, feature: str, seams: Sequence[Seam], changes: dict[str, str | None], refusals: Sequence[Refusal]
) -> str | None:
    """Return why a feature does not work on a host, or None."""
    for refusal in refusals:
        if refusal.feature == feature and set(refusal.where) <= host.using:
            return f"Refused by name: {refusal.why}"
    features = tuple(dict.fromkeys((ALL, feature)))
    try:
        for peer in host.peers:
            accepted(peer, features, host.using)
    except PeerVersionError as error:
        return str(error)
    for seam in seams:
        needing = seam.needed_by(features, host.using) if seam.peer in host.peers else ()
        if needing and changes[seam.name] is not None:
            return f"{named(needing)}: {seam.name}: {changes[seam.name]} ({seam.upstream})"
    return None


def table(data: dict[str, Any]) -> str:
    """Return what `survey` found as text."""
    rows = [("peer", "version", "state", "seams")]
    for name, peer in data["peers"].items():
        count = len(peer["held"]) + len(peer["changed"])
        rows.append((name, peer["version"] or "-", peer["state"], f"{len(peer['held'])} of {count}" if count else ""))
    lines = [f"mismatch-ext {data['release']}", "", *_columns(rows)]
    there = {name: cells for name, cells in data["hosts"].items() if "not_installed" not in cells}
    good, notes = "holds" if data["imported"] else "found", dict[str, int]()
    cells = [("feature", *there)]
    for feature in FEATURES:
        row = [feature]
        for name, reasons in there.items():
            why = reasons[feature]
            told = data["notes"].get(name, {}).get(feature) if why is None else why
            number = "" if told is None else f" [{notes.setdefault(told, len(notes) + 1)}]"
            row.append(f"{good if why is None else 'no'}{number}")
        cells.append(tuple(row))
    lines += ["", *_columns(cells), "", _NAMES[data["imported"]], _BESIDE] if there else []
    lines += [f"[{number}] {reason}" for reason, number in notes.items()]
    lacking = {name: host["not_installed"] for name, host in data["hosts"].items() if name not in there}
    return "\n".join([*lines, "", *(f"{name}: {peer} is not installed." for name, peer in lacking.items())]).rstrip()


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _is_there(name: str) -> bool:
    """Tell whether a module has a file, without importing the packages above it."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    places = [Path(folder, *rest) for folder in folders]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)
