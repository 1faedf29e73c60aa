"""`ulysses`: sequences that several ranks share, as a transform of a model that stays as
it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fzero.comms.mesh import SEQ
from fzero.model.transforms import Call, Changes, LossFn, TransformedStep, Wrap
from fzero.sequence.attention import Now, Swapping, active, is_pretrained, register
from fzero.sequence.parts import Division, Part, check_counted, check_keys, joined

_MIXING = (
    *(nn.RNNBase, nn.RNNCellBase, nn.modules.batchnorm._BatchNorm),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""Modules that may mix tokens otherwise than by attention."""


@dataclass(frozen=True)
class Ulysses:
    """The transform of `ulysses`."""

    dim: int = 1
    pad: Mapping[Any, float] = field(default_factory=dict)
    whole: frozenset[Any] = frozenset()
    splits: bool = True
    may_count: bool = False
    token_wise: tuple[str, ...] = ()
    in_eval: bool = True
    """Whether a model in evaluation mode has parts of sequences, too."""

    def __str__(self) -> str:
        """The call that makes it, with the arguments that are not the default.

        >>> print(Ulysses(whole=frozenset({"mask"})))
        fzero.sequence.ulysses('seq', whole=['mask'])
        """
        own, default = asdict(self), asdict(Ulysses())
        own["whole"] = sorted(self.whole, key=repr)
        given = [f"{name}={own[name]!r}" for name in own if getattr(self, name) != default[name]]
        return f"fzero.sequence.ulysses({', '.join([repr(SEQ), *given])})"

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. It adds nothing."""
        model, loss_fn = spec.model, getattr(spec, "loss_fn", None)
        named = {name: module for name, module in model.named_modules() if _is_called(module)}
        self._check_mixing(model)
        pretrained = [module for module in named.values() if is_pretrained(module)]
        for module in pretrained:
            _check_pretrained(module)
        if pretrained:
            register()
        has_own_loss = is_pretrained(model) or hasattr(model, "loss_function")
        if self.splits and loss_fn is None and not has_own_loss:
            raise ValueError(
                f"loss_fn: must be given with ulysses where the model is not of transformers, "
                f"because ranks have different numbers of labels, got None with "
                f"{type(model).__name__}; pass a function that returns (sum, weight)"
            )
        is_mean = getattr(spec.cfg, "gradient_allreduce_op", "mean") != "sum"
        division = Division(
            self.dim, self.pad, self.whole, bool(pretrained), is_mean, loss_fn is not None
        )
        now = Now()

        def forwards(call: Call) -> Mapping[str, Wrap]:
            # generation calls the model with whole sequences
            if call.seq is None or not call.is_counted:
                return {}
            return {name: self._wrap(call.seq, now) for name in named}

        return Changes(
            name="ulysses",
            text=str(self),
            forwards=forwards,
            batch=division if self.splits else None,
            loss=(lambda given: _loss_of_part(given, now)) if self.splits else None,
            splits_samples=True,
            is_exact=True,
        )

    def _wrap(self, axis: Any, now: Now) -> Wrap:
        def wrap(name: str, module: nn.Module) -> Callable[..., Any]:
            forward = module.forward
            asks = _asked(module) if is_pretrained(module) else ()
            # made here, because a compiled block may enter it, not make it
            mode = Swapping(axis, now, may_count=self.may_count or bool(asks))

            def run(*args: Any, **kwargs: Any) -> Any:
                if not name and self.splits and not now.is_running:
                    raise ValueError(
                        "ulysses: the model must be called by the loss of a step, which divides "
                        "the batch, got a call outside; pass ulysses(…, splits=False), and divide "
                        "batches yourself"
                    )
                if not (self.in_eval or module.training):
                    return forward(*args, **kwargs)
                if asks:
                    if not self.splits and active() is None:
                        now.begin(_given_part(args, kwargs, axis))
                    kwargs = _with_positions(module, asks, args, kwargs, now)
                if active() is not None:
                    return forward(*args, **kwargs)
                with mode:
                    return forward(*args, **kwargs)

            return run

        return wrap

    def _check_mixing(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, _MIXING) and name not in self.token_wise:
                raise ValueError(
                    f"ulysses: a model must mix tokens by attention alone, got {name!r}, a "
                    f"{type(module).__name__}, which would see this rank's tokens only; leave the "
                    f"model undivided, or pass token_wise={name!r} if it works on each token"
                )


def _loss_of_part(given: LossFn | None, now: Now) -> LossFn:
    """The loss of a rank's part of a micro-batch."""

    def loss(model: nn.Module, part: Any) -> Any:
        if not isinstance(part, Part):  # one rank
            return _loss(model, given, part)
        now.begin(part)
        now.is_running = True
        try:
            found = _loss(model, given, part.batch)
        except KeyError as error:
            if error.args == ("labels",):
                error.add_note(
                    "ulysses: a loss function finds the labels of a divided sequence as "
                    "'shift_labels', of the token after each; compare them with logits of the "
                    "same place"
                )
            raise
        finally:
            now.is_running = False
        if given is not None:
            if not (isinstance(found, tuple) and len(found) == 2):
                raise ValueError(
                    f"loss_fn: must return (sum, weight) with ulysses, because ranks have "
                    f"different numbers of labels, got {type(found).__name__}; return the sum of "
                    f"the losses of tokens, and the number of tokens"
                )
            check_counted(found[1], part.batch)
        return found

    return loss


def _loss(model: nn.Module, given: LossFn | None, batch: Any) -> Any:
    if given is not None:
        return given(model, batch)
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"ulysses: the model's output must have a loss where no loss_fn is given, got "
            f"{type(output).__name__} without; put 'labels' into the batch, or pass loss_fn="
        )
    return loss


def _is_called(module: nn.Module) -> bool:
    """Whether the forward of a module may call attention."""
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and (bool(module._modules) or isinstance(module, nn.MultiheadAttention))


def _asked(module: nn.Module) -> Collection[str]:
    """The arguments of a model of transformers that it gets even if the caller leaves
    them out.
    """
    known = inspect.signature(type(module).forward).parameters
    return [key for key in ("position_ids", "attention_mask", "use_cache") if key in known]


def _given_part(args: tuple[Any, ...], kwargs: dict[str, Any], axis: Any) -> Part | None:
    """The part of the batch with which a model of transformers is called."""
    named = (kwargs.get(key) for key in ("input_ids", "inputs_embeds"))
    tokens = next((x for x in (*args, *named) if isinstance(x, Tensor)), None)
    return None if tokens is None else joined(kwargs, tokens, axis)


def _with_positions(
    module: Any, asks: Collection[str], args: tuple[Any, ...], kwargs: dict[str, Any], now: Now
) -> dict[str, Any]:
    """The keyword arguments of a model of transformers: positions in the whole sequence,
    a mask that keeps it from looking for several sequences in this part, and no cache.
    """
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if now.part is None or first is None or len(args) > 1:
        return kwargs
    given = dict(kwargs)
    if "position_ids" in asks and given.get("position_ids") is None:
        given["position_ids"] = now.part.positions
    if "attention_mask" in asks and given.get("attention_mask") is None:
        given["attention_mask"] = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device)
    if "use_cache" in asks and active() is None:  # the outermost model
        cached = given.get("use_cache")
        now.packs = not (getattr(module.config, "use_cache", False) if cached is None else cached)
        given["use_cache"] = False
    return given


def _check_pretrained(module: nn.Module) -> None:
    config: Any = module.config
    name = type(module).__name__
    if (found := getattr(config, "_attn_implementation", None)) != "sdpa":
        raise ValueError(
            f"ulysses: {name} must compute attention by 'sdpa', got {found!r}; load it with "
            f"attn_implementation='sdpa'"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds or getattr(config, "is_encoder_decoder", False):
        what = min(kinds) if kinds else "an encoder and a decoder"
        raise ValueError(
            f"ulysses: {name} must have full or sliding attention over one sequence in all layers, "
            f"got {what}; leave this model undivided"
        )


def ulysses(
    axis: str = SEQ,
    *,
    dim: int = 1,
    pad: Mapping[Any, float] | None = None,
    whole: Collection[Any] = (),
    splits: bool = True,
    may_count: bool = False,
    token_wise: str | Collection[str] = (),
) -> Ulysses:
    """Divides the tokens of each sample among the ranks of a mesh axis (Ulysses,
    arXiv 2309.14509).

        step = fzero.make_train_step(
            model, cfg, mesh=Mesh.of(data=2, seq=4), loss_fn=sum_and_count,
            transforms=[fzero.sequence.ulysses("seq")],
        )

    ZeRO shards the state over all ranks of `data` and `seq` together. The ranks of one
    `seq` group get the same batch (`fzero.sequence.batch_of`), and each computes with its
    part of the tokens. Attention swaps tokens for heads by an all-to-all, and back.

    A model of transformers gets position ids, and labels shifted before the cut. A
    `loss_fn` gets the part of each tensor whose dimension `dim` is as long as the
    sequence, must return (sum, weight), and finds `labels` of a mapping as
    `shift_labels`, shifted. Other tensors, such as a mask (B, 1, L, L), are whole.

    *Collective:* see `fzero.sequence.attend`. Loss, gradients and weights are those of
    one rank for each group, to rounding.

    Args:
        axis: the mesh axis, which must be "seq".
        dim: the dimension of tokens in the tensors of a batch.
        pad: the value that pads a tensor where the ranks do not divide the tokens, by
            key of a mapping, or place in a tuple; names of transformers are known.
        whole: the keys or places of tensors that every rank gets whole.
        splits: whether a step divides batches. False takes batches that are divided
            already.
        may_count: whether the model may call `torch.arange` with the number of its
            tokens. Positions made so would be wrong on all ranks but the first.
        token_wise: names of convolutions, recurrent layers and batch norms that work on
            each token alone.

    Raises:
        ValueError: from the step: the model mixes tokens otherwise than by attention,
            the ranks do not divide its heads, a loss is no (sum, weight), labels were
            shifted twice, or the batch differs within a group.
        ConfigError: from the step: `compile="block"`.
    """
    if axis != SEQ:
        raise ValueError(
            f"ulysses: axis must be {SEQ!r}, the mesh axis whose ranks share samples, got "
            f"{axis!r}; pass {SEQ!r}, and mesh=Mesh.of(data=2, seq=2), say"
        )
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise ValueError(
            f"ulysses: dim must be a whole number, at least 1, because dimension 0 is that of "
            f"samples, got {dim!r}; pass 1 for (samples, tokens)"
        )
    check_keys([*(pad or {})], "pad")
    check_keys([*whole], "whole")
    mixes = (token_wise,) if isinstance(token_wise, str) else tuple(token_wise)
    return Ulysses(dim, dict(pad or {}), frozenset(whole), splits, may_count, mixes)
