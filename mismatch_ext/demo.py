"""`mismatch-ext demo`: a gap, its cause and the remedy, shown on a miniature policy in seconds, with torch alone.

The rollout engine decodes token by token from a cache of keys and values, by torch's fused attention. The trainer scores whole
sequences, by attention that is spelled out. Both hold the same weights.

Suffixes of shapes: B sequences, T tokens, V vocabulary, H heads, D size of a head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from mismatch_ext.doctor import Diagnosis, Sample, Scores, Tried, conclude, gather, report, rescored
from mismatch_ext.doctor.fits import own_rounding
from mismatch_ext.files import write_whole
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.log_reading import DOCTOR_FILE
from mismatch_ext.report.page import build_demo
from mismatch_ext.words import quantity

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 96, 4, 2
PROMPT, RESPONSE, RESPONSES = 8, 64, 128
TRAINING_STEPS = 100
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Qwen2.5-7B-Instruct's generation_config.json has this value, and vLLM's server applies it unless it is told not to.
PENALTY = 1.05

Cache = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """A pre-norm transformer block; with a cache, it sees only the newest token and uses fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor, cache: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, _ = hidden.shape
        qkv_BTHD = self.qkv(self.before(hidden)).view(batch, length, 3, HEADS, -1)
        query, key, value = qkv_BTHD.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        else:
            scores = query @ key.mT / query.shape[-1] ** 0.5
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        hidden = hidden + self.mixed(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden + self.down(F.silu(self.up(self.between(hidden)))), (key, value)


class Policy(nn.Module):
    """A two-layer transformer over `VOCABULARY` tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(PROMPT + RESPONSE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Return logits `[B, T, V]` in float32. A given cache is extended by the tokens."""
        start = cache[0][0].shape[2] if cache else 0
        hidden = self.embedding(ids_BT) + self.position(torch.arange(start, start + ids_BT.shape[1]))
        for layer, block in enumerate(self.blocks):
            past = None
            if cache is not None:
                empty = hidden.new_empty(len(ids_BT), HEADS, 0, WIDTH // HEADS)
                past = cache[layer] if start else (empty, empty)
            hidden, extended = block(hidden, past)
            if cache is not None:
                cache[layer : layer + 1] = [extended]
        logits: Tensor = self.head(self.norm(hidden))
        return logits.float()


def sequences(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return sequences `[B, T]` in which most tokens are the sum of the two before them, and the rest are random."""
    ids_BT = torch.randint(VOCABULARY, (count, length), generator=generator)
    noisy_BT = torch.rand(count, length, generator=generator) < 0.25
    for at in range(2, length):
        following = (ids_BT[:, at - 1] + ids_BT[:, at - 2]) % VOCABULARY
        ids_BT[:, at] = torch.where(noisy_BT[:, at], ids_BT[:, at], following)
    return ids_BT


def trained(seed: int, progress: Callable[[str, int, int], None]) -> Policy:
    """Return a policy in float32 that has learned most of what `sequences` has to teach."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(TRAINING_STEPS):
        ids_BT = sequences(32, PROMPT + RESPONSE, generator)
        loss = F.cross_entropy(policy(ids_BT[:, :-1]).flatten(0, 1), ids_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress("train a miniature policy", step + 1, TRAINING_STEPS)
    return policy.eval().requires_grad_(False)


def penalized(logits_BV: Tensor, seen_BT: Tensor, penalty: float) -> Tensor:
    """Return logits after a repetition penalty: those of tokens seen before are divided by it, or multiplied if negative."""
    seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter_(1, seen_BT, True)
    lowered_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, lowered_BV, logits_BV)


def rollout(
    policy: Policy, prompts_BT: Tensor, generator: torch.Generator, penalty: float = 1.0, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Decode as the engine does: return the sampled (or forced) tokens `[B, T]` and their log-probabilities `[B, T]`."""
    cache: Cache = []
    ids_BT, logprobs, last = prompts_BT, [], prompts_BT
    for at in range(RESPONSE):
        logits_BV = penalized(policy(last, cache)[:, -1], ids_BT, penalty)
        logp_BV = logits_BV.log_softmax(-1)
        if forced is None:
            last = torch.multinomial(logp_BV.exp(), 1, generator=generator)
        else:
            last = forced[:, at : at + 1]
        logprobs.append(logp_BV.gather(1, last))
        ids_BT = torch.cat([ids_BT, last], 1)
    return ids_BT[:, PROMPT:], torch.cat(logprobs, 1)


def score(policy: Policy, prompts_BT: Tensor, responses_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the trainer's log-probabilities of the responses `[B, T]`, and its logits `[B, T, V]`."""
    logits_BTV = policy(torch.cat([prompts_BT, responses_BT], 1))[:, PROMPT - 1 : -1]
    return logits_BTV.log_softmax(-1).gather(2, responses_BT[:, :, None])[:, :, 0], logits_BTV


def cast(policy: Policy, dtype: torch.dtype) -> Policy:
    """Return a copy of the policy in a dtype."""
    copy = Policy().to(dtype).eval().requires_grad_(False)
    copy.load_state_dict(policy.state_dict())
    return copy


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the demo shows: the gap per dtype, the gap with the planted fault, what the doctor says, and the gap without it."""

    gaps: dict[str, dict[str, float]]
    faulty: dict[str, float]
    diagnosis: Diagnosis
    mended: dict[str, float]


def show(seed: int = 0, progress: Callable[[str, int, int], None] = lambda what, done, total: None) -> Shown:
    """Measure the gap of a miniature policy in three dtypes, plant a fault in the engine, and have the doctor name it."""
    master = trained(seed, progress)
    generator = torch.Generator().manual_seed(seed + 1)
    prompts_BT = sequences(RESPONSES, PROMPT, generator)
    mask_BT = torch.ones(RESPONSES, RESPONSE, dtype=torch.bool)
    gaps = {}
    for done, (name, dtype) in enumerate(DTYPES.items()):
        progress("sample and score in three dtypes", done, len(DTYPES))
        policy = cast(master, dtype)
        responses_BT, sampled_BT = rollout(policy, prompts_BT, generator)
        gaps[name] = gap_metrics(
            gap_sums(old=score(policy, prompts_BT, responses_BT)[0], rollout=sampled_BT, mask=mask_BT)
        )

    progress("sample and score in three dtypes", len(DTYPES), len(DTYPES))
    progress("plant a fault, ask the doctor, apply its remedy", 0, 2)
    policy = cast(master, torch.bfloat16)
    responses_BT, sampled_BT = rollout(policy, prompts_BT, generator, PENALTY)
    scored_BT, _ = score(policy, prompts_BT, responses_BT)
    oracle = cast(policy, torch.float32)  # the weights that the engine holds, in exact arithmetic
    oracle_BT, logits_BTV = score(oracle, prompts_BT, responses_BT)
    exact_BT, _ = score(cast(policy, torch.float64), prompts_BT, responses_BT)
    float32_error = float((oracle_BT.double() - exact_BT).abs().mean())
    scores = Scores(
        trainer=scored_BT.double().flatten().numpy(),
        own=scored_BT.double().flatten().numpy(),
        logits=logits_BTV.flatten(0, 1),
        float32_error=own_rounding(float32_error, logits_BTV.numpy(), oracle_BT.numpy()),
        engine_dtype="bfloat16",
        trainer_dtype="bfloat16",
    )
    sample = _sample(prompts_BT, responses_BT, sampled_BT)
    evidence = gather(sample, scores, asked=1.0, seed=seed)
    families = {cause.family for cause in conclude(evidence).mendable}
    progress("plant a fault, ask the doctor, apply its remedy", 1, 2)
    _, again_BT = rollout(policy, prompts_BT, generator, forced=responses_BT)
    left, after = rescored(_sample(prompts_BT, responses_BT, again_BT), scores)
    evidence.remedies.append(Tried(families=families, left=left, after=after))
    progress("plant a fault, ask the doctor, apply its remedy", 2, 2)
    return Shown(
        gaps=gaps,
        faulty=gap_metrics(gap_sums(old=scored_BT, rollout=sampled_BT, mask=mask_BT)),
        diagnosis=conclude(evidence),
        mended=gap_metrics(gap_sums(old=scored_BT, rollout=again_BT, mask=mask_BT)),
    )


def _sample(prompts_BT: Tensor, responses_BT: Tensor, logprobs_BT: Tensor) -> Sample:
    return Sample(
        prompts=tuple(map(tuple, prompts_BT.tolist())),
        responses=tuple(map(tuple, responses_BT.tolist())),
        masks=((True,) * RESPONSE,) * RESPONSES,
        logprobs=tuple(map(tuple, logprobs_BT.tolist())),
    )


MINIATURE = (
    f"A miniature: a policy of {LAYERS} layers and {VOCABULARY} tokens, trained here a moment ago. A cached decode is the "
    "rollout engine, a full pass is the trainer; both run torch's CPU kernels. The size of your own gap depends on your model, "
    "engine and GPU."
)
YOURS = "mismatch-ext doctor --model PATH --prompts prompts.txt --out runs/doctor"


def run(out: Path, seed: int = 0) -> None:
    """Run the demo, print what it shows, and write `doctor.json` and `report.html`."""
    console = Console(highlight=False)
    console.print(MINIATURE, soft_wrap=True)
    with _progress(console) as progress:
        shown = show(seed, progress)
    table = Table(title="Gap at the same weights, nats per token", title_justify="left")
    for column in ("dtype of both sides", "mean |Δlogp|", "k3", "largest", "bfloat16 / this"):
        table.add_column(column, justify="left" if column.startswith("dtype") else "right")
    for name, gap in shown.gaps.items():
        times = shown.gaps["bfloat16"]["logp_abs_diff_mean"] / gap["logp_abs_diff_mean"]
        columns = (gap[key] for key in ("logp_abs_diff_mean", "k3_kl", "logp_abs_diff_max"))
        table.add_row(name, *map(quantity, columns), f"{times:.2g} x" if times < 100 else f"{times:.0f} x")
    console.print(table)
    console.print(
        f"Planted in the bfloat16 engine: repetition_penalty={PENALTY}, which Qwen2.5-7B-Instruct's generation_config.json "
        "sets and vLLM's server applies by default. What the doctor says of it:\n",
        soft_wrap=True,
    )
    console.print(report(shown.diagnosis), markup=False, soft_wrap=True)
    write_whole(out / DOCTOR_FILE, json.dumps(shown.diagnosis.data(), indent=2).encode(), make_folder=True)
    bars = {name: gap["logp_abs_diff_mean"] for name, gap in shown.gaps.items()} | {
        f"bfloat16, repetition_penalty {PENALTY} in the engine": shown.faulty["logp_abs_diff_mean"],
        "bfloat16, without it again": shown.mended["logp_abs_diff_mean"],
    }
    path = build_demo(out, MINIATURE, bars, YOURS)
    console.print(f"\nreport: {path}\nThe same for your model: {YOURS}", soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows progress: as a bar in a terminal, otherwise as one line per stage."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(f"{what} ...")
            bars.update(tasks[what], completed=done)

        yield progress
