"""Declares two operators of torchvision before it is imported, in every process that has this directory on its path.

torchvision registers fake implementations of `nms` and `qnms` when it is imported. The registry's build is for CUDA, and its
library, which declares them, does not load beside a CPU torch; the import then fails, although SGLang calls neither. Beside a
CUDA build of torch it loads, and nothing is declared here.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
kept: list[Any] = []


class BeforeTorchvision(MetaPathFinder):
    """Declares the operators when somebody looks for torchvision, and leaves finding it to the others."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Return None always."""
        if fullname == "torchvision" and not kept:
            import torch

            if torch.version.cuda:
                return
            library = torch.library.Library("torchvision", "FRAGMENT")
            kept.append(library)  # the operators go when it goes
            for name in ("nms", "qnms"):
                library.define(f"{name}{NMS}")


sys.meta_path.insert(0, BeforeTorchvision())
