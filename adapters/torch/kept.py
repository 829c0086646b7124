"""Older versions of the weights that a rank keeps, for a model that FSDP1 or FSDP2 of torch has wrapped."""

from __future__ import annotations

import torch
from mismatch_ext.adapters.torch.shards import local, reshard
from torch import Tensor, nn

from mismatch_ext.errors import RecordError


class KeptWeights:
    """Copies of this rank's shards, in host memory, one for each of the last versions."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        """Versions that are kept."""
        return sorted(self._kept)

    def keep(self, model: nn.Module, version: int, count: int) -> None:
        """Copy the present weights, and drop all but the last few older versions.

        Args:
            model: Wrapped by FSDP1 or FSDP2.
            version: Version of the present weights.
            count: How many older versions to keep beside it.
        """
        reshard(model)
        # `copy=True` copies weights on the host too: `.cpu()` would return the weights themselves, which training changes.
        self._kept[version] = {name: local(p).to("cpu", copy=True) for name, p in model.named_parameters()}
        for older in self.versions[: -count - 1]:
            del self._kept[older]

    def use(self, model: nn.Module, version: int) -> None:
        """Replace the present weights by a kept version; keep the present ones before, because they are overwritten.

        Raises:
            RecordError: That version is not kept.
        """
        if version not in self._kept:
            raise RecordError(f"weights of version {version} are not kept; kept are {self.versions}.")
        reshard(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local(parameter).copy_(self._kept[version][name])
