"""`named`: the model that a word of the command line names, as a module on `meta`,
without weights or downloads.

7B, 350M, 1.3e9 a plain GPT with this many parameters to 2 %, and a vocabulary of 32,000
(smaller below 8.39M) pkg.mod:fn what the function returns, called without arguments; or
a module of that name config.json, a folder a configuration of transformers
LlamaForCausalLM a class of transformers, with the defaults of its configuration;
LlamaConfig is the same LlamaForCausalLM,num_hidden_layers=4,hidden_size=512 the same
with other sizes
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fzero.common.optional import MissingPackageError, package

COUNT = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMBT]?)", re.IGNORECASE)
SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
HEAD, VOCABULARY = 128, 32_000
ASPECT = 96  # the preferred width over depth of a GPT, about that of published ones


class ModelError(ValueError):
    """A word names no model."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model on `meta`, and what it is."""

    model: nn.Module
    what: str

    @property
    def num_params(self) -> int:
        """Ψ, tied ones once."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def description(self) -> str:
        """Its description in words."""
        scale, letter = next(
            (s, n) for n, s in reversed(SCALES.items()) if self.num_params >= s or s == 1
        )
        return f"{self.what}: {self.num_params / scale:.4g}{letter} parameters"


def named(word: str) -> NamedModel:
    """The model that a word names; see above.

    Raises:
        ModelError: the word names none, or the model cannot be built.

    >>> named("350M").description
    'a plain GPT of 17 blocks, width 1152, vocabulary 32000: 344.7M parameters'
    """
    if match := COUNT.fullmatch(word.strip()):
        return _gpt(float(match[1]) * SCALES[match[2].upper()])
    for path in (Path(word), Path(word) / "config.json"):
        if path.is_file():
            return _of_file(path)
    return _imported(word) if ":" in word else _of_class(word)


def sample_of(model: nn.Module, batch: int, sequence: int) -> dict[str, Tensor]:
    """A batch of token ids and labels on `meta`, (batch, sequence) each, for a model
    that takes both.

    Raises:
        ModelError: the model takes other arguments.
    """
    takes = inspect.signature(model.forward).parameters
    if not {"input_ids", "labels"} <= set(takes):
        raise ModelError(
            f"model: {type(model).__name__} must take input_ids and labels for --batch and "
            f"--sequence, got {', '.join(takes)}; pass a function that makes a batch, --sample "
            f"pkg.mod:fn"
        )
    tokens = torch.empty((batch, sequence), dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def filled(model: nn.Module, device: str) -> nn.Module:
    """The model on `device`, with small random values if any tensor is on `meta`, else
    with its own.
    """
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        model = model.to_empty(device=device)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(std=0.02)
            for buffer in model.buffers():
                buffer.zero_()
    return model.to(device)


def sample_from(word: str) -> Any:
    """The batch that the function at an import path returns; its tensors may be on
    `meta`.

    Raises:
        ModelError: there is no such function, or it fails.
    """
    return _called(word, "sample", "a function without arguments that returns a batch")


# --- a plain GPT ----------------------------------------------------------------------------------


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each with a pre-norm and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = min(HEAD, width)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        heads = (*x_BTC.shape[:2], 3, x_BTC.shape[2] // self.head, self.head)
        q, k, v = self.qkv(self.ln_1(x_BTC)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.proj(mixed.transpose(1, 2).reshape(x_BTC.shape))
        y_BTC: Tensor = self.mlp(self.ln_2(x_BTC))
        return x_BTC + y_BTC


class PlainGPT(nn.Module):
    """A GPT with an untied head and without position embeddings (negligible in size);
    returns the loss.
    """

    def __init__(self, depth: int, width: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTC = self.embedding(input_ids)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits = self.head(self.norm(x_BTC)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), labels.flatten())


def _gpt(count: float) -> NamedModel:
    if not 1e5 <= count <= 1e14:
        rule = "a count of parameters must be between 100K and 100T"
        raise ModelError(f"model: {rule}, got {count:.3g}; write it as 7B or 350M")
    depth, width, vocabulary = shape_of(count)
    with torch.device("meta"), _Unfilled():
        model = PlainGPT(depth, width, vocabulary)
    blocks = f"{depth} block{'s' * (depth > 1)}"
    return NamedModel(model, f"a plain GPT of {blocks}, width {width}, vocabulary {vocabulary}")


def shape_of(count: float) -> tuple[int, int, int]:
    """Depth, width and vocabulary of a GPT with `count` parameters to 2 %, from 1e5 to
    1e14.

    Among such shapes, the one whose width over depth is nearest to `ASPECT`. A count
    too small for the full vocabulary gives one block and as many tokens as fit.

    >>> shape_of(1e5), shape_of(3.5e8)
    ((1, 64, 390), (17, 1152, 32000))
    """

    def of_block(width: int) -> int:
        return 12 * width**2 + 13 * width

    smallest = of_block(HEAD) + 2 * HEAD * (VOCABULARY + 1)
    if count < smallest:
        width = HEAD if count >= 1e6 else HEAD // 2
        return 1, width, round((count - of_block(width)) / (2 * width)) - 1
    shapes = []
    for width in (HEAD * n for n in range(1, 2500)):
        depth = max(round((count - 2 * VOCABULARY * width) / of_block(width)), 1)
        error = abs(depth * of_block(width) + 2 * VOCABULARY * width + 2 * width - count) / count
        shapes.append((max(error, 0.02), abs(width / depth / ASPECT - 1), depth, width))
    *_, depth, width = min(shapes)
    return depth, width, VOCABULARY


# --- import paths and transformers ----------------------------------------------------------------


def _imported(word: str) -> NamedModel:
    made = _called(word, "model", "a function without arguments that returns a module")
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"model: {word!r} must be a torch.nn.Module, got {type(made).__name__}; return one"
        )
    return NamedModel(made, f"{type(made).__name__} of {word}")


def _called(word: str, field: str, what: str) -> Any:
    module_name, _, name = word.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`
    try:
        made: Any = importlib.import_module(module_name)
        for part in name.split("."):
            made = getattr(made, part)
        if callable(made) and not isinstance(made, nn.Module):
            with torch.device("meta"):
                made = made()
    except Exception as error:
        raise ModelError(
            f"{field}: {word!r} must name {what}, got {type(error).__name__}: {error}; correct it, "
            f"or name another as in pkg.mod:fn"
        ) from error
    return made


def _transformers() -> Any:
    try:
        return package(
            "transformers",
            needed_by="model: a model of transformers",
            instead="pass a count such as 7B, or an import path such as pkg.mod:fn",
        )
    except MissingPackageError as error:
        raise ModelError(str(error)) from None


class _Unfilled(TorchFunctionMode):
    """Skips the initial values of tensors on `meta`, which would cost torch seconds of
    imports.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:  # on `meta` it is implemented in Python, and imports all of sympy
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        # torch.nn.init passes it by keyword
        filled = kwargs.get("tensor", args[0] if args else None)
        is_filling = getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_")
        return (
            filled
            if is_filling and isinstance(filled, Tensor) and filled.is_meta
            else func(*args, **kwargs)
        )


def _of_file(path: Path) -> NamedModel:
    try:
        given = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model: {str(path)!r} must be a JSON file, got {error}; correct the file"
        ) from None
    if not isinstance(given, Mapping) or "model_type" not in given:
        raise ModelError(
            f"model: {str(path)!r} must be a configuration of transformers with a 'model_type', "
            f"got none; pass the config.json of a model, and fzero's own configuration as --config"
        )
    transformers = _transformers()
    fields = dict(given)
    try:
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:
        raise ModelError(
            f"model: {str(path)!r}: transformers rejects it: {error}; correct the file"
        ) from error
    names = given.get("architectures") or []
    return _built(getattr(transformers, names[0], None) if names else None, config, str(path))


def _of_class(word: str) -> NamedModel:
    transformers = _transformers()
    name, *sizes = word.split(",")
    cls = getattr(transformers, name, None) if name.isidentifier() else None
    if cls is None or not isinstance(cls, type):
        raise ModelError(
            f"model: {word!r} must be a count of parameters (7B), an import path (pkg.mod:fn), the "
            f"config.json of a model, or the name of a class of transformers (LlamaForCausalLM), "
            f"got none of these; nothing is downloaded, so pass the config.json of a model on a hub"
        )
    if issubclass(cls, transformers.PretrainedConfig):
        return _built(None, _sized(cls, sizes, word), word)
    config_class: Any = getattr(cls, "config_class", None)
    if config_class is None:
        raise ModelError(
            f"model: {word!r} must be a model or a configuration of transformers, got neither; "
            f"name one"
        )
    return _built(cls, _sized(config_class, sizes, word), word)


def _sized(config_class: Any, sizes: list[str], word: str) -> Any:
    """A configuration of transformers with its defaults, but for `key=value` of JSON
    values.
    """
    default, own = config_class(), dict[str, Any]()
    for size in sizes:
        key, _, value = size.partition("=")
        if not hasattr(default, key):  # transformers would take any name
            near = get_close_matches(key, vars(default), 1)
            hint = f"; did you mean {near[0]}?" if near else "; name one"
            raise ModelError(
                f"model: {word!r}: {key!r} must be an attribute of {config_class.__name__}, got "
                f"none{hint}"
            )
        try:
            own[key] = json.loads(value)
        except ValueError:
            own[key] = value
    return config_class(**own)


def _built(cls: Any, config: Any, source: str) -> NamedModel:
    transformers = _transformers()
    config.use_cache = False  # useless in training, and a capture cannot trace it
    try:
        with torch.device("meta"), _Unfilled():
            if cls is not None:
                model = cls(config)
            elif type(config) in transformers.AutoModelForCausalLM._model_mapping:
                model = transformers.AutoModelForCausalLM.from_config(config)
            else:
                model = transformers.AutoModel.from_config(config)
    except Exception as error:
        fix = "correct the configuration"
        raise ModelError(
            f"model: {source!r}: transformers cannot build it: {error}; {fix}"
        ) from error
    return NamedModel(model.train(), f"{type(model).__name__} of {source}")
