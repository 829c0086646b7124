"""What the doctor takes of options and of a host's configuration, and what it takes back to try a remedy."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.doctor.command import as_logged
from mismatch_ext.adapters.doctor.examining import _try_remedies
from mismatch_ext.adapters.doctor.hosts import HostRun
from mismatch_ext.adapters.doctor.options import asked_of, configure
from mismatch_ext.adapters.doctor.sides import Run

from mismatch_ext.doctor import conclude, gather, report
from mismatch_ext.errors import ConfigError
from tests.unit.test_doctor import drawn


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args([*arguments, "--rollouts", "x", "--out", "y"])


def test_options_come_before_the_hosts_settings_and_say_so() -> None:
    host = HostRun(
        sides=dict(
            model="run", dtype="float16", trainer_dtype="float16", temperature=0.7, sampling={"temperature": 0.7, "top_p": 0.9}
        ),
        max_tokens=1000, dataset=None, origin={"model": "a", "dtype": "b", "sampling.top_p": "c", "max_tokens": "d"}, left_out={},
    )  # fmt: skip
    plain = asked_of(parsed(), host)
    assert plain.run == Run(**{**host.sides, "sampling": {**host.sides["sampling"], "seed": 0}})
    assert plain.max_tokens == 128
    given = asked_of(
        parsed("--model", "other", "--dtype", "float32", "--temperature", "1", "--max-tokens", "500"), host
    )
    assert (given.run.model, given.run.dtype, given.run.trainer_dtype) == ("other", "float32", "float16")
    assert given.run.temperature == given.run.sampling["temperature"] == 1 and given.run.sampling["top_p"] == 0.9
    assert given.max_tokens == 500 and given.origin["dtype"] == "--dtype"


def engine_parsed(*arguments: str) -> argparse.Namespace:
    """Parse a call that starts an engine."""
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args([*arguments, "--prompts", "x", "--out", "y"])


@pytest.mark.parametrize(
    ("given", "trainer"),
    [
        (("--engine-arg", "dtype=float"), "float32"),
        (("--engine-arg", "dtype=float32", "--trainer-dtype", "float16"), "float16"),
    ],
)
def test_a_dtype_among_the_engines_arguments_is_the_dtype_that_is_judged(given: tuple[str, ...], trainer: str) -> None:
    asked = asked_of(engine_parsed("--model", "m", "--engine-arg", "max_model_len=64", *given), None)
    assert (asked.run.dtype, asked.run.trainer_dtype) == ("float32", trainer)
    assert asked.run.arguments == {"max_model_len": 64}
    host = HostRun(
        sides={"model": "run", "dtype": "bfloat16", "trainer_dtype": "bfloat16"},
        max_tokens=9, dataset=None, origin={"dtype": "vLLM's own"}, left_out={},
    )  # fmt: skip
    hosted = asked_of(engine_parsed(*given), host)
    assert hosted.run.dtype == "float32" and "dtype" not in hosted.run.arguments
    assert hosted.run.trainer_dtype == (trainer if "--trainer-dtype" in given else "bfloat16")


@pytest.mark.parametrize("sampling", [{"structured_outputs": {"json": {}}}, {"regex": "[0-9]+"}])
def test_a_grammar_is_refused_by_name(sampling: dict[str, Any]) -> None:
    host = HostRun(sides={"model": "run", "sampling": sampling}, max_tokens=9, dataset=None, origin={}, left_out={})
    with pytest.raises(ConfigError, match=f"{next(iter(sampling))} restricts the engine's tokens.*leave it out"):
        asked_of(parsed(), host)


@pytest.mark.parametrize(
    ("arguments", "stated", "hosted", "scored", "said"),
    [
        ((), 0.8, None, 0.8, "the log's"),
        (("--temperature", "1"), 0.8, None, 1.0, "by --temperature; the log was sampled at 0.8"),
        ((), 0.8, 0.7, 0.7, "the run's; the log was sampled at 0.8"),
        ((), 0, None, 1.0, "sampled at temperature 0, at which no trainer scores; the trainer is scored at 1"),
    ],
)
def test_a_trainer_is_scored_at_the_temperature_that_was_given_or_the_runs_or_the_logs(
    arguments: tuple[str, ...], stated: float | None, hosted: float | None, scored: float, said: str
) -> None:
    host = None
    if hosted is not None:
        host = HostRun(sides={"temperature": hosted}, max_tokens=9, dataset=None, origin={}, left_out={})
    given = parsed("--model", "x", "--rollouts", "log.jsonl", *arguments)
    run, notes = as_logged(asked_of(given, host).run, given, {} if stated is None else {"temperature": stated}, host)
    assert run.temperature == scored
    (note,) = notes
    assert said in note


def test_a_start_of_the_very_same_engine_neither_confirms_nor_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, scores = drawn(lambda z: 23 * torch.tanh(z / 23))
    evidence = gather(sample, scores)
    found = conclude(evidence)
    (cause,) = found.causes
    assert (cause.key, cause.family, cause.status) == ("softcap", "config", "fits")

    def start(*_: object) -> None:
        raise AssertionError("the same engine was started again")

    monkeypatch.setattr(Run, "start", start)
    rungs: list[str] = []
    _try_remedies(evidence, Run(model="m"), sample, SimpleNamespace(shape=None), rungs.append)  # type: ignore[arg-type]
    judged = conclude(evidence)
    assert judged.causes == found.causes and judged.verdict == found.verdict and rungs == []
    assert "softcap: no start of the engine can confirm or refute it" in judged.notes[-1]
    assert "refuted" not in report(judged).replace("confirm or refute it", "")
