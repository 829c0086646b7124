"""Load a checkpoint whose tensors have other names than the model's; transformers' Trainer does not.

`save_pretrained` writes experts one by one, as model hubs have them, and the model holds them fused. `from_pretrained` converts
the names. `Trainer` resumes by `load_state_dict(..., strict=False)`, so that the experts keep the weights that training began
with, and it only warns about missing keys (https://github.com/huggingface/transformers/issues/48805). Remove this when Trainer
converts (https://github.com/huggingface/transformers/pull/48822).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from mismatch_ext.errors import MismatchError


def load_converted(model: nn.Module, checkpoint: str | Path) -> bool:
    """Load a checkpoint by `from_pretrained`, if it holds names that the model does not.

    Args:
        model: The model, unwrapped and unsharded.
        checkpoint: Folder with `model.safetensors`, or its shards and their index; other folders are left to the trainer.

    Returns:
        Whether it loaded the checkpoint; if not, `load_state_dict` is enough.

    Raises:
        MismatchError: Weights of the model are not in the checkpoint under any name.
    """
    if not isinstance(model, PreTrainedModel) or _names(Path(checkpoint)) <= set(model.state_dict()):
        return False
    # The widest of the model's own dtypes holds the others exactly; the copy below goes back to each parameter's dtype.
    widest = max((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    # transformers' annotation says that only the model is returned.
    both: Any = type(model).from_pretrained(
        str(checkpoint), config=model.config, dtype=widest, output_loading_info=True
    )
    loaded, info = both
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise MismatchError(
            f"checkpoint {checkpoint} lacks weights of {type(model).__name__}: {', '.join(missing[:5])}"
            f"{' and others' if len(missing) > 5 else ''}; resume from another checkpoint."
        )
    model.load_state_dict(loaded.state_dict())
    return True


def _names(checkpoint: Path) -> set[str]:
    index, single = checkpoint / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_NAME
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if single.is_file():
        with safe_open(single, framework="pt") as file:
            return set(file.keys())
    return set()
