"""Reads a run from verl's overrides, so that the doctor starts its engine as verl's rollout server does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mismatch_ext.adapters.doctor.hosts import OTHER_KERNELS, Dataset, HostRun, not_started
from mismatch_ext.adapters.doctor.verl_command import composed, require
from mismatch_ext.adapters.transformers.attention import PORTABLE
from mismatch_ext.adapters.transformers.doctor.models import ensure_checkpoint, with_room

from mismatch_ext.config import MismatchConfig
from mismatch_ext.precision.dtypes import canonical

_ROLLOUT = "actor_rollout_ref.rollout."
_ACTOR = "actor_rollout_ref.actor."
_MODEL = "actor_rollout_ref.model."
# vLLM's arguments, as verl's server passes them on under the same names, and one under another.
PASSED = {
    name: name
    for name in (
        *("max_num_seqs", "enable_chunked_prefill", "max_num_batched_tokens", "enable_prefix_caching", "logprobs_mode"),
        *("enforce_eager", "gpu_memory_utilization", "scheduling_policy", "quantization"),
    )
} | {"tensor_model_parallel_size": "tensor_parallel_size"}
VERLS_ATTENTION = "flash_attention_2"
# What verl sets for its own worker processes.
_VERLS_OWN = ("worker_extension_cls", "distributed_executor_backend", "load_format", "seed")
LEFT_OUT = {
    "load_format": "the doctor's engine loads the checkpoint, and no trainer sends it weights",
    "seed": "the doctor's own, by --seed",
    "data_parallel_size": "the doctor starts one replica",
    "attn_implementation": OTHER_KERNELS,
    "mtp.enable_rollout": "the doctor's engine decodes without drafts: whether those are drawn from the policy is not checked",
    "lora_rank": "adapters begin at zero; give the adapter of a later step by --model",
    "strategy": "the doctor's trainer is transformers, in this engine's dtypes but without its kernels",
    "quantization": "vLLM's own quantization in the place of verl's block-wise one",
}


def read_verl(overrides: Sequence[str], checkpoint: str | None = None) -> HostRun:
    """Compose verl's configuration from `main_ppo`'s overrides, and read what its rollout server and its actor are started with.

    `checkpoint` is examined instead of the run's own model. Raises ConfigError if Hydra refuses an override, a setting is
    missing, or the engine is not one that the doctor starts.
    """
    from omegaconf import OmegaConf

    config = composed(overrides)
    names = (f"{_ROLLOUT}name", *([f"{_MODEL}path"] if checkpoint is None else []))
    require(config, names)
    block = _settled(config)
    group: Any = OmegaConf.to_container(config.actor_rollout_ref, resolve=True)
    rollout, actor, model = group["rollout"], group["actor"], group["model"]
    engine, path = rollout["name"], checkpoint or str(model["path"])
    _ensure_started(rollout, actor, engine)
    ensure_checkpoint("--model" if checkpoint else f"--verl: {_MODEL}path", path)
    weights, held_by = _trainer_dtype(actor)
    own = {key: value for key, value in (rollout["engine_kwargs"].get(engine) or {}).items() if value is not None}
    arguments = _arguments(rollout, model, path)
    kwargs = f"{_ROLLOUT}engine_kwargs.{engine}."
    arguments |= {key: (value, kwargs + key) for key, value in own.items() if key not in (*_VERLS_OWN, "dtype")}
    sampling = _sampling(rollout)
    routing = None if block is None else block.routing
    override = f"{_MODEL}override_config"
    dtype = canonical(own.get("dtype", rollout["dtype"]))
    # Each value with the setting that it comes from.
    settings: dict[str, tuple[Any, str]] = {}
    settings["model"] = path, f"{_MODEL}path"
    settings["dtype"] = dtype, f"{kwargs if 'dtype' in own else _ROLLOUT}dtype"
    settings["trainer_dtype"] = settings["trainer_weights"] = weights, held_by
    settings["trainer_config"] = _trainer_config(model), f"{override}, of which the rollout server is told nothing"
    settings["replays"] = routing is not None and routing.mode == "R3", "mismatch.routing.mode"
    layout = "packed" if model["use_remove_padding"] else "left-positions"
    settings["layout"] = layout, f"{_MODEL}use_remove_padding"
    settings["attention"] = _attention(model), f"{override}.attn_implementation, or verl's own choice"
    settings["temperature"] = float(rollout["temperature"]), f"{_ROLLOUT}temperature"
    settings["engine"] = engine, f"{_ROLLOUT}name"
    sides = {name: value for name, (value, _) in settings.items()}
    sides["sampling"] = sampling
    sides["arguments"] = {name: value for name, (value, _) in arguments.items()}
    origin = {f"arguments.{name}": where for name, (_, where) in arguments.items()}
    origin |= {name: where for name, (_, where) in settings.items()}
    origin["max_tokens"] = f"{_ROLLOUT}response_length"
    origin |= {f"sampling.{key}": f"{_ROLLOUT}{key}" for key in sampling}
    origin["sampling.repetition_penalty"] = "fixed in verl's agent loop"
    return HostRun(
        sides=sides,
        max_tokens=int(rollout["response_length"]),
        dataset=_dataset(OmegaConf.to_container(config.data, resolve=True), rollout, model),
        origin=origin,
        left_out=_left_out(rollout, actor, model),
    )


def _settled(config: Any) -> MismatchConfig | None:
    """Set the precision that the block asks for, and return the part of the block that acts."""
    from mismatch_ext.adapters.verl.config import set_precision
    from mismatch_ext.adapters.verl.refusals import PRECISION, refuse
    from omegaconf import OmegaConf, open_dict

    given = config.get("mismatch")
    stated: Any = None if given is None else OmegaConf.to_container(given, resolve=True)
    block = MismatchConfig.parse(stated)
    if block is None:
        return None
    if block.precision is not None:
        refuse(config, block, PRECISION)
        with open_dict(config):
            set_precision(config, block)
    return block


def _ensure_started(rollout: dict[str, Any], actor: dict[str, Any], engine: str) -> None:
    """Refuse settings with which the doctor would start something else than the run does."""
    if engine != "vllm":
        todo = "give this engine's own by --engine, --engine-arg and --sampling, or --rollouts"
        raise not_started(f"--verl: {_ROLLOUT}name", engine, "the doctor reads the settings of vLLM alone", todo)
    if qat := (rollout.get("qat") or {}).get("enable", False):
        why = "the doctor's trainer has no quantization-aware weights"
        raise not_started(f"--verl: {_ROLLOUT}qat.enable", qat, why, "set it to False")
    if split := (rollout.get("disaggregation") or {}).get("enabled", False):
        why = "the doctor starts one engine for prefill and decode"
        raise not_started(f"--verl: {_ROLLOUT}disaggregation.enabled", split, why, "set it to False")
    stages = rollout["pipeline_model_parallel_size"]
    if stages > 1:
        why = "the doctor starts one stage"
        raise not_started(f"--verl: {_ROLLOUT}pipeline_model_parallel_size", stages, why, "set it to 1")


def _trainer_dtype(actor: dict[str, Any]) -> tuple[str, str]:
    """Return the dtype of the actor's passes, in which FSDP gathers its weights too, and the setting that says it."""
    if actor["strategy"] not in ("fsdp", "fsdp2"):
        name = actor["strategy"]
        return canonical((actor.get(name) or {}).get("dtype", "bfloat16")), f"{_ACTOR}{name}.dtype"
    mixed = actor["fsdp_config"].get("mixed_precision") or {}
    found = mixed.get("param_dtype")
    if found is not None:
        return canonical(found), f"{_ACTOR}fsdp_config.mixed_precision.param_dtype"
    return "bfloat16", "verl's FSDP engine, without fsdp_config.mixed_precision"


def _arguments(rollout: dict[str, Any], model: dict[str, Any], path: str) -> dict[str, tuple[Any, str]]:
    """Return vLLM's arguments by name, each with the setting that it comes from."""
    given = {
        theirs: (rollout[name], _ROLLOUT + name) for name, theirs in PASSED.items() if rollout.get(name) is not None
    }
    given["trust_remote_code"] = model["trust_remote_code"], _MODEL + "trust_remote_code"
    if rollout["expert_parallel_size"] > 1:
        given["enable_expert_parallel"] = True, _ROLLOUT + "expert_parallel_size"
    if (length := with_room(rollout["max_model_len"], path)) is not None:
        given["max_model_len"] = length, f"{_ROLLOUT}max_model_len, and one token to score a whole response"
    given["generation_config"] = "auto", "vLLM's default, which verl leaves"
    return given


def _sampling(rollout: dict[str, Any]) -> dict[str, Any]:
    return {
        "temperature": float(rollout["temperature"]),
        "top_p": float(rollout["top_p"]),
        "top_k": int(rollout["top_k"]),
        "repetition_penalty": 1.0,
        "ignore_eos": bool(rollout["ignore_eos"]),
    }


def _overridden(model: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the trainer's model configuration that the run overrides."""
    given: dict[str, Any] = model.get("override_config") or {}
    overridden: dict[str, Any] = given.get("model_config", given)
    return overridden


def _attention(model: dict[str, Any]) -> str:
    """Return the trainer's attention implementation, which is flash attention unless the run says otherwise."""
    return str(_overridden(model).get("attn_implementation", VERLS_ATTENTION))


def _trainer_config(model: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _overridden(model).items() if key != "attn_implementation"}


def _dataset(data: Any, rollout: dict[str, Any], model: dict[str, Any]) -> Dataset | None:
    files = data.get("train_files")
    if not files:
        return None
    return Dataset(
        paths=(files,) if isinstance(files, str) else tuple(map(str, files)),
        option="data.train_files",
        column=data["prompt_key"],
        template=model.get("custom_chat_template"),
        template_arguments=dict(data.get("apply_chat_template_kwargs") or {}),
        longest=int(rollout["prompt_length"]),
    )


def _left_out(rollout: dict[str, Any], actor: dict[str, Any], model: dict[str, Any]) -> dict[str, str]:
    mtp, lora = rollout.get("mtp") or {}, model.get("lora") or {}
    present: dict[str, Any] = {}
    present["mtp.enable_rollout"] = mtp.get("enable") and mtp.get("enable_rollout")
    present["load_format"] = present["seed"] = True
    present["attn_implementation"] = _attention(model) not in PORTABLE
    present["data_parallel_size"] = rollout["data_parallel_size"] > 1
    present["lora_rank"] = model.get("lora_rank") or lora.get("rank")
    present["strategy"] = actor["strategy"] not in ("fsdp", "fsdp2")
    present["quantization"] = rollout.get("quantization")
    return {name: LEFT_OUT[name] for name, given in present.items() if given}
