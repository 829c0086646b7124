"""Truncated sampling: the ratio under top-p, top-k and min-p, with the trainer's softmax over all tokens or those kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.doctor.models import end_tokens
from torch import Tensor, nn
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from benchmarks.gpu.engine import Rollout, decode, logits_of
from benchmarks.gpu.gap import interval
from benchmarks.gpu.models import in_dtype, policy, prompts_of
from benchmarks.gpu.part import Found, Say, Setting
from benchmarks.gpu.svg import Figure, Panel, Series

NAME, TITLE = "sampling", "ratios under truncated sampling, with and without masks"
ROWS, TOKENS = 64, 64


def warpers() -> dict[str, list[Any]]:
    """Return transformers' own truncations, by what a request says."""
    return {
        "none": [],
        "top_p 0.95": [TopPLogitsWarper(0.95)],
        "top_p 0.9": [TopPLogitsWarper(0.9)],
        "top_p 0.8": [TopPLogitsWarper(0.8)],
        "top_k 50": [TopKLogitsWarper(50)],
        "top_k 8": [TopKLogitsWarper(8)],
        "min_p 0.05": [MinPLogitsWarper(0.05)],
    }


def run(setting: Setting, folder: Path, say: Say) -> Found:
    """Measure the mean ratio pi / mu of each truncation in float32, where nothing else differs, and in bf16."""
    model, what = policy("any", setting)
    prompts = prompts_of(model, setting, min(ROWS, setting.responses))
    table: dict[str, Any] = {}
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        held = in_dtype(model, dtype)
        for number, (asked, chosen) in enumerate(warpers().items()):
            say(f"{name}, {asked}")
            rollout = decode(
                held,
                prompts,
                min(TOKENS, setting.new_tokens),
                generator=setting.generator(100 + number),
                rows=setting.rows,
                warpers=chosen,
                support=True,
                ends=end_tokens(model),
            )
            table[f"{asked}, {name}"] = ratios(held, rollout)
    return {"model": what, "ratios": table}


def ratios(model: nn.Module, rollout: Rollout) -> dict[str, Any]:
    """Return means of pi / mu over tokens, with pi over the whole vocabulary and over the tokens that were kept."""
    plain, masked = both(model, rollout)
    mask, tokens = rollout.mask, rollout.mask.sum(1).double().numpy()
    found: dict[str, Any] = {"tokens kept, mean": float(_kept(rollout)[mask].mean())}
    for name, said in (("without mask", plain), ("with mask", masked)):
        ratio = (said - rollout.logprobs).exp() * mask
        found[f"mean ratio, {name}"] = interval(ratio.sum(1), tokens)
        found[f"mean |d|, {name}"] = float((said - rollout.logprobs)[mask].abs().mean())
        found[f"outside of 0.8 to 1.25, {name}"] = float(((ratio[mask] < 0.8) | (ratio[mask] > 1.25)).double().mean())
    return found


@torch.no_grad()
def both(model: nn.Module, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Return the trainer's log-probabilities `[B, T]` over all tokens, and over those that each step kept."""
    assert rollout.support is not None
    plain, masked = [], []
    for row, kept in zip(rollout.ids, rollout.support, strict=True):
        logits, _ = logits_of(model, input_ids=row[None], use_cache=False)
        logits = logits[0, rollout.prompt - 1 : -1].double()
        token = row[rollout.prompt :, None]
        plain.append(logits.log_softmax(-1).gather(-1, token)[:, 0].cpu())
        inside = logits.masked_fill(~kept.to(logits.device), -torch.inf)
        masked.append(inside.log_softmax(-1).gather(-1, token)[:, 0].cpu())
    return torch.stack(plain), torch.stack(masked)


def _kept(rollout: Rollout) -> Tensor:
    assert rollout.support is not None
    return rollout.support.sum(-1).double()


def figures(found: Found) -> dict[str, Figure]:
    """Draw the mean ratio of each truncation, with and without masks."""
    rows = {name: row for name, row in found["ratios"].items() if name.endswith("float32")}
    places = list(range(len(rows)))
    series = [
        Series(name=said, x=places, y=[row[f"mean ratio, {said}"]["value"] for row in rows.values()])
        for said in ("without mask", "with mask")
    ]
    panel = Panel(
        title="mean of trainer's over engine's probability",
        x_title="",
        y_title="mean ratio, float32",
        series=series,
        labels=[name.partition(",")[0] for name in rows],
    )
    return {"ratios": Figure(panels=[panel], caption=found["model"])}
