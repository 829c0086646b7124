"""The places in torch and transformers that this package relies on; routers are not listed, but found in each model."""

from __future__ import annotations

from mismatch_ext.compat import Has, Says, Seam, Takes

SEAMS = (
    Seam(
        name="torch/loss_scaler",
        peer="torch",
        features=("precision",),
        what="a loss scaler whose ranks agree on an overflow before any of them steps",
        claims=(
            Has("torch.amp.grad_scaler:GradScaler._per_optimizer_states"),
            Takes("torch.amp.grad_scaler:GradScaler._found_inf_per_device", "self", "optimizer", first=True),
            Has("torch.amp.grad_scaler:GradScaler.unscale_"),
            Has("torch.amp.grad_scaler:OptState"),
        ),
        upstream="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py",
    ),
    Seam(
        name="transformers/weights_at_hand",
        peer="transformers",
        features=("monitor.doctor",),
        what="building a copy of a model from weights that are at hand, under a checkpoint's names",
        claims=(
            Takes(
                "transformers.modeling_utils:PreTrainedModel.from_pretrained", "pretrained_model_name_or_path", "config"
            ),
            Says("transformers.modeling_utils", r"\bstate_dict\b"),
            Says("transformers.modeling_utils", r"\boutput_loading_info\b"),
        ),
        upstream="https://github.com/huggingface/transformers/blob/v5.10.4/src/transformers/modeling_utils.py",
    ),
)
