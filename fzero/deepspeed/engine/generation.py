"""`Generator`: the methods of DeepSpeed's hybrid engine, on `fzero.generation`.

Upstream merges LoRA into the training weights and takes it out again, which changes
their bits in 16 bits; here it is merged into copies.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fzero.generation.gathered_model import generating
from fzero.generation.lora import lora_params
from fzero.plans.units import blocks_of

if TYPE_CHECKING:
    from fzero.deepspeed.engine.engine import Engine

PARTS = ("gather", "generate", "training")


class Generator:
    """The part of an engine that generates between updates."""

    is_lora_fused = False
    """Whether a script has asked for merged LoRA by `fuse_lora_weight`; each `generate`
    merges it, asked or not.
    """
    _own_generate: Any = None
    _seconds: dict[str, float] | None = None
    _since: float | None = None
    """When training began, while the engine is in training mode."""
    _first: float | None = None
    _rows = 0

    def __init__(self, engine: Engine) -> None:
        self.engine, module = engine, engine.module
        # scripts call the module's
        if engine.keys.hybrid_engine.enabled and hasattr(module, "generate"):
            self._own_generate = engine.held_module.replace(
                "generate", lambda original, inputs, kwargs: engine.generate(*inputs, **kwargs)
            ).original
            self._seconds = dict.fromkeys(PARTS, 0.0)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's `generate` on full parameters, with LoRA merged; see
        `fzero.generation.generating`.

        The training mode stays as it is, as upstream: call `engine.eval()` to generate
        without dropout.

        *Collective:* every rank. In stage 3 parameters are gathered once for the call;
        with `hybrid_engine.pin_parameters: false`, in each forward. Ranks may stop at
        different lengths.

        Raises:
            ValueError: the module has no `generate`, or more than
                `hybrid_engine.max_out_tokens` tokens are requested.
        """
        own = self._own_generate or getattr(self.engine.module, "generate", None)
        if own is None:
            raise ValueError(
                f"engine.generate: the module must have `generate`, and is a "
                f"{type(self.engine.module).__name__}; call the engine, or generate inside of "
                f"engine.gathered()"
            )
        prompt = next((x for x in (*inputs, *kwargs.values()) if isinstance(x, Tensor)), None)
        self._check_length(prompt, kwargs)
        began = time.perf_counter()
        by = "copy" if self.engine.keys.hybrid_engine.pin_parameters else "unit"
        step, state = self.engine.active_step(), self.engine.state
        with self.engine.held_module.alone(), generating(step, state, by=by):  # type: ignore[arg-type]
            gathered = time.perf_counter()
            found = own(*inputs, **kwargs)
        if self._seconds is not None:
            self._seconds["gather"] += gathered - began
            self._seconds["generate"] += time.perf_counter() - gathered
            self._first = self._first or began
            self._rows += 0 if prompt is None else len(prompt)
        return found

    def _check_length(self, prompt: Tensor | None, kwargs: dict[str, Any]) -> None:
        keys = self.engine.keys.hybrid_engine
        length = kwargs.get("max_length") or 0
        if kwargs.get("max_new_tokens") and prompt is not None:
            length = prompt.shape[-1] + kwargs["max_new_tokens"]
        if keys.enabled and length > keys.max_out_tokens:
            raise ValueError(
                f"hybrid_engine.max_out_tokens: must be at least the tokens of prompt and answer, "
                f"{length}, got {keys.max_out_tokens}; raise it in the configuration"
            )

    def note_mode(self, *, trains: bool) -> None:
        """Notes a change of the training mode: where a hybrid engine leaves it, it
        prints where the time went.
        """
        now = time.perf_counter()
        if self._seconds is not None and self._since is not None and not trains:
            self._seconds["training"] += now - self._since
            if self._first is not None and self._rows:
                self._print_times(now - self._first)
            self._seconds, self._first, self._rows = dict.fromkeys(PARTS, 0.0), None, 0
        self._since = now if trains else None

    def _print_times(self, total: float) -> None:
        assert self._seconds is not None
        times = self._seconds | {"other": total - sum(self._seconds.values())}
        shares = ", ".join(
            f"{name} {seconds:.3g} s ({seconds / total:.0%})" for name, seconds in times.items()
        )
        rows = self._rows * self.engine.train_step.world_size
        self.engine.log_line(
            f"end to end {total:.3g} s: {shares}; {rows / total:.3g} samples per second"
        )

    def fuse_lora_weight(self) -> None:
        """Sets `is_lora_fused`. No weight changes: `generate` merges LoRA into copies,
        whether this was called or not.
        """
        self.is_lora_fused = True

    def unfuse_lora_weight(self) -> None:
        """Clears `is_lora_fused`."""
        self.is_lora_fused = False

    unfuse_lora_weight_non_pinned = unfuse_lora_weight

    @property
    def all_lora_params(self) -> list[list[Any]]:
        """[right matrix, left matrix, scale, weight] of each LoRA layer with
        DeepSpeed-Chat's attributes.
        """
        return lora_params(self.engine.module)

    @property
    def layer_params(self) -> list[list[nn.Parameter]]:
        """The parameters of each repeated block of the module."""
        return [
            list(self.engine.module.get_submodule(name).parameters())
            for name in blocks_of(self.engine.module)
        ]

    @property
    def layer_lora_params(self) -> list[list[Any]]:
        """[right matrix, left matrix, scale] of the LoRA layers in each repeated block,
        one after the other.
        """
        blocks = (self.engine.module.get_submodule(name) for name in blocks_of(self.engine.module))
        return [[one for found in lora_params(block) for one in found[:-1]] for block in blocks]

    def prepare_shared_prefill(
        self, source_batch_size: int, repeats: int, prompt_length: int
    ) -> None:
        """Raises: the keys and values of a prompt are the model's own, and no memory of
        the engine's holds them.

        Raises:
            RuntimeError: always, as upstream does where its kernels do not run.
        """
        raise RuntimeError(
            f"engine.prepare_shared_prefill: needs a workspace of kernels for {source_batch_size} "
            f"prompts, and there is none; call engine.generate(..., "
            f"num_return_sequences={repeats}) of transformers, or n_samples_per_prompt of a rollout"
        )

    def repeat_shared_prefill_cache(self, source_batch_size: int, repeats: int) -> None:
        """Raises as `prepare_shared_prefill` does."""
        self.prepare_shared_prefill(source_batch_size, repeats, 0)

    def release_inference_cache(self) -> None:
        """Does nothing: no memory is kept after `generate`."""

    retake_inference_cache = release_inference_cache
