"""Types of ours and of the peers where files meet: mypy reads this file, and an import that it does not follow is an Any here."""

from __future__ import annotations

from typing import assert_type

from mismatch_ext.adapters.sglang import Rollout as SglangRollout
from mismatch_ext.adapters.sglang import ServerProblem, ServerVerdict
from mismatch_ext.adapters.transformers import TrainedModel
from mismatch_ext.adapters.transformers.routing import moe_layout
from mismatch_ext.adapters.transformers.routing.layout import MoeLayout, Router
from mismatch_ext.adapters.trl import MismatchGRPOConfig
from mismatch_ext.adapters.trl.config import step_of_checkpoint
from mismatch_ext.adapters.trl.trainer import MismatchGRPOTrainer
from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer as MismatchVerlTrainer
from mismatch_ext.adapters.verl.engine import MismatchFSDPEngine
from mismatch_ext.adapters.vllm import Rollout as VllmRollout
from mismatch_ext.adapters.vllm.probes import score_tokens
from mismatch_ext.patches.trl.engine_arguments import engine_arguments
from torch import Tensor, nn
from transformers import TrainerState
from vllm import LLM

from mismatch_ext.config import MismatchConfig
from mismatch_ext.log import RunLog
from mismatch_ext.loop import Run
from mismatch_ext.patching import Patch


def ours(model: nn.Module, llm: LLM, verdict: ServerVerdict) -> None:
    """From each adapter and from the patches."""
    assert_type(moe_layout(model), MoeLayout)
    assert_type(moe_layout(model).routers, tuple[Router, ...])
    assert_type(score_tokens(llm, [[1, 2]]), Tensor)
    assert_type(verdict.problems, tuple[ServerProblem, ...])
    assert_type(step_of_checkpoint("runs/checkpoint-1"), int | None)
    assert_type(engine_arguments({}), Patch)


def derived(
    config: MismatchGRPOConfig, trainer: MismatchGRPOTrainer, engine: MismatchFSDPEngine, verl: MismatchVerlTrainer
) -> None:
    """From classes of ours, and from the peers' that they derive from."""
    assert_type(config.mismatch_block(), MismatchConfig | None)
    assert_type(config.beta, float)
    assert trainer.mm is not None
    assert_type(trainer.mm.log, RunLog)
    assert_type(trainer.state, TrainerState)
    assert_type(engine.block, MismatchConfig | None)
    assert_type(verl.global_steps, int)


def sides(trained: TrainedModel, vllm: VllmRollout, sglang: SglangRollout) -> list[Run]:
    """From the sides of a loop to what a run asks of them."""
    return [Run(None, trained, vllm, "runs"), Run(None, trained, sglang, "runs")]
