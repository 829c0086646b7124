"""An image in the prompt of a real vLLM engine, in float32: what it samples and which experts it records."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from pathlib import Path
from typing import Any

import torch
import transformers
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from mismatch_ext.patches.vllm.cpu_routes import cpu_routes_patches
from vllm import LLM, SamplingParams

from mismatch_ext.patching import applied
from mismatch_ext.routing import align
from tests.peers.engines.tiny_images import TEXT, images, save_tiny


def image_in_a_prompt(out: str) -> Any:
    """Sample behind an image and behind its negative, and compare with transformers, routed by itself and replayed."""
    path = Path(out) / "model"
    save_tiny(path)
    with applied(*cpu_routes_patches()):
        llm = LLM(
            model=str(path), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4, seed=0,
            enable_return_routed_experts=True, limit_mm_per_prompt={"image": 1, "video": 0}, skip_mm_profiling=True,
        )  # fmt: skip
    processor: Any = transformers.AutoProcessor.from_pretrained(path)
    model: Any = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    layout = moe_layout(model)
    # A sampled image token would ask transformers for a second image. Log-probabilities are those before the bias.
    no_image = {model.config.image_token_id: -100.0}
    sampling = SamplingParams(temperature=1.0, max_tokens=8, logprobs=0, ignore_eos=True, seed=1, logit_bias=no_image)
    found = []
    for image in images():
        outputs = llm.generate([{"prompt": TEXT, "multi_modal_data": {"image": image}}], sampling, use_tqdm=False)
        [output], [trace] = outputs, engine.to_traces(outputs, shape=layout.shape, version=0)
        answer, prompt = output.outputs[0], list(output.prompt_token_ids or ())
        ours = processor(text=[TEXT], images=[image], return_tensors="pt")
        ids = torch.tensor([prompt + list(answer.token_ids)])
        seen = (ids == model.config.image_token_id).long()
        inputs = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": seen, "use_cache": False,
            "pixel_values": ours["pixel_values"], "image_grid_thw": ours["image_grid_thw"],
        }  # fmt: skip
        sampled = [answer.logprobs[i][token].logprob for i, token in enumerate(answer.token_ids)]
        aligned, recorded = align([trace], torch.ones_like(ids))
        with torch.no_grad():
            with record_routing(model) as recording:
                native = model(**inputs).logits
            with replay_routing(model, aligned, recorded, others="replay"):
                replayed = model(**inputs).logits
        own, rows = recording.trace.experts[:-1].sort(-1).values, trace.experts.sort(-1).values
        found.append(
            {
                "prompt": prompt,
                "ours": ours["input_ids"][0].tolist(),
                "image_rows": int(seen.sum()),
                "gap": _gap(native, ids, len(prompt), sampled),
                "replayed_gap": _gap(replayed, ids, len(prompt), sampled),
                "differing": int((own != rows).sum()),
                "rows": len(rows),
                "layers": rows.shape[1],
                "routes_of_image": rows[seen[0, :-1].bool()].tolist(),
            }
        )
    return found


def _gap(logits: torch.Tensor, ids: torch.Tensor, prompt: int, sampled: list[float]) -> float:
    """Return the largest difference of a sampled token's log-probability."""
    scored = logits[0, prompt - 1 : -1].log_softmax(-1).gather(-1, ids[0, prompt:, None])[:, 0]
    return float((scored - torch.tensor(sampled)).abs().max())
