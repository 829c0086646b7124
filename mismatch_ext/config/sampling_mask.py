"""The `sampling_mask` section: scoring over the tokens that truncated sampling left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mismatch_ext.errors import ConfigError
from mismatch_ext.strict import require as _require
from mismatch_ext.strict import settle

if TYPE_CHECKING:
    from mismatch_ext.provenance import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class SamplingMaskConfig:
    """Log-probabilities over the tokens that top_p, top_k and min_p left to sample from (DeepSeek-V3.2, arXiv 2512.02556).

    The reference is scored over the same tokens, so that the KL of equal models is 0.
    """

    max_support: int | None = None
    """Most tokens per position that the engine is asked for; where more were left, the run ends. Absent, twice `top_k` and 8, for
    ties."""

    def __post_init__(self) -> None:
        settle(self, "mismatch.sampling_mask")
        if self.max_support is not None:
            _require(self.max_support >= 2, "mismatch.sampling_mask.max_support", self.max_support, "an integer >= 2")

    def asked(self, sampling: SamplingSettings) -> int:
        """Return how many of the most likely tokens the engine is asked for.

        Raises:
            ConfigError: Sampling is not truncated, or no setting limits the number of tokens.
        """
        if not sampling.truncates_support:
            raise ConfigError(
                f"mismatch.sampling_mask with top_p={sampling.top_p:g}, top_k={sampling.top_k} and min_p={sampling.min_p:g}: "
                "nothing is cut off, so that there is no mask; remove mismatch.sampling_mask."
            )
        if self.max_support is not None:
            return self.max_support
        if sampling.top_k <= 0:
            raise ConfigError(
                f"mismatch.sampling_mask.max_support is absent, with top_k={sampling.top_k}: nothing bounds how many tokens "
                f"top_p={sampling.top_p:g} and min_p={sampling.min_p:g} can leave; set max_support to the most that you expect, "
                "or top_k."
            )
        return 2 * sampling.top_k + 8
