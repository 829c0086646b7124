"""vLLM or SGLang in the place of transformers' decode, where one is installed, by the doctor's own engines."""

from __future__ import annotations

from pathlib import Path

import torch
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.sides import Run
from torch import Tensor, nn

from benchmarks.gpu.engine import Rollout
from benchmarks.gpu.part import Setting


def external_rollout(model: nn.Module, prompts: Tensor, setting: Setting, dtype: torch.dtype, folder: Path) -> Rollout:
    """Sample with the engine that the setting names, from the same weights.

    Args:
        model: In float32; it is saved where the setting names no checkpoint.
        prompts: Of equal length `[B, P]`, int64.
        setting: Of the run.
        dtype: The engine's.
        folder: For the checkpoint.
    """
    path = Path(setting.model) if setting.model else folder / "served"
    if not path.is_dir():
        model.save_pretrained(path)  # type: ignore[operator]
    arguments = {"skip_tokenizer_init": True, "max_model_len": prompts.shape[1] + setting.new_tokens + 1}
    if setting.engine == "sglang":
        arguments = {"skip_tokenizer_init": True, "context_length": arguments["max_model_len"]}
    run = Run(
        model=str(path),
        dtype=str(dtype).removeprefix("torch."),
        engine=setting.engine,
        arguments=arguments,
        sampling={"temperature": 1.0, "seed": setting.seed},
    )
    engine = run.start(None)
    try:
        sample = engine.sample(
            ToSample(
                prompts=prompts.tolist(), responses=len(prompts), max_tokens=setting.new_tokens, sampling=run.sampling
            )
        )
    finally:
        engine.shutdown()
    width = max(map(len, sample.responses))
    rows = [[*p, *r, *[0] * (width - len(r))] for p, r in zip(sample.prompts, sample.responses, strict=True)]
    logprobs = [[*row, *[0.0] * (width - len(row))] for row in sample.logprobs]
    mask = [[True] * len(r) + [False] * (width - len(r)) for r in sample.responses]
    return Rollout(
        ids=torch.tensor(rows, device=prompts.device),
        logprobs=torch.tensor(logprobs, dtype=torch.float64),
        mask=torch.tensor(mask),
    )
