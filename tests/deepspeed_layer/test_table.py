"""The modules of DeepSpeed's tree that have no file: made from a table, and known to
type checkers by stubs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from fzero.deepspeed import names, stubs
from fzero.deepspeed.table import EXPORTS

PACKAGE = Path(stubs.__file__).parent


@pytest.mark.parametrize("name", EXPORTS)
def test_a_row_is_a_module_of_deepspeeds_with_the_names_of_its_stub(name: str) -> None:
    assert f"deepspeed.{name}" in names.modules()
    path = PACKAGE.joinpath(*name.split("."))
    assert not path.with_suffix(".py").exists() and not (path / "__init__.py").exists()
    module, stub = import_module(f"fzero.deepspeed.{name}"), dict[str, object]()
    exec(stubs.stub_of(name), stub)
    public = {word.rpartition(":")[2] for words in EXPORTS[name].values() for word in words.split()}
    assert all(getattr(module, x) is stub[x] for x in public) and public <= {*dir(module)}
    assert {*module.__all__} == public - {*EXPORTS[name].get("", "").split()}


def test_stubs_are_written_where_type_checkers_look(tmp_path: Path) -> None:
    stubs.write(tmp_path)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pyi")}
    assert len(written) == len(EXPORTS)
    assert {
        "fzero/deepspeed/ops/adam/__init__.pyi",
        "fzero/deepspeed/ops/adam/cpu_adam.pyi",
    } < written
