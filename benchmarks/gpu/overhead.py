"""What it costs: replay in a training step, the loss scaler, and the exact KL over a vocabulary, each beside its peer.

Times of the two are taken in turn, so that a machine that drifts hits both, and after their results were found equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from torch import Tensor, nn

from benchmarks._timing import paired
from benchmarks.bench_kl_full import FORMS
from benchmarks.bench_precision import trained
from benchmarks.gpu.models import SIZES, random_model
from benchmarks.gpu.part import Found, Say, Setting, synchronize
from benchmarks.gpu.svg import Figure, Panel, Series
from mismatch_ext.precision.scaler import LossScaler

NAME, TITLE = "overhead", "costs and peak memory, beside peers"
TOKENS, VOCABULARY = 2048, 152_000
# Sums of float32 over a vocabulary, in two orders.
EQUAL = 1e-4


def run(setting: Setting, folder: Path, say: Say) -> Found:
    """Measure the three; peak memory is known on a GPU alone."""
    rows = {}
    for name, measure in (("replay", replay), ("scaler", scaler), ("kl_full", kl_full)):
        say(name)
        rows[name] = measure(setting)
    return {"model": f"on {setting.device}", "rows": rows}


def _peak(function: Callable[[], Any], device: str) -> float | None:
    """Return the bytes that a call needs beyond those in use before it; None where nobody counts them."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


def _row(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], equal: str, setting: Setting) -> dict[str, Any]:
    """Return times and peaks of both, and ours over theirs: above 1, ours costs more."""
    repeats = 2 if setting.quick else 7
    found = paired(name, ours, theirs, equal=equal, repeats=repeats, wait=lambda: synchronize(setting.device))
    peaks = [_peak(ours, setting.device), _peak(theirs, setting.device)]
    memory = None if None in peaks or not peaks[1] else peaks[0] / peaks[1]  # type: ignore[operator]
    return {
        "what": name,
        "time of ours over theirs": 1 / found["ratio"],
        "seconds of ours": found["ours"],
        "seconds of theirs": found["theirs"],
        "peak memory of ours over theirs": memory,
        "peak bytes of ours": peaks[0],
        "peak bytes of theirs": peaks[1],
        "equal": equal,
    }


def replay(setting: Setting) -> dict[str, Any]:
    """Return the cost of replay in forward and backward of a model with experts, in float32."""
    size = replace(SIZES["tiny" if setting.quick else "small"], vocabulary=1024)
    model = random_model("experts", size, device=setting.device, seed=setting.seed).train()
    batch, width = (2, 32) if setting.quick else (4, 1024)
    ids = torch.randint(1024, (batch, width), generator=torch.Generator().manual_seed(1)).to(setting.device)
    with torch.no_grad(), record_routing(model) as recording:
        model(input_ids=ids, use_cache=False)
    trace = recording.trace

    def plain() -> Tensor:
        return _step(model, ids)

    def replayed() -> Tensor:
        with replay_routing(model, trace):
            return _step(model, ids)

    losses = [float(plain()), float(plain()), float(replayed())]
    # A device whose sums are of no fixed order repeats itself to that order alone.
    own, ours = abs(losses[1] - losses[0]), abs(losses[2] - losses[0])
    _ensure(ours <= max(own, EQUAL * abs(losses[0])), f"losses {losses}, replaying the model's own routes")
    what = (
        f"forward and backward, {size.layers} layers, {size.experts} experts top-{size.top_k}, {batch * width} tokens: "
    )
    return _row(f"{what}replay against none", replayed, plain, f"losses differ by {ours:.1g}", setting)


def _step(model: nn.Module, ids: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def scaler(setting: Setting) -> dict[str, Any]:
    """Return the cost of our loss scaler against torch's over 20 steps of FP16 training."""
    device = setting.device

    def ours() -> list[Tensor]:
        return trained(LossScaler(device, init_scale=2.0**10, growth_interval=2000), device=device)

    def theirs() -> list[Tensor]:
        return trained(torch.amp.GradScaler(device, init_scale=2.0**10), device=device)

    same = all(torch.equal(a, b) for a, b in zip(ours(), theirs(), strict=True))
    _ensure(same, "parameters after 20 steps, of our scaler and of torch's")
    return _row(
        "20 FP16 steps: LossScaler against torch.amp.GradScaler", ours, theirs, "parameters, bit for bit", setting
    )


def kl_full(setting: Setting) -> dict[str, Any]:
    """Return the cost of the chunked exact KL against log_softmax of both, forward and backward, in float32."""
    tokens, width = (64, 1024) if setting.quick else (TOKENS, VOCABULARY)
    generator = setting.generator(400)
    logits = torch.randn(tokens, width, generator=generator, device=setting.device)
    reference = torch.randn(tokens, width, generator=generator, device=setting.device).mul_(0.3).add_(logits)
    logits.requires_grad_()

    def form(name: str) -> Callable[[], tuple[float, Tensor]]:
        def call() -> tuple[float, Tensor]:
            logits.grad = None
            kl = FORMS[name](logits, reference)
            kl.sum().backward()
            assert logits.grad is not None
            return float(kl.detach().double().sum()), logits.grad[:64].double().square().sum()

        return call

    ours, theirs = form("ours"), form("naive")
    (a, first), (b, second) = ours(), theirs()
    apart = max(abs(a / b - 1), abs(float(first / second) - 1))
    _ensure(apart < EQUAL, f"KL and gradient are apart by {apart:.1g} of their size")
    what = f"exact KL of [{tokens}, {width}] float32 logits, forward and backward: chunked against log_softmax of both"
    return _row(what, ours, theirs, f"KL and gradient, to {apart:.1g} of their size", setting)


def _ensure(equal: bool, what: str) -> None:
    if not equal:
        raise RuntimeError(f"not equal, so that times mean nothing: {what}")


def figures(found: Found) -> dict[str, Figure]:
    """Draw ours over theirs."""
    rows = found["rows"]
    series = []
    for name in ("time", "peak memory"):
        values = [row[f"{name} of ours over theirs"] for row in rows.values()]
        kept = [at for at, value in enumerate(values) if value is not None]
        series.append(Series(name=name, x=kept, y=[values[at] for at in kept]))
    panel = Panel(
        title="ours over theirs", x_title="", y_title="ratio, below 1 ours costs less", series=series, labels=list(rows)
    )
    return {"costs": Figure(panels=[panel], caption=found["model"])}
