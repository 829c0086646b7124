"""A run's own pass over a batch that it kept is taken apart by trying, and only what was shown gets a remedy."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.doctor.examining import examine_logged
from mismatch_ext.adapters.doctor.sides import Run
from mismatch_ext.adapters.transformers.scoring import active_dropout
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import disable_dropout_in_model

from mismatch_ext.doctor import Diagnosis, read_rollouts, report
from mismatch_ext.evidence import ColumnBatch, lines_of

ROWS, PROMPT, LENGTH, END = 96, 6, 30, 1
SHORT = 3
"""Tokens of every second prompt."""
WIDTH = 14
"""Tokens and pads of a prompt in the run's batch."""


def model(kind: str = "", dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": 0, "initializer_range": 0.12}
    if kind == "gpt2":
        rates = {name: 0.0 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")}
        config: Any = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64, **rates, **ends)
        return GPT2LMHeadModel(config).eval()
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attention_dropout=dropout, **ends,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def scored(which: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return log-probabilities of the responses, which end the rows."""
    with torch.no_grad():
        logits = which(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, -LENGTH:]


def sampled(engine: Any, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return prompts of one length with their responses, and the engine's log-probabilities."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 64, (ROWS // 2, length), generator=made)
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = engine(input_ids=ids, use_cache=False).logits[:, -1].float()
            logits[:, END] = -torch.inf
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=made)], 1)
    return ids, scored(engine, ids)


def kept(fault: str, folder: Path) -> Path:
    """Sample from a bfloat16 engine, score with a run's pass that has a fault, and keep rows of the batch; save the model."""
    kind = "gpt2" if fault == "left" else ""
    sound = model(kind, 0.1 if fault == "dropout" else 0.0)
    sound.save_pretrained(folder)
    engine = copy.deepcopy(sound).to(torch.bfloat16)
    parts = [sampled(engine, length, seed) for seed, length in enumerate((PROMPT, SHORT))]
    run = copy.deepcopy(sound).train(fault == "dropout")
    if fault == "weights":
        with torch.no_grad():
            run.lm_head.weight.mul_(1.05)
    rows = [row for ids, _ in parts for row in ids]
    prompts = [row[:-LENGTH] for row in rows]
    ids = torch.stack([torch.cat([row.new_zeros(WIDTH - len(row) + LENGTH), row]) for row in rows])
    present = torch.stack([torch.arange(WIDTH + LENGTH) >= WIDTH + LENGTH - len(row) for row in rows]).long()
    with torch.autocast("cpu", torch.bfloat16):
        if fault in ("mask", "left"):
            # Pads that are attended to, or that shift the positions of a model which counts columns.
            trainer = scored(run, ids, torch.ones_like(present) if fault == "mask" else present)
        else:
            trainer = torch.cat([scored(run, part) for part, _ in parts])
    batch = ColumnBatch(
        prompts=ids[:, :WIDTH], prompt_mask=present[:, :WIDTH], responses=ids[:, WIDTH:], trainer=trainer,
        rollout=torch.cat([logprobs for _, logprobs in parts]),
        settings=lambda: {"host": "trl", "dtype": "bfloat16", "weights": "float32", "temperature": 1.0},
    )  # fmt: skip
    assert [batch.row(0).prompt_ids, batch.row(0).left] == [prompts[0].tolist(), WIDTH - PROMPT]
    path = folder / "evidence-1.jsonl.gz"
    lines = "".join(json.dumps(line) + "\n" for line in lines_of(batch, "an alarm"))
    path.write_bytes(gzip.compress(lines.encode()))
    return path


def examined(fault: str, folder: Path) -> Diagnosis:
    return examine_logged(Run(model=str(folder)), read_rollouts(kept(fault, folder)), quick=True)


@pytest.mark.parametrize(
    ("fault", "named", "verdict", "said"),
    [
        ("", [], "clean", "Clean"),
        ("dropout", ["dropout"], "explained", "disable_dropout: true"),
        ("mask", ["layout"], "partly", "not shown in the run's own pass, by trying: prompts padded on the left"),
        (
            "weights",
            ["layout"],
            "partly",
            "or --model is another checkpoint: these rows were scored by the weights after step 0",
        ),
        ("left", ["layout"], "explained", "one with prompts padded on the left, without position_ids"),
    ],
)
def test_a_runs_own_pass_is_taken_apart_by_trying(
    tmp_path: Path, fault: str, named: list[str], verdict: str, said: str
) -> None:
    """The run's batch has prompts of two lengths and pads that no batch of the kept rows alone would have."""
    found = examined(fault, tmp_path)
    printed = report(found)
    assert [cause.key for cause in found.causes] == named and found.verdict == verdict, printed
    assert said in printed and "use_remove_padding" not in printed


def test_dropout_that_acts_is_named_as_the_modules_have_it() -> None:
    adapted = get_peft_model(model(dropout=0.1), LoraConfig(lora_dropout=0.05, target_modules=["q_proj"]))
    assert active_dropout(adapted) == ["attention_dropout 0.1", "lora_dropout 0.05"]
    # TRL's `disable_dropout` reaches modules alone; the attention of this model asks its own attribute.
    disable_dropout_in_model(adapted)
    assert active_dropout(adapted) == ["attention_dropout 0.1"]
    assert active_dropout(model()) == []
