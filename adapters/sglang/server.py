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

from mismatch_ext.config import MismatchConfig, PrecisionConfig, section_of
from mismatch_ext.errors import EngineError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.precision.dtypes import LOGPROBS_MODE, canonical, spelled
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
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            notes = "".join(f"\n  note: {note}" for note in self.notes)
            raise EngineError(
                f"sglang {self.version} does not run as the trainer needs it, {len(self.problems)} problems:{lines}{notes}"
            )


def read_server(info: Mapping[str, Any]) -> EngineReading:
    """Read the dtypes and modes that a server reports.

    Args:
        info: The server's report. SGLang's own does not show whether the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB`;
            where `EngineTransport.server_info` has not added it, it is taken to be unset.

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
    settings = [info.get(name) for name in ("quantization", "torchao_config", "modelopt_quant")]
    quantizations = [str(value)[:60] for value in settings if value not in (None, "", "unquant")]
    dtype = spelled(info["dtype"])
    head_in_float32 = info.get("enable_fp32_lm_head") is True
    return EngineReading(
        engine="sglang",
        version=info["version"],
        model_dtype=dtype,
        parameter_dtypes={},
        kv_cache_dtype=spelled(info["kv_cache_dtype"]),
        logprobs_mode="raw_logprobs" if info.get(ORIGINAL_LOGPROB) is True else "processed_logprobs",
        quantization=next(iter(quantizations), None),
        head_dtype="float32" if head_in_float32 else dtype,
    )


def check_server(
    info: Mapping[str, Any],
    *,
    config: MismatchConfig,
    trainer_dtype: str,
    sends_all_weights: bool = False,
) -> ServerVerdict:
    """Compare all settings of a server with what the trainer needs, before the first request.

    Args:
        info: The server's report.
        config: The `mismatch` config; if it has a `precision` section, the dtype is taken from there.
        trainer_dtype: Dtype that the trainer computes in, used if there is no `precision` section.
        sends_all_weights: Whether the trainer sends all weights before the first request, so that the server may begin with
            random ones.

    Returns:
        The verdict; call `raise_for_problems` to refuse the server.

    Raises:
        EngineError: `info` is not a report of SGLang; names the field.
        PrecisionError: `trainer_dtype` is not a compute dtype.
    """
    reading = read_server(info)
    precision = config.precision
    if precision is None:
        precision = section_of(PrecisionConfig, canonical(trainer_dtype), "trainer_dtype", "dtype")
    routing = config.routing is not None and config.routing.mode == "R3"
    problems = [*_version_and_precision(reading, precision), *_settings(info, precision, sends_all_weights)]
    if routing:
        problems += routing_problems(info)
    notes = []
    if not isinstance(info.get(ORIGINAL_LOGPROB), bool):
        notes.append(
            f"{ORIGINAL_LOGPROB} is assumed to be unset in the server's environment, which the report does not show."
        )
    if not routing and (speculative := info.get("speculative_algorithm")) is not None:
        notes.append(
            f"speculative_algorithm={speculative}: whether weight updates reach the draft model, and whether drafted tokens are "
            "drawn from the policy's own distribution, is not checked; the gap of the tokens is measured as usual."
        )
    return ServerVerdict(version=reading.version, problems=tuple(problems), notes=tuple(notes))


def _version_and_precision(reading: EngineReading, precision: PrecisionConfig) -> list[ServerProblem]:
    """Return what differs from the trainer in version, dtypes, quantization or the kind of log-probabilities."""
    peer, problems = PEERS["sglang"], _Problems()
    if not peer.accepts(reading.version):
        why = "Formats and the kind of log-probabilities differ between versions."
        install = f"pip install sglang=={peer.ran[-1]}"
        problems.add("version", reading.version, allowed=peer.supports, flag=install, why=why)
    if reading.model_dtype != precision.dtype:
        why = "Trainer and server then compute different log-probabilities, and weight updates are cast without a word."
        if reading.model_dtype == "auto":
            why = "SGLang's 'auto' turns a float32 checkpoint into float16, and what it became is not reported."
        problems.add("dtype", reading.model_dtype, allowed=precision.dtype, flag=f"--dtype {precision.dtype}", why=why)
    if reading.kv_cache_dtype not in precision.kv_cache_dtypes:
        why = "Another cache dtype rounds keys and values that the trainer does not."
        allowed = " or ".join(precision.kv_cache_dtypes)
        flag = f"--kv-cache-dtype {precision.engine_kv_cache or 'auto'}"
        problems.add("kv_cache_dtype", reading.kv_cache_dtype, allowed=allowed, flag=flag, why=why)
    if reading.quantization != precision.engine_weights:
        flag = "leave out --quantization, --torchao-config and --modelopt-quant"
        why = "Quantized weights are not the trainer's."
        if precision.engine_weights is not None:
            flag = f"--quantization {precision.engine_weights}"
            why = "mismatch.precision.engine_weights asks for it."
        found, allowed = reading.quantization or "none", precision.engine_weights or "none"
        problems.add("quantization", found, allowed=allowed, flag=flag, why=why)
    if precision.head not in (None, reading.head_dtype):
        why = "mismatch.precision.head asks for an output head in float32."
        problems.add("enable_fp32_lm_head", "false", allowed="true", flag="--enable-fp32-lm-head", why=why)
    if reading.logprobs_mode != LOGPROBS_MODE:
        why = "Log-probabilities then ignore the temperature that is sampled with."
        problems.add(ORIGINAL_LOGPROB, "1", allowed="unset", flag=f"unset {ORIGINAL_LOGPROB}", why=why)
    return problems.found


def _settings(info: Mapping[str, Any], precision: PrecisionConfig, sends_all_weights: bool) -> list[ServerProblem]:
    """Return settings under which the server runs another model, loses updates, or computes other values."""
    problems = _Problems()
    preferred = info.get("preferred_sampling_params")
    if _given(preferred):
        name, why = "preferred_sampling_params", "They fill in what a request leaves out, and no record has them."
        problems.add(name, preferred, allowed="none", flag="leave out --preferred-sampling-params", why=why)
    override = info.get("json_model_override_args")
    only_quantizes = precision.engine_weights is not None and _says_only_format(override, precision.engine_weights)
    if _given(override) and not only_quantizes:
        why = "The server's model is then another one than the checkpoint's configuration, which the trainer computes with, says."
        flag = "leave out --json-model-override-args"
        problems.add("json_model_override_args", override, allowed="{}", flag=flag, why=why)
    if info.get("load_format") == "dummy" and not sends_all_weights:
        why = "Its weights are random, and what an update leaves out, such as buffers, stays so."
        problems.add("load_format", "dummy", allowed="auto", flag="--load-format auto", why=why)
    if info.get("enable_lora") is True or _given(info.get("lora_paths")):
        why = "Weight updates reach only the base model, and what an adapter adds is not the trainer's."
        problems.add("enable_lora", True, allowed="false", flag="leave out --enable-lora and --lora-paths", why=why)
    replicas = info.get("dp_size") or 1
    if replicas != 1:
        why = "SGLang refuses weight updates from tensors to several replicas; run a server for each."
        problems.add("dp_size", replicas, allowed="1", flag="--dp-size 1", why=why)
    target = info.get("rl_on_policy_target")
    if target is not None and precision.dtype != "bfloat16":
        why = f"On-policy mode rounds logits and head to bfloat16 under any dtype; the trainer computes in {precision.dtype}."
        problems.add("rl_on_policy_target", target, allowed="none", flag="leave out --rl-on-policy-target", why=why)
    bounded = "enable_decoder_swa_bounded_replay"
    if info.get(bounded) is True:
        why = "What it computes after a prefix hit is not the full prefill that the trainer computes."
        problems.add(bounded, True, allowed="false", flag="--no-enable-decoder-swa-bounded-replay", why=why)
    return problems.found


def routing_problems(info: Mapping[str, Any]) -> list[ServerProblem]:
    """Return settings under which routes are not recorded for every token and layer.

    SGLang keeps a token's routes in host memory under the index of the token's KV-cache slot. If something other than the model
    fills a slot, for example a second cache, it brings no routes, and the routes of the slot's former token stay.
    """
    problems = _Problems()
    captured = info.get("enable_return_routed_experts")
    if captured is not True:
        why = "Without it the server ignores a request's return_routed_experts."
        problems.add("enable_return_routed_experts", captured, allowed="true", flag=ROUTES_FLAG, why=why)
    backend = info.get("moe_runner_backend")
    if backend in BYPASSING:
        why = "It chooses experts inside a fused kernel, past the place where SGLang records them."
        problems.add("moe_runner_backend", backend, allowed="triton", flag="--moe-runner-backend triton", why=why)
    other_cache = "Keys and values that come back from that cache come without their routes."
    switches = {
        "enable_two_batch_overlap": "A batch is then computed in two halves, of which no one has compared the recorded experts.",
        "enable_hierarchical_cache": other_cache,
        "enable_lmcache": other_cache,
    }
    for name, why in switches.items():
        if info.get(name) is True:
            flag = f"leave out --{name.replace('_', '-')}"
            problems.add(name, True, allowed="false", flag=flag, why=why)
    mode = info.get("disaggregation_mode")
    if mode not in (None, "null"):
        why = "The prompt's routes stay with the server that computed it."
        problems.add("disaggregation_mode", mode, allowed="null", flag="leave out --disaggregation-mode", why=why)
    speculative = info.get("speculative_algorithm")
    if speculative is not None:
        name, why = "speculative_algorithm", "Routes of drafted tokens have not been compared with a trainer's."
        problems.add(name, speculative, allowed="none", flag="leave out --speculative-algorithm", why=why)
    stages = info.get("pp_size") or 1
    if stages != 1:
        why = "A pipeline stage records only the routes of its own layers."
        problems.add("pp_size", stages, allowed="1", flag="--pp-size 1", why=why)
    return problems.found


class _Problems:
    """A list of problems that grows."""

    def __init__(self) -> None:
        self.found: list[ServerProblem] = []

    def add(self, field: str, value: object, *, allowed: str, flag: str, why: str) -> None:
        """Add a setting with its value, what is allowed, the flag to change, and the reason."""
        found = value if isinstance(value, str) else brief(value)
        self.found.append(ServerProblem(field=field, found=found, allowed=allowed, flag=flag, why=why))


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
