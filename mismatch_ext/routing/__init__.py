"""Expert routing of mixture-of-experts models: the record of routes, its replay in the trainer, and how far two records agree."""

from mismatch_ext.routing.agreement import OTHER_PASSES, ROUTING_MEASURES, Agreement, agreement
from mismatch_ext.routing.align import align, align_packed
from mismatch_ext.routing.ingest import storage_dtype
from mismatch_ext.routing.plausibility import check_plausible, expert_overlap
from mismatch_ext.routing.shape import RoutingShape
from mismatch_ext.routing.sharing import Shared, share_prompts
from mismatch_ext.routing.trace import RoutingTrace

__all__ = [
    "OTHER_PASSES",
    "ROUTING_MEASURES",
    "Agreement",
    "RoutingShape",
    "RoutingTrace",
    "Shared",
    "agreement",
    "align",
    "align_packed",
    "check_plausible",
    "expert_overlap",
    "share_prompts",
    "storage_dtype",
]
