"""The table of an environment: which peers are installed, which seams hold, which features work, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_ext.compat.seam import Finding, Seam, examine, named
from mismatch_ext.compat.source import Sources
from mismatch_ext.errors import PeerVersionError
from mismatch_ext.versions import PEERS, Peer, accepted, installed, known_wrong, on_cpu_build

FEATURES = (
    *("monitor", "monitor.weight_sync", "monitor.doctor"),
    *("precision", "lr", "kl", "correction", "sampling_mask", "routing.R2", "routing.R3"),
)


@dataclass(frozen=True)
class Host:
    """A way to run a block.

    Args:
        name: Its name in the table's head.
        peers: Peers that must be installed.
        using: Circumstances, as in `Seam.where`.
    """

    name: str
    peers: tuple[str, ...]
    using: frozenset[str]


@dataclass(frozen=True)
class PeerState:
    """What was found out about one peer.

    Args:
        peer: The peer.
        version: Its version; None if it is not installed.
        findings: What the probes of all its seams found, also of seams that no feature needs here.
        wrong: Known faults of this version in this environment.
    """

    peer: Peer
    version: str | None
    findings: tuple[Finding, ...]
    wrong: tuple[str, ...]

    @property
    def state(self) -> str:
        """Say in a few words whether its version was tested."""
        if self.version is None:
            return "not installed"
        if self.peer.tested(self.version):
            return "tested"
        if not self.peer.accepts(self.version):
            return f"refused (accepted: {self.peer.supports})"
        return f"untested (run: {', '.join(self.peer.ran)})"


@dataclass(frozen=True)
class Survey:
    """The state of an environment.

    Args:
        peers: One entry per peer.
        hosts: Maps each host to its features, and each feature to the reason for its refusal, or None if it works. If a host
            lacks a peer, its value is the peer's name.
    """

    peers: tuple[PeerState, ...]
    hosts: dict[str, dict[str, str | None] | str]

    def data(self) -> dict[str, Any]:
        """Return all of it as JSON-able data."""
        return {
            "release": installed("mismatch-ext"),
            "peers": {
                state.peer.name: {
                    "version": state.version,
                    "state": state.state,
                    "held": [f.seam.name for f in state.findings if f.change is None],
                    "changed": {f.seam.name: f.change for f in state.findings if f.change is not None},
                    "known_wrong": list(state.wrong),
                }
                for state in self.peers
            },
            "hosts": {
                name: {"not_installed": features} if isinstance(features, str) else features
                for name, features in self.hosts.items()
            },
        }

    def __str__(self) -> str:
        rows = [("peer", "version", "state", "seams")]
        for state in self.peers:
            held = sum(finding.change is None for finding in state.findings)
            count = f"{held} of {len(state.findings)} hold" if state.findings else ""
            rows.append((state.peer.name, state.version or "-", state.state, count))
        lines = [f"mismatch-ext {installed('mismatch-ext')}", "", *_columns(rows)]
        there = {name: found for name, found in self.hosts.items() if not isinstance(found, str)}
        notes: dict[str, int] = {}
        table = [("feature", *there)]
        for feature in FEATURES:
            cells = []
            for found in there.values():
                reason = found[feature]
                cells.append("works" if reason is None else f"no [{notes.setdefault(reason, len(notes) + 1)}]")
            table.append((feature, *cells))
        lines += ["", *_columns(table)] if there else []
        lines += [
            "",
            *(f"{name}: {lack} is not installed." for name, lack in self.hosts.items() if isinstance(lack, str)),
        ]
        lines += [f"[{number}] {reason}" for reason, number in notes.items()]
        return "\n".join(lines).rstrip()


def survey(seams: Sequence[Seam], hosts: Iterable[Host]) -> Survey:
    """Look at the installed peers.

    Args:
        seams: All declared seams.
        hosts: Ways to run a block.
    """
    sources = Sources()
    findings: dict[str, Finding] = {}
    for seam in seams:
        if installed(seam.peer) is not None:
            findings[seam.name] = examine([seam], (seam.features[0],), seam.where, sources)[0]
    peers = []
    for peer in PEERS.values():
        version = installed(peer.name)
        wrong = known_wrong(peer.name, version, ("cpu",) if on_cpu_build() else ()) if version is not None else ()
        own = tuple(finding for finding in findings.values() if finding.seam.peer == peer.name)
        peers.append(
            PeerState(peer, version, own, tuple(f"{entry.feature or 'all'}: {entry.reason}" for entry in wrong))
        )
    return Survey(tuple(peers), {host.name: _features(host, findings) for host in hosts})


def _features(host: Host, findings: dict[str, Finding]) -> dict[str, str | None] | str:
    missing = [peer for peer in host.peers if installed(peer) is None]
    if missing:
        return missing[0]
    return {feature: _refusal(host, feature, findings) for feature in FEATURES}


def _refusal(host: Host, feature: str, findings: dict[str, Finding]) -> str | None:
    asked = tuple(dict.fromkeys(("monitor", feature)))
    try:
        for peer in host.peers:
            accepted(peer, asked, host.using)
    except PeerVersionError as error:
        return str(error)
    for finding in findings.values():
        seam = finding.seam
        if finding.change is not None and seam.peer in host.peers and (needing := seam.needed_by(asked, host.using)):
            return f"{named(needing)}: {seam.name}: {finding.change} ({seam.upstream})"
    return None


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
