"""The doctor in a run: what the run's own pass does otherwise is taken apart by trying, and only what was shown gets a remedy."""

from __future__ import annotations

import copy

import pytest
import torch
from mismatch_ext.adapters.transformers.doctor.in_run import Computing, Rows, examine_batch
from mismatch_ext.adapters.transformers.scoring import active_dropout
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import disable_dropout_in_model

from mismatch_ext.doctor import Diagnosis, report

ROWS, PROMPT, LENGTH, END = 96, 6, 30, 1


def model(dropout: float = 0.0) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.12, attention_dropout=dropout, bos_token_id=0,
        eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def scored(which: Qwen3ForCausalLM, ids: Tensor, mask: Tensor | None = None, *, extra: int = 0) -> Tensor:
    """Return log-probabilities of the responses; `extra` columns of padding stand on the left."""
    wide = torch.cat([torch.zeros(len(ids), extra, dtype=ids.dtype), ids], 1)
    with torch.no_grad():
        logits = which(input_ids=wide, attention_mask=mask, use_cache=False).logits.float()[:, :-1]
    return logits.log_softmax(-1).gather(-1, wide[:, 1:, None])[..., 0][:, extra + PROMPT - 1 :]


def examined(fault: str) -> Diagnosis:
    """Sample from a bfloat16 engine, score with a run's pass that has a fault, and examine the batch."""
    sound = model(0.1 if fault == "dropout" else 0.0)
    engine = copy.deepcopy(sound).to(torch.bfloat16)
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 64, (ROWS, PROMPT), generator=made)
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = engine(input_ids=ids, use_cache=False).logits[:, -1].float()
            logits[:, END] = -torch.inf
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=made)], 1)
    run = copy.deepcopy(sound).train(fault == "dropout")
    lost = torch.ones(ROWS, PROMPT + LENGTH + 4, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        trainer = scored(run, ids, lost, extra=4) if fault == "mask" else scored(run, ids)
    rows = Rows(
        prompts=ids[:, :PROMPT].tolist(), responses=ids[:, PROMPT:].tolist(), masks=[[True] * LENGTH] * ROWS,
        engine=scored(engine, ids).tolist(), trainer=trainer.tolist(),
    )  # fmt: skip
    computing = Computing(trainer_dtype="bfloat16", trainer_weights="float32", engine_dtype="bfloat16", temperature=1.0)
    return examine_batch(rows, computing, copy.deepcopy(sound).eval())


@pytest.mark.parametrize(
    ("fault", "named", "verdict", "remedy"),
    [
        ("", [], "clean", ""),
        ("dropout", ["dropout"], "explained", "disable_dropout: true"),
        ("mask", ["layout"], "partly", ""),
    ],
)
def test_a_runs_own_pass_is_taken_apart_by_trying(fault: str, named: list[str], verdict: str, remedy: str) -> None:
    found = examined(fault)
    printed = report(found)
    assert [cause.key for cause in found.causes] == named and found.verdict == verdict, printed
    assert remedy in printed and "position_ids beside" not in printed and "use_remove_padding" not in printed


def test_dropout_that_acts_is_named_as_the_modules_have_it() -> None:
    adapted = get_peft_model(model(0.1), LoraConfig(lora_dropout=0.05, target_modules=["q_proj"]))
    assert active_dropout(adapted) == ["attention_dropout 0.1", "lora_dropout 0.05"]
    # TRL's `disable_dropout` reaches modules alone; the attention of this model asks its own attribute.
    disable_dropout_in_model(adapted)
    assert active_dropout(adapted) == ["attention_dropout 0.1"]
    assert active_dropout(model()) == []
