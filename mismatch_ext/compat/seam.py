"""A seam: a place in a peer that this package relies on, and the features that need it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mismatch_ext.compat.claims import Claim, changed
from mismatch_ext.compat.source import Sources
from mismatch_ext.errors import SeamError
from mismatch_ext.versions import PEERS, installed

ALL = "monitor"
"""The feature that every block asks for: every run needs the seams of this feature."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Seam:
    """One place in a peer that this package relies on.

    Args:
        name: "peer/what", unique.
        peer: Key of `PEERS`.
        features: Features of the block that need it (`MismatchConfig.features`): a section, or a mode such as "routing.R3".
        what: What it is used for.
        claims: What must be true of the peer's source.
        upstream: Where the peer documents or defines it.
        where: The seam is used only when all of these circumstances hold, such as "vllm", "cpu" or the name of a trainer.
    """

    name: str
    peer: str
    features: tuple[str, ...]
    what: str
    claims: tuple[Claim, ...]
    upstream: str
    where: tuple[str, ...] = ()

    def needed_by(self, asked: Iterable[str], using: Iterable[str]) -> tuple[str, ...]:
        """Return those asked features that need this seam in these circumstances."""
        if not set(self.where) <= set(using):
            return ()
        return tuple(one for one in asked if any(one == own or one.startswith(f"{own}.") for own in self.features))

    def probe(self, sources: Sources) -> str | None:
        """Return None when the seam holds, otherwise what was found instead; imports nothing."""
        found = [change for claim in self.claims if (change := changed(claim, sources)) is not None]
        return " ".join(found) or None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one probe.

    Args:
        seam: The seam.
        change: What was found instead; None when the seam holds.
        features: Those asked features that need the seam.
    """

    seam: Seam
    change: str | None
    features: tuple[str, ...]


def examine(
    seams: Iterable[Seam], asked: Sequence[str], using: Iterable[str], sources: Sources | None = None
) -> list[Finding]:
    """Probe each seam that the features need in these circumstances once.

    Args:
        seams: All declared seams.
        asked: Features, as in `MismatchConfig.features`.
        using: Circumstances, as in `Seam.where`.
        sources: Where to read; None reads the installed packages.
    """
    sources, using = sources or Sources(), set(using)
    needed = [(seam, features) for seam in seams if (features := seam.needed_by(asked, using))]
    return [Finding(seam=seam, change=seam.probe(sources), features=features) for seam, features in needed]


def refuse_changed(findings: Iterable[Finding]) -> None:
    """Refuse every feature with a seam that does not hold.

    Raises:
        SeamError: A seam does not hold; names the features, the seams, what was found, their descriptions, and what to do.
    """
    lost = [finding for finding in findings if finding.change is not None]
    if lost:
        raise SeamError(" ".join(map(_sentence, lost)) + f" {_remedy(lost)} Nothing was patched or started.")


def _sentence(finding: Finding) -> str:
    seam = finding.seam
    version = installed(seam.peer)
    return (
        f"{named(finding.features)}: {seam.peer} {version} has changed {seam.name}, which is used for {seam.what}: "
        f"{finding.change} See {seam.upstream}."
    )


def _remedy(lost: Sequence[Finding]) -> str:
    features = [feature for finding in lost for feature in finding.features]
    peers = dict.fromkeys(finding.seam.peer for finding in lost)
    install = " ".join(f"{peer}=={PEERS[peer].nearest(installed(peer))}" for peer in peers)
    if ALL in features:
        return f"Install a version that was run (pip install {install}); no section can do without."
    sections = dict.fromkeys(feature.partition(".")[0] for feature in features)
    return f"Remove {' and '.join(sections)} from the block, or install a version that was run (pip install {install})."


def named(features: Sequence[str]) -> str:
    """Return the block's keys that switch the features on, as text."""
    if ALL in features:
        return "the mismatch block"
    keys = []
    for feature in features:
        section, _, mode = feature.partition(".")
        keys.append(f"mismatch.{section}.mode={mode!r}" if section == "routing" else f"mismatch.{feature}")
    return " and ".join(keys)
