"""`mismatch.level: observe` before Ray starts: what the block would set is set in a copy of verl's configuration, and said."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mismatch_ext.adapters.verl.settings.modes import HYBRID, unsupported
from mismatch_ext.adapters.verl.settings.refusals import ELSEWHERE, REQUIRED
from omegaconf import DictConfig, OmegaConf, open_dict

from mismatch_ext.terminal import say
from mismatch_ext.verdicts import Verdicts

Step = tuple[str, Callable[[DictConfig], Any]]

ENTERED = (
    "trainer.use_v1",
    "trainer.v1.trainer_mode",
    HYBRID,
    "actor_rollout_ref.rollout.name",
)
"""Settings without which this package's trainer cannot take the place of verl's, and so cannot observe."""


def rehearse(config: DictConfig, steps: Sequence[Step]) -> tuple[Verdicts, dict[str, tuple[Any, Any]]]:
    """Prepare a copy of a configuration, and return what was refused and what was set.

    Args:
        config: All of verl's configuration; left as it is.
        steps: What prepares it, each under the name of its check.

    Returns:
        Findings, and each setting that differs: its value, and the one that `enforce` gives it.
    """
    verdicts, target = Verdicts("observe"), copy.deepcopy(config)
    before = dict(_leaves(OmegaConf.to_container(config, resolve=False)))
    for name, step in steps:
        # A step prints what it has set, which holds for a run and not for this copy: its output is dropped.
        with verdicts.checking(name), open_dict(target), contextlib.redirect_stdout(io.StringIO()):
            step(target)
    after = dict(_leaves(OmegaConf.to_container(target, resolve=False)))
    changes = {
        name: (before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }
    return verdicts, changes


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def say_changes(changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Say what `enforce` would have set in verl's configuration."""
    for name, (was, would) in changes.items():
        say(f"mismatch-ext: mismatch.level='observe': enforce would have set {name}={would!r} (is {was!r})")


def entered(config: DictConfig) -> bool:
    """Tell whether this package's trainer can take the place of the one that a configuration starts."""
    if any(name == module or name.startswith(f"{module}.") for module in ELSEWHERE for name in sys.modules):
        return False
    allowed = {name: values for name, values, _ in REQUIRED}
    given = {name: OmegaConf.select(config, name) for name in ENTERED}
    if not all(value is None or value in allowed.get(name, (value,)) for name, value in given.items()):
        return False
    found = unsupported(config)
    return found is None or found[0] not in ENTERED


def leave(config: DictConfig) -> None:
    """Take the block out of a run that cannot be observed, which then is stock verl's."""
    warnings.warn(
        "mismatch.level='observe': this run is not observed, because this package's trainer cannot take the place of verl's "
        f"under {', '.join(f'{name}={OmegaConf.select(config, name)!r}' for name in ENTERED)}; it trains as without the block.",
        stacklevel=2,
    )
    with open_dict(config):
        config.mismatch = None
