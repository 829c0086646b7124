"""Names of the events in `metrics-*.jsonl`, and of the reasons for which a row is bad.

They stand apart from what writes them, so that a report of a run can be read without torch.
"""

from __future__ import annotations

ALARM = "alarm"
"""An alarm was raised, or is over."""
BAD_ROWS = "bad_rows"
"""Rows were bad, or were too many."""
CHECK_FAILED = "check_failed"
"""A check failed in a run that went on."""
EVIDENCE = "evidence"
"""Rows were kept for the doctor."""
WEIGHT_SYNC = "weight_sync"
"""A weight update went wrong."""
SYNC_UNANSWERED = "weight_sync_unanswered"
"""An engine did not answer, so that nothing is known of an update."""
WEIGHTS_UNVERIFIED = "weights_unverified"
"""The engine's weights are never verified in this run."""
WEIGHTS_STILL = "weights_still"
"""Several updates in a row sent the same weights."""
WEIGHTS_MOVING = "weights_moving"
"""Updates send other weights again."""
NOTHING_TRAINED = "nothing_trained"
"""At the start of a run its optimizer has nothing to train."""

BAD_ROW_REASONS = {
    "rollout_logprobs": "a log-probability of the engine is missing or not finite",
    "old_logprobs": "a log-probability of the trainer at sampling time, or of its reference, is not finite",
    "routes": "its routes are missing, malformed, or of other tokens",
    "tokens": "its tokens are not those that the engine sampled",
    "weight_version": "it was sampled with other weights than its batch",
    "mask": "its sampling mask is missing or does not fit its tokens",
    "head": "its most likely tokens, for score centering, are no distribution",
}
"""Why a row is bad, by the name in the metric `bad_rows/<reason>`. All ranks reduce exactly these."""
