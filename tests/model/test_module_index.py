"""The index of a model's modules has PyTorch's own names, and a binding keeps none that
the model has outgrown.
"""

from __future__ import annotations

import torch
from torch import nn

from fzero.model.binding import Binding
from fzero.model.module_index import ModuleIndex


def tied() -> nn.Module:
    """A module with two names inside, a tied weight, a cache and a buffer that is None."""
    inner = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": nn.ModuleDict({"x": inner}), "b": inner, "c": nn.Linear(3, 3)})
    model["d"] = nn.LSTM(3, 3)
    model["c"].register_buffer("cache", torch.arange(2.0), persistent=False)
    model["c"].register_buffer("none", None)
    return model


def test_the_index_has_the_names_that_pytorch_gives() -> None:
    model = tied()
    index = ModuleIndex.of(model)
    assert [*index.modules.items()] == [*model.named_modules()]
    assert [*index.every.items()] == [*model.named_modules(remove_duplicate=False)]
    assert index.recurrent == (model["d"],)
    for kind, named in (
        ("_parameters", model.named_parameters),
        ("_buffers", model.named_buffers),
    ):
        found = {
            slot.name: slot.owner[slot.key]
            for slot in index.slots(kind, every=True)  # type: ignore[arg-type]
        }
        expected = dict(named(remove_duplicate=False))
        assert {name: id(x) for name, x in found.items() if x is not None} == {
            name: id(x) for name, x in expected.items()
        }
    caches = {slot.name for slot in index.slots() if slot.is_cache}
    assert caches == {"c.cache"}
    inside = ModuleIndex.of(model["a"], "a").slots("_parameters")
    assert [slot.name for slot in inside] == ["a.x.weight", "a.x.bias"]
    attributes = {name: own[key] for name, own, key in index.attributes()}
    assert attributes["c.in_features"] == 3 and attributes["a.x.eps"] == model["b"].eps


def test_a_binding_reads_a_changed_model_again() -> None:
    model = tied()
    binding = Binding(model, {})
    before = binding.index
    assert binding.index is before
    model["a"]["x"] = nn.Identity()
    assert binding.index is not before
    assert [*binding.index.modules.items()] == [*model.named_modules()]
