"""Train the example models from scratch: a dense Qwen3 and a Qwen3-MoE for the addition task.

    python -m examples.arithmetic.pretrain --kind dense --out .cache/models

The demonstrations are deliberately imperfect: 30 % of them are direct answers, and 4 % of the written steps
(and of the digits of direct answers) are wrong, with the error carried on. The model therefore solves about
half of the problems when sampled at temperature 1, in two response styles of very different length, which
leaves reinforcement learning something to gain. It is peaked on most tokens and uncertain on a few, like a
language model after instruction tuning; a random network is not, and its mismatch lacks the heavy tail.

Training is seeded, and still ends in other weights on another kind of CPU. Checkpoints of the standard recipes are
therefore shipped in examples/arithmetic/models, and `ensure_model` takes those; `--train` trains anew, and `--ship` puts
the result there. A checkpoint trained anew is cached under a digest of its whole recipe, of the training data and of
the torch and transformers versions; the number of threads is not part of it, although it changes the last bits of the
weights.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from examples.arithmetic.packing import IGNORED, draw_demonstrations, pack
from examples.arithmetic.recipe import RECIPES, Recipe, build_model
from examples.arithmetic.shipped import ship, shipped_model
from examples.arithmetic.task import FAMILIAR_DIGITS, is_worked, make_dataset, score
from examples.arithmetic.tokenizer import PAD_ID, VOCABULARY, make_tokenizer

LOOP_REVISION = 1
"""Raise by one when the code of the training loop changes in a way that no recipe field shows."""


def make_optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW without weight decay on the norms."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), fused=True)


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then cosine decay to `final_learning_rate` of the peak."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    floor = recipe.final_learning_rate
    return recipe.learning_rate * warm * (floor + (1 - floor) * cosine)


def train(recipe: Recipe, *, progress: bool = True) -> tuple[PreTrainedModel, list[dict[str, float]]]:
    """Train from scratch in float32.

    Returns:
        The model in evaluation mode, and the loss every tenth step.
    """
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    model = build_model(recipe).train()
    is_moe = recipe.kind == "moe"
    if is_moe:
        model.set_experts_implementation("eager")  # on a CPU faster than the grouped matrix product
    optimizer = make_optimizer(model, recipe)
    extra = {"output_router_logits": True} if is_moe and recipe.balance_loss else {}
    history = []
    title = f"training the {recipe.kind} model"
    bar = tqdm(range(recipe.steps), desc=title, unit="step", disable=not progress)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, recipe)
        batch = pack(draw_demonstrations(rng, recipe, recipe.batch_size), recipe.row_length)
        output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **extra)
        loss = cross_entropy(output.logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        total = loss + recipe.balance_loss * output.aux_loss if extra else loss
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0 or step + 1 == recipe.steps:
            history.append({"step": step + 1, "loss": round(loss.item(), 4)})
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval(), history


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    samples: int = 256,
    digits: tuple[int, int] = FAMILIAR_DIGITS,
    *,
    max_new_tokens: int = 80,
    seed: int = 1,
) -> dict[str, Any]:
    """Sample one answer per problem at temperature 1 and score it.

    Returns:
        accuracy, accuracy_by_digits (length of the longer operand), accuracy_worked and accuracy_direct (None
        where no answer has that style), worked_fraction, and mean and standard deviation of the response
        length in tokens.
    """
    tokenizer = make_tokenizer()
    rows = make_dataset(samples, digits, seed)
    encoded = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    torch.manual_seed(seed)
    output = model.generate(
        **encoded, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens
    )[:, encoded["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    scores = [score(text, row["a"], row["b"]) for text, row in zip(texts, rows, strict=True)]
    lengths = (output != PAD_ID).sum(1).double()
    worked = [is_worked(text) for text in texts]
    by_digits: dict[str, list[float]] = {}
    for row, value in zip(rows, scores, strict=True):
        by_digits.setdefault(str(len(str(max(row["a"], row["b"])))), []).append(value)

    def mean(values: list[float]) -> float | None:
        return round(sum(values) / len(values), 4) if values else None

    return {
        "samples": samples,
        "digits": list(digits),
        "accuracy": mean(scores),
        "accuracy_by_digits": {key: mean(by_digits[key]) for key in sorted(by_digits)},
        "accuracy_worked": mean([s for s, w in zip(scores, worked, strict=True) if w]),
        "accuracy_direct": mean([s for s, w in zip(scores, worked, strict=True) if not w]),
        "worked_fraction": mean([float(w) for w in worked]),
        "response_length_mean": round(lengths.mean().item(), 2),
        "response_length_std": round(lengths.std(correction=0).item(), 2),
    }


def recipe_key(recipe: Recipe) -> str:
    """Digest of everything in this folder that decides the checkpoint, including the text of the training data."""
    sample = draw_demonstrations(random.Random(recipe.seed), recipe, 64)
    return _digest(recipe=asdict(recipe), loop_revision=LOOP_REVISION, vocabulary=VOCABULARY, data=sample)


def cache_key(recipe: Recipe) -> str:
    """Digest of everything that decides the checkpoint but the machine: `recipe_key` and the versions that train it."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return _digest(recipe_key=recipe_key(recipe), **versions)


def _digest(**content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@contextlib.contextmanager
def _quiet_and_contained(threads: int) -> Iterator[None]:
    """Leave the caller's thread count, random state and transformers progress bars as they were."""
    hub = transformers.utils.logging
    before, bars = torch.get_num_threads(), hub.is_progress_bar_enabled()
    torch.set_num_threads(threads)
    hub.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)
        if bars:
            hub.enable_progress_bar()


def default_threads() -> int:
    """Two threads where there are two cores, unless OMP_NUM_THREADS says otherwise."""
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    return min(2, os.cpu_count() or 1)


def _processor() -> str:
    """The processor's name, or its architecture where the package that knows the name is not installed."""
    try:
        import cpuinfo
    except ImportError:
        return platform.machine()
    return str(cpuinfo.get_cpu_info().get("brand_raw", platform.machine()))


def _train_into(directory: Path, recipe: Recipe, threads: int, progress: bool) -> None:
    """Train, evaluate and save one checkpoint with its training.json."""
    with _quiet_and_contained(threads):
        start = time.perf_counter()
        model, history = train(recipe, progress=progress)
        trained = time.perf_counter()
        evaluation = evaluate(model, recipe.evaluation_samples, recipe.digits)
        evaluated = time.perf_counter()
        model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    record = {
        "recipe": asdict(recipe),
        "recipe_key": recipe_key(recipe),
        "cache_key": cache_key(recipe),
        "machine": _processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": threads,
        "train_seconds": round(trained - start, 1),
        "evaluation_seconds": round(evaluated - trained, 1),
        "evaluation": evaluation,
        "history": history,
    }
    (directory / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def summary(record: dict[str, Any]) -> str:
    """One line about a checkpoint from its training.json."""
    recipe, e = record["recipe"], record["evaluation"]
    return (
        f"{recipe['kind']} model: {record['parameters']:,} parameters, {recipe['steps']} steps in "
        f"{record['train_seconds']:.0f} s on {record['threads']} thread(s); at temperature 1 it solves "
        f"{100 * e['accuracy']:.0f} % of {e['samples']} problems, "
        f"{100 * e['worked_fraction']:.0f} % of answers worked, response length "
        f"{e['response_length_mean']:.1f} +- {e['response_length_std']:.1f} tokens"
    )


def ensure_model(
    kind: str,
    cache_dir: str | os.PathLike[str] = ".cache/models",
    seed: int = 0,
    *,
    recipe: Recipe | None = None,
    threads: int | None = None,
    progress: bool = True,
    anew: bool = False,
) -> Path:
    """Return the folder of a trained checkpoint: the shipped one, else one from the cache, trained first if need be.

    The checkpoint is written to a temporary folder and renamed, so that an interrupted run leaves nothing
    that looks like a model, and of two processes that train the same one, the first to finish wins.

    Args:
        kind: "dense" or "moe".
        cache_dir: parent of the checkpoints trained on this machine; created when missing.
        seed: replaces the recipe's seed.
        recipe: replaces the kind's standard recipe.
        threads: torch threads; default `default_threads()`.
        progress: show a progress bar and, also for a cached model, a summary line on standard error.
        anew: leave the shipped checkpoint aside.

    Returns:
        A folder that AutoModelForCausalLM, AutoTokenizer and vLLM load, training.json beside the weights.

    Raises:
        ValueError: unknown kind, or a recipe of another kind.
        NotADirectoryError: `cache_dir` is a file.
        DamagedModelError: the shipped checkpoint is not the one that was committed.
    """
    if kind not in RECIPES:
        raise ValueError(f"kind must be one of {', '.join(sorted(RECIPES))}, got {kind!r}")
    if recipe is not None and recipe.kind != kind:
        raise ValueError(f"kind is {kind!r}, but the recipe's is {recipe.kind!r}")
    recipe = replace(recipe or RECIPES[kind], seed=seed)
    parent = Path(cache_dir)
    if parent.exists() and not parent.is_dir():
        raise NotADirectoryError(f"cache_dir {parent} is not a directory; remove it or name another one")
    target = None if anew else shipped_model(kind, recipe_key(recipe))
    origin = "shipped" if target is not None else "trained here"
    if target is None:
        target = parent / f"{kind}-seed{seed}-{cache_key(recipe)}"
        if not target.is_dir():
            _build(target, recipe, threads or default_threads(), progress)
    if progress:
        record = json.loads((target / "training.json").read_text(encoding="utf-8"))
        tqdm.write(f"{origin}: {target}\n{summary(record)}", file=sys.stderr)
    return target


def _build(target: Path, recipe: Recipe, threads: int, progress: bool) -> None:
    """Train into a temporary folder beside `target`, then rename it."""
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=parent) as scratch:
        staging = Path(scratch) / "model"
        staging.mkdir()
        _train_into(staging, recipe, threads, progress)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # not the race with another process, which wrote the same checkpoint
                raise


def main(arguments: list[str] | None = None) -> None:
    """Train or find one checkpoint and print its path."""
    parser = argparse.ArgumentParser(description="Find an example model, or train it.")
    parser.add_argument("--kind", choices=sorted(RECIPES), default="dense")
    parser.add_argument("--out", type=Path, default=Path(".cache/models"), help="cache folder (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="torch threads (at most 2 by default)")
    parser.add_argument("--train", action="store_true", help="leave the shipped model aside")
    parser.add_argument("--ship", action="store_true", help="put the model trained here in the shipped one's place")
    options = parser.parse_args(arguments)
    anew = options.train or options.ship
    model = ensure_model(options.kind, options.out, options.seed, threads=options.threads, anew=anew)
    if options.ship:
        command = f"python -m examples.arithmetic.pretrain --kind {options.kind} --seed {options.seed} --ship"
        model = ship(model, options.kind, command)
    print(model)


if __name__ == "__main__":
    main()
