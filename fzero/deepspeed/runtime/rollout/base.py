"""What goes into a rollout engine and what comes out. Shape letters: B prompts, N
answers, P tokens of a prompt, T of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass
class RolloutConfig:
    """The kind of the engine. `use_graph_capture` has no effect."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class SamplingConfig:
    """How tokens are drawn: a temperature of 0 takes the likeliest, `top_k` -1 takes
    all. `continuous_batch_size` has no effect: all prompts are answered at once.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@dataclass
class RolloutRequest:
    """Prompts, padded on the left.

    Args:
        prompt_ids: (B, P).
        prompt_attention_mask: (B, P), 1 at tokens that are no padding.
    """

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        _check(
            "RolloutRequest",
            "prompt_ids",
            self.prompt_ids,
            "prompt_attention_mask",
            self.prompt_attention_mask,
        )


@dataclass
class RolloutBatch:
    """Prompts with their answers, padded on the right.

    Args:
        input_ids: (N, T); the answers to a prompt stand one after the other.
        attention_mask: (N, T).
        response_start_idx: (N,), the index of the first token of an answer.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor

    def __post_init__(self) -> None:
        _check("RolloutBatch", "input_ids", self.input_ids, "attention_mask", self.attention_mask)
        if self.response_start_idx.shape != (self.batch_size,):
            raise ValueError(
                f"RolloutBatch.response_start_idx: must have shape ({self.batch_size},), got "
                f"{tuple(self.response_start_idx.shape)}; give an index for each row of input_ids"
            )

    @property
    def batch_size(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def seq_len(self) -> int:
        return int(self.input_ids.shape[1])


class RolloutEngine(ABC):
    """Generates answers to prompts."""

    name = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """The answers to this rank's prompts. *Collective:* every rank."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Makes the engine use the present weights."""

    def shutdown(self) -> None:
        """Frees what the engine holds."""
        return None


def _check(of: str, name: str, ids: Tensor, mask_name: str, mask: Tensor) -> None:
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise ValueError(
            f"{of}.{name}: must have two dimensions, and {mask_name} the same shape, got "
            f"{tuple(ids.shape)} and {tuple(mask.shape)}; pad the rows to one length"
        )
