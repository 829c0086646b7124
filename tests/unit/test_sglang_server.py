"""One verdict on a server, with every setting that the trainer cannot match and the flag to change."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from mismatch_ext.adapters.sglang import EngineTransport, check_server, read_server, to_provenance

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError
from mismatch_ext.rollout import SamplingSettings
from tests.unit.sglang_recorded import FOLDER

FIELDS: dict[str, dict[str, list[str]]] = json.loads((FOLDER / "fields.json").read_text(encoding="utf-8"))
# The report of a server that is right for FP16 and R3, and what makes it wrong.
GOOD: dict[str, Any] = json.loads((FOLDER / "checked_server.json").read_text(encoding="utf-8"))
PROBLEMS = [json.loads(line) for line in (FOLDER / "server_problems.jsonl").read_text(encoding="utf-8").splitlines()]
R3 = MismatchConfig.parse({"precision": {"dtype": "float16"}, "routing": {"mode": "R3"}})
PLAIN = MismatchConfig.parse({})
UNSHOWN = "SGLANG_RETURN_ORIGINAL_LOGPROB"
assert R3 is not None and PLAIN is not None


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_RETURN_ORIGINAL_LOGPROB", raising=False)


def verdict(change: dict[str, Any], config: Any = R3, dtype: str = "float16") -> Any:
    """Check a server that is right for FP16 and R3, but for the change."""
    return check_server({**GOOD, UNSHOWN: False, **change}, config=config, trainer_dtype=dtype)


@pytest.mark.parametrize("version", FIELDS)
def test_the_fields_that_are_read_are_the_servers(version: str) -> None:
    later = {"torchao_config", "enable_decoder_swa_bounded_replay"}
    missing = set(GOOD) - {"version"} - set(FIELDS[version]["ServerArgs"])
    assert missing <= later


def test_a_server_that_fits_passes() -> None:
    found = verdict({})
    assert not found.problems
    found.raise_for_problems()
    assert found.version == "0.5.23" and not found.notes


@pytest.mark.parametrize("change", PROBLEMS, ids=lambda row: f"{row['report']}")
def test_each_problem_is_found_alone_and_names_the_flag(change: dict[str, Any]) -> None:
    found = verdict(change["report"])
    (problem,) = found.problems
    assert (problem.field, problem.flag) == (change["field"], change["flag"])
    with pytest.raises(EngineError, match="does not run as the trainer needs it, 1 problems") as error:
        found.raise_for_problems()
    assert f"Fix: {problem.flag}." in str(error.value)


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
    changes = {key: value for row in PROBLEMS for key, value in row["report"].items()}
    found = verdict({**changes, UNSHOWN: True})
    fields = {problem.field for problem in found.problems}
    assert fields == {UNSHOWN, *(row["field"] for row in PROBLEMS)}


def test_routing_is_checked_only_where_it_is_replayed() -> None:
    off = {"enable_return_routed_experts": False, "moe_runner_backend": "flashinfer_trtllm", "pp_size": 4}
    assert not verdict(off, config=PLAIN).problems
    assert len(verdict(off).problems) == 3
    own = MismatchConfig.parse({"routing": {"mode": "R2"}})
    assert not verdict(off, config=own).problems


def test_the_on_policy_mode_is_refused_with_all_but_bfloat16() -> None:
    mode = {"rl_on_policy_target": "fsdp", "enable_deterministic_inference": True}
    assert not verdict(mode | {"dtype": "bfloat16"}, config=PLAIN, dtype="bfloat16").problems
    (problem,) = verdict(mode | {"dtype": "float32"}, config=PLAIN, dtype="float32").problems
    assert problem.field == "rl_on_policy_target"


def test_the_blocks_dtype_comes_before_the_trainers() -> None:
    assert not verdict({}, dtype="bfloat16").problems
    (problem,) = verdict({}, config=PLAIN, dtype="bfloat16").problems
    assert (problem.field, problem.found, problem.allowed) == ("dtype", "float16", "bfloat16")


def test_what_is_empty_is_no_problem() -> None:
    empty = {"preferred_sampling_params": "{}", "json_model_override_args": "", "enable_lora": False, "lora_paths": []}
    assert not verdict(empty).problems


def test_raw_logprobs_are_those_of_the_server_and_not_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    # A server elsewhere: what was not said is assumed, and the verdict says so.
    assert read_server(GOOD).logprobs_mode == "processed_logprobs"
    found = check_server(GOOD, config=PLAIN, trainer_dtype="float16")
    assert not found.problems and "SGLANG_RETURN_ORIGINAL_LOGPROB is assumed to be unset" in str(found.notes)


class InProcess:
    """The part of an `sglang.Engine` that reports."""

    def __init__(self, quantization: str | None) -> None:
        self.tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization))

    def get_server_info(self) -> dict[str, Any]:
        return dict(GOOD)


@pytest.mark.parametrize(("value", "mode"), [("TRUE", "raw"), ("0", "processed"), ("", "processed")])
def test_an_engine_in_this_process_has_its_environment(monkeypatch: pytest.MonkeyPatch, value: str, mode: str) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", value)
    info = EngineTransport(InProcess(None)).server_info()
    assert read_server(info).logprobs_mode == f"{mode}_logprobs"
    found = check_server(info, config=R3, trainer_dtype="float16")
    assert bool(found.problems) == (mode == "raw") and not found.notes


def test_a_quantization_that_the_checkpoint_brings_is_seen_in_this_process() -> None:
    info = EngineTransport(InProcess("fp8")).server_info()
    (problem,) = check_server(info, config=R3, trainer_dtype="float16").problems
    assert (problem.field, problem.found) == ("quantization", "fp8")


def test_a_provenance_has_what_was_read_and_the_temperature() -> None:
    made = to_provenance(
        read_server(GOOD | {"dtype": "half"}), sampling=SamplingSettings(temperature=0.7), weight_version=4
    )
    assert (made.engine, made.engine_version, made.dtype, made.weight_version) == ("sglang", "0.5.23", "float16", 4)
    assert (made.sampling.temperature, made.logprobs_mode) == (0.7, "processed_logprobs")


@pytest.mark.parametrize("info", [{}, {"version": 5}, {"version": "0.5.18"}, GOOD | {"dtype": None}])
def test_what_is_no_report_is_refused(info: Any) -> None:
    with pytest.raises(EngineError, match="the report of the SGLang server has .*allowed: "):
        check_server(info, config=R3, trainer_dtype="float16")
