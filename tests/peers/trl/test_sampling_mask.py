"""The `sampling_mask` section in the real TRL with vLLM: gap, gradient, reference and warning under each kind of truncation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_sampling_mask as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_sampling_mask")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]


def test_the_ratio_is_one_over_what_the_engine_sampled_from(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.settings, model=dense, out=tmp_path).expect()
    for name, one in found["found"].items():
        # The pass that TRL takes, one of our own, and the gradient: over the masks all are the engine's and those of dense ones.
        assert max(one["replayed"], one["old"], one["gradient"]) < 1e-5, (name, one)
        assert 0.02 < one["plain"] < 0.5 and 0.6 < one["ratio"] < 0.98, (name, one)
        least, mean, most = one["size"]
        assert 1 <= least <= mean <= most, (name, one)
    assert found["found"]["top_k"]["size"] == [8, 8, 8] and found["found"]["all"]["size"][2] <= 8
    # The gap that is logged, corrected and watched is that over the masks.
    for entry, one in zip(found["history"], found["found"].values(), strict=True):
        assert entry["mismatch/logp_abs_diff_mean"] < 1e-5 and entry["mismatch/support_truncated"] == 0.0
        assert entry["mismatch/sampling_mask_size"] == pytest.approx(one["size"][1])
    # The reference is scored over the same tokens: equal models have a KL of 0, and others another.
    assert found["kl"][0] == pytest.approx(0.0, abs=1e-9) and min(found["kl"][1:]) > 1e-3
    assert not found["warned"] and "trl/fused_head" in found["patches"]
    # The same of numbers that the engine keeps as of vLLM's objects, bit for bit; an object for each sampled token alone.
    kept, listed = (found["engine"][name] for name in ("kept", "listed"))
    assert all(kept[name] == listed[name] for name in ("records", "offsets", "result", "tokens"))
    assert kept["objects"] == kept["tokens"] > 0 and listed["objects"] > 8 * listed["tokens"]
    assert "vllm/top_logprobs" in found["patches"]


def test_parts_are_scored_over_their_masks_and_a_loss_of_other_tokens_is_refused(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    found = run(scenarios.parts, model=dense, out=tmp_path).expect()
    # On the policy that sampled, each ratio is 1; over the whole vocabulary it is up to 0.3 nats off.
    for name in ("PartsOutside", "PartsInside", "Filtered", "Chunks"):
        assert len(found[name]) == 2 and max(found[name]) < 1e-5, found
    assert "mismatch.sampling_mask, but the loss was computed without a replayed forward pass" in found["OtherTokens"]


def test_trls_own_head_runs_only_for_its_entropies(run: Run) -> None:
    found = run(scenarios.heads).expect()
    stock = found["stock"]
    assert stock[1] is not None and stock[2:] == [None] * 3
    assert found["entropies"] == [[[-3.0] * 6, *stock[1:]], 1]
    assert found["alone"] == [[[-3.0] * 6, *[None] * 4], 0]
    assert found["TRL's"] == [stock, 1]


def test_masks_follow_their_tokens_however_the_head_comes_to_them(run: Run) -> None:
    # All positions, as on a CPU, or those that count, as with Triton; a truncated row has none.
    found = run(scenarios.orders).expect()
    assert found["found"] == [True, True] and found["some"] and found["other"]
    for rows in (1, 3, 4):
        for compact in (False, True):
            assert found[f"{rows} {compact} done"] == 2
            for repeat in range(2):
                for ours, dense in zip(found[f"{rows} {compact} {repeat}"], found["dense"], strict=True):
                    assert ours == pytest.approx(dense, abs=1e-5), (rows, compact)
    packed = found["packed"]
    assert packed["tokens"] == packed["places"] and packed["done"] == 1
    assert packed["scored"] == pytest.approx(packed["dense"], abs=1e-5)
    assert (
        "mismatch.sampling_mask: TRL's fused head is given 5 tokens that are not those which come next"
        in found["refused"]
    )
