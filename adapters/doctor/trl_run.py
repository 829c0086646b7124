"""Reads a run from TRL's configuration file for the doctor, which starts the engine as `GRPOTrainer` starts its colocated one."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.doctor.hosts import OTHER_KERNELS, Dataset, HostRun, not_started
from mismatch_ext.adapters.transformers.attention import PORTABLE
from mismatch_ext.adapters.transformers.doctor.models import ensure_checkpoint, with_room
from mismatch_ext.adapters.transformers.peft_adapters import whole
from mismatch_ext.adapters.vllm.engine import asked_of

from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.dtypes import canonical

Placed = tuple[Any, str]
"""A setting and its place: in the file, where nothing else is said."""
SERVER = "give its address by --server as well, or give --rollouts"


def read_trl(path: Path, checkpoint: str | None = None, *, served: bool = False) -> HostRun:
    """Read a configuration file as TRL's `grpo` script does."""
    script, args, model, unknown = _parsed(path)
    where = path.name
    if checkpoint is None and not model.model_name_or_path:
        raise ConfigError(f"--trl: {where} has no model_name_or_path; add it, or give the run's checkpoint there.")
    _ensure_started(args, model, where, served)
    block = args.mismatch_block()
    name = checkpoint or str(model.model_name_or_path)
    ensure_checkpoint("--model" if checkpoint else f"--trl: {where}: model_name_or_path", name)
    precision = None if block is None or block.precision is None else block.precision.dtype
    autocast = "float16" if args.fp16 else "bfloat16" if args.bf16 else None
    init: dict[str, Any] = dict(args.model_init_kwargs or {})
    weights = _weights_dtype(init.get("dtype", model.dtype), name)
    given = dict(args.generation_kwargs or {})
    sampling = {
        "repetition_penalty": args.repetition_penalty,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": 0.0 if args.min_p is None else args.min_p,
    } | {key: value for key, value in given.items() if key not in ("n", "max_tokens", "logprobs")}
    arguments = _engine_arguments(args, name, where)
    if block is not None and block.precision is not None:
        of_precision = asked_of(block.precision)
        del of_precision["dtype"]  # the side's own
        arguments |= {key: (value, f"{where}: mismatch.precision") for key, value in of_precision.items()}
    routing = None if block is None else block.routing
    flag = "fp16" if args.fp16 else "bf16" if args.bf16 else "dtype"
    of_weights = "model_init_kwargs.dtype" if "dtype" in init else "dtype"
    own_dtype = "vLLM's own choice for the checkpoint: TRL says none"
    sides: dict[str, Placed] = {"model": (name, f"{where}: model_name_or_path")}
    sides["dtype"] = (precision or auto_dtype(name), f"{where}: mismatch.precision.dtype" if precision else own_dtype)
    sides["trainer_dtype"] = (autocast or weights, f"{where}: {flag}, as TRL settles it")
    sides["trainer_weights"] = (weights, f"{where}: {of_weights}")
    config = {key: value for key, value in init.items() if key not in _LOADING}
    sides["trainer_config"] = (config, f"{where}: model_init_kwargs")
    sides["replays"] = (routing is not None and routing.mode == "R3", f"{where}: mismatch.routing.mode")
    sides["layout"] = ("left", "TRL's own: prompts padded on the left, no position_ids")
    sides["head"] = ("float32" if args.cast_lm_head_to_fp32 else "", f"{where}: cast_lm_head_to_fp32")
    sides["attention"] = (_attention(args, model), f"{where}: attn_implementation")
    sides["temperature"] = (args.temperature, f"{where}: temperature")
    origin = {key: place for key, (_, place) in sides.items()}
    origin["max_tokens"] = f"{where}: max_completion_length"
    for key in sampling:
        origin[f"sampling.{key}"] = f"{where}: {'generation_kwargs.' if key in given else ''}{key}"
    for key, (_, place) in arguments.items():
        origin[f"arguments.{key}"] = place
    values = {key: value for key, (value, _) in sides.items()}
    return HostRun(
        sides=values | {"sampling": sampling, "arguments": {key: value for key, (value, _) in arguments.items()}},
        max_tokens=int(given.get("max_tokens", args.max_completion_length)),
        dataset=_dataset(script, args),
        origin=origin,
        left_out=_left_out(args, model, unknown),
    )


def _engine_arguments(args: Any, name: str, where: str) -> dict[str, Placed]:
    """Return the arguments that TRL starts its engine with."""
    arguments: dict[str, Placed] = {}
    for key in ("tensor_parallel_size", "gpu_memory_utilization", "model_impl"):
        arguments[key] = (getattr(args, f"vllm_{key}"), f"{where}: vllm_{key}, as TRL passes it on")
    length = with_room(args.vllm_max_model_length, name)
    arguments["max_model_len"] = (length, f"{where}: vllm_max_model_length, and one token to score a whole response")
    arguments["max_num_seqs"] = (
        args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        f"{where}: per_device_train_batch_size x vllm_tensor_parallel_size x steps_per_generation",
    )
    arguments["max_num_batched_tokens"] = (4096, "fixed in TRL")
    arguments["logprobs_mode"] = ("processed_logprobs", "fixed in TRL")
    arguments["trust_remote_code"] = (args.trust_remote_code, f"{where}: trust_remote_code")
    arguments["generation_config"] = ("auto", "vLLM's default, which TRL leaves")
    return arguments


# Arguments of `from_pretrained` that are not fields of the model's configuration.
_LOADING = (
    "dtype", "revision", "device_map", "trust_remote_code", "attn_implementation", "low_cpu_mem_usage", "use_cache",
    "use_kernels", "quantization_config", "token", "cache_dir", "local_files_only",
)  # fmt: skip


def auto_dtype(model: str) -> str:
    """Return the compute dtype that vLLM takes for a checkpoint when it is told none."""
    try:
        from vllm.config import ModelConfig

        return canonical(ModelConfig(model=whole(model), dtype="auto").dtype)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{model}: vLLM's dtype for it is not known ({' '.join(str(error).split())[:200]}); give --dtype."
        ) from error


def _parsed(path: Path) -> tuple[Any, Any, Any, dict[str, str]]:
    """Return TRL's script, training and model arguments, and the options that none of them knows."""
    from mismatch_ext.adapters.trl.config import MismatchGRPOConfig
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser
    from trl.scripts.grpo import GRPOScriptArguments

    kinds: Any = (GRPOScriptArguments, MismatchGRPOConfig, ModelConfig, DatasetMixtureConfig)
    parser = TrlParser(kinds)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            # A GPU run's file must be readable without a GPU, where TRL refuses to train unless it is told to use the CPU.
            here = [] if torch.cuda.is_available() else ["--use_cpu", "true"]
            found = parser.parse_args_and_config(["--config", str(path), *here], return_remaining_strings=True)
    except OSError as error:
        raise ConfigError(f"--trl: {path} cannot be read: {error.strerror or error}.") from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        words = said.getvalue().splitlines()[-1] if isinstance(error, SystemExit) else str(error)
        raise ConfigError(f"--trl: TRL refuses {path}: {' '.join(words.split())[:400]}") from error
    script, args, model, _, rest = found
    names = [word.removeprefix("--") for word in rest if word.startswith("--")]
    return script, args, model, dict.fromkeys(names, "no argument of TRL's GRPO script")


def _ensure_started(args: Any, model: Any, where: str, served: bool) -> None:
    """Refuse settings under which the doctor would start something different from the run."""
    init = args.model_init_kwargs or {}
    revision = init.get("revision", model.model_revision)
    for name, given, why, todo in (
        ("use_vllm", args.use_vllm is False, "transformers samples, and there is no engine", "there is no gap to explain"),
        ("vllm_mode", args.vllm_mode != "colocate" and not served, "the engine is a server of its own", SERVER),
        ("load_in_4bit", model.load_in_4bit, "the doctor's trainer holds no quantized weights", "set it to false"),
        ("load_in_8bit", model.load_in_8bit, "the doctor's trainer holds no quantized weights", "set it to false"),
        ("vllm_structured_outputs_regex", bool(args.vllm_structured_outputs_regex),
         "the engine's distribution is another than the trainer's by what was asked", "leave it out"),
        ("model_revision", revision not in (None, "main"),
         "TRL gives the revision to the trainer and not to the engine", "download it, and name its folder"),
    ):  # fmt: skip
        if given:
            value = revision if name == "model_revision" else getattr(args, name, getattr(model, name, None))
            raise not_started(f"--trl: {where}: {name}", value, why, todo)


def _weights_dtype(given: Any, model: str) -> str:
    """Return the dtype that TRL loads the trainer's weights in."""
    if given not in (None, "auto"):
        return canonical(given)
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(whole(model)).dtype
    return "float32" if found is None else canonical(found)


def _attention(args: Any, model: Any) -> str:
    """Return the trainer's attention implementation; "" if TRL leaves the choice to transformers."""
    return str((args.model_init_kwargs or {}).get("attn_implementation", model.attn_implementation) or "")


def _dataset(script: Any, args: Any) -> Dataset | None:
    if not script.dataset_name:
        return None
    return Dataset(
        paths=(str(script.dataset_name),),
        option="dataset_name",
        config=script.dataset_config,
        split=script.dataset_train_split,
        template_arguments=dict(args.chat_template_kwargs or {}),
    )


def _left_out(args: Any, model: Any, unknown: dict[str, str]) -> dict[str, str]:
    """Return what is no setting of the engine's arithmetic, or has no meaning in the doctor's process, and why."""
    attention = _attention(args, model)
    rows = (
        ("seed", True, "the doctor's own, by --seed"),
        ("vllm_enable_sleep_mode", args.vllm_enable_sleep_mode, "the doctor's engine never sleeps"),
        ("attn_implementation", attention not in ("", *PORTABLE), OTHER_KERNELS),
        ("use_peft", model.use_peft, "adapters begin at zero; give the adapter of a later step by --model"),
    )
    return {name: why for name, given, why in rows if given} | unknown
