"""The rollout engine of a training engine: its model generates on parameters that are gathered once for each request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.deepspeed.runtime.rollout.base import RolloutBatch, RolloutEngine, RolloutRequest, SamplingConfig
from fzero.engine.engine import Engine


@dataclass
class HybridEngineRolloutConfig:
    """`enable_profiling` keeps the seconds of the last request. The two others have no effect."""

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False


class HybridEngineRollout(RolloutEngine):
    """Generates by `engine.generate`.

    Args:
        engine: of `initialize`; its module has transformers' `generate`.
        tokenizer: has `pad_token_id` or `eos_token_id`.
        cfg: None takes the defaults.
    """

    name = "hybrid_engine"

    def __init__(self, engine: Engine, tokenizer: Any, cfg: HybridEngineRolloutConfig | None = None) -> None:
        self.engine, self.tokenizer, self.cfg = engine, tokenizer, cfg or HybridEngineRolloutConfig()
        self._profile: dict[str, float] | None = None

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """The answers to this rank's prompts; each ends with its first end-of-sequence token. *Collective:* every rank.

        Generates in evaluation mode, and leaves the training mode as it was.
        """
        eos, num_samples = self.tokenizer.eos_token_id, sampling.n_samples_per_prompt
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else eos
        if pad is None:
            raise ValueError(
                "tokenizer: must have pad_token_id or eos_token_id, and has neither; set tokenizer.pad_token_id"
            )
        prompts, mask = (
            x.repeat_interleave(num_samples, 0) for x in (request.prompt_ids, request.prompt_attention_mask)
        )
        draws = {"do_sample": False} if sampling.temperature == 0 else {
            "do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0),
        }  # fmt: skip
        was_training, began = self.engine.module.training, time.perf_counter()
        self.engine.module.eval()
        try:
            ids: Tensor = self.engine.generate(
                prompts,
                attention_mask=mask,
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=pad,
                eos_token_id=eos,
                **draws,
            )
        finally:
            self.engine.module.train(was_training)
        start = prompts.shape[1]
        answer = torch.ones_like(ids[:, start:])
        if eos is not None:
            ends = ids[:, start:] == eos
            answer = (ends.cumsum(1) - ends.long() == 0).long()  # up to the first end, which counts
            ids = torch.cat([ids[:, :start], ids[:, start:].masked_fill(answer == 0, pad)], 1)
        if self.cfg.enable_profiling:
            self._profile = {"seconds": time.perf_counter() - began, "tokens": float(answer.sum())}
        starts = torch.full((len(ids),), start, dtype=torch.long, device=ids.device)
        return RolloutBatch(ids, torch.cat([mask.to(answer), answer], 1), starts)

    def get_last_profile(self) -> dict[str, float] | None:
        """Seconds and tokens of the last request, with `enable_profiling`; else None."""
        return self._profile

    def sync_weights(self, step: int) -> None:
        """Does nothing: each request uses the present weights."""
