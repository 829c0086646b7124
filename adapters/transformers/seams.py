"""What this package relies on in torch and transformers; routers are not listed, but found in each model."""

from __future__ import annotations

from mismatch_ext.seams import Seam, exists

_SCALER = "torch.amp.grad_scaler"

SEAMS = (
    Seam(
        name="torch/loss_scaler",
        features=("precision",),
        what="a loss scaler whose ranks agree on an overflow before any of them steps",
        claims=(
            exists(f"{_SCALER}:GradScaler._found_inf_per_device", "optimizer"),
            exists(f"{_SCALER}:GradScaler.unscale_", "optimizer"),
            exists(f"{_SCALER}:OptState"),
        ),
        checked="a scaler that is off, and overflows that do not end, are errors",
        upstream="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py",
    ),
    Seam(
        name="transformers/weights_at_hand",
        features=("monitor.doctor",),
        what="building a copy of a model from weights that are at hand, under a checkpoint's names",
        claims=(
            exists("transformers.modeling_utils:PreTrainedModel.from_pretrained", "pretrained_model_name_or_path"),
        ),
        checked="a copy with missing or mismatched weights is an error",
        upstream="https://github.com/huggingface/transformers/blob/v5.10.4/src/transformers/modeling_utils.py",
    ),
)
