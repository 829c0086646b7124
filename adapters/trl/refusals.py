"""What TRL's adapter refuses before TRL builds the model, or before it builds an engine, which takes minutes on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mismatch_ext.adapters import compat
from mismatch_ext.adapters.trl.correction import native_options

from mismatch_ext.config import ESTIMATORS, MismatchConfig, PrecisionConfig
from mismatch_ext.errors import ConfigError, MismatchError, PrecisionError
from mismatch_ext.presets import DPPO, resolve
from mismatch_ext.versions import on_cpu_build

# Arguments of TRL's trainers that let a completion be stitched together from several generations.
STITCHING = ("tools", "rollout_func", "environment_factory")

Test = Callable[[Any, Any], Any]


class Row(NamedTuple):
    """A setting under which a feature of the block would not do what it says."""

    feature: str  # section or mode, as in `Seam.features`
    found: str  # a template over the settings `s` and the block `b`
    wrong: Test  # of settings and block
    why: str
    instead: str
    error: type[MismatchError] = ConfigError


def refuse(rows: Iterable[Row], settings: Any, block: MismatchConfig) -> None:
    """Raise the error of the first row whose feature the block has, and whose setting is there."""
    for row in rows:
        asked = any(f"{feature}.".startswith(f"{row.feature}.") for feature in block.features)
        if asked and row.wrong(settings, block):
            raise row.error(f"{row.found.format(s=settings, b=block)}: {row.why}; {row.instead}.")


def _add(rows: list[Row], *fields: Any) -> None:
    rows.append(Row(*fields))


def _under(loss: str, is_set: Callable[[Any], bool]) -> Test:
    def asked(s: Any, b: Any) -> bool:
        settings = resolve(b.correction)
        return settings.weighs_score and settings.loss == loss and is_set(s)

    return asked


def _changed_in_float16(name: str) -> Test:
    default = getattr(PrecisionConfig(dtype="float16"), name)
    return lambda s, b: b.precision.dtype == "float16" and getattr(b.precision, name) != default


def _normalizes_a_part(s: Any, b: Any) -> bool:
    settings = resolve(b.correction)
    ours = native_options(settings) is None and settings.normalize
    return bool(ours and (settings.weighs_score or s.world_size > 1))


def _keeps_kl_of_bad_rows(s: Any, b: Any) -> bool:
    if not (b.acts and getattr(s, "loss_type", "") and s.use_liger_kernel and s.beta != 0.0):
        return False
    from trl import GRPOTrainer

    return hasattr(GRPOTrainer, "compute_liger_loss")  # later, the option means kernels within the model


_NO_GAP = "generation by transformers reports no rollout log-probabilities, so there is no gap to measure or correct"
_WITH_ENGINE = "set use_vllm=True or remove it"

# `s` is TRL's configuration, with all settings final.
SETTINGS: list[Row] = []
for _name in ("precision", "correction", "sampling_mask"):
    _add(
        SETTINGS,
        _name, f"use_vllm=False with mismatch.{_name}", lambda s, b: not s.use_vllm, _NO_GAP, _WITH_ENGINE,
    )  # fmt: skip
_add(
    SETTINGS,
    "lr", "use_vllm=False with mismatch.lr.trigger={b.lr.trigger!r}",
    lambda s, b: not s.use_vllm and b.lr.trigger in ("mismatch_kl", "f_tau"), _NO_GAP, _WITH_ENGINE,
)  # fmt: skip
_add(
    SETTINGS,
    "monitor", "use_vllm=False with a mismatch block without kl, routing, lr or monitor.alarms",
    lambda s, b: not (s.use_vllm or b.kl or b.routing or b.lr or b.monitor.alarms), _NO_GAP, _WITH_ENGINE,
)  # fmt: skip
_add(
    SETTINGS,
    "monitor", "a config that acts, with use_liger_kernel=True and beta={s.beta:g}", _keeps_kl_of_bad_rows,
    "Liger's loss does not score rows one by one, so that a row that cannot be trained on would keep its KL",
    "set use_liger_kernel=False, or beta=0",
)  # fmt: skip
_add(
    SETTINGS,
    "routing.R3", "mismatch.routing.mode='R3' with use_vllm=False", lambda s, b: not s.use_vllm,
    "the routes of transformers' generation are not recorded", "use mode='R2', or use_vllm=True",
)  # fmt: skip
_add(
    SETTINGS,
    "routing.R3", "mismatch.routing.mode='R3' with vllm_tensor_parallel_size={s.vllm_tensor_parallel_size}",
    lambda s, b: s.vllm_mode == "colocate" and s.vllm_tensor_parallel_size != 1,
    "routes are followed on engines of one rank", "set it to 1, or mode='R2'",
)  # fmt: skip
_add(
    SETTINGS,
    "routing", "mismatch.routing.reference=True with beta=0 and no mismatch.kl",
    lambda s, b: b.routing.reference and s.beta == 0.0, "there is no reference model to be replayed",
    "set reference=False, or a KL coefficient",
)  # fmt: skip
_add(
    SETTINGS,
    "sampling_mask", "mismatch.sampling_mask with vllm_mode={s.vllm_mode!r}", lambda s, b: s.vllm_mode != "colocate",
    "a server's answers have no number for what was cut off", "allowed: vllm_mode='colocate'",
)  # fmt: skip
_add(
    SETTINGS,
    "sampling_mask", "mismatch.sampling_mask with generation_kwargs['logprobs']={s.generation_kwargs[logprobs]!r}",
    lambda s, b: "logprobs" in (s.generation_kwargs or {}),
    "masks are read off as many log-probabilities as the section asks for", "remove logprobs",
)  # fmt: skip
_add(
    SETTINGS,
    "kl", "mismatch.kl.estimator='full'", lambda s, b: b.kl.estimator == "full",
    "it needs the logits of both policies, of which TRL keeps only the sampled tokens' log-probabilities",
    f"set it to {', '.join(ESTIMATORS[:-1])} or {ESTIMATORS[-1]}, or use mismatch_ext.kl_full in your own loop",
)  # fmt: skip
_add(
    SETTINGS,
    "kl", "mismatch.kl.reward_path='rewards' with mask_truncated_completions=True",
    lambda s, b: b.kl.reward_path == "rewards" and s.mask_truncated_completions,
    "masked completions have no KL but stay in their group, so that finishing would be punished",
    "use reward_path='surrogate'",
)  # fmt: skip
_add(
    SETTINGS,
    "kl", "mismatch.kl.reward_path='rewards' with multi_objective_aggregation={s.multi_objective_aggregation!r}",
    lambda s, b: b.kl.reward_path == "rewards" and s.multi_objective_aggregation != "sum_then_normalize",
    "the KL would be normalized on its own", "use reward_path='surrogate'",
)  # fmt: skip
_add(
    SETTINGS,
    "correction", "mismatch.correction.normalize", _normalizes_a_part,
    "weights would be divided by the mean of a micro-batch or of one process, not of the whole batch",
    "use one process and loss='ppo_clip', or remove it",
)  # fmt: skip
# Of the policy term that REINFORCE and DPPO replace.
_IS_SET: dict[str, Callable[[Any], bool]] = {
    "off_policy_mask_threshold": lambda s: s.off_policy_mask_threshold is not None,
    "top_entropy_quantile": lambda s: s.top_entropy_quantile < 1.0,
    "delta": lambda s: s.delta is not None,
    "importance_sampling_level": lambda s: s.importance_sampling_level != "token",
}
_IS_SET["loss_type"] = lambda s: s.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo")
for _loss in ("reinforce", *DPPO):
    for _name, _is_set in _IS_SET.items():
        _add(
            SETTINGS,
            "correction", f"mismatch.correction.loss={_loss!r} with {_name}", _under(_loss, _is_set),
            "it belongs to the policy term that this loss replaces, and would be ignored", "leave out one of the two",
        )  # fmt: skip

# `s` is DeepSpeed's configuration.
DEEPSPEED: list[Row] = []
for _name in ("init_scale", "growth_interval"):
    _add(
        DEEPSPEED,
        "precision", f"mismatch.precision.{_name}={{b.precision.{_name}!r}} with DeepSpeed", _changed_in_float16(_name),
        "its own loss scaler reads its own settings",
        "leave it out, and set fp16.initial_scale_power, loss_scale_window, hysteresis and min_loss_scale there",
        PrecisionError,
    )  # fmt: skip
_add(
    DEEPSPEED,
    "precision", "mismatch.precision.head={b.precision.head!r} with DeepSpeed", lambda s, b: b.precision.head is not None,
    "it casts the head's weights with all others", "leave it out", PrecisionError,
)  # fmt: skip
_add(
    DEEPSPEED,
    "precision", "mismatch.precision with torch_autocast in DeepSpeed's configuration",
    lambda s, b: s.get("torch_autocast", {}).get("enabled"),
    "TRL scores completions outside of that autocast, and would update in another dtype than it scores in",
    "Remove torch_autocast; fp16 or bf16 follow from mismatch.precision", PrecisionError,
)  # fmt: skip
_add(
    DEEPSPEED,
    "monitor.weight_sync", "a check of weight updates with zero_optimization.offload_param.device='nvme'",
    lambda s, b: s.get("zero_optimization", {}).get("offload_param", {}).get("device") == "nvme",
    "weights on a disk are not read to see whether they moved",
    "allowed: 'cpu', 'none'; or set mismatch.monitor.weight_sync='off' to go on unverified",
)  # fmt: skip
_add(
    DEEPSPEED,
    "lr", "mismatch.lr with a scheduler in DeepSpeed's configuration", lambda s, b: "scheduler" in s,
    "DeepSpeed steps it inside of its own step, and TRL would log another rate than was applied",
    "remove the scheduler there, and set lr_scheduler_type",
)  # fmt: skip

# `s` is the version of FSDP. torch does not start FSDP1 on a CPU, so that the weight check was never run with it.
FSDP = (
    Row(
        "monitor.weight_sync", "a check of weight updates with fsdp_version=1",
        lambda s, b: s == 1, "weights were verified with FSDP2's shards alone",
        "set fsdp_version: 2 in accelerate's config, or mismatch.monitor.weight_sync='off' to go on unverified",
    ),
)  # fmt: skip


def _derives_from(*names: str) -> Test:
    return lambda s, b: any(kind.__name__ in names for kind in s.__mro__)


# `s` is the class of a trainer or configuration. By name: importing TRL's experimental trainers warns.
TRAINERS: list[Row] = []
_add(
    TRAINERS,
    "monitor", "AsyncGRPO ({s.__name__})", _derives_from("AsyncGRPOTrainer", "AsyncGRPOConfig"),
    "TRL does not say which weights sampled a token, so drift cannot be separated from mismatch",
    "use MismatchGRPOTrainer, or verl's modes colocate_async and separate_async",
)  # fmt: skip
for _name in ("kl", "correction"):
    _add(
        TRAINERS,
        _name, f"mismatch.{_name} with {{s.__name__}}", _derives_from("GMPOTrainer"), "GMPOTrainer's loss has no seam for it",
        "allowed: precision, routing, lr and monitor, or use MismatchGRPOTrainer",
    )  # fmt: skip


def check_sharding(block: MismatchConfig, *, deepspeed: Mapping[str, Any] | None, fsdp: int | None) -> None:
    """Refuse sections that do not work with sharded parameters; `fsdp` is its version, and None for neither of the two."""
    if deepspeed is not None:
        refuse(DEEPSPEED, deepspeed, block)
    refuse(FSDP, fsdp, block)


def check_peers(
    trainer: type[Any], block: MismatchConfig, *, use_vllm: bool, server: bool, stitches: bool = False
) -> None:
    """Refuse features that the peers lack, and warn of untested versions; `stitches`: completions of several generations."""
    peers = ["torch", "transformers", "accelerate", "trl", *(["vllm"] if use_vllm else [])]
    using = {"trl", *(kind.__name__ for kind in trainer.__mro__)}
    if use_vllm:
        circumstances = {"vllm": True, "cpu": on_cpu_build(), "server": server, "tools": stitches}
        using |= {name for name, here in circumstances.items() if here}
    features = list(block.features)
    if block.correction is not None and resolve(block.correction).centering is not None:
        features.append("correction.centering")  # reads the fused head
    compat.check(peers, features, using)


def check_device(device: str, block: MismatchConfig, *, engine: bool) -> None:
    """Refuse a device without float64, in which log-probabilities are compared."""
    if device == "mps" and (engine or block.kl is not None or block.routing is not None):
        raise ConfigError(
            "a mismatch block on device 'mps', which has no float64; allowed: a CPU or a CUDA device. Set use_cpu=True, or "
            "remove the block."
        )


def check_reference(accelerator: Any, built: bool) -> None:
    """Refuse a reference model of zeros: by accelerate's default for FSDP2, only the first rank loads weights."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or not built or accelerator.num_processes == 1:
        return
    if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            "a reference model with FSDP2 and fsdp_cpu_ram_efficient_loading=true: TRL shards it as each rank has loaded it, "
            "which is zeros on all but the first; set it to false in accelerate's config."
        )
