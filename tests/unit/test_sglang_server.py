"""One verdict on a server, with every setting that the trainer cannot match and the flag to change."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from mismatch_ext.adapters.sglang import EngineTransport, check_server, read_server, to_provenance

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError, PrecisionError, RecordError
from mismatch_ext.rollout import SamplingSettings
from tests.unit.sglang_recorded import FOLDER

FIELDS: dict[str, dict[str, list[str]]] = json.loads((FOLDER / "fields.json").read_text(encoding="utf-8"))
GOOD: dict[str, Any] = {
    "version": "0.5.23",
    "dtype": "float16",
    "kv_cache_dtype": "auto",
    "quantization": None,
    "torchao_config": "",
    "modelopt_quant": None,
    "enable_return_routed_experts": True,
    "enable_deterministic_inference": False,
    "rl_on_policy_target": None,
    "moe_runner_backend": "auto",
    "speculative_algorithm": None,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "disaggregation_mode": "null",
    "pp_size": 1,
    "preferred_sampling_params": None,
    "json_model_override_args": "{}",
    "load_format": "auto",
    "enable_lora": None,
    "lora_paths": None,
    "dp_size": 1,
    "enable_two_batch_overlap": False,
}
R3 = MismatchConfig.parse({"precision": {"dtype": "float16"}, "routing": {"mode": "R3"}})
PLAIN = MismatchConfig.parse({})
assert R3 is not None and PLAIN is not None


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_RETURN_ORIGINAL_LOGPROB", raising=False)


def verdict(change: dict[str, Any], config: Any = R3, dtype: str = "float16", **arguments: Any) -> Any:
    """Check a server that is right for FP16 and R3, but for the change."""
    return check_server(GOOD | change, config=config, trainer_dtype=dtype, **{"original_logprobs": False, **arguments})


@pytest.mark.parametrize("version", FIELDS)
def test_the_fields_that_are_read_are_the_servers(version: str) -> None:
    later = {"torchao_config", "enable_decoder_swa_bounded_replay"}
    missing = set(GOOD) - {"version"} - set(FIELDS[version]["ServerArgs"])
    assert missing <= later


def test_a_server_that_fits_passes() -> None:
    found = verdict({})
    assert not found.problems
    found.raise_for_problems()
    assert str(found) == "sglang 0.5.23: runs as the trainer needs it."


INSTALL = "pip install sglang==0.5.23"
# Change of the server's report, the field of the problem, what to change, and part of the reason.
PROBLEMS = [
    ({"version": "0.5.11"}, "version", INSTALL, "Formats"),
    ({"version": "unknown"}, "version", INSTALL, "Formats"),
    ({"dtype": "bfloat16"}, "dtype", "--dtype float16", "cast without a word"),
    ({"dtype": "auto"}, "dtype", "--dtype float16", "float32 checkpoint into float16"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype", "--kv-cache-dtype auto", "rounds keys"),
    ({"kv_cache_dtype": "bf16"}, "kv_cache_dtype", "--kv-cache-dtype auto", "rounds keys"),
    ({"quantization": "fp8"}, "quantization", "leave out --quantization, --torchao-config and --modelopt-quant", "not"),
    ({"torchao_config": "int8wo"}, "quantization", "leave out --quantization, --torchao-config and --modelopt-quant", ""),
    ({"modelopt_quant": {"a": 1}}, "quantization", "leave out --quantization, --torchao-config and --modelopt-quant", ""),
    ({"preferred_sampling_params": {"n": 5}}, "preferred_sampling_params", "leave out --preferred-sampling-params", "no record"),
    ({"json_model_override_args": '{"a": 1}'}, "json_model_override_args", "leave out --json-model-override-args", "another one"),
    ({"load_format": "dummy"}, "load_format", "--load-format auto", "random"),
    ({"enable_lora": True}, "enable_lora", "leave out --enable-lora and --lora-paths", "only the base model"),
    ({"dp_size": 2}, "dp_size", "--dp-size 1", "several replicas"),
    ({"rl_on_policy_target": "fsdp"}, "rl_on_policy_target", "leave out --rl-on-policy-target", "to bfloat16"),
    ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm", "leave out --speculative-algorithm", "drafted tokens"),
    ({"enable_return_routed_experts": False}, "enable_return_routed_experts", "--enable-return-routed-experts", "ignores"),
    ({"enable_return_routed_experts": None}, "enable_return_routed_experts", "--enable-return-routed-experts", "ignores"),
    ({"moe_runner_backend": "flashinfer_trtllm"}, "moe_runner_backend", "--moe-runner-backend triton", "fused"),
    ({"moe_runner_backend": "flashinfer_mxfp4"}, "moe_runner_backend", "--moe-runner-backend triton", "fused"),
    ({"moe_runner_backend": "triton_kernel"}, "moe_runner_backend", "--moe-runner-backend triton", "fused"),
    ({"enable_hierarchical_cache": True}, "enable_hierarchical_cache", "leave out --enable-hierarchical-cache", "without"),
    ({"enable_lmcache": True}, "enable_lmcache", "leave out --enable-lmcache", "without their routes"),
    ({"disaggregation_mode": "decode"}, "disaggregation_mode", "leave out --disaggregation-mode", "prompt's routes"),
    ({"pp_size": 2}, "pp_size", "--pp-size 1", "own layers"),
    ({"enable_two_batch_overlap": True}, "enable_two_batch_overlap", "leave out --enable-two-batch-overlap", "two halves"),
    (
        {"enable_decoder_swa_bounded_replay": True},
        "enable_decoder_swa_bounded_replay",
        "--no-enable-decoder-swa-bounded-replay",
        "full prefill",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field", "flag", "why"), PROBLEMS)
def test_each_problem_is_found_alone_and_names_the_flag(
    change: dict[str, Any], field: str, flag: str, why: str
) -> None:
    found = verdict(change)
    (problem,) = found.problems
    assert (problem.field, problem.flag) == (field, flag)
    assert why in problem.why and f"Fix: {flag}." in str(found)
    with pytest.raises(EngineError, match="does not run as the trainer needs it, 1 problems"):
        found.raise_for_problems()


def test_speculative_decoding_is_measured_and_what_is_not_checked_is_said() -> None:
    drafted = {"speculative_algorithm": "EAGLE"}
    found = verdict(drafted, config=PLAIN)
    assert not found.problems
    (note,) = found.notes
    assert "speculative_algorithm=EAGLE" in note and "the draft model" in note and "is not checked" in note
    assert not verdict({}, config=PLAIN).notes
    with pytest.raises(EngineError, match="speculative_algorithm"):
        verdict(drafted).raise_for_problems()


def test_a_head_in_float32_is_asked_for_by_its_flag() -> None:
    head = MismatchConfig.parse({"precision": {"dtype": "float16", "head": "float32"}})
    (problem,) = verdict({"enable_fp32_lm_head": False}, config=head).problems
    assert problem.flag == "--enable-fp32-lm-head"
    assert not verdict({"enable_fp32_lm_head": True}, config=head).problems
    assert read_server(GOOD | {"enable_fp32_lm_head": True}).head_dtype == "float32"
    assert read_server(GOOD).head_dtype == "float16"


def test_all_problems_come_in_one_verdict() -> None:
    changes: dict[str, Any] = {}
    for change, field, _, _ in PROBLEMS:
        changes |= {} if field in ("quantization", "version") and changes.get(field) else change
    found = verdict(changes, original_logprobs=True)
    fields = [problem.field for problem in found.problems]
    assert fields == [
        "version", "dtype", "kv_cache_dtype", "quantization", "SGLANG_RETURN_ORIGINAL_LOGPROB", "preferred_sampling_params",
        "json_model_override_args", "load_format", "enable_lora", "dp_size", "rl_on_policy_target",
        "enable_decoder_swa_bounded_replay",
        "enable_return_routed_experts", "moe_runner_backend", "enable_two_batch_overlap",
        "enable_hierarchical_cache", "enable_lmcache",
        "disaggregation_mode", "speculative_algorithm", "pp_size",
    ]  # fmt: skip
    with pytest.raises(EngineError) as error:
        found.raise_for_problems()
    assert all(problem.flag in str(error.value) for problem in found.problems)


def test_routing_is_checked_only_where_it_is_replayed() -> None:
    off = {"enable_return_routed_experts": False, "moe_runner_backend": "flashinfer_trtllm", "pp_size": 4}
    assert not verdict(off, config=PLAIN).problems
    assert len(verdict(off, config=PLAIN, needs_routing=True).problems) == 3
    assert not verdict(off, needs_routing=False).problems
    own = MismatchConfig.parse({"routing": {"mode": "R2"}})
    assert not verdict(off, config=own).problems


def test_the_on_policy_mode_is_refused_with_all_but_bfloat16() -> None:
    mode = {"rl_on_policy_target": "fsdp", "enable_deterministic_inference": True}
    assert not verdict(mode | {"dtype": "bfloat16"}, config=PLAIN, dtype="bfloat16").problems
    for dtype in ("float16", "float32"):
        (problem,) = verdict(mode | {"dtype": dtype}, config=PLAIN, dtype=dtype).problems
        assert problem.field == "rl_on_policy_target" and f"the trainer computes in {dtype}" in problem.why


def test_the_blocks_dtype_comes_before_the_trainers() -> None:
    assert not verdict({}, dtype="bfloat16").problems
    (problem,) = verdict({}, config=PLAIN, dtype="bfloat16").problems
    assert (problem.field, problem.found, problem.allowed) == ("dtype", "float16", "bfloat16")
    with pytest.raises(PrecisionError, match="'int8' is not a compute dtype"):
        verdict({}, config=PLAIN, dtype="int8")


@pytest.mark.parametrize(
    "change",
    [{"preferred_sampling_params": "{}"}, {"preferred_sampling_params": {}}, {"json_model_override_args": ""},
     {"enable_lora": False}, {"lora_paths": []}],
)  # fmt: skip
def test_what_is_empty_is_no_problem(change: dict[str, Any]) -> None:
    assert not verdict(change).problems


def test_the_reading_is_what_the_audit_compares() -> None:
    reading = read_server(GOOD | {"dtype": "half", "quantization": "unquant", "version": "0.5.18"})
    assert (reading.engine, reading.version, reading.model_dtype) == ("sglang", "0.5.18", "float16")
    assert (reading.kv_cache_dtype, reading.quantization, reading.parameter_dtypes) == ("auto", None, {})
    assert reading.logprobs_mode == "processed_logprobs"


def test_raw_logprobs_are_those_of_the_server_and_not_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    # A server elsewhere: what was not said is assumed, and the verdict says so.
    assert read_server(GOOD).logprobs_mode == "processed_logprobs"
    found = verdict({}, original_logprobs=None)
    assert not found.problems and len(found.notes) == 1
    assert "note: SGLANG_RETURN_ORIGINAL_LOGPROB is assumed to be unset" in str(found)
    assert not verdict({}).notes and not verdict({}, original_logprobs=True).notes
    assert verdict({}, original_logprobs=True).problems


class InProcess:
    """The part of an `sglang.Engine` that reports."""

    def __init__(self, quantization: str | None) -> None:
        self.tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization))

    def get_server_info(self) -> dict[str, Any]:
        return dict(GOOD)


@pytest.mark.parametrize(("value", "mode"), [("1", "raw"), ("TRUE", "raw"), ("0", "processed"), ("", "processed")])
def test_an_engine_in_this_process_has_its_environment(monkeypatch: pytest.MonkeyPatch, value: str, mode: str) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", value)
    info = EngineTransport(InProcess(None)).server_info()
    assert read_server(info).logprobs_mode == f"{mode}_logprobs"
    assert read_server(info, original_logprobs=mode != "raw").logprobs_mode != f"{mode}_logprobs"
    found = check_server(info, config=R3, trainer_dtype="float16")
    assert not found.problems == (mode == "processed") and not found.notes


def test_a_quantization_that_the_checkpoint_brings_is_seen_in_this_process() -> None:
    info = EngineTransport(InProcess("fp8")).server_info()
    (problem,) = check_server(info, config=R3, trainer_dtype="float16").problems
    assert (problem.field, problem.found) == ("quantization", "fp8")


@pytest.mark.parametrize(
    ("override", "fields"),
    [
        ('{"quantization_config": {"quant_method": "fp8"}}', []),
        ({"quantization_config": {"quant_method": "fp8"}}, []),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": []}}, []),
        ('{"quantization_config": {"quant_method": "fp8"}, "rope_theta": 1}', ["json_model_override_args"]),
        ('{"quantization_config": null}', ["json_model_override_args"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["json_model_override_args"]),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": ["lm_head"]}}, ["json_model_override_args"]),
        ("quantization_config", ["json_model_override_args"]),
    ],
)
def test_an_override_of_the_format_alone_passes_where_weights_are_quantized_on_purpose(
    override: object, fields: list[str]
) -> None:
    asked = MismatchConfig.parse({"precision": {"dtype": "float16", "engine_weights": "fp8"}})
    change = {"quantization": "fp8", "json_model_override_args": override}
    assert [problem.field for problem in verdict(change, config=asked).problems] == fields
    assert [problem.field for problem in verdict(change).problems] == ["quantization", "json_model_override_args"]


def test_a_provenance_has_what_was_read_and_the_temperature() -> None:
    made = to_provenance(read_server(GOOD), sampling=SamplingSettings(temperature=0.7), weight_version=4)
    assert (made.engine, made.engine_version, made.dtype, made.weight_version) == ("sglang", "0.5.23", "float16", 4)
    assert made.sampling.temperature == 0.7 and made.logprobs_mode == "processed_logprobs"
    with pytest.raises(RecordError, match="dtype 'auto' is not one of"):
        to_provenance(read_server(GOOD | {"dtype": "auto"}), sampling=SamplingSettings(), weight_version=0)


@pytest.mark.parametrize("info", [{}, {"version": 5}, {"version": "0.5.18"}, GOOD | {"dtype": None}])
def test_what_is_no_report_is_refused(info: Any) -> None:
    with pytest.raises(EngineError, match="the report of the SGLang server has .*allowed: "):
        check_server(info, config=R3, trainer_dtype="float16")
