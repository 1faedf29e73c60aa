"""Imports go down only: a walk over the source of every module, without running any."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fzero
import fzero.testing

ROOT = Path(__file__).parents[2]

CORE = "sharding common comms optim data config compression plans"
STEP = (
    f"{CORE} state verbs storage model runtime pipeline graph transforms parallelism curvature step "
    f"simulation"
)
MAY_IMPORT: dict[str, str] = {
    "sharding": "",
    "common": "sharding",
    "comms": "sharding common",
    "optim": "sharding common",
    "attention": "common",
    "data": "sharding common",
    "config": "sharding common comms optim attention data",
    "plans": "sharding common comms optim config",
    "compression": "sharding common optim config model",
    "state": CORE,
    "verbs": f"{CORE} state",
    "storage": f"{CORE} state verbs",
    "model": "sharding common",
    "runtime": f"{CORE} state verbs storage model",
    "pipeline": f"{CORE} state verbs storage model runtime transforms",
    "transforms": f"{CORE} state model runtime graph",
    "sequence": "sharding common comms config model",
    "tiling": "sharding common model plans transforms",
    "graph": f"{CORE} state verbs storage model runtime",
    "curvature": "sharding common comms plans storage verbs state model runtime",
    "parallelism": f"{CORE} runtime pipeline graph estimation",
    "step": f"{CORE} state verbs storage model runtime graph transforms parallelism curvature",
    "simulation": (
        f"{CORE} state verbs storage model runtime pipeline graph transforms parallelism step"
    ),
    "resharding": STEP,
    # needs no step
    "estimation": f"{CORE} state storage model runtime pipeline graph transforms tiling",
    "checkpoint": f"{STEP} resharding",
    "digests": f"{STEP} resharding checkpoint",
    "generation": f"{STEP} resharding",
    "per_sample": STEP,
    "profiling": f"{STEP} resharding estimation",
    "deepspeed": (
        f"fzero {STEP} resharding estimation checkpoint profiling generation attention sequence "
        f"tiling"
    ),
    "engine": "common deepspeed",
    "integrations": "deepspeed",
    "tuning": f"fzero {STEP} estimation profiling launch cli",
    "launch": "common comms config",
    "cli": f"fzero {STEP} estimation profiling digests testing sequence",
    "testing": f"fzero {STEP} resharding checkpoint deepspeed",
    "fzero": "*",
    "__main__": "*",
}
"""What each room may import, wherever in a file the import stands. Nobody imports the
public names but who stands above them.
"""

INTEGERS_ONLY = {
    *(
        "sharding",
        "sharding.checks",
        "sharding.dtypes",
        "sharding.partition",
        "sharding.order",
        "sharding.layout",
    ),
    *("sharding.specs", "sharding.buckets", "sharding.flat_runs", "sharding.transfer"),
}
PACKAGES = ("sharding", "fzero")

BELOW_THE_SURFACE = {
    "benchmarks.nvme": {
        f"fzero.storage.{name}"
        for name in ("file_store", "file_tensor", "host_memory", "movers", "stream")
    },
    "benchmarks.offload_timeline": {"fzero.storage.direct_io", "fzero.storage.stream"},
    "benchmarks.plans": {"fzero.profiling.machine"},
}
"""What measures parts that users do not call, and the modules of these."""

PUBLIC_MODULES = {"sharding", "sharding.views", "sharding.reference", "sharding.testing"}
"""The modules of sharding that users may import. Of fzero they may import the package
and its doors.
"""

ROOT_NAMES = 46
"""Public names of `fzero` itself: what a training loop of one's own calls, `log`,
`record` and `replay` among them, what its model calls (`tiled`), and `notebook_launch`, which a
notebook calls around such a loop; all others stand behind a door."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def imports(path: Path, *, runs: bool = False) -> Iterator[tuple[str, str | None]]:
    """Every import of a file, also inside functions: (module, name from it or None);
    with `runs`, without `annotations_only`.
    """
    unused = annotations_only(path) if runs else set[ast.AST]()
    for node in nodes_of(path):
        if node in unused:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports by full name only"
            yield from ((node.module or "", alias.name) for alias in node.names)


def annotations_only(path: Path) -> set[ast.AST]:
    """The imports under `if TYPE_CHECKING:`, which never run. Those of a door do: the
    door imports a name when it is used.
    """
    blocks = [
        x
        for x in tree_of(path).body
        if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING"
    ]
    return (
        set() if path.name == "__init__.py" else {node for block in blocks for node in block.body}
    )


MODULES = {name_of(path) for path in files(*PACKAGES)}


def imported_modules(path: Path, *, runs: bool = False) -> set[str]:
    """`from fzero.comms import collectives` imports the module, and
    `from sharding.views import pad` one as well.
    """
    modules = set()
    for module, name in imports(path, runs=runs):
        inner = f"{module}.{name}"
        modules.add(inner if inner in MODULES else module)
    return modules


def room_of(module: str) -> str:
    """`fzero.plans.plan` is in `plans`, `fzero.step` a room by itself."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] or first if first == "fzero" else first


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    within = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return within and f"{within}.{node.attr}"  # type: ignore[attr-defined]


@cache
def attributes(path: Path) -> set[str]:
    """Every dotted name that is read, such as `torch.distributed.all_reduce`."""
    names = (dotted(node) for node in nodes_of(path) if isinstance(node, ast.Attribute))
    return {name for name in names if name}


def own_imports(path: Path, *, runs: bool = False) -> set[str]:
    return {
        module
        for module in imported_modules(path, runs=runs)
        if module.partition(".")[0] in PACKAGES
    }


def test_every_room_is_in_the_table_and_says_what_it_is_for() -> None:
    assert {room_of(module) for module in MODULES} == set(MAY_IMPORT)
    for folder in (
        path for path in (ROOT / "fzero").rglob("*") if path.is_dir() and any(path.glob("*.py"))
    ):
        assert ast.get_docstring(tree_of(folder / "__init__.py")), folder


def test_rooms_import_what_is_below_them() -> None:
    wrong = set()
    for path in files(*PACKAGES):
        room = room_of(name_of(path))
        below = {room, *MAY_IMPORT[room].split()}
        for module in own_imports(path):
            if "*" not in below and room_of(module) not in below:
                wrong.add((name_of(path), module))
    assert not wrong


def test_no_module_imports_itself_by_way_of_others_of_its_room() -> None:
    beside = {
        name_of(path): {
            x for x in own_imports(path, runs=True) if room_of(x) == room_of(name_of(path))
        }
        - {name_of(path)}
        for path in files(*PACKAGES)
    }
    beside["fzero"] = set()
    TopologicalSorter(beside).prepare()  # raises for a cycle, and names it


def test_modules_of_integers_do_not_import_torch() -> None:
    for path in files("sharding"):
        if name_of(path) in INTEGERS_ONLY:
            assert not any(
                module.partition(".")[0] == "torch" for module in imported_modules(path)
            ), path


def users_of(*, module: str, but: str) -> set[str]:
    """The modules that name something of a module of torch, but of a part of it."""

    def uses(path: Path) -> bool:
        names = {
            f"{module}.{name}" if name else module for module, name in imports(path)
        } | attributes(path)
        return any(
            f"{name}.".startswith(module) and not f"{name}.".startswith(but) for name in names
        )

    return {name_of(path) for path in files("fzero", "sharding", "examples") if uses(path)}


def test_torch_distributed_is_named_behind_one_door_only_and_its_files_behind_another() -> None:
    checkpoints = "torch.distributed.checkpoint."
    assert users_of(module="torch.distributed.", but=checkpoints) == {
        "fzero.launch.agent",
        "fzero.launch.rendezvous",
        *(
            f"fzero.comms.{name}"
            for name in ("axes", "collectives", "pending", "process_group", "traced")
        ),
        "fzero.comms.hangs.failures",
        "fzero.deepspeed.comm.comm",
        *(
            f"fzero.testing.conformance.{name}"
            for name in (
                *("deepspeed_system", "jobs", "laws", "ranks"),
                *("torch_systems", "training"),
            )
        ),
    }  # two start ranks, one is torch.distributed under another name; laws are tried on torch's own
    assert users_of(module=checkpoints, but="-") == {
        "fzero.checkpoint.dcp_format",
        "fzero.checkpoint.dcp_metadata",
        "fzero.testing.conformance.torch_systems",
    }


OTHERS = {"fzero.integrations.transformers": ["Trainer", "TrainingArguments"]}
"""What users import of modules that need a library of others."""


@pytest.mark.parametrize("path", files("examples", "benchmarks"), ids=name_of)
def test_examples_and_benchmarks_import_public_names_only(path: Path) -> None:
    for module, name in imports(path):
        if module in BELOW_THE_SURFACE.get(name_of(path), ()):
            continue
        if module.partition(".")[0] == "fzero":
            if name is None or (module, name) == ("fzero", room_of(f"fzero.{name}")):
                continue  # a door itself
            assert name in (OTHERS.get(module) or public_names(module)), f"{module}: {name}"
        if module.partition(".")[0] == "sharding":
            assert module in PUBLIC_MODULES, module
            assert name is None or not name.startswith("_"), f"{module}: {name}"
    for name in attributes(path):
        package, first, *second = *name.split("."), "", ""
        if package == "fzero" and first not in fzero.__all__:
            assert not second[0] or second[0] in public_names(f"fzero.{first}"), name


def test_nothing_but_a_test_imports_a_test() -> None:
    tests = {path.stem for path in files("tests")}
    # they stand beside the file that imports them
    own = {path.stem for path in files("examples", "benchmarks")}
    for path in files(*PACKAGES, "examples", "benchmarks"):
        found = {module.partition(".")[0] for module in imported_modules(path)} - own
        assert not found & (tests | {"tests", "pytest"}), f"{path} imports {sorted(found & tests)}"


DOORS = [
    name_of(folder)
    for folder in sorted((ROOT / "fzero").glob("*/__init__.py"))
    if "door(" in folder.read_text()
]


def public_names(module: str) -> list[str]:
    return list(getattr(importlib.import_module(module), "__all__", ()))


@pytest.mark.parametrize("module", ["fzero", *DOORS])
def test_every_public_name_is_there_and_hides_no_module(module: str) -> None:
    package, names = importlib.import_module(module), public_names(module)
    assert (
        names == sorted(names)
        and all(hasattr(package, name) for name in names)
        and {*names} <= {*dir(package)}
    )
    assert not {f"{module}.{name}" for name in names} & MODULES
    assert module != "fzero" or len(names) <= ROOT_NAMES


def test_no_public_name_of_sharding_hides_a_module() -> None:
    assert not {f"sharding.{name}" for name in public_names("sharding")} & MODULES


def loaded_by(*statements: str) -> Iterator[set[str]]:
    """After each statement, the modules of `PACKAGES` that one program has loaded so
    far.
    """
    show = f"print(*(name for name in sys.modules if name.partition('.')[0] in {PACKAGES}))"
    program = "\n".join(
        ["import torch, sys", *(line for statement in statements for line in (statement, show))]
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return ({*line.split()} for line in ended.stdout.splitlines())


def test_a_door_opens_when_it_is_used() -> None:
    """`import fzero` takes a hundredth of a second beyond `import torch`."""
    (package,) = loaded_by("import fzero")
    assert package == {
        "fzero",
        "fzero.checkpoint",
        "fzero.checkpoint.readers",
        "fzero.common",
        "fzero.common.doors",
        "fzero.common.version",
        "fzero.runtime",
        "fzero.runtime.hooks",
    }


def test_a_built_wheel_imports_every_room(tmp_path: Path) -> None:
    for name in ("fzero", "sharding"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [
        sys.executable,
        "-c",
        "from setuptools import build_meta; build_meta.build_wheel('dist')",
    ]  # as pip calls it
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    rooms = sorted(
        {name_of(path) for path in files("fzero", "sharding") if path.name == "__init__.py"}
    )
    program = f"""
import importlib, sys, zipfile
alias = ("names.json", "ops/adam/cpu_adam.pyi", "alias_path/bin/deepspeed", "alias_path/deepspeed-0.19.8.dist-info/METADATA")
assert {{f"fzero/deepspeed/{{name}}" for name in alias}} <= {{*zipfile.ZipFile({str(wheel)!r}).namelist()}}
sys.path.insert(0, {str(wheel)!r})
assert all(importlib.import_module(room).__file__.startswith({str(wheel)!r}) for room in {rooms})
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "dist", check=True)
