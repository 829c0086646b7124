"""The settings of an SGLang server, read from its own report, and one verdict on whether the trainer can match it.

The report comes from `GET /server_info` (`/get_server_info` in earlier versions) or from `Engine.get_server_info()`. It holds
the server's version and its arguments after the server resolved them. `dtype` may still be "auto" there, which does not say the
dtype.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_ext.adapters.http import brief
from mismatch_ext.adapters.sglang.answers import ROUTES_FLAG
from mismatch_ext.adapters.sglang.engine import ORIGINAL_LOGPROB

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.precision.dtypes import LOGPROBS_MODE, PrecisionPolicy, canonical, spelled
from mismatch_ext.versions import PEERS

BYPASSING = ("flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4", "triton_kernel")
"""MoE runners that choose experts inside a fused kernel, which does not pass the place where SGLang records experts."""


@dataclass(frozen=True, kw_only=True)
class ServerProblem:
    """One setting of a server that the trainer cannot match: its field and value in the report, what it must be, and why."""

    field: str
    found: str
    allowed: str
    flag: str
    why: str

    def __str__(self) -> str:
        return f"{self.field}: found {self.found}; allowed: {self.allowed}. {self.why} Fix: {self.flag}."


@dataclass(frozen=True, kw_only=True)
class ServerVerdict:
    """Whether a server fits the trainer, and everything that does not fit.

    Args:
        version: The server's version.
        problems: All problems, in the order of the checks.
        notes: Assumptions about what the report does not show, and what requests to this server must not ask for.
    """

    version: str
    problems: tuple[ServerProblem, ...]
    notes: tuple[str, ...] = ()

    def raise_for_problems(self) -> None:
        """Refuse a server that does not fit.

        Raises:
            EngineError: There is a problem; the message has one line for each.
        """
        if self.problems:
            raise EngineError(str(self))

    def __str__(self) -> str:
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        if not self.problems:
            return f"sglang {self.version}: runs as the trainer needs it.{notes}"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        head = f"sglang {self.version} does not run as the trainer needs it, {len(self.problems)} problems:"
        return f"{head}\n{lines}{notes}"


def read_server(info: Mapping[str, Any], *, original_logprobs: bool | None = None) -> EngineReading:
    """Read the dtypes and modes that a server reports.

    Args:
        info: The server's report.
        original_logprobs: Whether the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB`, which SGLang's report does not show.
            None takes it from the report if `EngineTransport.server_info` added it there, and otherwise assumes that it is unset.

    Returns:
        The reading. It has no parameter dtypes, because they cannot be read, and a dtype "auto" stays "auto". Over HTTP the
        quantization is the one of the server's arguments; a quantization that only the checkpoint states is not seen. Its
        "processed_logprobs" are log_softmax(logits / T), as the trainer computes them; unlike vLLM's mode of that name, they
        are not renormalized over the tokens that top-p, top-k and min-p keep.

    Raises:
        EngineError: `info` is not a report of SGLang; names the field.
    """
    for name in ("version", "dtype", "kv_cache_dtype"):
        if not isinstance(info.get(name), str):
            raise EngineError(
                f"the report of the SGLang server has {name}={brief(info.get(name))}; allowed: text. Is it that of GET "
                f"/server_info of an SGLang server ({PEERS['sglang'].supports})?"
            )
    quantizations = (info.get(name) for name in ("quantization", "torchao_config", "modelopt_quant"))
    if original_logprobs is None:
        original_logprobs = info.get(ORIGINAL_LOGPROB) is True
    return EngineReading(
        engine="sglang",
        version=info["version"],
        model_dtype=spelled(info["dtype"]),
        parameter_dtypes={},
        kv_cache_dtype=spelled(info["kv_cache_dtype"]),
        logprobs_mode="raw_logprobs" if original_logprobs else "processed_logprobs",
        quantization=next((str(value)[:60] for value in quantizations if value not in (None, "", "unquant")), None),
        head_dtype="float32" if info.get("enable_fp32_lm_head") is True else spelled(info["dtype"]),
    )


def check_server(
    info: Mapping[str, Any],
    *,
    config: MismatchConfig,
    trainer_dtype: str,
    needs_routing: bool | None = None,
    original_logprobs: bool | None = None,
    sends_all_weights: bool = False,
) -> ServerVerdict:
    """Compare all settings of a server with what the trainer needs, before the first request.

    Args:
        info: The server's report.
        config: The `mismatch` config; if it has a `precision` section, the dtype is taken from there.
        trainer_dtype: Dtype that the trainer computes in, used if there is no `precision` section.
        needs_routing: Whether routes are replayed; None takes it from the config (`routing.mode` R3).
        original_logprobs: As in `read_server`.
        sends_all_weights: Whether the trainer sends all weights before the first request, so that the server may begin with
            random ones.

    Returns:
        The verdict; call `raise_for_problems` to refuse the server.

    Raises:
        EngineError: `info` is not a report of SGLang; names the field.
        PrecisionError: `trainer_dtype` is not a compute dtype.
    """
    reading = read_server(info, original_logprobs=original_logprobs)
    policy = (
        PrecisionPolicy(canonical(trainer_dtype)) if config.precision is None else PrecisionPolicy.of(config.precision)
    )
    routing = config.routing is not None and config.routing.mode == "R3" if needs_routing is None else needs_routing
    problems = [*_version_and_precision(reading, policy), *_settings(info, policy, sends_all_weights)]
    if routing:
        problems += routing_problems(info)
    notes = []
    if original_logprobs is None and not isinstance(info.get(ORIGINAL_LOGPROB), bool):
        notes.append(
            f"{ORIGINAL_LOGPROB} is assumed to be unset in the server's environment, which the report does not show; say "
            "original_logprobs=True or False."
        )
    if not routing and (speculative := info.get("speculative_algorithm")) is not None:
        notes.append(
            f"speculative_algorithm={speculative}: whether weight updates reach the draft model, and whether drafted tokens are "
            "drawn from the policy's own distribution, is not checked; the gap of the tokens is measured as usual."
        )
    return ServerVerdict(version=reading.version, problems=tuple(problems), notes=tuple(notes))


def _version_and_precision(reading: EngineReading, policy: PrecisionPolicy) -> list[ServerProblem]:
    peer, dtype = PEERS["sglang"], policy.dtype
    auto = reading.model_dtype == "auto"
    unquantized = "leave out --quantization, --torchao-config and --modelopt-quant"
    return _problems(
        (not peer.accepts(reading.version), "version", reading.version, peer.supports, f"pip install sglang=={peer.ran[-1]}",
         "Formats and the kind of log-probabilities differ between versions."),
        (reading.model_dtype != dtype, "dtype", reading.model_dtype, dtype, f"--dtype {dtype}",
         "SGLang's 'auto' turns a float32 checkpoint into float16, and what it became is not reported." if auto else
         "Trainer and server then compute different log-probabilities, and weight updates are cast without a word."),
        (reading.kv_cache_dtype not in policy.kv_cache_dtypes, "kv_cache_dtype", reading.kv_cache_dtype,
         " or ".join(policy.kv_cache_dtypes), f"--kv-cache-dtype {policy.kv_cache or 'auto'}",
         "Another cache dtype rounds keys and values that the trainer does not."),
        (reading.quantization != policy.quantization, "quantization", reading.quantization or "none",
         policy.quantization or "none",
         unquantized if policy.quantization is None else f"--quantization {policy.quantization}",
         "Quantized weights are not the trainer's." if policy.quantization is None else
         "mismatch.precision.engine_weights asks for it."),
        (policy.head not in (None, reading.head_dtype), "enable_fp32_lm_head", "false", "true",
         "--enable-fp32-lm-head", "mismatch.precision.head asks for an output head in float32."),
        (reading.logprobs_mode != LOGPROBS_MODE, ORIGINAL_LOGPROB, "1", "unset", f"unset {ORIGINAL_LOGPROB}",
         "Log-probabilities then ignore the temperature that is sampled with."),
    )  # fmt: skip


def _settings(info: Mapping[str, Any], policy: PrecisionPolicy, sends_all_weights: bool) -> list[ServerProblem]:
    """Return settings under which the server runs another model, loses updates, or computes other values."""
    preferred, override = info.get("preferred_sampling_params"), info.get("json_model_override_args")
    target, replicas = info.get("rl_on_policy_target"), info.get("dp_size") or 1
    quantized = policy.quantization is not None and _says_only_format(override, policy.quantization)
    return _problems(
        (_given(preferred), "preferred_sampling_params", preferred, "none", "leave out --preferred-sampling-params",
         "They fill in what a request leaves out, and no record has them."),
        (_given(override) and not quantized, "json_model_override_args", override, "{}",
         "leave out --json-model-override-args",
         "The server's model is then another one than the checkpoint's configuration, which the trainer computes with, says."),
        (info.get("load_format") == "dummy" and not sends_all_weights, "load_format", "dummy", "auto", "--load-format auto",
         "Its weights are random, and what an update leaves out, such as buffers, stays so."),
        (info.get("enable_lora") is True or _given(info.get("lora_paths")), "enable_lora", True, "false",
         "leave out --enable-lora and --lora-paths",
         "Weight updates reach the base model alone, and what an adapter adds is not the trainer's."),
        (replicas != 1, "dp_size", replicas, "1", "--dp-size 1",
         "SGLang refuses weight updates from tensors to several replicas; run a server for each."),
        (target is not None and policy.dtype != "bfloat16", "rl_on_policy_target", target, "none",
         "leave out --rl-on-policy-target",
         f"On-policy mode rounds logits and head to bfloat16 under any dtype; the trainer computes in {policy.dtype}."),
        (info.get("enable_decoder_swa_bounded_replay") is True, "enable_decoder_swa_bounded_replay", True, "false",
         "--no-enable-decoder-swa-bounded-replay",
         "What it computes after a prefix hit is not the full prefill that the trainer computes."),
    )  # fmt: skip


def routing_problems(info: Mapping[str, Any]) -> list[ServerProblem]:
    """Return settings under which routes are not recorded for every token and layer.

    SGLang keeps a token's routes in host memory under the index of the token's KV-cache slot. If something other than the model
    fills a slot, for example a second cache, it brings no routes, and the routes of the slot's former token stay.
    """
    captured, backend, stages = (
        info.get("enable_return_routed_experts"), info.get("moe_runner_backend"), info.get("pp_size") or 1,
    )  # fmt: skip
    speculative = info.get("speculative_algorithm")
    mode, other_cache = (
        info.get("disaggregation_mode"),
        "Keys and values that come back from that cache come without their routes.",
    )
    return _problems(
        (captured is not True, "enable_return_routed_experts", captured, "true", ROUTES_FLAG,
         "Without it the server ignores a request's return_routed_experts."),
        (backend in BYPASSING, "moe_runner_backend", backend, "triton", "--moe-runner-backend triton",
         "It chooses experts inside a fused kernel, past the place where SGLang records them."),
        (info.get("enable_two_batch_overlap") is True, "enable_two_batch_overlap", True, "false",
         "leave out --enable-two-batch-overlap",
         "A batch is then computed in two halves, of which no one has compared the recorded experts."),
        (info.get("enable_hierarchical_cache") is True, "enable_hierarchical_cache", True, "false",
         "leave out --enable-hierarchical-cache", other_cache),
        (info.get("enable_lmcache") is True, "enable_lmcache", True, "false", "leave out --enable-lmcache", other_cache),
        (mode not in (None, "null"), "disaggregation_mode", mode, "null", "leave out --disaggregation-mode",
         "The prompt's routes stay with the server that computed it."),
        (speculative is not None, "speculative_algorithm", speculative, "none", "leave out --speculative-algorithm",
         "Routes of drafted tokens have not been compared with a trainer's."),
        (stages != 1, "pp_size", stages, "1", "--pp-size 1", "A pipeline stage records the routes of its own layers alone."),
    )  # fmt: skip


def _problems(*rows: tuple[bool, str, object, str, str, str]) -> list[ServerProblem]:
    """Return the problems among rows of (is one, field, value, what is allowed, flag to change, reason)."""
    return [
        ServerProblem(
            field=field, found=value if isinstance(value, str) else brief(value), allowed=allowed, flag=flag, why=why
        )
        for is_one, field, value, allowed, flag, why in rows
        if is_one
    ]


def _says_only_format(override: object, quantized: str) -> bool:
    """Tell whether an override says only that all weights are quantized in this format, as verl's override for fp8 does."""
    try:
        changes = json.loads(override) if isinstance(override, str) else override
    except ValueError:
        return False
    if not isinstance(changes, dict) or set(changes) != {"quantization_config"}:
        return False
    settings = changes["quantization_config"]
    if not isinstance(settings, dict) or settings.get("quant_method") != quantized:
        return False
    return not any(_given(settings.get(name)) for name in ("ignored_layers", "modules_to_not_convert", "ignore"))


def _given(value: object) -> bool:
    """Tell whether a setting has a value other than None and an empty text, list or object."""
    return value is not None and value not in ("", "{}", [], (), {})
