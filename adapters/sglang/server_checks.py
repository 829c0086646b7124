"""Finds settings of an SGLang server that a trainer cannot match; one function checks one group of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_ext.adapters.sglang.fields import brief, is_integer
from mismatch_ext.adapters.sglang.routes import FLAG

from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.precision.policy import PrecisionPolicy
from mismatch_ext.versions import PEERS

ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
BYPASSING = ("flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4", "triton_kernel")
"""MoE runners that choose experts inside a fused kernel, which does not pass the place where SGLang records experts."""


@dataclass(frozen=True, kw_only=True)
class ServerProblem:
    """One setting of a server that the trainer cannot match.

    Args:
        field: Name of the setting in the server's report.
        found: Its value there.
        allowed: The value that it must have.
        flag: The flag to give or leave out when starting the server.
        why: The reason.
    """

    field: str
    found: str
    allowed: str
    flag: str
    why: str

    def __str__(self) -> str:
        return f"{self.field}: found {self.found}; allowed: {self.allowed}. {self.why} Fix: {self.flag}."


def version_problems(reading: EngineReading) -> list[ServerProblem]:
    """Check that the server's version is in the range that this release accepts."""
    peer = PEERS["sglang"]
    why = "Formats and the kind of log-probabilities differ between versions."
    flag = f"pip install sglang=={peer.ran[-1]}"
    return [] if peer.accepts(reading.version) else [_problem("version", reading.version, peer.supports, flag, why)]


def precision_problems(reading: EngineReading, policy: PrecisionPolicy) -> list[ServerProblem]:
    """Check dtypes, quantisation and the kind of log-probabilities."""
    problems = []
    dtype = policy.engine_dtype
    if reading.model_dtype != dtype:
        why = (
            "SGLang's 'auto' turns a float32 checkpoint into float16, and what it became is not reported."
            if reading.model_dtype == "auto"
            else "Trainer and server then compute different log-probabilities, and weight updates are cast without a word."
        )
        problems.append(_problem("dtype", reading.model_dtype, dtype, f"--dtype {dtype}", why))
    if reading.kv_cache_dtype not in policy.kv_cache_dtypes:
        why = "Another cache dtype rounds keys and values that the trainer does not."
        allowed = " or ".join(policy.kv_cache_dtypes)
        flag = f"--kv-cache-dtype {policy.kv_cache or 'auto'}"
        problems.append(_problem("kv_cache_dtype", reading.kv_cache_dtype, allowed, flag, why))
    if reading.quantization != policy.quantization:
        why = "Quantised weights are not the trainer's."
        flag = "leave out --quantization, --torchao-config and --modelopt-quant"
        if policy.quantization is not None:
            why, flag = "mismatch.precision.quantized.weights asks for it.", f"--quantization {policy.quantization}"
        problems.append(
            _problem("quantization", reading.quantization or "none", policy.quantization or "none", flag, why)
        )
    if reading.logprobs_mode != policy.logprobs_mode:
        why = "Log-probabilities then ignore the temperature that is sampled with."
        problems.append(_problem(ORIGINAL_LOGPROB, "1", "unset", f"unset {ORIGINAL_LOGPROB}", why))
    return problems


def model_problems(
    fields: Mapping[Any, Any], sends_all_weights: bool, quantized: str | None = None
) -> list[ServerProblem]:
    """Check that the server runs the checkpoint's model, that updates reach its weights, and that it samples as a request says.

    Args:
        fields: The server's report.
        sends_all_weights: Whether the trainer sends all weights before the first request.
        quantized: Format in which the server's weights are quantised on purpose; None for no quantisation. An override of the
            model's configuration is accepted if it says only this, and says it of all layers.
    """
    found: list[ServerProblem] = []
    preferred, override = fields.get("preferred_sampling_params"), fields.get("json_model_override_args")
    if _given(preferred):
        why = "They fill in what a request leaves out, and no record has them."
        flag = "leave out --preferred-sampling-params"
        found.append(_problem("preferred_sampling_params", preferred, "none", flag, why))
    if _given(override) and not (quantized and _of_format_alone(override, quantized)):
        why = "The server's model is then another one than the checkpoint's configuration, which the trainer computes with, says."
        flag = "leave out --json-model-override-args"
        found.append(_problem("json_model_override_args", override, "{}", flag, why))
    load_format = fields.get("load_format")
    if isinstance(load_format, str) and load_format == "dummy" and not sends_all_weights:
        why = "Its weights are random, and what an update leaves out, buffers among it, stays so."
        found.append(_problem("load_format", "dummy", "auto", "--load-format auto", why))
    if fields.get("enable_lora") is True or _given(fields.get("lora_paths")):
        why = "Weight updates reach the base model alone, and what an adapter adds is not the trainer's."
        found.append(_problem("enable_lora", True, "false", "leave out --enable-lora and --lora-paths", why))
    replicas = fields.get("dp_size")
    if is_integer(replicas) and replicas != 1:
        why = "SGLang refuses weight updates from tensors to several replicas; run a server for each."
        found.append(_problem("dp_size", replicas, "1", "--dp-size 1", why))
    return found


def numeric_problems(fields: Mapping[Any, Any], policy: PrecisionPolicy, deterministic: bool) -> list[ServerProblem]:
    """Check modes that change the computed values: on-policy, deterministic, speculative, and the bounded replay of a prefix."""
    found: list[ServerProblem] = []
    target, speculative = fields.get("rl_on_policy_target"), fields.get("speculative_algorithm")
    if target is not None and policy.dtype != "bfloat16":
        why = f"On-policy mode rounds logits and head to bfloat16 under any dtype; the trainer computes in {policy.dtype}."
        found.append(_problem("rl_on_policy_target", target, "none", "leave out --rl-on-policy-target", why))
    setting = fields.get("enable_deterministic_inference")
    if deterministic and setting is not True:
        why = "A deterministic run was asked for, and log-probabilities otherwise depend on what else is in the batch."
        flag = "--enable-deterministic-inference"
        found.append(_problem("enable_deterministic_inference", setting, "true", flag, why))
    if speculative is not None:
        why = "Neither log-probabilities nor routes of drafted tokens have been compared with a trainer's."
        found.append(_problem("speculative_algorithm", speculative, "none", "leave out --speculative-algorithm", why))
    why = "What it computes after a prefix hit is not the full prefill that the trainer computes."
    flag = "--no-enable-decoder-swa-bounded-replay"
    return found + _switched_on(fields, "enable_decoder_swa_bounded_replay", why, flag)


def routing_problems(fields: Mapping[Any, Any]) -> list[ServerProblem]:
    """Check that routes are recorded for every token and layer.

    SGLang keeps a token's routes in host memory under the index of the token's KV-cache slot. If something other than the model
    fills a slot, for example a second cache, it brings no routes, and the routes of the slot's former token stay.
    """
    problems = []
    captured = fields.get("enable_return_routed_experts")
    if captured is not True:
        why = "Without it the server ignores a request's return_routed_experts."
        problems.append(_problem("enable_return_routed_experts", captured, "true", FLAG, why))
    backend = fields.get("moe_runner_backend")
    if isinstance(backend, str) and backend in BYPASSING:
        why = "It chooses experts inside a fused kernel, past the place where SGLang records them."
        problems.append(_problem("moe_runner_backend", backend, "triton", "--moe-runner-backend triton", why))
    why = "A batch is then computed in two halves, of which no one has compared the recorded experts."
    problems += _switched_on(fields, "enable_two_batch_overlap", why)
    for name in ("enable_hierarchical_cache", "enable_lmcache"):
        why = "Keys and values that come back from that cache come without their routes."
        problems += _switched_on(fields, name, why)
    mode, stages = fields.get("disaggregation_mode"), fields.get("pp_size")
    if mode is not None and not (isinstance(mode, str) and mode == "null"):
        why = "The prompt's routes stay with the server that computed it."
        problems.append(_problem("disaggregation_mode", mode, "null", "leave out --disaggregation-mode", why))
    if is_integer(stages) and stages != 1:
        why = "A pipeline stage records the routes of its own layers alone."
        problems.append(_problem("pp_size", stages, "1", "--pp-size 1", why))
    return problems


def server_notes(fields: Mapping[Any, Any], assumed: bool) -> tuple[str, ...]:
    """Return notes on what is not a problem of the server but must be known.

    Args:
        fields: The server's report.
        assumed: Whether the kind of log-probabilities that the server returns is an assumption.
    """
    notes = []
    if assumed:
        notes.append(
            f"{ORIGINAL_LOGPROB} is assumed to be unset in the server's environment, which the report does not show; say "
            "original_logprobs=True or False."
        )
    if fields.get("enable_deterministic_inference") is True:
        notes.append(
            "n > 1 is not allowed on a deterministic server, which returns n times the same response; give a prompt once per "
            "sample, each with a seed of its own (a request without one has seed 42)."
        )
    return tuple(notes)


def _of_format_alone(override: object, quantized: str) -> bool:
    """Tell whether an override says only that all weights are quantised in this format, as verl's override for fp8 does."""
    try:
        found = json.loads(override) if isinstance(override, str) else override
    except ValueError:
        return False
    if not isinstance(found, dict) or set(found) != {"quantization_config"}:
        return False
    said = found["quantization_config"]
    if not isinstance(said, dict) or said.get("quant_method") != quantized:
        return False
    return not any(_given(said.get(name)) for name in ("ignored_layers", "modules_to_not_convert", "ignore"))


def _given(value: object) -> bool:
    """Tell whether a setting has a value other than None and an empty text, list or object."""
    empty = (
        isinstance(value, str) and value.strip() in ("", "{}") or isinstance(value, (list, tuple, dict)) and not value
    )
    return value is not None and not empty


def _switched_on(fields: Mapping[Any, Any], name: str, why: str, flag: str = "") -> list[ServerProblem]:
    """Return a problem if a switch is on that must be off."""
    flag = flag or f"leave out --{name.replace('_', '-')}"
    return [_problem(name, True, "false", flag, why)] if fields.get(name) is True else []


def _problem(field: str, found: object, allowed: str, flag: str, why: str) -> ServerProblem:
    shown = found if isinstance(found, str) and len(found) <= 60 else brief(found)
    return ServerProblem(field=field, found=shown, allowed=allowed, flag=flag, why=why)
