"""The output head in float32: set, read back and audited on both sides, and named with its cost if one side alone has it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.transformers import TrainedModel
from mismatch_ext.adapters.transformers.head import keep_in_float32, read_head
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from mismatch_ext import Run
from mismatch_ext.errors import ConfigError, PrecisionError
from mismatch_ext.log_reading import read_run
from mismatch_ext.precision.audit import HEAD_UNREAD, EngineReading, TrainerReading, audit
from mismatch_ext.precision.heads import EVENT, is_one_sided
from tests.torch_rollout import TorchRollout

BF16 = partial(torch.autocast, "cpu", torch.bfloat16)
VOCABULARY, HIDDEN = 31, 32


def llama(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def logits_and_hidden(model: LlamaForCausalLM) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(24).view(2, 12)
    with BF16():
        output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return output.logits, output.hidden_states[-1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_kept_head_multiplies_in_float32_under_autocast_and_learns(tied: bool) -> None:
    model = llama(tied=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    plain, hidden = logits_and_hidden(model)
    assert read_head(model, BF16) == "bfloat16" and plain.dtype == torch.bfloat16
    keep_in_float32(model)
    logits, again = logits_and_hidden(model)
    exact = hidden.float() @ model.lm_head.weight.T
    assert torch.equal(hidden, again) and read_head(model, BF16) == "float32"
    assert torch.allclose(logits, exact, atol=1e-5) and not torch.allclose(plain.float(), exact, atol=1e-5)
    logits.square().sum().backward()
    assert model.lm_head.weight.grad is not None and model.lm_head.weight.grad.abs().sum() > 0


def test_a_head_that_is_not_linear_is_refused_and_a_sharded_one_is_not_read() -> None:
    model: Any = llama()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ConfigError, match=r"the output head of LlamaForCausalLM is not a linear layer"):
        keep_in_float32(model)
    assert read_head(model, BF16) is None
    model.lm_head = nn.Linear(HIDDEN, VOCABULARY)
    model.lm_head.weight = nn.Parameter(torch.zeros(7))  # as FSDP1 holds a rank's part
    assert read_head(model, BF16) is None


TRAINER = TrainerReading(
    parameter_dtypes={"float32": 9}, autocast_dtype="bfloat16", scaler=None, reduce_dtype=None, device="cpu",
    head_dtype="bfloat16",
)  # fmt: skip
ENGINE = EngineReading(
    engine="vllm", version="0.30.0", model_dtype="bfloat16", parameter_dtypes={"bfloat16": 9}, kv_cache_dtype="auto",
    logprobs_mode="processed_logprobs", quantization=None, head_dtype="bfloat16",
)  # fmt: skip


@pytest.mark.parametrize(("trainer", "engine"), [("bfloat16", "float32"), ("float32", "bfloat16"), (None, None)])
def test_the_audit_says_both_heads(trainer: str | None, engine: str | None) -> None:
    readings = replace(TRAINER, head_dtype=trainer), replace(ENGINE, head_dtype=engine)
    free = audit("bfloat16", *readings, None)
    found = {check.side: check.found for check in free.checks if check.what == "output head"}
    assert free.ok and found == {
        side: head for side, head in (("trainer", trainer), ("engine", engine)) if head is not None
    }
    asked = audit({"dtype": "bfloat16", "head": "float32"}, *readings, None)
    wrong = {finding.side: finding.found for finding in asked.findings}
    expected = {} if trainer != "bfloat16" else {"trainer": "bfloat16"}
    # An engine that cannot be read is refused, and a trainer is named among what was not read.
    assert wrong == expected | ({} if engine == "float32" else {"engine": engine or "unknown"})
    assert (HEAD_UNREAD in asked.unread) == (trainer is None)


def test_another_dtype_of_a_head_is_refused_without_being_asked_for() -> None:
    report = audit("bfloat16", TRAINER, replace(ENGINE, head_dtype="float16"), None)
    with pytest.raises(PrecisionError, match=r"engine output head: expected bfloat16 or float32, found float16"):
        report.raise_for_findings()


@pytest.mark.parametrize(
    ("trainer", "engine", "computes", "one_sided"),
    [
        ("bfloat16", "float32", "bfloat16", True),
        ("float32", "bfloat16", "bfloat16", True),
        ("float32", "float32", "bfloat16", False),
        (None, "float32", "bfloat16", False),
        # The whole trainer is finer, which is another matter.
        ("float32", "bfloat16", None, False),
    ],
)
def test_a_head_is_one_sided_where_the_rest_is_alike(
    trainer: str | None, engine: str, computes: str | None, one_sided: bool
) -> None:
    reading = replace(TRAINER, head_dtype=trainer, autocast_dtype=computes)
    assert is_one_sided(reading, replace(ENGINE, head_dtype=engine)) == one_sided


class Headed(TorchRollout):
    """An engine in bfloat16 whose head computes in a dtype of its own."""

    head = "bfloat16"

    def reading(self) -> EngineReading:
        return replace(super().reading(), head_dtype=self.head)


def loop(head: str) -> tuple[TrainedModel, Headed]:
    """Return a trainer that computes in bfloat16, and an engine with that head."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    rollout = Headed(model, lambda model, tokens, mask: model(input_ids=tokens).logits, dtype="bfloat16")
    rollout.head = head
    return TrainedModel(model, optimizer, reference=llama(), autocast=BF16), rollout


def test_a_run_sets_and_reads_the_heads_of_policy_and_reference(tmp_path: Path) -> None:
    trainer, rollout = loop("float32")
    assert trainer.reading().head_dtype == "bfloat16"
    with Run({"precision": {"dtype": "bfloat16", "head": "float32"}}, trainer, rollout, tmp_path).start():
        assert trainer.reading().head_dtype == "float32"
        assert trainer.reference is not None and read_head(trainer.reference, BF16) == "float32"
    header = read_run(tmp_path / "mismatch").header
    heads = {check["side"]: check["found"] for check in header["audit"]["checks"] if check["what"] == "output head"}
    assert heads == {"trainer": "float32", "engine": "float32"}
    trainer, rollout = loop("bfloat16")
    with pytest.raises(PrecisionError, match=r"engine output head: expected float32, found bfloat16"):
        Run({"precision": {"dtype": "bfloat16", "head": "float32"}}, trainer, rollout, tmp_path / "other").start()


def test_a_run_warns_of_an_engine_with_a_finer_head_by_what_it_measures(tmp_path: Path) -> None:
    trainer, rollout = loop("float32")
    with pytest.warns(
        UserWarning, match=r"the engine's output head computes in float32, and the trainer's in bfloat16"
    ):
        Run({}, trainer, rollout, tmp_path).start()
    (event,) = [event for event in read_run(tmp_path / "mismatch").events if event.name == EVENT]
    assert "nats per token over" in event.message and "mismatch.precision.head: float32" in event.message
    trainer, rollout = loop("bfloat16")
    Run({}, trainer, rollout, tmp_path / "alike").start()
    assert not [event for event in read_run(tmp_path / "alike/mismatch").events if event.name == EVENT]
