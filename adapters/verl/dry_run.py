"""Composes verl's configuration as `main_ppo` does, and makes the driver's checks of it without starting Ray."""

from __future__ import annotations

import argparse
import contextlib
import io
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, MismatchError

LATER = {
    "monitor": "workers: verl's loss and token layout behave as in the tested version, and the engine is verl's own",
    "monitor.weight_sync": "each weight update: trainer and rollout server score the same probe tokens",
    "precision": "workers and servers: the weights fit the dtype, and both sides hold the dtypes and formats that you asked for",
    "routing.R2": "workers: the model has routers that can be replayed",
    "routing.R3": "workers: the model has routers that can be replayed; each batch: the engine's routes fit its tokens",
    "correction": "workers: the policy loss multiplies by the correction's weights, if it has any",
    "sampling_mask": "each answer: the engine reported enough tokens for its mask",
}
"""What is checked once Ray runs, by the feature that needs it."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What the driver would do with a configuration."""

    verdict: str  # "accepted", "refused", "not observed" (verl trains without the block), or "no mismatch config"
    refused: list[str]
    warnings: list[str]
    settings: list[str]  # of verl that the block sets
    later: list[str]

    @property
    def status(self) -> int:
        """The exit status: 0 if the block acts as asked, otherwise 1."""
        return 0 if self.verdict == "accepted" else 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def __str__(self) -> str:
        parts = (
            ("refused", self.refused), ("warning", self.warnings), ("sets", self.settings), ("checked later", self.later),
        )  # fmt: skip
        lines = [f"{name}: {line}" for name, entries in parts for line in entries]
        return "\n".join([*lines, f"verdict: {self.verdict}"])


def dry_run(words: Sequence[str]) -> DryRun:
    """Make the driver's checks for the arguments of `main_ppo`; raises ConfigError if there is no configuration to check."""
    given = _arguments(words)
    verls = io.StringIO()
    with contextlib.redirect_stdout(verls), warnings.catch_warnings(record=True) as warned:
        config = composed(given.overrides, given.config_path, given.config_name)
        warned.clear()
        warnings.simplefilter("always")
        observes, refused, later = False, list[str](), list[str]()
        stated = config.get("mismatch")
        if stated is not None:
            observes, refused, later = _checked(config)
    told = list(dict.fromkeys(str(entry.message) for entry in warned if "mismatch" in str(entry.message)))
    said = [line.removeprefix(_OURS) for line in verls.getvalue().splitlines() if line.startswith(_OURS)]
    if stated is None:
        verdict = "no mismatch config"
    elif refused:
        verdict = "not observed" if observes else "refused"
    else:
        verdict = "accepted"
    return DryRun(verdict=verdict, refused=refused, warnings=told, settings=said, later=[] if refused else later)


_OURS = "mismatch-ext: "


def _checked(config: Any) -> tuple[bool, list[str], list[str]]:
    """Return whether the run is only observed, every refusal, and what is checked later."""
    from mismatch_ext.adapters.verl.block import block_of
    from mismatch_ext.adapters.verl.config import observable, prepare, reasons
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    observes = False
    try:
        given: Any = OmegaConf.to_container(config.mismatch, resolve=True)
        block = MismatchConfig.parse(given)
        assert block is not None
        observes = block.level == "observe"
        if found := [str(error) for error in reasons(config, observable(config, block))]:
            return observes, found, []
        prepare(config)
    except MismatchError as error:
        return observes, [str(error)], []
    except OmegaConfBaseException as error:
        raise ConfigError(f"--verl: {' '.join(str(error).split())[:400]}") from error
    try:
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
    except Exception as error:  # noqa: BLE001 - whatever verl refuses with
        return False, [f"verl: {type(error).__name__}: {' '.join(str(error).split())}"], []
    acting = block_of(config.actor_rollout_ref)
    assert acting is not None
    return observes, [], [LATER[feature] for feature in acting.features if feature in LATER]


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mismatch-ext compat --verl", add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-path", "-cp", default="config")
    parser.add_argument("--config-name", "-cn", default="ppo_trainer")
    return parser.parse_intermixed_args(words)


def composed(overrides: Sequence[str], folder: str = "config", name: str = "ppo_trainer") -> Any:
    """Compose verl's configuration from arguments of `main_ppo`; raises ConfigError if Hydra refuses them."""
    try:
        import verl.trainer
    except ModuleNotFoundError as error:
        raise ConfigError(f"--verl: {error}. Run this where verl is installed.") from error
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    where = Path(verl.trainer.__path__[0], folder).resolve()  # as Hydra's main, below the module that calls it
    try:
        with initialize_config_dir(version_base=None, config_dir=str(where)):
            return compose(name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"--verl: {' '.join(str(error).split())[:400]}") from error


def require(config: Any, paths: Iterable[str]) -> None:
    """Raise ConfigError for the first of these settings that a configuration lacks."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        for path in paths:
            OmegaConf.select(config, path, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"--verl: {' '.join(str(error).split())[:400]}") from error
