"""What verl's configuration may not say beside a block: the rows of refusals.toml, read before Ray starts and by
`mismatch-ext compat`.

This module imports no verl, so that `compat` can read it where none is installed.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from mismatch_ext.config import MismatchConfig, RoutingConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.dtypes import TrainerFixes, spelled
from mismatch_ext.presets import PRESETS, ResolvedCorrection, resolve

SYNC, COLOCATE, SEPARATE = "sync", "colocate_async", "separate_async"
MODES = (SYNC, COLOCATE, SEPARATE)
"""Modes of verl 0.9.1's V1 trainer, all of them."""
TRAINER = "mismatch"
"""Name of our synchronous trainer in verl's registry, prefix of the other modes' names, and the vendor's name of our engine."""
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
"""verl's own: modules that it imports in every process."""
TRAINERS = "mismatch_ext.adapters.verl.driver.modes"
EXTENSION = "mismatch_ext.adapters.verl.rollout.vllm_extension.RolloutExtension"
LOOPS = "mismatch_ext.adapters.verl.sampling_mask.MaskedLoopManager"
FSDP = ("fsdp", "fsdp2")
"""Strategies of verl's FSDP engine; verl has one class for both."""
VERL_PRESETS = frozenset(name for name in PRESETS if name == "disabled" or name.startswith(("decoupled_", "bypass_")))
"""The names of the factory methods of verl's RolloutCorrectionConfig."""
QUIRKS = frozenset({"verl_inverse_k1", "verl_empty_rows"})
"""Where verl, and so its presets, compute differently from this package."""
# Other trainers of verl that check their configuration as main_ppo does. The list names modules one by one, because main_ppo
# uses modules beside them too: its separate_async has a worker from verl.experimental.separation.
ELSEWHERE = (
    "verl.experimental.one_step_off_policy",
    "verl.experimental.fully_async_policy",
    "verl.experimental.separation.ray_trainer",
)

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
CORRECTION, POLICY_LOSS = "algorithm.rollout_correction", f"{ACTOR}.policy_loss"
_MIXED = f"{ACTOR}.fsdp_config.mixed_precision"
FIXES = TrainerFixes(
    masters=f"Set {ACTOR}.fsdp_config.model_dtype=fp32, and let mixed_precision compute in the half dtype",
    autocast_off=f"Set {_MIXED}.param_dtype=fp32, or leave it out",
    autocast=f"Set {_MIXED}.param_dtype={{flag}}, or leave it out: mismatch.precision sets it.",
    flags=(("float16", "fp16"), ("bfloat16", "bf16")),
    reduction=f"Set {_MIXED}.reduce_dtype=fp32",
)
"""What to change where the trainer does not compute as asked for."""


def trainer_of(mode: str) -> str:
    """Return the name in verl's registry of our trainer for a mode."""
    return TRAINER if mode == SYNC else f"{TRAINER}_{mode}"


class Asked:
    """A configuration of verl as its user gave it, or the part that is known, with the block.

    Its properties are facts by which rows are chosen; its methods of a value tell whether that value is refused.
    """

    def __init__(self, config: Mapping[str, Any], block: MismatchConfig) -> None:
        self._config, self.block = config, block

    def at(self, path: str, default: Any = None) -> Any:
        """Return the value of a path; the default where it is absent or null.

        Paths below `mismatch.` are of the block, where those of `correction` have the preset's values, and one in capitals is an
        environment variable.
        """
        if path.isupper():
            return self.variables.get(path, os.environ.get(path, default))
        first, *names = path.split(".")
        found: Any = self.block
        if first != "mismatch":
            found, names = self._config, [first, *names]
        elif names[0] == "correction":
            found, names = self.correction, names[1:]
        for name in names:
            if found is None or isinstance(found, (str, int, float)):
                return default
            found = found.get(name) if hasattr(found, "get") else getattr(found, name)
        return default if found is None else found

    def holds(self, condition: str) -> bool:
        """Tell whether a fact or setting has a value ("mode=sync"), a fact holds, the block has a section, or "not ..."."""
        if condition.startswith("not "):
            return not self.holds(condition.removeprefix("not "))
        name, _, value = condition.partition("=")
        if value:
            return value == str(self.at(name) if "." in name else getattr(self, name))
        if condition.startswith("mismatch."):
            wanted = condition.removeprefix("mismatch.").split(".")
            return any(feature.split(".")[: len(wanted)] == wanted for feature in self.block.features)
        return bool(getattr(self, condition))

    @cached_property
    def mode(self) -> str:
        """Mode of verl's trainer, also if our trainer has replaced verl's."""
        given = str(self.at("trainer.v1.trainer_mode", SYNC))
        return next((mode for mode in MODES if given in (mode, trainer_of(mode))), given)

    @cached_property
    def correction(self) -> ResolvedCorrection | None:
        """Settings of the `correction` section."""
        return None if self.block.correction is None else settings_of(self.block.correction)

    @property
    def strategy(self) -> str:
        """Strategy of the actor's engine."""
        return str(self.at(f"{ACTOR}.strategy", "fsdp"))

    @property
    def engine(self) -> str:
        """Name of the rollout's engine."""
        return str(self.at(f"{ROLLOUT}.name", "vllm"))

    @property
    def bypass(self) -> bool:
        """Whether the engine's log-probabilities are the old policy's, so that no pass scores fresh rollouts."""
        if self.correction is not None:
            return self.correction.mode == "bypass"
        return bool(self.at(f"{CORRECTION}.bypass_mode"))

    @property
    def clips(self) -> bool:
        """Whether the `correction` section has weights, and bounds them instead of masking tokens."""
        section = self.correction
        if section is None or section.level == "none":
            return False
        return section.bound in ("truncate", "clip")

    @property
    def drops(self) -> bool:
        """Whether the loss drops sequences."""
        return self.correction is not None and self.correction.off_policy_threshold is not None

    @property
    def stops(self) -> bool:
        """Whether an alarm stops the run with a checkpoint."""
        return any(rule.action == "stop" for rule in self.block.monitor.alarms.values())

    @cached_property
    def variables(self) -> dict[str, str]:
        """Variables that Ray's processes are to have by the configuration."""
        return dict(self.at("ray_kwargs.ray_init.runtime_env.env_vars") or {})

    # What is refused.

    def given(self, value: Any) -> bool:
        """Tell whether a setting has a value other than False, 0 and nothing."""
        return bool(value)

    def off(self, value: Any) -> bool:
        """Tell whether a setting is given, and is False or 0."""
        return value is not None and not value

    def other_kind_of_engine(self, value: Any) -> bool:
        """Tell whether the reference has another kind of engine than the actor; verl has one class for FSDP1 and FSDP2."""
        return value not in (None, *(FSDP if self.strategy in FSDP else [self.strategy]))

    def measured_on_request(self, value: Any) -> bool:
        """Tell whether somebody asked to measure routes: the share is neither 0 nor the default."""
        return value not in (0, RoutingConfig(mode="R3").measured)

    def other_replay(self, value: Any) -> bool:
        """Tell whether verl replays in another mode than the block."""
        return value not in (None, "disabled", self.at("mismatch.routing.mode"))

    def other_weights(self, value: Any) -> bool:
        """Tell whether the rollout's weights have another format than the block says."""
        return bool((value or None) != self.at("mismatch.precision.engine_weights"))

    def other_cache(self, value: Any) -> bool:
        """Tell whether vLLM's keys and values have another format than the block says."""
        assert self.block.precision is not None
        if self.engine != "vllm" or value is None:
            return False
        return value not in self.block.precision.kv_cache_dtypes

    def other_dtype(self, value: Any) -> bool:
        """Tell whether a dtype is given that is not the block's."""
        return value is not None and spelled(value) != self.at("mismatch.precision.dtype")

    def other_dtype_than_verls_default(self, value: Any) -> bool:
        """Tell whether somebody gave another dtype: bfloat16 is what verl's own file says."""
        return self.other_dtype(value) and spelled(value) != "bfloat16"

    def names_the_head(self, value: Any) -> bool:
        """Tell whether adapters are on the output head."""
        return any("lm_head" in name for name in ([value] if isinstance(value, str) else value or ()))

    def ignored(self, value: Any) -> bool:
        """Tell whether verl does not hand a setting of its own correction to its policy loss."""
        return bool(value) and value != "ppo_clip" and self.at(f"{POLICY_LOSS}.loss_mode") != "bypass_mode"


def settings_of(section: Any) -> ResolvedCorrection:
    """Return the settings of a `correction` section; a preset with one of verl's names does what verl's method of it does."""
    settings = resolve(section)
    own_rules = isinstance(section.reject, Mapping)
    if section.preset in VERL_PRESETS and not own_rules:
        settings = replace(settings, compat=QUIRKS)
    return settings


@dataclass(frozen=True)
class Row:
    """A setting that is refused for some of its values."""

    path: str  # its name in verl's configuration, or in the block below `mismatch.`
    values: (
        str | dict[str, Any]
    )  # that are refused: a method of `Asked`, or {"one_of": [...]}, {"other_than": [...]} or {"not_derived_from": "..."}
    sentence: str  # why, and what to do; it follows "path=value: "
    when: tuple[str, ...] = ()  # what must hold (`Asked.holds`)
    measurable: bool = False  # whether a run with this setting can be measured all the same
    about: str = ""

    def refuses(self, value: Any, asked: Asked) -> bool:
        """Tell whether a value is refused in a configuration in which the row is looked at."""
        if isinstance(self.values, str):
            return bool(getattr(asked, self.values)(value))
        if "one_of" in self.values:
            return value in self.values["one_of"]
        if "not_derived_from" in self.values:
            return bool(value) and not derives(value, self.values["not_derived_from"])
        return value is not None and value not in self.values["other_than"]


def _rows() -> Iterator[Row]:
    groups = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["group"]
    for group in groups:
        rows, when = group.pop("rows"), tuple(group.pop("when", ()))
        for path, values, sentence in rows:
            yield Row(path, values, sentence, when, **group)


NO_PROBES = "weight updates are verified in FSDP models only"
"""Why they are not under Megatron."""
TABLE = tuple(_rows())
PRECISION = tuple(row for row in TABLE if row.about == "precision")


def refused(config: Mapping[str, Any], block: MismatchConfig, rows: Iterable[Row] = TABLE) -> Iterator[tuple[Row, Any]]:
    """Yield the rows that refuse something of a configuration, each with the value that it refuses."""
    asked = Asked(config, block)
    for row in rows:
        if all(map(asked.holds, row.when)):
            value = asked.at(row.path)
            if row.refuses(value, asked):
                yield row, value


def reasons(config: Mapping[str, Any], block: MismatchConfig, rows: Iterable[Row] = TABLE) -> Iterator[ConfigError]:
    """Yield an error for each setting of verl with which the block cannot work."""
    for module in ELSEWHERE:
        if any(name == module or name.startswith(f"{module}.") for name in sys.modules):
            yield ConfigError(
                f"trainer={module!r}: that trainer takes none of the mismatch block's settings. Start verl.trainer.main_ppo, or "
                "remove the block."
            )
    for row, value in refused(config, block, rows):
        if block.acts or not row.measurable:
            yield _error(row, value)


def doubts(config: Mapping[str, Any], block: MismatchConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with verl's own settings in a run that is only measured, and can be measured as it is."""
    if not block.acts:
        for row, value in refused(config, block):
            if row.measurable:
                yield _error(row, value)


def _error(row: Row, value: Any) -> ConfigError:
    shown = f"={value!r}" if value is None or isinstance(value, (str, int, float)) else ""
    return ConfigError(f"{row.path}{shown}: {row.sentence}")


def refuse(config: Mapping[str, Any], block: MismatchConfig, rows: Iterable[Row] = TABLE) -> None:
    """Raise the first of `reasons`."""
    for error in reasons(config, block, rows):
        raise error


def derives(name: str, own: str) -> bool:
    """Tell whether a setting names a class of this package, or one that is derived from it, by their dotted names."""
    module, _, attribute = name.rpartition(".")
    try:
        found = None if name == own else getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        return False
    bases = getattr(found, "__mro__", ())
    return name == own or any(f"{kind.__module__}.{kind.__qualname__}" == own for kind in bases)
