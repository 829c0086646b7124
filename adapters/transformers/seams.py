"""The places in torch and transformers that this package relies on; routers are not listed, but found in each model."""

from __future__ import annotations

from mismatch_ext.compat import Both, Either, Has, Says, Seam, Steps, Takes

_MODULE = "torch.utils.checkpoint"
_OLDER = f"{_MODULE}:_checkpoint_without_reentrant_generator"
_CALLED = r"(?<!def )\b_checkpoint_without_reentrant_generator{}\("

SEAMS = (
    Seam(
        name="torch/reentrant_checkpoint",
        peer="torch",
        features=("routing",),
        what="giving a layer that is computed again the routes of its own forward pass",
        claims=(
            Takes(f"{_MODULE}:CheckpointFunction.forward", "ctx", "run_function", "preserve_rng_state", first=True),
            Says(_MODULE, r"\bCheckpointFunction\.apply\("),
        ),
        upstream="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py",
    ),
    Seam(
        name="torch/non_reentrant_checkpoint",
        peer="torch",
        features=("routing",),
        what="the same, in the mode that saves no inputs through autograd",
        claims=(
            Either(
                Both(
                    Steps(f"{_OLDER}_impl"),
                    Takes(f"{_OLDER}_impl", "fn", first=True),
                    Says(_MODULE, _CALLED.format("_impl")),
                ),
                Both(Steps(_OLDER), Takes(_OLDER, "fn", first=True), Says(_MODULE, _CALLED.format(""))),
            ),
        ),
        upstream="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py",
    ),
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
