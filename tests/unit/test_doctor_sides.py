"""What the doctor takes back of a run to try a remedy."""

from __future__ import annotations

from mismatch_ext.adapters.doctor import Run


def test_a_mended_run_serves_the_trainers_own_checkpoint_without_the_settings_of_the_remedy() -> None:
    run = Run(model="own", engine_model="other", arguments={"kv_cache_dtype": "fp8_e4m3", "max_model_len": 64})
    mended = run.mended(("kv_cache_dtype", "quantization"))
    assert mended.engine_model is None and mended.model == "own"
    assert mended.arguments == {"max_model_len": 64} and mended.dtype == run.dtype
