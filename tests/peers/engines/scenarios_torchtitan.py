"""torchtitan on the plain loop, by examples/third/torchtitan_grpo.py: its loss, and a run with vLLM.

torchtitan lies beside the SGLang environment, since it needs the triton that is there (`make setup`).
"""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import torch
import vllm  # noqa: F401 (imported once for all forks)

ROOT = Path(__file__).resolve().parents[3]
OVERLAY = ROOT / ".venv-sglang/torchtitan"
MODEL = ROOT / "examples/arithmetic/models/dense"


def with_vllm(out: str, steps: int) -> None:
    """Run the example as a script."""
    sys.argv = ["torchtitan_grpo.py", f"--steps={steps}", "--prompts=4", f"--output_dir={out}/run"]
    _example().main()


def _example() -> Any:
    sys.path.append(str(OVERLAY))
    return importlib.import_module("examples.third.torchtitan_grpo")


def losses() -> list[float]:
    """Return torchtitan's loss of weighed advantages, its gradient's norm, and both of the weights times the clipped loss."""
    example, generator = _example(), torch.Generator().manual_seed(0)
    labels = torch.randint(0, 16, (6, 20), generator=generator)
    mask = torch.rand(labels.shape, generator=generator) < 0.8
    advantages, weights = torch.randn(6, 1, generator=generator), 2 * torch.rand(labels.shape, generator=generator)
    weights[0] = 0.0  # rejected
    old = torch.randn(labels.shape, generator=generator) * 0.3
    old += (
        (start := torch.randn(*labels.shape, 16, generator=generator))
        .log_softmax(-1)
        .gather(-1, labels[..., None])[..., 0]
    )
    found = []
    for theirs in (True, False):
        logits = start.clone().requires_grad_()
        if theirs:
            given = {"generator_logprobs": old, "advantages": weights * advantages, "loss_mask": mask}
            loss, _ = example.GRPOLoss.Config().build()(logits, labels, int(mask.sum()), **given)
        else:
            ratio = (logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0] - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -(weights * gain)[mask].mean()
        loss.backward()
        assert logits.grad is not None and math.isfinite(loss.item())
        found += [float(loss.detach()), float(logits.grad.norm())]
    return found
