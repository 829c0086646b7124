"""Train the small models from scratch and put them where they are shipped from: a dense Qwen3 and a Qwen3-MoE.

    python -m examples.arithmetic.pretrain --kind dense

The demonstrations are imperfect on purpose: 30 % of them are direct answers, and 4 % of the written steps (and of the digits of
direct answers) are wrong, with the error carried on. So the model solves about half of the problems when sampled at temperature
1, in two styles of very different length, and reinforcement learning has something to gain. It is peaked on most tokens and
uncertain on a few, like a language model after instruction tuning. A random network is not, and its gap lacks the heavy tail.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from examples.arithmetic.recipe import RECIPES, Recipe, build_model
from examples.arithmetic.shipped import FOLDER, SUMS
from examples.arithmetic.task import demonstration, format_prompt, sample_problem
from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, encode, make_tokenizer

IGNORED = -100
"""Target of tokens that carry no loss: the prompt and the padding."""
Pair = tuple[list[int], list[int]]
"""Ids of a prompt and of its answer."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Demonstrations packed into rows [R, T]; positions restart at 0, so that none sees another."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    """The next token, or IGNORED."""


def draw_demonstrations(rng: random.Random, recipe: Recipe, n: int) -> list[Pair]:
    """Draw `n` demonstrations, whose answers end in the end-of-sequence token."""
    pairs = []
    for _ in range(n):
        a, b = sample_problem(rng, recipe.digits)
        answer = demonstration(rng, a, b, direct_fraction=recipe.direct_fraction, error=recipe.error)
        pairs.append((encode(format_prompt(a, b)), [*encode(answer), EOS_ID]))
    return pairs


def pack(pairs: list[Pair], row_length: int) -> PackedBatch:
    """Pack demonstrations into as few rows as best-fit-decreasing finds."""
    rows: list[list[Pair]] = []
    space: list[int] = []
    for pair in sorted(pairs, key=lambda p: -len(p[0]) - len(p[1])):
        need = len(pair[0]) + len(pair[1]) - 1  # the last token is only ever a target
        fits = [i for i, free in enumerate(space) if free >= need]
        if fits:
            row = min(fits, key=space.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            space.append(row_length)
        rows[row].append(pair)
        space[row] -= need
    inputs, positions, targets = [], [], []
    for row_pairs, free in zip(rows, space, strict=True):
        inputs.append([i for prompt, answer in row_pairs for i in (*prompt, *answer[:-1])] + [PAD_ID] * free)
        positions.append([at for p, a in row_pairs for at in range(len(p) + len(a) - 1)] + list(range(free)))
        goal = [i for prompt, answer in row_pairs for i in ([IGNORED] * (len(prompt) - 1) + answer)]
        targets.append(goal + [IGNORED] * free)
    return PackedBatch(
        input_ids=torch.tensor(inputs), position_ids=torch.tensor(positions), targets=torch.tensor(targets)
    )


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Return the rate of a linear warm-up and cosine decay to `final_learning_rate` of the peak."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    floor = recipe.final_learning_rate
    return recipe.learning_rate * warm * (floor + (1 - floor) * cosine)


def train(recipe: Recipe) -> tuple[PreTrainedModel, list[dict[str, float]]]:
    """Train from scratch in float32; return the model in evaluation mode, and the loss every tenth step."""
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    model = build_model(recipe).train()
    if recipe.kind == "moe":
        model.set_experts_implementation("eager")  # on a CPU faster than the grouped matrix product
    decayed = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), fused=True)
    extra = {"output_router_logits": True} if recipe.kind == "moe" else {}
    history = []
    bar = tqdm(range(recipe.steps), desc=f"training the {recipe.kind} model", unit="step")
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, recipe)
        batch = pack(draw_demonstrations(rng, recipe, recipe.batch_size), recipe.row_length)
        output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **extra)
        loss = cross_entropy(output.logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        (loss + recipe.balance_loss * output.aux_loss if extra else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0 or step + 1 == recipe.steps:
            history.append({"step": step + 1, "loss": round(loss.item(), 4)})
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval(), history


def write(recipe: Recipe, folder: Path, command: str) -> None:
    """Train and save a checkpoint, with training.json and the sums of its files."""
    shutil.rmtree(folder, ignore_errors=True)
    model, history = train(recipe)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    record = {
        "command": command,
        "recipe": asdict(recipe),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "history": history,
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(sums), encoding="utf-8")


def main() -> None:
    """Train one checkpoint, and put it in the place of the shipped one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=sorted(RECIPES), required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    command = f"python -m examples.arithmetic.pretrain --kind {options.kind} --seed {options.seed}"
    write(replace(RECIPES[options.kind], seed=options.seed), FOLDER / options.kind, command)


if __name__ == "__main__":
    main()
