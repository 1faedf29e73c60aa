"""Imports go down only: a walk over the source of every module, without running any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fzero
import fzero.testing

ROOT = Path(__file__).parents[1]

LAYERS: tuple[tuple[str, ...], ...] = (
    # integers and names only, no torch
    (
        *("sharding.checks", "sharding.dtypes", "sharding.partition", "sharding.order", "sharding.layout"),
        *("sharding.specs", "sharding.buckets", "sharding.boxes", "sharding.transfer", "sharding"),
    ),
    # tensors cut and joined by a layout; collectives on stacked ranks; what property tests try
    ("sharding.views", "sharding.reference", "sharding.toy_models", "sharding.testing"),
    # the only door to torch.distributed; what is sent
    (
        "fzero.launched",
        "fzero.codecs",
        "fzero.sent",
        "fzero.ranges",
        "fzero.lockstep",
        "fzero.stacks",
        "fzero.hangs",
        "fzero.collectives",
        "fzero.wires",
    ),
    # pure
    (
        "fzero.arguments",
        "fzero.tables",
        "fzero.transforms",
        "fzero.precision",
        "fzero.loss_scaling",
        "fzero.pieces",
        "fzero.matrix_transforms",
        "fzero.torch_optimizers",
        "fzero.lr_schedules",
        "fzero.deepspeed_keys",
        "fzero.config_sieve",
        "fzero.config_files",
        "fzero.config_fields",
        "fzero.config_optimizers",
        "fzero.config_schedulers",
        "fzero.config_precision",
        "fzero.config_offload",
        "fzero.elasticity",
        "fzero.config_elasticity",
        "fzero.tuner",
        "fzero.config_conflicts",
        "fzero.schedule",
        "fzero.state",
        "fzero.measure",
        "fzero.config",
        "fzero.config_autotuning",
        "fzero.config_table",
        "fzero.meshes",
        "fzero.wiring",
        "fzero.placements",
        "fzero.orders",
        "fzero.plan",
        "fzero.estimates",
        "fzero.named_models",
        "fzero.flop_counts",
        "fzero.batches",
        "fzero.reshard_plan",
        "fzero.checkpoint_plan",
        "fzero.trainability",
        "fzero.graph_analysis",
        "fzero.graph_stays",
        "fzero.graph_buckets",
        "fzero.graph_products",
        "fzero.graph_schedule",
        "fzero.graph_remat",
        "fzero.timeline",
        "fzero.graph_sent",
    ),
    # what moves state, and what runs a model
    (
        *("fzero.own_params", "fzero.verbs", "fzero.binding", "fzero.checkpointing"),
        *(
            "fzero.host_buffers",
            "fzero.claims",
            "fzero.checkpoint_files",
            "fzero.safetensors_files",
            "fzero.checkpoint_format",
            "fzero.deepspeed_checkpoint_files",
            "fzero.deepspeed_checkpoint_flats",
            "fzero.deepspeed_checkpoint_whole",
            "fzero.deepspeed_checkpoint_source",
            "fzero.direct_files",
            "fzero.file_store",
            "fzero.stream",
            "fzero.movers",
            "fzero.file_tensors",
            "fzero.staging",
            "fzero.stream_buffers",
        ),
        *("fzero.bound_mesh", "fzero.eager", "fzero.offload"),
        *("fzero.graph_exchange", "fzero.graph_backends", "fzero.stacked", "fzero.mesh_in_graph"),
    ),
    ("fzero.compiled", "fzero.compiled_blocks"),
    # their composition
    (
        *("fzero.paper_moves", "fzero.traced_activations", "fzero.paper_parts", "fzero.paper_pass"),
        *("fzero.paper_update", "fzero.paper_step", "fzero.planner", "fzero.fit_search", "fzero.fit"),
        *("fzero.profile_reports", "fzero.module_watch", "fzero.profiler"),
        *("fzero.machine_report", "fzero.tune_space", "fzero.tune_probe"),
        "fzero.recipe",
        "fzero.module_buffers",
        "fzero.updater",
        "fzero.initialise",
        "fzero.bound_measure",
        "fzero.step",
        "fzero.simulate",
        "fzero.place",
        "fzero.comm",
        "fzero.chrome_trace",
        "fzero.reshard",
        "fzero.checkpoint",
        "fzero.weights",
        "fzero.deepspeed_checkpoint",
        "fzero.deepspeed_checkpoint_export",
        "fzero.whole",
    ),
    # what keeps state: the engine, and the names by which DeepSpeed scripts call for it
    (
        *(
            "fzero.client_optimizers",
            "fzero.engine_keys",
            "fzero.engine_settings",
            "fzero.engine_watch",
            "fzero.engine_optimizer",
            "fzero.dataloader",
            "fzero.monitor",
        ),
        *("fzero.live_params", "fzero.engine_accessors", "fzero.engine_module", "fzero.engine_files"),
        *("fzero.engine", "fzero.initialize"),
    ),
    (
        *(
            "fzero.deepspeed.accelerator",
            "fzero.deepspeed.checkpointing",
            "fzero.deepspeed.comm",
            "fzero.deepspeed.zero",
        ),
        *("fzero.deepspeed.utils", "fzero.deepspeed.ops.adam", "fzero.deepspeed.ops"),
        *("fzero.deepspeed.runtime.lr_schedules", "fzero.deepspeed.runtime.utils"),
        *("fzero.deepspeed.runtime.zero.stage3", "fzero.deepspeed.runtime.zero.stage_1_and_2"),
        *("fzero.deepspeed.runtime.zero", "fzero.deepspeed.runtime", "fzero.deepspeed"),
    ),
    ("fzero.integrations.auto", "fzero.integrations.transformers", "fzero.integrations"),
    ("fzero",),
    # what the tests of users may call
    (
        *("fzero.laws", "fzero.laws_of_orders", "fzero.laws_of_transforms", "fzero.laws_of_collectives"),
        *("fzero.plain", "fzero.training_machine", "fzero.testing"),
    ),
    # starting ranks, and the command line
    (
        *("fzero.hosts", "fzero.launch_environment", "fzero.keeper", "fzero.agent", "fzero.launchers"),
        *("fzero.preflight", "fzero.supervise", "fzero.launch", "fzero.commands"),
        *("fzero.tune_runs", "fzero.tune_report", "fzero.tune", "fzero.__main__"),
    ),
)
"""From the lowest up. A module imports modules of lower layers, and those to its left in its own."""

BELOW_THE_SURFACE = {
    "benchmarks.nvme": {f"fzero.{name}" for name in ("file_store", "host_buffers", "movers", "stream")},
    "benchmarks.offload_timeline": {"fzero.direct_files", "fzero.stream"},
}
"""What measures parts that users do not call, and the modules of these."""

ORDER = [module for layer in LAYERS for module in layer]
INTEGERS_ONLY, PACKAGES = LAYERS[0], ("sharding", "fzero")
PUBLIC_MODULES = {"sharding", "sharding.views", "sharding.reference", "sharding.testing"}
"""What users may import of sharding; of fzero, the package itself and `fzero.testing`."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Every import of a file, also inside functions: (module, name from it or None)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports by full name only"
            yield from ((node.module or "", alias.name) for alias in node.names)


def imported_modules(path: Path) -> set[str]:
    """`from fzero import collectives` imports the module, and `from sharding.views import pad` one as well."""
    modules = set()
    for module, name in imports(path):
        inner = f"{module}.{name}"
        modules.add(inner if inner in ORDER else module)
    return modules


def attributes(path: Path) -> set[str]:
    """Every dotted name that is read, such as `torch.distributed.all_reduce`."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    names = {ast.unparse(node) for node in nodes}
    return {name for name in names if name.replace(".", "").isidentifier()}


def test_every_module_has_its_layer() -> None:
    assert sorted(map(name_of, files(*PACKAGES))) == sorted(ORDER)


@pytest.mark.parametrize("path", files(*PACKAGES), ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    own = [module for module in imported_modules(path) if module.partition(".")[0] in PACKAGES]
    name = name_of(path)
    below = set(ORDER[: ORDER.index(name)])
    assert set(own) <= below, f"{name} imports from above or beside: {sorted(set(own) - below)}"


def test_modules_of_integers_do_not_import_torch() -> None:
    for path in files("sharding"):
        if name_of(path) in INTEGERS_ONLY:
            assert not any(module.partition(".")[0] == "torch" for module in imported_modules(path)), path


def users_of(*, module: str, but: str) -> set[str]:
    """The modules that name something of a module of torch, but of a part of it."""

    def uses(path: Path) -> bool:
        names = {f"{module}.{name}" if name else module for module, name in imports(path)} | attributes(path)
        return any(f"{name}.".startswith(module) and not f"{name}.".startswith(but) for name in names)

    return {name_of(path) for path in files("fzero", "sharding", "examples") if uses(path)}


def test_torch_distributed_is_named_behind_one_door_only_and_its_files_behind_another() -> None:
    checkpoints = "torch.distributed.checkpoint."
    assert users_of(module="torch.distributed.", but=checkpoints) == {
        "fzero.agent",
        "fzero.collectives",
        "fzero.deepspeed.comm",
    }  # agent starts ranks, and the last one is torch.distributed under another name
    assert users_of(module=checkpoints, but="-") == {"fzero.checkpoint_format"}


OTHERS = {"fzero.integrations.transformers": ["Trainer", "TrainingArguments"]}
"""What users import of modules that need a library of others."""


@pytest.mark.parametrize("path", files("examples", "benchmarks"), ids=name_of)
def test_examples_and_benchmarks_import_public_names_only(path: Path) -> None:
    for module, name in imports(path):
        if module in BELOW_THE_SURFACE.get(name_of(path), ()):
            continue
        if module.partition(".")[0] == "fzero":
            names = {"fzero": fzero.__all__, "fzero.testing": fzero.testing.__all__} | OTHERS
            whole = (("fzero", None), ("fzero.deepspeed", None))
            assert name in names.get(module, ()) or (module, name) in whole, f"{module}: {name}"
        if module.partition(".")[0] == "sharding":
            assert module in PUBLIC_MODULES, module
            assert name is None or not name.startswith("_"), f"{module}: {name}"
    for name in attributes(path):
        package, _, rest = name.partition(".")
        if package == "fzero":
            assert rest.partition(".")[0] in fzero.__all__, name


def test_nothing_but_a_test_imports_a_test() -> None:
    tests = {path.stem for path in files("tests")}
    own = {path.stem for path in files("examples", "benchmarks")}  # they stand beside the file that imports them
    for path in files(*PACKAGES, "examples", "benchmarks"):
        found = {module.partition(".")[0] for module in imported_modules(path)} - own
        assert not found & (tests | {"tests", "pytest"}), f"{path} imports {sorted(found & tests)}"


def test_every_public_name_exists_and_is_told_in_alphabetical_order() -> None:
    assert all(hasattr(fzero, name) for name in fzero.__all__)
    assert list(fzero.__all__) == sorted(fzero.__all__)
