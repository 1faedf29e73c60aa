"""The blocks of dtypes and of the loss scale: `fp16`, `bf16`, `torch_autocast` and
`data_types`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from fzero.config.fields import Block, Count, Dtype, Rate, number
from fzero.optim.loss_scale import LossScaling
from fzero.optim.precision import find_class


class FP16(Block):
    """DeepSpeed key `fp16`: parameters in fp16 beside an fp32 master, and a scaled
    loss.
    """

    enabled: bool = False
    """Whether parameters, gradients and communication are fp16."""
    auto_cast: bool = False
    """Whether the floating tensors of a batch are cast to fp16, too."""
    loss_scale: Rate = 0.0
    """The factor of the loss; 0 is dynamic."""
    initial_scale_power: Annotated[int, BeforeValidator(number), Field(ge=0, le=126)] = 16
    """Dynamic: the initial scale is two to this power."""
    loss_scale_window: Count = 1000
    """Dynamic: steps without overflow until the scale doubles."""
    hysteresis: Count = 2
    """Dynamic: overflows until the scale halves."""
    consecutive_hysteresis: bool = False
    """Dynamic: whether a step without overflow restores the hysteresis."""
    min_loss_scale: Rate = 1.0
    """Dynamic: an overflow that would lower the scale below this is an error."""
    fp16_master_weights_and_grads: bool = False
    """Whether the fp16 parameters are the master; the optimizer state is fp32."""

    def loss_scaling(self) -> LossScaling:
        return LossScaling(
            initial=self.loss_scale or 2.0**self.initial_scale_power,
            dynamic=self.loss_scale == 0,
            window=self.loss_scale_window,
            hysteresis=self.hysteresis,
            consecutive=self.consecutive_hysteresis,
            minimum=self.min_loss_scale,
        )


class BF16(Block):
    """DeepSpeed key `bf16` (or `bfloat16`): parameters in bf16 beside an fp32 master."""

    enabled: bool = False
    """Whether parameters, gradients and communication are bf16."""
    auto_cast: bool = False
    """Whether the floating tensors of a batch are cast to bf16, too. fzero's own key.
    """
    check_grad_overflow: bool = True
    """Whether a step whose gradient is not finite is skipped; false makes it an error.
    """
    bf16_master_weights_and_grads: bool = False
    """Whether the bf16 parameters are the master."""
    bf16_optimizer_states: bool = False
    """Whether the optimizer state is bf16 as well; needs bf16 parameters as the master.
    """
    stochastic_rounding: bool = False
    """Whether a bf16 master and its optimizer state are rounded stochastically, which
    keeps small updates on average. fzero's own key."""

    @model_validator(mode="after")
    def _needs_a_bf16_master(self) -> Self:
        for key in ("bf16_optimizer_states", "stochastic_rounding"):
            if getattr(self, key) and not self.bf16_master_weights_and_grads:
                raise ValueError(
                    f"{key} needs bf16_master_weights_and_grads, got false; set it to true as well"
                )
        return self


class TorchAutocast(Block):
    """DeepSpeed key `torch_autocast`: the forward runs under `torch.autocast`."""

    enabled: bool = False
    """Whether each operation has the precision of torch's autocast lists."""
    dtype: Dtype = "bfloat16"
    """The lower precision; with fp16 the loss is scaled by the rules of `fp16`."""
    lower_precision_safe_modules: tuple[str, ...] = (
        "torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"
    )  # fmt: skip
    """Classes of modules whose own parameters are held, sent and gathered in the lower
    precision, beside a master.
    """

    @model_validator(mode="after")
    def _is_lower(self) -> Self:
        if self.enabled and self.dtype == "float32":
            raise ValueError(
                "dtype: must be 'bfloat16' or 'float16', got 'float32'; or set enabled to false"
            )
        for name in self.lower_precision_safe_modules:
            try:
                find_class(name)
            except ValueError as error:
                raise ValueError(f"lower_precision_safe_modules: {error}") from None
        return self


class DataTypes(Block):
    """DeepSpeed key `data_types`, with dtypes that DeepSpeed has no key for. A value
    overrides those of `fp16` and `bf16`.
    """

    param_dtype: Dtype | None = None
    """The dtype of all floating parameters; null is that of `fp16` or `bf16`, or each
    parameter's own.
    """
    grad_accum_dtype: Dtype | None = None
    """The dtype in which gradients are accumulated over micro-steps; null is that of
    the parameters.
    """
    reduce_dtype: Dtype | None = None
    """The dtype in which gradients are sent; null is `communication_data_type`, or that
    of the parameters. fzero's own key.
    """
    master_dtype: Dtype | None = None
    """The dtype of the master; null is fp32 where parameters are cast, else their own.
    fzero's own key.
    """
    optimizer_dtype: Dtype | None = None
    """The dtype of the optimizer state; null is that of the master. fzero's own key."""
    buffer_dtype: Dtype | None = None
    """The dtype of the module's floating buffers; null leaves them unchanged."""
    keep_in_fp32_modules: Literal["auto"] | tuple[str, ...] = "auto"
    """Names of module buffers that are fp32 beside parameters in 16 bits; `*` stands for
    any characters, and a name may match anywhere. "auto" takes the lists of transformers'
    models. For the engine (fzero.initialize); a step leaves buffers as they are."""

    @model_validator(mode="after")
    def _one_dtype(self) -> Self:
        names = self.keep_in_fp32_modules
        if names not in ("auto", ()) and self.buffer_dtype not in (None, "float32"):
            raise ValueError(
                f"keep_in_fp32_modules excludes buffer_dtype, the dtype of all module buffers, got "
                f"{[*names]} beside {self.buffer_dtype!r}; leave buffer_dtype out, and buffers keep "
                f"their dtype"
            )
        return self
