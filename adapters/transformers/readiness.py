"""FP16 readiness of a transformers checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.readiness import ReadinessReport, scan_activations, scan_weights

# An owner and a name: neither an absolute path nor a path of more than two parts matches.
HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def scan_checkpoint(model_dir: str | Path, prompts: Sequence[str], dtype: str = "float16") -> ReadinessReport:
    """Scan a checkpoint's weights, and its activations on sample prompts, for what does not fit a dtype.

    The forward pass runs in float32, so that it can measure what would overflow.

    Args:
        model_dir: Folder of the checkpoint and its tokenizer.
        prompts: Texts typical of the run's prompts and responses; if empty, only the weights are scanned.
        dtype: The compute dtype in question.

    Raises:
        PrecisionError: The checkpoint cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = _folder(model_dir)
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(model_dir) if prompts else None
    except (OSError, ValueError) as error:
        raise PrecisionError(f"checkpoint {model_dir} cannot be loaded: {error}") from error
    weights = scan_weights(model.named_parameters(), dtype)

    def forward() -> None:
        assert tokenizer is not None
        with torch.no_grad():
            for prompt in prompts:
                model(**tokenizer(prompt, return_tensors="pt", return_token_type_ids=False), use_cache=False)

    activations = scan_activations(model, forward, dtype) if prompts else []
    return ReadinessReport(weights=weights, activations=activations, dtype=dtype)


def _folder(model_dir: str | Path) -> Path:
    """Return a checkpoint's folder, or a model's name on the Hub, which transformers looks up."""
    try:
        path = Path(model_dir).expanduser()
    except RuntimeError as error:  # a "~name" of nobody
        raise PrecisionError(f"checkpoint {model_dir} cannot be loaded: {error}") from error
    if path.is_dir() or (not path.exists() and HUB_NAME.fullmatch(str(model_dir))):
        return path
    wrong = "is a file" if path.exists() else "does not exist"
    raise PrecisionError(
        f"checkpoint {model_dir} cannot be loaded: {path} {wrong}; give the folder that holds config.json, the weights and the "
        "tokenizer."
    )
