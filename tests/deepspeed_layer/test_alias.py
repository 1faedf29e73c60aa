"""`import deepspeed` is fzero.deepspeed in processes that ask for it, with DeepSpeed
installed beside it and without.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed_names
import deepspeed_page
import deepspeed_shape
import pytest

import fzero.deepspeed
from fzero.deepspeed import alias, git_version_info, missing, names
from fzero.deepspeed.__main__ import main
from fzero.deepspeed.names import Definition

ROOT = Path(__file__).parents[2]

TRAINS = """
import sys
import torch
import deepspeed
import deepspeed.comm as dist
from deepspeed import DeepSpeedEngine, zero
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live

def main():
    passed = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
    assert passed == ["--steps", "2"] and __name__ == "__main__"
    deepspeed.init_distributed()
    model = torch.nn.Linear(4, 4)
    assert not isinstance(model, (MoE, PipelineModule))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert isinstance(engine, DeepSpeedEngine)
    for _ in range(2):
        loss = engine(torch.ones(1, 4, device=engine.device)).sum()
        engine.backward(loss)
        engine.step()
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert model.weight.numel() == 16
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {deepspeed.__name__}, {engine.global_steps} steps", flush=True)
    deepspeed.comm.barrier()
"""
CHILDREN = """
import importlib.metadata, importlib.util, multiprocessing, shutil, subprocess

def child(queue):
    import deepspeed
    from deepspeed.inference.engine import InferenceEngine
    queue.put((deepspeed.__name__, importlib.metadata.version("deepspeed")))

def children():
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == ("fzero.deepspeed", "0.19.8")
    process.join()
    program = '''
import importlib.metadata, importlib.util
assert importlib.util.find_spec("deepspeed") and importlib.metadata.version("deepspeed") == "0.19.8"
import deepspeed, deepspeed.moe.layer
assert deepspeed.__name__ == "fzero.deepspeed"
'''
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert "fzero" not in printed.stderr
    shown = subprocess.run([shutil.which("deepspeed"), "--help"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("usage: fzero [run]"), shown
    print("children too")
"""
MAIN = '\nif __name__ == "__main__":\n    main()\n'


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that finds every installed package but DeepSpeed."""
    folder = tmp_path_factory.mktemp("environment")
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    packages.mkdir(parents=True)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith("deepspeed"):
            (packages / path.name).symlink_to(path)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys._base_executable).parent}\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    return str(folder / "bin" / "python")


def run(python: str, *arguments: str, cwd: Path, code: int = 0) -> str:
    """What a program writes; its environment finds this fzero."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV_")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [python, *arguments]
    ended = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == code, ended.stderr
    return ended.stdout + ended.stderr


INSTALLED = """
import importlib.metadata, importlib.util, os, sys
import fzero.deepspeed
found = importlib.util.find_spec("deepspeed")
assert (found is not None) == (sys.argv[1] == "with") and "alias_path" not in str(found) + os.environ["PATH"]
try:
    importlib.metadata.version("deepspeed")
except importlib.metadata.PackageNotFoundError:
    assert found is None
fzero.deepspeed.install()
fzero.deepspeed.install()
import deepspeed, torch
from deepspeed import PipelineModule, zero
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule as same
import deepspeed.comm.comm, deepspeed.ops.adam.cpu_adam, deepspeed.runtime.zero.partition_parameters as pp
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.elasticity.config import ElasticityError
from deepspeed.runtime.constants import TRAIN_BATCH_SIZE

assert deepspeed is fzero.deepspeed and importlib.metadata.version("deepspeed") == "0.19.8"
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
for name, module in [*sys.modules.items()]:
    if name.startswith("fzero.deepspeed.") and "deepspeed." + name.split(".", 2)[2] in sys.modules:
        assert sys.modules["deepspeed." + name.split(".", 2)[2]] is module, name
assert pp.Init is zero.Init and deepspeed.runtime.zero.GatheredParameters is zero.GatheredParameters
assert checkpointing is deepspeed.checkpointing and same is PipelineModule
assert deepspeed.comm.comm.all_reduce is deepspeed.comm.all_reduce and TRAIN_BATCH_SIZE == "train_batch_size"
assert deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam is deepspeed.ops.adam.DeepSpeedCPUAdam
assert deepspeed.runtime.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine and issubclass(ElasticityError, Exception)
assert hasattr(deepspeed, "init_inference") and not hasattr(deepspeed, "intialize") and not hasattr(deepspeed.moe.layer, "MOE")

def raises(error, *words):
    def check(use):
        try:
            use()
        except error as raised:
            assert all(word in str(raised) for word in words), raised
        else:
            raise AssertionError(words)
    return check

class Experts(torch.nn.Module, MoE):
    pass

builder = deepspeed.ops.op_builder.CPUAdamBuilder
assert builder.NAME == "cpu_adam" and "async_io" in deepspeed.ops.__compatible_ops__
assert deepspeed.utils.torch.required_torch_version(min_version=2.0)
raises(NotImplementedError, "CPUAdamBuilder")(builder)
raises(NotImplementedError, "deepspeed.moe.layer.MoE", "data-parallel")(lambda: MoE(4, torch.nn.Linear(4, 4)))
raises(NotImplementedError, "deepspeed.moe.layer.MoE")(Experts)
raises(NotImplementedError, "deepspeed.init_inference", "fzero export")(lambda: deepspeed.init_inference(None))
raises(AttributeError, "deepspeed.autotuning.autotuner.Autotuner", "fzero tune")(lambda: deepspeed.autotuning.Autotuner.run)
raises(AttributeError, "intialize")(lambda: deepspeed.intialize)
raises(ModuleNotFoundError, "deepspeed.moe.lyer")(lambda: importlib.import_module("deepspeed.moe.lyer"))
raises(ImportError, "MOE")(lambda: exec("from deepspeed.moe.layer import MOE"))
for module in sorted(fzero.deepspeed.names.modules()):
    found = importlib.import_module(module)
    for name in sorted(fzero.deepspeed.names.names_of(module) | fzero.deepspeed.names.submodules(module)):
        assert hasattr(found, name), (module, name)
    for name in ("", "_", "__all_", "intialize"):
        assert not hasattr(found, name), (module, name)
"""


@pytest.mark.parametrize("real", [pytest.param("with", marks=pytest.mark.long), "without"])
def test_names_are_fzeros_or_raise_when_they_are_used(
    real: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = sys.executable if real == "with" else request.getfixturevalue("without")
    (tmp_path / "script.py").write_text(INSTALLED)
    written = run(python, "script.py", real, cwd=tmp_path)
    assert written.count("fzero: `import deepspeed` is fzero.deepspeed") == 1


@pytest.mark.long
def test_a_script_and_its_children_run_unchanged(without: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINS + CHILDREN + MAIN + "    children()\n")
    written = run(without, "-m", "fzero.deepspeed", "script.py", "--steps", "2", cwd=tmp_path)
    assert "rank 0 of 1: fzero.deepspeed, 2 steps" in written and "children too" in written


FZERO = "-m fzero run --as-deepspeed --num_procs 2"
TORCHRUN = "-m torch.distributed.run --nproc-per-node 2 -m fzero.deepspeed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "script", "real"),
    [
        (FZERO, ["script.py"], "with"),
        (FZERO.replace("run ", ""), ["-m", "script"], "without"),
        (TORCHRUN, ["script.py"], "without"),
        (TORCHRUN, ["-m", "script"], "with"),
    ],
    ids=["fzero-with", "fzero-without", "torchrun-without", "torchrun-with"],
)
def test_ranks_run_unchanged(
    launcher: str, script: list[str], real: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = sys.executable if real == "with" else request.getfixturevalue("without")
    (tmp_path / "script.py").write_text(TRAINS + MAIN)
    written = run(python, *launcher.split(), *script, "--steps", "2", cwd=tmp_path)
    assert all(f"rank {rank} of 2: fzero.deepspeed, 2 steps" in written for rank in range(2))
    assert written.count("fzero: `import deepspeed` is fzero.deepspeed") == 1


@pytest.mark.long
def test_a_script_that_installs_runs_with_two_ranks(without: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import fzero.deepspeed\nfzero.deepspeed.install()\n" + TRAINS + MAIN
    )
    written = run(
        without,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "script.py",
        "--steps",
        "2",
        cwd=tmp_path,
    )
    assert all(f"rank {rank} of 2: fzero.deepspeed, 2 steps" in written for rank in range(2))


ASKS = """
import sys
assert not any(name.partition(".")[0] == "transformers" for name in sys.modules)
import accelerate.utils.deepspeed as of_accelerate, fzero.deepspeed, fzero.deepspeed.ops.adam
from accelerate.utils import is_deepspeed_available
from transformers.integrations.deepspeed import is_deepspeed_available as asked_by_transformers
from transformers.utils.versions import require_version
assert is_deepspeed_available() and asked_by_transformers()
require_version("deepspeed>=0.9.3")
from accelerate.utils.deepspeed import *
from deepspeed.ops.adam import DeepSpeedCPUAdam
import torch
mapped = of_accelerate.map_pytorch_optim_to_deepspeed(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
assert type(mapped) is DeepSpeedCPUAdam is fzero.deepspeed.ops.adam.DeepSpeedCPUAdam
"""


def test_accelerate_and_transformers_find_it(without: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ASKS)
    run(without, "-m", "fzero.deepspeed", "script.py", cwd=tmp_path)


def test_the_real_package_cannot_be_replaced_after_its_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = ModuleType("deepspeed")
    real.__file__ = "/somewhere/deepspeed/__init__.py"
    monkeypatch.setitem(sys.modules, "deepspeed", real)
    with pytest.raises(
        RuntimeError,
        match=r"must come before `import deepspeed`.*/somewhere/deepspeed/__init__\.py",
    ):
        alias.install()
    assert not any(isinstance(finder, alias.Finder) for finder in sys.meta_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.py"], "there is no script absent.py; the current folder is "),
        (["--steps", "2"], "needs a script, got --steps; flags of the script follow its name"),
        (["-m"], "needs a script, got none"),
    ],
)
def test_a_wrong_call_of_the_runner_is_an_error_in_words(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(words)


def test_the_record_has_every_name_of_the_installed_package() -> None:
    (init,) = (f for f in metadata.files("deepspeed") or () if str(f) == "deepspeed/__init__.py")
    found = deepspeed_names.recorded(Path(str(init.locate())).parent)
    if metadata.version("deepspeed") in ("0.19.6", "0.19.8"):
        found.pop("deepspeed.git_version_info_installed")  # made by the build
        assert found.keys() <= names.modules().keys() and len(found) > 700
        for module, theirs in found.items():
            entry = names.modules()[module]
            assert theirs.all_names() <= {*entry.own, *entry.imported}, module


def test_a_name_of_either_version_is_recorded_and_the_newer_one_counts() -> None:
    old = deepspeed_names.Names(False, {"f", "moved"}, {"Gone"}, constants={"A": 1, "B": 2})
    new = deepspeed_names.Names(True, {"f"}, constants={"A": 3}, imported={"moved": "other:moved"})
    both = deepspeed_names.merged(old, new)
    assert both.all_names() == {"f", "moved", "Gone", "A", "B"} and both.is_package
    assert both.functions == {"f"} and both.classes == {"Gone"}
    assert both.constants == {"A": 3, "B": 2} and both.imported == {"moved": "other:moved"}


@pytest.mark.parametrize(
    ("module", "name", "is_gone"),
    [
        ("deepspeed.runtime.zero.mics", "MiCS_Init", True),
        ("deepspeed.compression.compress", "init_compression", True),
        ("deepspeed.runtime.pipe.dualpipev", "DualPipeVModule", False),
        ("deepspeed.sequence.linear_cross_entropy", "", False),
    ],
)
def test_names_that_only_one_version_has_are_here(module: str, name: str, is_gone: bool) -> None:
    assert names.modules()[module].is_gone == is_gone
    assert not name or names.origin(module, name) is not None


def test_the_page_of_names_is_what_its_command_makes() -> None:
    assert deepspeed_page.PAGE.read_text() == deepspeed_page.page()


@pytest.mark.long
def test_what_is_the_same_and_what_differs_is_compared_with_the_installed_package() -> None:
    """A name that the page calls the same has DeepSpeed's signature, defaults, bases,
    public methods, fields and members.
    """
    if metadata.version("deepspeed") == "0.19.6":
        found, recorded = (
            deepspeed_shape.differences(),
            json.loads(deepspeed_shape.RECORD.read_text()),
        )
        assert len(found) > 50 and {k: v for k, v in found.items() if recorded.get(k) != v} == {}
        assert recorded.keys() == found.keys()


def test_a_difference_of_any_kind_is_found() -> None:
    def function(parameters: list[list[str]]) -> dict[str, Any]:
        return {"kind": "function", "parameters": parameters}

    one, kind = ["a", "POSITIONAL_OR_KEYWORD", "1"], "POSITIONAL_OR_KEYWORD"
    compare = deepspeed_shape.difference
    assert compare(function([one]), function([one, ["own", "KEYWORD_ONLY", "2"]])) == []
    assert compare(function([one]), function([["a", kind, "2"]])) == ["a=2, there 1"]
    assert compare(function([one]), function([])) == ["no a"]
    assert compare(function([one]), function([["own", kind, "1"], one])) == [
        "a at another position"
    ]
    assert compare(function([one]), function([one, ["own", kind, ""]])) == ["own is required"]
    plain = {
        "kind": "class",
        "bases": ["torch.Module"],
        "own": [],
        "init": [one],
        "methods": {"run": [["self", kind, ""], one]},
        "fields": {"size": ["1", ""]},
        "members": {},
    }
    assert compare(plain, plain) == []
    for key, value in (
        ("bases", []),
        ("methods", {}),
        ("fields", {"size": ["2", ""]}),
        ("members", {"x": "1"}),
    ):
        assert len(compare(plain, plain | {key: value})) == 1, key


def test_stand_ins_of_one_origin_are_one_object() -> None:
    places = [
        ("deepspeed", "PipelineModule"),
        ("deepspeed.pipe", "PipelineModule"),
        ("deepspeed.runtime.pipe", "PipelineModule"),
    ]
    origins = {names.origin(*place) for place in places}
    assert origins == {Definition("deepspeed.runtime.pipe.module", "PipelineModule", "classes")}


@pytest.mark.parametrize("name", sorted(missing.INSTEAD))
def test_advice_is_about_names_that_deepspeed_has(name: str) -> None:
    module, _, last = name.rpartition(".")
    assert name in names.modules() or names.origin(module, last) is not None


def test_the_command_and_the_metadata_agree_with_the_record() -> None:
    (about,) = alias.FOLDER.glob("*.dist-info/METADATA")
    assert (
        "Version: 0.19.8\n" in about.read_text()
        and '"versions": ["0.19.6", "0.19.8"]' in deepspeed_names.RECORD.read_text()[:40]
        and fzero.deepspeed.__version__ == git_version_info.version == "0.19.8"
    )
    assert os.access(alias.FOLDER / "bin" / "deepspeed", os.X_OK)
