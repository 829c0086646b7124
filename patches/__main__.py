"""Print the table of patches: `python -m mismatch_ext.patches`."""

from __future__ import annotations

from mismatch_ext.patches.trl.engine_arguments import ENGINE_ARGUMENTS
from mismatch_ext.patches.trl.fused_head import FUSED_HEAD
from mismatch_ext.patches.trl.server_client import SERVER_CLIENT
from mismatch_ext.patches.verl.advantage import KL_IN_REWARDS
from mismatch_ext.patches.verl.megatron_replay import CLOSED_TOPK
from mismatch_ext.patches.verl.validate_config import GUARD, VALIDATE_CONFIG
from mismatch_ext.patches.vllm.cpu_moe_repack import CPU_MOE_REPACK
from mismatch_ext.patches.vllm.cpu_routes import CPU_ROUTES
from mismatch_ext.patches.vllm.top_logprobs import TOP_LOGPROBS

from mismatch_ext.patching import Patch

# When each patch is active; nothing is patched outside these moments.
DECLARED: tuple[tuple[Patch, str], ...] = (
    (ENGINE_ARGUMENTS, "while TRL builds its trainer; only with a `mismatch` block"),
    (FUSED_HEAD, "while a TRL trainer with `sampling_mask` scores a batch"),
    (SERVER_CLIENT, "while TRL builds its trainer with `vllm_mode: server`; only with a `mismatch` block"),
    (CPU_MOE_REPACK, "during weight updates on a CPU: `update_weights`, and those of a server with the plugin"),
    (CPU_ROUTES, "while TRL builds its trainer with `routing.mode: R3`, on a CPU with vLLM 0.31 or later"),
    (TOP_LOGPROBS, "with `sampling_mask`: while TRL's colocated vLLM generates, and in verl's vLLM servers"),
    (VALIDATE_CONFIG, "wherever verl has loaded this package; without a `mismatch` block it calls verl's own"),
    (GUARD, "wherever verl has loaded this package, or failed to; without a `mismatch` block it calls verl's own"),
    (KL_IN_REWARDS, "in verl's driver, with `kl.reward_path: rewards`"),
    (CLOSED_TOPK, "in workers of a Megatron actor of verl, with `routing`"),
)


def table() -> str:
    """Return the table as Markdown."""
    lines = ["# Patches", "", "What the rules are: patches/README.md."]
    for patch, active in DECLARED:
        checks = ["its probe"] if patch.probe is not None else []
        checks += [patch.observed] if patch.observed else []
        lines += ["", f"## {patch.name}", ""]
        lines += [
            f"- **Symbol**: `{patch.target}`, {patch.peer} {patch.supports or 'of any version'}",
            f"- **Active**: {active}",
            f"- **Checked by**: {'; '.join(checks)}",
            f"- **Why**: {patch.reason}",
            f"- **Not covered**: {patch.not_covered}",
            f"- **Can go when**: {patch.remove_when}",
            f"- **Upstream**: {patch.upstream}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
