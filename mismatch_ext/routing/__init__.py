"""Expert routing of mixture-of-experts models: the record of routes, its replay in the trainer, and how far two records agree."""

from mismatch_ext.routing.agreement import (
    OTHER_PASSES,
    agreement,
    agreement_metrics,
    check_plausible,
    expert_overlap,
)
from mismatch_ext.routing.align import align, align_packed
from mismatch_ext.routing.ingest import storage_dtype
from mismatch_ext.routing.trace import RoutingShape, RoutingTrace, share_prompts

__all__ = [
    "OTHER_PASSES",
    "RoutingShape",
    "RoutingTrace",
    "agreement",
    "agreement_metrics",
    "align",
    "align_packed",
    "check_plausible",
    "expert_overlap",
    "share_prompts",
    "storage_dtype",
]
