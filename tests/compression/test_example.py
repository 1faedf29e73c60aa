"""examples/compress.py runs, and its shrunk models are smaller."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "compress.py"


@pytest.mark.long
def test_the_example_compresses_by_each_technique() -> None:
    spec = importlib.util.spec_from_file_location("compress_example", PATH)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    results = example.main(num_steps=12)
    assert results.keys() == {*example.TECHNIQUES, "2 of 4 layers, distilled"}
    assert all(accuracy > 0.3 for accuracy, _ in results.values())  # by chance a quarter
