"""Composes verl's configuration as `main_ppo` does, and makes the driver's checks of it without starting Ray."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from mismatch_ext.adapters.doctor.verl_command import arguments_of, composed, require

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, MismatchError
from mismatch_ext.rollout import SamplingSettings

AGENT_LOOPS = ("single_turn_agent", "tool_agent")
"""verl's own agent loops, which hand on what the package needs."""
LATER = {
    "monitor": "workers: verl's loss and token layout behave as in the tested version, and the engine is verl's own",
    "monitor.weight_sync": "each weight update: trainer and rollout server score the same probe tokens",
    "precision": "workers and servers: the weights fit the dtype, and both sides hold the dtypes and formats that you asked for",
    "routing.R2": "workers: the model has routers that can be replayed",
    "routing.R3": "workers: the model has routers that can be replayed; each batch: the engine's routes fit its tokens",
    "correction": "workers: the policy loss reacts to the correction's weights",
    "sampling_mask": "each answer: the engine reported enough tokens for its mask",
}
"""What is checked once Ray runs, by the feature that needs it."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What the driver would do with a configuration."""

    verdict: str  # "accepted", "refused", "not measured" (verl trains without the block), or "no mismatch config"
    refused: list[str]
    warnings: list[str]
    settings: list[str]  # of verl that the block changes, each with its new value, and what to know about them
    later: list[str]

    @property
    def status(self) -> int:
        """The exit status: 0 if the driver accepts the block, otherwise 1."""
        return 0 if self.verdict == "accepted" else 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def __str__(self) -> str:
        parts = (
            ("refused", self.refused), ("warning", self.warnings), ("sets", self.settings), ("checked later", self.later),
        )  # fmt: skip
        lines = [f"{name}: {line}" for name, entries in parts for line in entries]
        trains = ": verl would train without the config" if self.verdict == "not measured" else ""
        return "\n".join([*lines, f"verdict: {self.verdict}{trains}"])


def dry_run(words: Sequence[str]) -> DryRun:
    """Make the driver's checks for the arguments of `main_ppo`; raises ConfigError if there is no configuration to check."""
    verls = io.StringIO()
    with contextlib.redirect_stdout(verls), warnings.catch_warnings(record=True) as warned:
        config = composed(words)
        before = _values(config)
        warned.clear()
        warnings.simplefilter("always")
        acts, refused, later = True, list[str](), list[str]()
        stated = config.get("mismatch")
        if stated is not None:
            require(config, ["actor_rollout_ref.rollout.name"])  # verl's own file leaves it to the user
            acts, refused, later = _checked(config)
    told = list(dict.fromkeys(str(entry.message) for entry in warned if "mismatch" in str(entry.message)))
    told += _of_no_effect(arguments_of(words).overrides)
    said = [line.removeprefix(_OURS) for line in verls.getvalue().splitlines() if line.startswith(_OURS)]
    said = [
        line for line in said if not line.startswith("algorithm.rollout_correction: ")
    ]  # the settings themselves follow
    changed = [f"{path}={value!r}" for path, value in _values(config).items() if (path, value) not in before.items()]
    said += [
        setting for setting in changed if not any(line.startswith((f"{setting}:", f"{setting},")) for line in said)
    ]
    if stated is None:
        verdict = "no mismatch config"
    elif refused:
        verdict = "refused" if acts else "not measured"
    else:
        verdict = "accepted"
    accepted = verdict == "accepted"
    return DryRun(
        verdict=verdict,
        refused=refused,
        warnings=told,
        settings=said if accepted else [],
        later=later if accepted else [],
    )


_OURS = "mismatch-ext: "


def _values(config: Any) -> dict[str, Any]:
    """Return each setting of verl by its path, without the copies of the block that workers and servers are given."""
    from omegaconf import OmegaConf

    values: dict[str, Any] = {}

    def collect(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inside in value.items():
                if key != "mismatch":
                    collect(f"{path}.{key}" if path else str(key), inside)
        else:
            values[path] = value

    collect("", OmegaConf.to_container(config))
    return values


def _checked(config: Any) -> tuple[bool, list[str], list[str]]:
    """Return whether a refusal ends the run, every refusal, and what is checked later."""
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    try:
        from mismatch_ext.adapters.verl.block import block_of
        from mismatch_ext.adapters.verl.config import handed_block, prepare, reasons
        from mismatch_ext.adapters.verl.driver.weights import unverified
        from mismatch_ext.adapters.verl.loss import weighs
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.utils.config import validate_config
    except MismatchError:
        raise
    except Exception as error:  # a broken package that verl imports raises whatever it likes
        raise ConfigError(
            f"--verl: verl cannot be imported here: {type(error).__name__}: {' '.join(str(error).split())[:400]} Repair that "
            "package, or run this where verl trains."
        ) from error

    acts = True  # a config that cannot be read ends the run
    try:
        given: Any = OmegaConf.to_container(config.mismatch, resolve=True)
        block = MismatchConfig.parse(given)
        assert block is not None
        acts = block.acts
        if found := [str(error) for error in reasons(config, handed_block(config, block))]:
            return acts, found, []
        prepare(config)
    except MismatchError as error:
        return acts, [str(error)], []
    except OmegaConfBaseException as error:
        raise ConfigError(f"--verl: {' '.join(str(error).split())[:400]}") from error
    rollout = config.actor_rollout_ref.rollout
    handed = block_of(config.actor_rollout_ref)
    assert handed is not None
    later = [LATER[name] for name in handed.features if name in LATER and (name != "correction" or weighs(handed))]
    group, checked = config.actor_rollout_ref, config
    if rollout.name == "vllm" and not any(importlib.metadata.distributions(name="vllm")):
        # For LoRA's rank, verl asks for the version of a distribution `vllm`, and a CPU build has another name.
        checked = copy.deepcopy(config)
        with open_dict(checked):
            checked.actor_rollout_ref.model.lora_rank = 0
            checked.actor_rollout_ref.model.lora.pop("rank", None)
        if group.model != checked.actor_rollout_ref.model:
            later.append("verl: LoRA's rank, with the version of the distribution `vllm`")
    try:
        validate_config(
            config=checked, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
        _as_later(config)
    except Exception as error:  # noqa: BLE001 - whatever verl refuses with
        return True, [f"verl: {type(error).__name__}: {' '.join(str(error).split())}"], []
    later += _biased(rollout)
    if OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        warnings.warn("mismatch.monitor: in bypass mode no pass of the trainer measures the gap", stacklevel=2)
    if (mode := config.actor_rollout_ref.actor.policy_loss.loss_mode) not in POLICY_LOSS_REGISTRY:
        later.append(f"workers: a policy loss {mode!r} is registered")
    if group.actor.strategy == "fsdp" and group.model.lora_rank and not group.model.lora.get("merge"):
        later.append(
            "workers: peft finds the adapter in FSDP1's layers (0.21 does not: actor_rollout_ref.actor.strategy=fsdp2)"
        )
    if (why := unverified(rollout, handed.monitor)) is not None:
        warnings.warn(f"mismatch.monitor.weight_sync: {why}", stacklevel=2)
        later.remove(LATER["monitor.weight_sync"])
    if (loop := OmegaConf.select(rollout, "agent.default_agent_loop") or AGENT_LOOPS[0]) not in AGENT_LOOPS:
        later.append(f"agent loops: {loop!r} is registered, and hands on extra_fields and the engine's token ids")
    return acts, [], later


def _as_later(config: Any) -> None:
    """Make the checks that verl makes in its workers, and with the first batch; raises what verl raises."""
    import torch
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.config import omega_conf_to_dataclass

    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    correction = config.algorithm.get("rollout_correction")
    if correction is not None:
        logprobs = {name: torch.full((2, 4), -1.0) for name in ("old_log_probs", "rollout_log_probs")}
        batch = DataProto.from_dict(tensors=logprobs | {"response_mask": torch.ones(2, 4)})
        compute_rollout_correction_and_add_to_batch(batch, correction)


def _of_no_effect(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each setting that was added where verl reads the fields of a dataclass and has none of this name."""
    from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig

    kinds: dict[str, type[Any]] = {"algorithm": AlgoConfig, "algorithm.rollout_correction": RolloutCorrectionConfig}
    for override in overrides:
        path = override.partition("=")[0]
        place, _, name = path.lstrip("+").rpartition(".")
        kind = kinds.get(place) if path.startswith("+") else None
        if kind is not None and name not in {field.name for field in fields(kind)}:
            yield f"{path}: {kind.__name__} of this verl has no such setting, so that it has no effect; leave it out"


def _biased(rollout: Any) -> list[str]:
    """Say that the engine samples from a part of the vocabulary, if it does."""
    sampling = SamplingSettings(top_p=float(rollout.top_p), top_k=max(0, int(rollout.top_k)))
    bias = sampling.ratio_bias()
    return [] if bias is None else [f"each batch: {bias}"]
