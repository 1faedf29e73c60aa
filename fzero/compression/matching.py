"""`compression`: finds the modules that the groups of a configuration name, and checks
that the techniques fit them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fzero.compression.added import salt_of
from fzero.compression.plan import CompressionPlan, Extra, Shrink, is_added
from fzero.compression.techniques import Mask, PruningKind, Quantize, QuantizeInput, Technique
from fzero.config.compression import CompressionTraining, Group
from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.model.module_index import ModuleIndex

_BLOCK = "compression_training"
_PRUNING: tuple[tuple[PruningKind, str, type[nn.Module] | tuple[type[nn.Module], ...]], ...] = (
    ("sparse", "sparse_mask_scores", (nn.Linear, nn.Conv2d)),
    ("row", "row_mask_scores", nn.Linear),
    ("head", "head_pruning_scores", nn.Linear),
    ("channel", "channel_mask_scores", nn.Conv2d),
)
"""The kinds of pruning in the order in which they apply, DeepSpeed's names of their
scores, and the modules that they take.
"""


def compression(
    cfg: Config | Mapping[str, Any] | str, model: nn.Module, *, seed: int = 0
) -> CompressionPlan:
    """The parameters and inputs that the block `compression_training` compresses in a
    model. Neither is changed.

    Args:
        cfg: a `Config`, a mapping in DeepSpeed's schema, or the path of a JSON file.
        model: any module; only the names, shapes and kinds of its modules and
            parameters are read.
        seed: the seed of stochastic rounding and of the first scores.

    Raises:
        TypeError: the model is no module.
        ConfigError: an expression matches no module that the technique takes, a module
            is in two groups of a technique, only one user of a tied weight is named, or
            sizes do not fit.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"compression: model must be an nn.Module, got {type(model).__name__}; call its class "
            f"first"
        )
    block = Config.load(cfg).compression_training or CompressionTraining()
    search = _Search(model, seed)
    search.quantize_weights(block)
    for kind, scores, taken in _PRUNING:
        search.prune(block, kind, scores, taken)
    search.quantize_inputs(block)
    return search.plan()


@dataclass
class _Search:
    """The findings so far."""

    model: nn.Module
    seed: int
    params: dict[str, list[Technique]] = field(default_factory=dict)
    inputs: dict[str, QuantizeInput] = field(default_factory=dict)
    extras: list[Extra] = field(default_factory=list)
    shrinks: list[Shrink] = field(default_factory=list)

    def __post_init__(self) -> None:
        index = ModuleIndex.of(self.model)
        self.modules: Mapping[str, Any] = index.modules
        first = {id(module): name for name, module in self.modules.items()}
        # A module that is registered twice has two names; plans use its first.
        self.first = {name: first[id(x)] for name, x in index.every.items()}
        owners = {id(param): name for name, param in self.model.named_parameters()}
        every = self.model.named_parameters(remove_duplicate=False)
        self.owner = {name: owners[id(param)] for name, param in every}

    def plan(self) -> CompressionPlan:
        params = {name: tuple(techniques) for name, techniques in self.params.items()}
        changed = {*params, *(name for shrink in self.shrinks for name, _ in shrink.cut)}
        aliases = {
            name: owner for name, owner in self.owner.items() if name != owner and owner in changed
        }
        for extra in self.extras:
            others = (name for name, first in self.first.items() if first == extra.module != name)
            aliases |= {f"{name}.{extra.key}": extra.name for name in others}
        return CompressionPlan(
            params, self.inputs, tuple(self.extras), tuple(self.shrinks), aliases, self.seed
        )

    # --- techniques -------------------------------------------------------------------------------

    def quantize_weights(self, block: CompressionTraining) -> None:
        technique = block.weight_quantization
        shared = technique.shared_parameters
        mixed = shared.fp16_mixed_quantize
        taken = (nn.Linear, nn.Conv2d, nn.Embedding)
        found: dict[str, Quantize] = {}
        named: list[list[str]] = []
        for where, group, names in self._groups("weight_quantization", technique, taken):
            bits, start = group.params.target_bits, group.params.start_bits
            named += names
            for name in (name for names_of in names for name in names_of):
                weight = self._weight(where, name)
                rows = (
                    isinstance(self.modules[name], nn.Embedding)
                    and shared.quantize_weight_in_forward
                )
                num_groups = self.modules[name].weight.shape[0] if rows else shared.quantize_groups
                self._check_groups(where, weight, name, num_groups)
                if isinstance(self.modules[name], nn.Conv2d) and bits < 4:
                    raise ConfigError(
                        f"{where}.params.target_bits: must be at least 4 for the convolution "
                        f"{name!r}, got {bits}"
                    )
                quantizer = Quantize(
                    bits,
                    bits if shared.quantize_weight_in_forward or start is None else start,
                    group.params.quantization_period,
                    shared.schedule_offset,
                    num_groups,
                    shared.quantization_type == "symmetric",
                    mixed.quantize_change_ratio if mixed.enabled else None,
                    salt_of(self.seed, weight) if shared.rounding == "stochastic" else None,
                )
                if found.setdefault(weight, quantizer) != quantizer and not rows:
                    # the other user of a tied weight is an embedding, whose rows are groups
                    continue
                found[weight] = quantizer
        self._check_ties("weight_quantization", found, named)
        for weight, quantizer in found.items():
            self.params.setdefault(weight, []).append(quantizer)

    def prune(self, block: CompressionTraining, kind: PruningKind, scores: str, taken: Any) -> None:
        technique = getattr(block, f"{kind}_pruning")
        shared = technique.shared_parameters
        groups = list(self._groups(f"{kind}_pruning", technique, taken))
        for where, group, names in groups:
            for index, of_pattern in enumerate(names):
                for name in of_pattern:
                    mask = self._mask(where, kind, name, group.params.dense_ratio, shared, scores)
                    self._apply(mask, name)
                if group.related_modules and of_pattern:
                    self._relate(where, kind, of_pattern, group.related_modules[index])
        found = {
            self._weight(where, name): None
            for where, _, names in groups
            for x in names
            for name in x
        }
        self._check_ties(f"{kind}_pruning", found, [x for _, _, names in groups for x in names])

    def _mask(
        self, where: str, kind: PruningKind, name: str, ratio: float, shared: Any, scores: str
    ) -> Mask:
        """The mask of a module's weight; notes the tensor that it is made from."""
        weight = self.modules[name].weight
        full, trained = self._weight(where, name), shared.method == "topk"
        shape = tuple(weight.shape)
        shapes: dict[PruningKind, tuple[int, ...]] = {
            "sparse": shape, "row": (shape[0], 1), "channel": (shape[0], *(1 for _ in shape[1:])),
        }  # fmt: skip
        if kind == "head":
            if shape[1] % shared.num_heads:
                raise ConfigError(
                    f"{_BLOCK}.head_pruning.shared_parameters.num_heads: must divide the columns "
                    f"of {name!r}, {shape[1]}, got {shared.num_heads}; name the output matrix of "
                    f"the attention, and its number of heads"
                )
            shapes["head"] = (1, shared.num_heads)
        home = full.rpartition(".")[0]
        key = scores if trained else f"{kind}_pruning_mask"
        mask = Mask(kind, ratio, f"{home}.{key}".removeprefix("."), trained, shared.schedule_offset)
        extra = Extra(home, key, shapes[kind], "scores" if trained else "mask", full, mask)
        self.extras += [] if extra in self.extras else [extra]
        return mask

    def _apply(self, mask: Mask, name: str) -> None:
        weight, bias = self.owner[f"{name}.weight"], self.owner.get(f"{name}.bias")
        techniques = self.params.setdefault(weight, [])
        if mask not in techniques:
            techniques.append(mask)
        if bias is not None and mask.kind in ("row", "channel"):
            home = mask.source.rpartition(".")[0]
            # the scores are gathered with the modules of their own unit
            if mask.trained and home != name:
                raise ConfigError(
                    f"{_BLOCK}.{mask.kind}_pruning: must name no module with a bias of its own "
                    f"that shares a weight with trained scores, got {name!r}, which shares that of "
                    f"{home!r}; set method to 'l1', or remove the bias"
                )
            self.params.setdefault(bias, []).append(
                Mask(mask.kind, mask.ratio, mask.source, mask.trained, mask.offset, True)
            )

    def quantize_inputs(self, block: CompressionTraining) -> None:
        technique = block.activation_quantization
        shared = technique.shared_parameters
        for where, group, names in self._groups(
            "activation_quantization", technique, (nn.Linear, nn.Conv2d)
        ):
            for name in (name for of_pattern in names for name in of_pattern):
                self._weight(where, name)
                extra = Extra(name, "x_min_max", (2,), "range", name)
                is_static = shared.range_calibration == "static"
                self.extras += [extra] if is_static else []
                self.inputs[name] = QuantizeInput(
                    group.params.bits,
                    shared.quantization_type == "symmetric",
                    shared.schedule_offset,
                    isinstance(self.modules[name], nn.Conv2d),
                    extra.name if is_static else None,
                )

    # --- modules ----------------------------------------------------------------------------------

    def _groups(
        self, name: str, technique: Any, taken: Any
    ) -> Iterator[tuple[str, Any, list[list[str]]]]:
        """Each group of a technique: its place in the configuration, the group, and per
        expression the modules that it names.
        """
        seen: dict[str, str] = {}
        if not technique.enabled:
            return
        for key, group in technique.different_groups.items():
            where = f"{_BLOCK}.{name}.different_groups.{key}"
            names = [
                self._named(f"{where}.modules", pattern, taken, warns=True)
                for pattern in group.modules
            ]
            new = list(dict.fromkeys(name for of_pattern in names for name in of_pattern))
            for module in new:
                if module in seen:
                    raise ConfigError(
                        f"{where}.modules: must name no module of another group of {name}, got "
                        f"{module!r}, which is in {seen[module]!r}; change one of the expressions"
                    )
            seen |= dict.fromkeys(new, key)
            self._check_once(where, group, names)
            yield where, group, names

    def _check_once(self, where: str, group: Group, names: Sequence[Sequence[str]]) -> None:
        every = [name for of_pattern in names for name in of_pattern]
        twice = next((name for name in every if every.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{where}.modules: must name each module once, got {twice!r} by two of "
                f"{', '.join(map(repr, group.modules))}; change one of them"
            )

    def _named(self, where: str, pattern: str, taken: Any, *, warns: bool = False) -> list[str]:
        """The modules of the kinds `taken` that an expression matches; none is an
        error, or with `warns` a warning.
        """
        try:
            found = [
                *dict.fromkeys(
                    self.first[n] for n in self.first if pattern == "*" or re.search(pattern, n)
                )
            ]
        except re.error as error:
            raise ConfigError(
                f"{where}: must be a regular expression, got {pattern!r} ({error}); '*' alone is "
                f"every Linear and Conv2d"
            ) from None
        kinds = tuple(
            k
            for k in (taken if isinstance(taken, tuple) else (taken,))
            if pattern != "*" or k is not nn.Embedding
        )
        names = [n for n in found if isinstance(self.modules[n], kinds)]
        if not names:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            others = sorted({type(self.modules[n]).__name__ for n in found})
            hint = (
                "; convert_conv1d_to_linear makes Linears of Conv1Ds" if "Conv1D" in others else ""
            )
            what = f"modules of {', '.join(others)}" if found else "nothing"
            text = (
                f"{wanted}, got {pattern!r}, which matches {what}; correct the expression "
                f"(re.search on names such as "
            )
            text += f"{_examples(self.modules, kinds)}){hint}"
            if not warns:
                raise ConfigError(f"{where}: must match a {text}")
            warnings.warn(
                f"{where}: compresses nothing, as in DeepSpeed, and should match a {text}",
                ConfigWarning,
                stacklevel=2,
            )
        return names

    def _weight(self, where: str, module: str) -> str:
        """The name of a module's weight, by which steps fetch it."""
        name = f"{module}.weight".removeprefix(".")
        if name not in self.owner:
            raise ConfigError(
                f"{where}.modules: must name modules whose weight is a parameter, got {module!r}, "
                f"whose weight is not (a parametrization?); leave it out, or "
                f"remove_parametrizations"
            )
        return self.owner[name]

    def _check_groups(self, where: str, weight: str, module: str, num_groups: int) -> None:
        numel = self.modules[module].weight.numel()
        if numel % num_groups:
            raise ConfigError(
                f"{_BLOCK}.weight_quantization.shared_parameters.quantize_groups: must divide the "
                f"elements of every quantized weight, got {num_groups} for {weight!r} with "
                f"{numel}; change it, or leave that module out"
            )

    def _check_ties(
        self, technique: str, weights: Iterable[str], named: Iterable[Sequence[str]]
    ) -> None:
        """Raises where a weight is shared with a module that no group names: that
        module would see it compressed, too.
        """
        modules = {name for names in named for name in names}
        for name, owner in self.owner.items():
            user = self.first[name.rpartition(".")[0]]
            if owner in weights and user not in modules:
                raise ConfigError(
                    f"{_BLOCK}.{technique}: must name all modules that share a weight, or none, "
                    f"got only {', '.join(sorted(modules & self._users(owner)))} of those that "
                    f"share {owner!r}; name {user!r}, too"
                )

    def _users(self, owner: str) -> set[str]:
        return {
            self.first[name.rpartition(".")[0]] for name, of in self.owner.items() if of == owner
        }

    # --- related modules --------------------------------------------------------------------------

    def _relate(
        self, where: str, kind: PruningKind, names: Sequence[str], patterns: Sequence[str]
    ) -> None:
        """Notes the dimensions that shrink with the pruned modules."""
        where = f"{where}.related_modules"
        if kind == "sparse":
            raise ConfigError(
                f"{where}: must be left out for sparse pruning, whose weights keep their shape; "
                f"remove it"
            )
        taken = {
            "row": (nn.Linear,),
            "head": (nn.Linear,),
            "channel": (nn.Conv2d, nn.BatchNorm2d, nn.Linear),
        }[kind]
        related = [self._named(where, pattern, taken) for pattern in patterns]
        for pattern, found in zip(patterns, related, strict=True):
            if len(found) != len(names):
                raise ConfigError(
                    f"{where}: must match as many modules as are pruned, {len(names)}, got "
                    f"{len(found)} for {pattern!r} ({', '.join(found)}); the first belongs to the "
                    f"first"
                )
        for index, name in enumerate(names):
            mask = next(
                x
                for x in self.params[self.owner[f"{name}.weight"]]
                if isinstance(x, Mask) and x.kind == kind
            )
            cut = [(f"{name}.weight", 1 if kind == "head" else 0)]
            cut += (
                [] if kind == "head" or f"{name}.bias" not in self.owner else [(f"{name}.bias", 0)]
            )
            size = self.modules[name].weight.shape[cut[0][1]]
            for found in related:
                cut += self._cut_of(where, kind, found[index], name, size)
            self.shrinks.append(Shrink(mask, tuple(cut)))

    def _cut_of(
        self, where: str, kind: PruningKind, related: str, name: str, size: int
    ) -> list[tuple[str, int]]:
        """The tensors of a related module that shrink, each with its dimension."""
        module = self.modules[related]
        is_norm = isinstance(module, nn.BatchNorm2d)
        dim = 0 if kind == "head" or is_norm else 1
        shape = (
            (module.num_features,)
            if isinstance(module, nn.BatchNorm2d)
            else tuple(module.weight.shape)
        )  # type: ignore[arg-type]
        grouped = isinstance(module, nn.Conv2d) and module.groups > 1
        if shape[dim] != size or grouped:
            what = f"groups {module.groups}" if grouped else f"{shape[dim]}"
            raise ConfigError(
                f"{where}: must have the size of what is pruned in {name!r}, {size}, in dimension "
                f"{dim}, got {what} for {related!r}; name the module that reads its output"
                + (
                    " (for heads: the matrices of queries, keys and values)"
                    if kind == "head"
                    else ""
                )
            )
        if len(users := self._users(self.owner.get(f"{related}.weight", ""))) > 1:
            raise ConfigError(
                f"{where}: must name modules whose weights are their own, got {related!r}, which "
                f"shares its weight with {', '.join(sorted(users - {related}))}; leave it out"
            )
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        own = {key for key, tensor in tensors if tensor.dim() and not is_added(key)}
        keys = own if is_norm else {"weight", *({"bias"} & own if kind == "head" else ())}
        return [(f"{related}.{key}", dim) for key in sorted(keys, reverse=True)]


def _examples(modules: Mapping[str, nn.Module], kinds: tuple[type[nn.Module], ...]) -> str:
    names = [name for name, module in modules.items() if isinstance(module, kinds)]
    return ", ".join(map(repr, names[:3])) or "none: the model has no such module"
