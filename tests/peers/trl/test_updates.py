"""Weight updates of an engine in this process, of one that sleeps, and what it samples with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


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
