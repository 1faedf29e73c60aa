"""A script's own values: what comes back from a checkpoint, and that nothing in them
ends a training.
"""

from __future__ import annotations

import enum
import io
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fzero.checkpoint import CheckpointError, NoCheckpointError
from fzero.checkpoint.client_values import KIND, plain, restored
from fzero.checkpoint.folders import CLIENT, find, read_client
from fzero.common.pickles import load_tensors


@dataclass
class Best:
    loss: float
    path: Path


class Mode(enum.IntEnum):
    FAST = 1


def read_back(value: Any) -> tuple[Any, list[str]]:
    stored, lines = plain(value)
    content = io.BytesIO()
    torch.save(stored, content)
    content.seek(0)
    return restored(load_tensors(content)), lines


hashable = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.datetimes(timezones=st.none() | st.timezones().map(lambda _: None))
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.sampled_from(
        [
            Path("a/b"),
            Path("/"),
            range(1, 9, 2),
            np.float32(0.5),
            np.int64(-3),
            np.bool_(True),
            np.float64(2),
        ]
    )
)
atoms = hashable | st.builds(bytearray, st.binary()) | st.just(slice(1, None, 2))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    keyed = st.dictionaries(hashable | st.just(KIND) | st.tuples(hashable), inner, max_size=3)
    items = st.lists(inner, max_size=3)
    return (
        keyed
        | items
        | items.map(tuple)
        | named.map(lambda d: Namespace(**d))
        | keyed.map(OrderedDict)
        | keyed.map(lambda d: defaultdict(list, d))
        | items.map(lambda x: deque(x, 5))
        | st.sets(hashable, max_size=3)
        | st.frozensets(hashable, max_size=3)
        | st.lists(st.text()).map(Counter)
    )


@given(st.recursive(atoms, containers, max_leaves=8))
def test_a_client_s_values_come_back_with_their_types(value: Any) -> None:
    found, lines = read_back(value)
    assert lines == [] and (found == value or repr(found) == repr(value))
    assert type(found) is type(value) or isinstance(value, Path)


@given(
    st.recursive(
        atoms | st.sampled_from([object(), print, open, Best(0.5, Path("x")), Mode.FAST]),
        containers,
    )
)
def test_no_value_ends_a_save(value: Any) -> None:
    read_back(value)


def test_values_of_a_script_s_own_classes_come_back_plain_and_are_named() -> None:
    held = {
        "best": Best(0.5, Path("x")),
        "mode": Mode.FAST,
        "log": print,
        "deep": [Namespace(f=open)],
        3: Mode.FAST,
    }
    held["self"] = held
    found, lines = read_back(held)
    assert found == {
        "best": {"loss": 0.5, "path": Path("x")},
        "mode": 1,
        "deep": [Namespace()],
        3: 1,
    }
    assert lines == [
        "client['best']: a Best comes back as a dict of its fields",
        "client['mode']: a Mode comes back as its value",
        "client['log']: a builtin_function_or_method is left out",
        "client['deep'][0].f: a builtin_function_or_method is left out",
        "client[3]: a Mode comes back as its value",
        "client['self']: a container that holds itself is left out",
    ]


@pytest.mark.parametrize("dtype", ["f4", "i8", "?", "c8", "U3", "M8[s]"])
def test_arrays_of_numpy_come_back(dtype: str) -> None:
    assert read_back(np.zeros((0, 2)))[0].shape == (0, 2)
    array = np.arange(6).astype(dtype).reshape(2, 3)
    found, lines = read_back({"a": array, "random": np.random.RandomState(0).get_state()})
    assert (
        not lines
        and found["a"].dtype == array.dtype
        and (found["a"] == array).all()
        and found["a"].flags.writeable
    )
    np.random.RandomState().set_state(found["random"])


@pytest.mark.parametrize(
    "file", [".metadata", "__0_0.distcp", "model.safetensors", "step1/__0_0.distcp", "a/state.pt"]
)
def test_a_folder_of_another_program_is_not_taken_for_an_empty_one(
    tmp_path: Path, file: str
) -> None:
    with pytest.raises(NoCheckpointError):
        find(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"of another program; take its weights with"
    ) as caught:
        find(tmp_path)
    assert not isinstance(caught.value, NoCheckpointError)


@pytest.mark.parametrize(
    "stored",
    [
        {KIND: "fraction", "of": "1/0"},
        {KIND: "decimal", "of": "no number"},
        {KIND: "number", "dtype": "<f4", "of": b""},
        {KIND: "array", "dtype": "|O", "shape": (1,), "of": b"12345678"},
        {KIND: "timedelta", "of": (10**12, 0, 0)},
        {KIND: "unknown", "of": 1},
    ],
    ids=str,
)
def test_a_damaged_value_is_an_error_of_the_checkpoint(
    stored: dict[str, Any], tmp_path: Path
) -> None:
    torch.save({"args": stored}, tmp_path / CLIENT)
    with pytest.raises(CheckpointError, match="must hold the value saved as client"):
        read_client(tmp_path)
