"""All declared seams, found without importing a peer, and the check that a trainer makes before it builds anything."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from mismatch_ext.compat import Seam, examine, refuse_changed
from mismatch_ext.compat.survey import Host, Survey, survey
from mismatch_ext.errors import PeerVersionError
from mismatch_ext.versions import PEERS, accepted, on_cpu_build, warn_untested

HERE = Path(__file__).parent
ENGINES = ("vllm", "sglang")
"""Peers that hold weights of their own."""


@cache
def declared() -> tuple[Seam, ...]:
    """Return `SEAMS` of each adapter's `seams.py`, which is loaded without its package because the package imports a peer."""
    return tuple(seam for path in sorted(HERE.glob("*/seams.py")) for seam in _load(path))


def _load(path: Path) -> tuple[Seam, ...]:
    name = f"{__package__}.{path.parent.name}.seams"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    seams: tuple[Seam, ...] = sys.modules[name].SEAMS
    return seams


def check(peers: Sequence[str], features: Sequence[str], using: Iterable[str] = ()) -> dict[str, str]:
    """Check that the features work with the installed peers, before anything of these peers is started.

    One warning names all versions that this release was not run with, and says how many seams hold.

    Args:
        peers: Keys of `versions.PEERS` that take part.
        features: What the block asks for (`MismatchConfig.features`).
        using: Circumstances, as in `Seam.where`: "trl" or "verl", "vllm", "cpu", the names of a trainer's base classes.

    Returns:
        Version by peer.

    Raises:
        PeerVersionError: A peer is missing, too old or known to be wrong for a feature; or this release was not run with an
            engine's version, and `monitor.weight_sync` is off, which would prove at run time that its weights are right.
        SeamError: Something that a feature needs is gone or has changed.
    """
    using = {*using}
    versions = {peer: accepted(peer, features, using) for peer in peers}
    findings = examine([seam for seam in declared() if seam.peer in versions], features, using)
    refuse_changed(findings)
    untested = {peer: version for peer, version in versions.items() if not PEERS[peer].tested(version)}
    engines = {peer: version for peer, version in untested.items() if peer in ENGINES}
    if engines and "monitor.weight_sync" not in features:
        found = " and ".join(f"{peer} {version}" for peer, version in engines.items())
        install = " ".join(f"{peer}=={PEERS[peer].nearest(version)}" for peer, version in engines.items())
        raise PeerVersionError(
            f"mismatch.monitor.weight_sync='off' with {found}, which this release was not run with: nothing would prove that "
            f"the engine holds the trainer's weights. Remove weight_sync: off, or install what was run (pip install {install})."
        )
    if untested:
        warn_untested(untested, f"the {len(findings)} seams in use hold")
    return versions


def hosts() -> tuple[Host, ...]:
    """Return the combinations of trainer and engine that `mismatch-ext compat` looks at."""
    trl, verl = ("torch", "transformers", "accelerate", "trl"), ("torch", "transformers", "verl")
    engine = {"vllm", *(["cpu"] if on_cpu_build() else [])}
    return (
        Host("TRL GRPO + vLLM", (*trl, "vllm"), frozenset({"trl", "GRPOTrainer", *engine})),
        Host("TRL GRPO + vLLM server", (*trl, "vllm"), frozenset({"trl", "GRPOTrainer", "server", *engine})),
        Host("TRL AsyncGRPO + vLLM server", (*trl, "vllm"), frozenset({"trl", "AsyncGRPOTrainer", "server", *engine})),
        Host("TRL RLOO + vLLM", (*trl, "vllm"), frozenset({"trl", "RLOOTrainer", *engine})),
        Host("TRL GRPO alone", trl, frozenset({"trl", "GRPOTrainer"})),
        Host("verl + vLLM", (*verl, "vllm"), frozenset({"verl", "fsdp2", *engine})),
        Host("verl + SGLang", (*verl, "sglang"), frozenset({"verl", "sglang", "fsdp2"})),
        Host("verl Megatron + vLLM", (*verl, "megatron-core", "vllm"), frozenset({"verl", "megatron", *engine})),
    )


def installed_environment() -> Survey:
    """Examine everything that is installed here, in about a second: it reads sources and imports no peer."""
    return survey(declared(), hosts())
