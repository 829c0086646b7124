"""All declared seams and refusals, read without importing a peer, and the check that comes before anything is built."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import PeerVersionError
from mismatch_ext.seams import FEATURES, Host, Refusal, Seam, examine, named, survey
from mismatch_ext.versions import PEERS, accepted, on_cpu_build, warn_untested

HERE = Path(__file__).parent
ENGINES = ("vllm", "sglang")
"""Peers that hold weights of their own."""


@cache
def declared() -> tuple[Seam, ...]:
    """Return `SEAMS` of each adapter's `seams.py`, or `upstream.py`."""
    files = sorted([*HERE.glob("*/seams.py"), *HERE.glob("*/upstream.py")])
    return tuple(seam for path in files for seam in _load(path.parent.name, path.stem).SEAMS)


def refusals() -> tuple[Refusal, ...]:
    """Return what the hosts refuse by name; for verl, what its driver's own table says of the smallest configurations."""
    of_verl = (
        Refusal(tuple(host.using), feature, why)
        for host in hosts()
        for feature in FEATURES
        if "verl" in host.using and (why := _why_verl_refuses(host, feature)) is not None
    )
    return (*_load("trl", "upstream").REFUSALS, *of_verl)


def _why_verl_refuses(host: Host, feature: str) -> str | None:
    """Return why verl's driver refuses the smallest block with a feature, and what to do; None where it does not."""
    section, _, key = feature.partition(".")
    values = {
        "precision": {"dtype": "float16"},
        "correction": {"preset": "decoupled_token_is"},
        "routing": {"mode": key},
        "monitor": {"weight_sync": "warn" if key == "weight_sync" else "off"},
    }
    block = MismatchConfig.parse({"monitor": values["monitor"], section: values.get(section, {})})
    assert block is not None
    actor, engine = "megatron" if "megatron" in host.using else "fsdp", "sglang" if "sglang" in host.using else "vllm"
    config = {"actor_rollout_ref": {"actor": {"strategy": actor}, "rollout": {"name": engine}}}
    for row, _ in _load("verl", "refusals").refused(config, block):
        return f"{row.path}: {row.sentence}"
    return None


def _load(adapter: str, file: str) -> ModuleType:
    """Load a module of an adapter without its package, because the package imports a peer."""
    name = f"{__package__}.{adapter}.{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / adapter / f"{file}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def check(peers: Sequence[str], features: Sequence[str], using: Iterable[str] = ()) -> dict[str, str]:
    """Check that the features work with the installed peers, before anything of these peers is started.

    Modules that this process has loaded are inspected. One warning names all versions that nobody has run with this release.

    Args:
        peers: Keys of `versions.PEERS` that take part.
        features: What the block asks for (`MismatchConfig.features`).
        using: Circumstances, as in `Seam.where`: "trl" or "verl", "vllm", "cpu", the names of a trainer's base classes.

    Returns:
        Version by peer.

    Raises:
        PeerVersionError: A peer is missing, too old or known to be wrong for a feature; or nobody has run an engine's version,
            and `monitor.weight_sync` is off, which would prove at run time that its weights are right.
        SeamError: Something that a feature needs is gone or has changed.
    """
    using = {*using}
    versions = {peer: accepted(peer, features, using) for peer in peers}
    count = examine([seam for seam in declared() if seam.peer in versions], features, using)
    untested = {peer: version for peer, version in versions.items() if not PEERS[peer].tested(version)}
    engines = {peer: version for peer, version in untested.items() if peer in ENGINES}
    if engines and "monitor.weight_sync" not in features:
        named = " and ".join(f"{peer} {version}" for peer, version in engines.items())
        install = " ".join(f"{peer}=={PEERS[peer].nearest(version)}" for peer, version in engines.items())
        stays = any(refusal.feature == "monitor.weight_sync" and {*refusal.where} <= using for refusal in refusals())
        raise PeerVersionError(
            f"mismatch.monitor.weight_sync='off' with {named}, which nobody has run with this release: nothing would prove that "
            f"the engine holds the trainer's weights. {'Install' if stays else 'Remove weight_sync: off, or install'} what was "
            f"run (pip install {install})."
        )
    if untested:
        warn_untested(untested, f"the {count} seams in use hold, and what they do is checked at run time")
    return versions


def hosts() -> tuple[Host, ...]:
    """Return the combinations of trainer and engine that `mismatch-ext compat` looks at."""
    trl, verl = ("torch", "transformers", "accelerate", "trl"), ("torch", "transformers", "verl")
    engine = {"vllm", *(["cpu"] if on_cpu_build() else [])}
    with_trl = [
        Host("TRL GRPO + vLLM", (*trl, "vllm"), frozenset({"trl", "GRPOTrainer", *engine})),
        Host("TRL GRPO + vLLM server", (*trl, "vllm"), frozenset({"trl", "GRPOTrainer", "server", *engine})),
        Host("TRL RLOO + vLLM", (*trl, "vllm"), frozenset({"trl", "RLOOTrainer", *engine})),
        Host("TRL GRPO alone", trl, frozenset({"trl", "GRPOTrainer", "alone"})),
    ]
    with_verl = [
        Host("verl + vLLM", (*verl, "vllm"), frozenset({"verl", "fsdp", *engine})),
        Host("verl + SGLang", (*verl, "sglang"), frozenset({"verl", "sglang", "fsdp"})),
        Host("verl Megatron + vLLM", (*verl, "megatron-core", "vllm"), frozenset({"verl", "megatron", *engine})),
    ]
    return (*with_trl, *with_verl)


def installed_environment(*, importing: bool = False) -> dict[str, Any]:
    """Examine everything that is installed here. It takes a second, or with imports about half a minute."""
    found = survey(declared(), refusals(), hosts(), importing=importing)
    if importing:
        for host in hosts():
            features = found["hosts"][host.name]
            if "not_installed" not in features:
                found["notes"][host.name] = _examine_trl_loss(host, features)
    return found


def _examine_trl_loss(host: Host, features: dict[str, str | None]) -> dict[str, str]:
    """Ask TRL's own loss, with TRL's default settings, whether it is the known one; return what is to be said by feature.

    A feature that does not work with this loss gets the reason in `features`.
    """
    trainer = next((name for name in ("GRPOTrainer", "RLOOTrainer") if name in host.using), None)
    if trainer is None or "trl" not in host.using:
        return {}
    try:
        behavior = importlib.import_module(f"{__package__}.trl.behavior")
    except Exception:  # noqa: BLE001 - whatever TRL raises where it does not fit its environment, the seams have said it
        return {}
    notes = dict[str, str]()
    for feature in FEATURES:
        if features[feature] is not None or feature.partition(".")[0] not in behavior.IN_OBJECTIVE:
            continue
        kind = getattr(behavior, trainer)
        change, added = behavior.examine(kind, [feature.partition(".")[0]], behavior.DEFAULT_LOSS)
        if change is not None:
            features[feature] = f"{named([feature])}: {trainer}._compute_loss {change}."
        elif added is not None:
            notes[feature] = added
    return notes
