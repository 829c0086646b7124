"""Rows of a batch examined by verl's real worker: clean, with planted faults, of other weights, and broken."""

from __future__ import annotations

from typing import Any

import torch
from mismatch_ext.adapters.verl.worker.doctor import examined, sent_weights
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from mismatch_ext.errors import MismatchError
from tests.peers.verl.in_process.routes import nested
from tests.peers.verl.in_process.workers import parameters, scored, update, worker

ROWS, PROMPT, LENGTH, END = 64, 6, 16, 1
OWN = 0.05
"""Nats that the run's own pass is let differ by from a plain pass of its weights."""


def rollouts(model: str, sampled: dict[str, Any]) -> TensorDict:
    """Sample responses by transformers in bfloat16, with log-probabilities of what its sampling settings have left.

    Args:
        model: The checkpoint.
        sampled: Arguments of its `generate`.
    """
    engine: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    prompts = torch.randint(3, 16, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    out = engine.generate(
        prompts, do_sample=True, max_new_tokens=LENGTH, eos_token_id=END, pad_token_id=END, output_scores=True,
        return_dict_in_generate=True, **{"top_k": 0, "temperature": 1.0, **sampled},
    )  # fmt: skip
    logprobs = engine.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    responses, rollout, whole = [], [], []
    for ids, values in zip(out.sequences, logprobs.float(), strict=True):
        ends = (ids[PROMPT:] == END).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(ids) - PROMPT
        responses.append(ids[PROMPT : PROMPT + length])
        rollout.append(values[:length])
        whole.append(ids[: PROMPT + length])
    return TensorDict(
        {
            "prompts": nested(list(prompts.unbind())), "responses": nested(responses), "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
            "response_mask": nested([torch.ones_like(ids) for ids in responses]),
            "loss_mask": nested([torch.ones_like(ids) for ids in responses]),
            "advantages": nested([torch.full((len(ids),), (-1.0) ** at) for at, ids in enumerate(responses)]),
            "rollout_log_probs": nested(rollout),
        },
        batch_size=ROWS,
    )  # fmt: skip


def ready(data: TensorDict) -> TensorDict:
    """Add what verl's trainer says of a batch beside its tensors."""
    lengths = data["input_ids"].offsets().diff().tolist()
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=True, global_token_num=lengths, compute_loss=False)
    return data


def looked_at(built: Any, data: TensorDict) -> dict[str, Any]:
    """Examine a batch, and tell what that has left of weights, gradients and random numbers."""
    before = (parameters(built), torch.get_rng_state(), [p.grad is None for p in built.engine.module.parameters()])
    sent = sent_weights(built.engine)
    assert sent is not None
    found = examined(built.engine, sent, data, engine_dtype="bfloat16", temperature=1.0)
    after = (parameters(built), torch.get_rng_state(), [p.grad is None for p in built.engine.module.parameters()])
    return {
        "untouched": before[0] == after[0] and torch.equal(before[1], after[1]) and before[2] == after[2],
        "causes": [(cause.key, cause.parameter) for cause in found.causes], "verdict": found.verdict,
        "parts": {part.name: part.mean for part in found.parts},
        "ratio": found.ratio, "tokens": found.tokens, "mean": found.gap["logp_abs_diff_mean"],
        "measured": float((data["old_log_probs"].values() - data["rollout_log_probs"].values()).abs().mean()),
    }  # fmt: skip


def examine(model: str) -> dict[str, Any]:
    """Examine clean rollouts, planted settings, a pass of the run's own kind, weights that training has left, and broken rows."""
    built = worker(model, {"monitor": {"doctor": "first_batch"}}, dtype="bfloat16", micro_batch=16)
    faults: dict[str, dict[str, Any]] = {"clean": {}, "top_p": {"top_p": 0.9}, "temperature": {"temperature": 0.9}}
    batches = {name: scored(built, ready(rollouts(model, sampled))) for name, sampled in faults.items()}
    found: dict[str, Any] = {name: looked_at(built, data) for name, data in batches.items()}
    own = batches["clean"].clone()
    signs = torch.ones(len(own["old_log_probs"].values()))
    signs[::2] = -1
    own["old_log_probs"].values().add_(OWN * signs)
    found["own"] = looked_at(built, own)
    broken = batches["clean"].clone()
    broken["rollout_log_probs"].values()[3] = torch.nan
    try:
        looked_at(built, broken)
    except MismatchError as error:
        found["broken"] = str(error)
    for _ in range(3):
        update(built, batches["clean"])
    stale = batches["clean"].clone()
    del stale["old_log_probs"]
    found["stale"] = looked_at(built, scored(built, ready(stale)))
    return found
