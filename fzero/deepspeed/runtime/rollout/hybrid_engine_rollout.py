"""The rollout engine of a training engine: its model generates on parameters that are
gathered once for each request.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fzero.config.config import ConfigWarning
from fzero.deepspeed.engine.engine import Engine
from fzero.deepspeed.runtime.rollout.base import (
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)


@dataclass
class HybridEngineRolloutConfig:
    """`enable_profiling` keeps the times of the last request. The others have no
    effect.
    """

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None


class HybridEngineRollout(RolloutEngine):
    """Generates by `engine.generate`.

    Args:
        engine: of `initialize`; its module has transformers' `generate`.
        tokenizer: has `pad_token_id` or `eos_token_id`.
        cfg: any object; the attributes of `HybridEngineRolloutConfig` that it lacks, or
            all of None, are False.
    """

    name = "hybrid_engine"
    use_graph_capture: bool
    enable_profiling: bool
    use_shared_prefill: bool

    def __init__(self, engine: Engine, tokenizer: Any, cfg: Any = None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        for field in fields(HybridEngineRolloutConfig):
            setattr(self, field.name, getattr(cfg, field.name, field.default))
            if field.name != "enable_profiling" and getattr(self, field.name):
                _warn_of_no_effect(field.name)
        self._profile: dict[str, float] | None = None

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """The answers to this rank's prompts; each ends with its first end-of-sequence
        token. *Collective:* every rank.

        Generates in evaluation mode, and leaves the training mode as it was.
        """
        began = time.perf_counter()
        if sampling.continuous_batch_size is not None:
            _warn_of_no_effect("continuous_batch_size")
        eos, num_samples = self.tokenizer.eos_token_id, sampling.n_samples_per_prompt
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else eos
        if pad is None:
            raise ValueError(
                "tokenizer: must have pad_token_id or eos_token_id, and has neither; set "
                "tokenizer.pad_token_id"
            )
        prompts, mask = (
            x.repeat_interleave(num_samples, 0)
            for x in (request.prompt_ids, request.prompt_attention_mask)
        )
        draws = (
            {"do_sample": False}
            if sampling.temperature <= 0
            else {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": max(sampling.top_k, 0),
            }
        )
        was_training, expanded = self.engine.module.training, time.perf_counter()
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
        start, generated = prompts.shape[1], time.perf_counter()
        response = ids[:, start:]
        ends = torch.isin(
            response,
            torch.as_tensor(
                [] if eos is None else eos, device=ids.device, dtype=ids.dtype
            ).flatten(),
        )
        is_within = ends.cumsum(1) - ends.long() == 0  # up to the first end, which counts
        answer = (is_within & ((response != pad) | ends)).long()
        ids = torch.cat([ids[:, :start], response.masked_fill(~is_within, pad)], 1)
        if self.enable_profiling:
            size, length = len(request.prompt_ids), response.shape[1]
            self._profile = _profile(
                began,
                expanded,
                generated,
                batch=size,
                samples=num_samples,
                prompt=start,
                length=length,
            )
        starts = torch.full((len(ids),), start, dtype=torch.long, device=ids.device)
        return RolloutBatch(ids, torch.cat([mask.to(answer), answer], 1), starts)

    def get_last_profile(self) -> dict[str, float] | None:
        """Milliseconds and tokens of the last request, with `enable_profiling`; else
        None.
        """
        return self._profile

    def sync_weights(self, step: int) -> None:
        """Does nothing: each request uses the present weights."""


def _warn_of_no_effect(name: str) -> None:
    text = (
        f"{name}: has no effect: answers are generated by engine.generate, with the same tokens; "
        f"leave it out"
    )
    warnings.warn(text, ConfigWarning, stacklevel=3)


def _profile(
    began: float,
    expanded: float,
    generated: float,
    *,
    batch: int,
    samples: int,
    prompt: int,
    length: int,
) -> dict[str, float]:
    """Milliseconds of the parts of a request, from the times at their ends, and its
    tokens, under DeepSpeed's names.
    """
    ended, tokens = time.perf_counter(), batch * samples * length
    return {
        "prompt_expansion_ms": (expanded - began) * 1e3,
        "generation_ms": (generated - expanded) * 1e3,
        "post_processing_ms": (ended - generated) * 1e3,
        "total_ms": (ended - began) * 1e3,
        "num_generated_tokens": tokens,
        "tokens_per_second": tokens / (ended - began),
        "batch_size": batch,
        "num_samples_per_prompt": samples,
        "prompt_length": prompt,
        "response_length": length,
    }
