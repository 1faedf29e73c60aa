"""`private`: a step that adds the noise of DP-SGD to the gradient it has reduced.

    g ← (Σ_b clip(g_b) + N(0, σ² C²)) / N

with the clipped gradients of all samples of all ranks (`fzero.per_sample.clip`), the
noise multiplier σ, the norm C and the number of samples N (Abadi et al. 2016,
arXiv:1607.00133, algorithm 1).

The noise is added once, after the reduction, to the part of the gradient that a rank
updates. It is drawn by chunks of a flat buffer from (seed, number of updates, buffer,
chunk), so that every stage, mesh and number of ranks adds the same noise, and a rank
draws that of its own part only.

Shape letters: N samples of an update; P padded elements of a flat buffer.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.common.arguments import check_whole
from fzero.per_sample.clipping import Clip
from fzero.runtime import phases
from fzero.runtime.finish import Collected, mean_of
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import Metrics, TrainState
from fzero.step import TrainStep, end
from fzero.storage.shard_transfer import updated_part

CHUNK = 1 << 16
State = TrainState[Tensor]


@dataclass(frozen=True, slots=True)
class PrivateStep:
    """`private(step, …)(state, batch)` → `(state, metrics)`; made by `private`.

    Attributes:
        step: the step, whose other methods are as ever.
        std: the standard deviation of the noise in the mean gradient, σ C / N.
        seed: of the noise.
    """

    step: TrainStep
    std: float
    seed: int

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One update with noise; see `TrainStep.__call__`. The norm that the metrics
        report is that of the gradient with its noise.
        """
        run = self.step.runtime
        state, micro_batches = phases.check(run, state, batch)
        collected = run.program(run, state, micro_batches)
        self._add_noise(run, collected)
        return end(run, collected)

    @torch.no_grad()
    def _add_noise(self, run: StepRuntime, collected: Collected) -> None:
        rows_M2 = collected.loss_stats.flatten(0, 1)[:, :2]
        _, weight = mean_of(rows_M2, is_sum=collected.is_sum)
        scale = collected.state.loss_scale.scale
        std = self.std * float(run.rules.loss.multiple(weight, scale))
        count = int(collected.state.step)
        for b in run.plan.flat_buffers:
            if b.trainable:
                home = collected.state.grads[b.key]
                assert isinstance(home, Tensor), b.key
                own = updated_part(home, b, run.mesh.shard)
                start = run.mesh.shard * b.shard_numel if own.numel() < b.padded_numel else 0
                last = min(start + own.numel(), b.layout.numel)
                for chunk in range(start // CHUNK, math.ceil(last / CHUNK) if last > start else 0):
                    first, stop = max(start, chunk * CHUNK), min(last, (chunk + 1) * CHUNK)
                    drawn = _drawn(f"{self.seed}/{count}/{b.key}/{chunk}", own.device)
                    part = drawn[first - chunk * CHUNK : stop - chunk * CHUNK]
                    own[first - start : stop - start].add_(part.to(own.dtype), alpha=std)


def _drawn(key: str, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(CHUNK, generator=generator).to(device)


def private(step: TrainStep, *, noise: float, seed: int) -> PrivateStep:
    """DP-SGD: the step with noise of standard deviation `noise · max_norm / N` in its
    mean gradient.

        clip = fzero.per_sample.clip(1.0)
        step = fzero.make_train_step(model, cfg, loss_fn=loss_of_each, transforms=[clip])
        private = fzero.per_sample.private(step, noise=1.1, seed=secret)
        state, metrics = private(state, batch)

    N is the configuration's `train_batch_size`. What privacy this buys is for an
    accountant to say (Opacus' `PRVAccountant`, for example), which assumes that each
    batch is a random sample of the data. Whoever knows the seed can subtract the noise,
    and the generator is not a cryptographic one.

    Args:
        step: an eager step with the transform `clip` of a finite norm, whose gradients
            are in memory. The same on all ranks.
        noise: the noise multiplier σ.
        seed: the same on all ranks.

    Raises:
        ValueError: the step does not clip, or is one graph, or keeps gradients in
            files.
    """
    clips = [one for one in step.spec.transforms if isinstance(one, Clip)]
    problem = None
    if len(clips) != 1 or not math.isfinite(clips[0].max_norm):
        problem = "with one fzero.per_sample.clip(max_norm), max_norm finite"
    elif step.program is not None or not step.runtime.job.is_whole:
        problem = "eager, and of the whole model"
    elif step.runtime.offload.has_files:
        problem = "with gradients in memory"
    elif step.spec.cfg.train_batch_size is None:
        problem = "with a train_batch_size, over which the noise is divided"
    if problem is not None:
        raise ValueError(
            f"private: must be given a step {problem}, got another one; make the step that way"
        )
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < math.inf:
        raise ValueError(
            f"private: noise must be a number of at least 0, got {noise!r}; it is the noise "
            f"multiplier, about 1"
        )
    check_whole("private: seed", seed, 0)
    num = step.spec.cfg.train_batch_size
    assert num is not None
    return PrivateStep(step, noise * clips[0].max_norm / num, seed)
