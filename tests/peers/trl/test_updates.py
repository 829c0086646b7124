"""Weight updates of an engine in this process, of one that sleeps, and what it samples with."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_ext.checks import Checks
from mismatch_ext.ranks import ONE_PROCESS


def test_a_sleeping_engine_gets_its_weights_and_cache_before_it_is_probed_or_generates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mismatch_ext.adapters.trl import engines, generation

    monkeypatch.setattr(engines, "is_cpu", lambda llm: False)
    said: list[str] = []
    llm: Any = SimpleNamespace(wake_up=lambda tags: said.extend(tags))
    engine: Any = engines.Colocated(llm, sleeps=True)
    engine.captured = lambda version: nullcontext([])
    verifier = SimpleNamespace(verify=lambda sent, look, stepped: said.append(f"probed {look.logprobs}"), probes=None)
    trainer = SimpleNamespace(
        sent=lambda dtypes: None, score=lambda probes: said.append("scored") or 2, fingerprint=str, step=3,
        ranks=ONE_PROCESS, log=SimpleNamespace(refusing=lambda *_: nullcontext()), split="train", trainer_settings=dict,
    )  # fmt: skip
    checked = object.__new__(generation.CheckedGeneration)
    vars(checked).update(
        engine=engine, checks=Checks(True), verifier=verifier, verifies=True, run=trainer, layout=None, masks=None,
        weight_version=0, provenance=lambda: None, _inner=SimpleNamespace(_llm_weights_sleeping=True), _kept=[],
        _refused=None, heads=None,
        _sending=SimpleNamespace(dtypes=(), samples={}), _plain_sync=lambda: said.append("weights"), _sent_at=3,
        plain_generate=lambda *_: said.append("generated") or ([], [], [], None),
    )  # fmt: skip
    checked.generate([])
    assert said == ["scored", "weights", "kv_cache", "probed 2", "generated"]
    assert not engine.fresh  # what it was started with is gone


def test_sampling_settings_are_those_that_the_engine_has_now() -> None:
    from mismatch_ext.adapters.trl.run import TrlRun

    from mismatch_ext.config import MismatchConfig
    from mismatch_ext.errors import ConfigError
    from mismatch_ext.rollout import SamplingSettings

    trainer, run = SimpleNamespace(), object.__new__(TrlRun)
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    logged: list[Any] = []
    vars(trainer).update(
        args=SimpleNamespace(generation_kwargs={"top_p": 0.9}), temperature=1.0,
        vllm_generation=SimpleNamespace(**settings),
    )  # fmt: skip
    vars(run).update(
        trainer=trainer, sampling=SamplingSettings(top_p=0.9), temperature=1.0, block=MismatchConfig.parse({}),
        log=SimpleNamespace(sampled_with=logged.append),
    )  # fmt: skip
    run.follow_sampling()
    assert logged == []
    trainer.vllm_generation.top_k = 8
    run.follow_sampling()
    assert run.sampling == logged[0] == SamplingSettings(top_k=8, top_p=0.9)
    # TRL's trainer scores with the temperature that it was built with, whatever its attribute says.
    for changed in ((trainer,), (trainer, trainer.vllm_generation)):
        for side in changed:
            side.temperature = 0.7
        with pytest.raises(ConfigError, match=r"0.7 in the trainer, which scores with 1.0"):
            run.follow_sampling()
