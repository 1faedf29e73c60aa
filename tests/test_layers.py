"""Imports go down only: a walk over the source of every module, without running any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fzero
import fzero.testing.checks

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
        "fzero.comms.codecs",
        "fzero.comms.records",
        "fzero.common.profiler_ranges",
        "fzero.comms.lockstep",
        "fzero.comms.thread_dumps",
        "fzero.comms.watchdog",
        "fzero.comms.collectives",
        "fzero.comms.comm_hooks",
    ),
    # pure
    (
        "fzero.common.arguments",
        "fzero.common.text_tables",
        "fzero.optim.transforms",
        "fzero.optim.mixed_precision",
        "fzero.optim.loss_scale",
        "fzero.optim.fragments",
        "fzero.optim.matrix",
        "fzero.optim.torch_optim",
        "fzero.optim.lr_schedules",
        "fzero.config.deepspeed_keys",
        "fzero.config.unused_keys",
        "fzero.config.files",
        "fzero.config.fields",
        "fzero.config.optimizers",
        "fzero.config.schedulers",
        "fzero.config.precision",
        "fzero.config.offload",
        "fzero.config.elastic_batch",
        "fzero.config.elasticity",
        "fzero.tuning.search",
        "fzero.config.conflicts",
        "fzero.plans.unit_scheduler",
        "fzero.state",
        "fzero.runtime.loss",
        "fzero.config.config",
        "fzero.config.autotuning",
        "fzero.config.table",
        "fzero.plans.mesh_axes",
        "fzero.plans.comm_hooks",
        "fzero.plans.placements",
        "fzero.plans.orders",
        "fzero.plan",
        "fzero.estimation.zero_formulas",
        "fzero.estimation.models",
        "fzero.common.flops",
        "fzero.runtime.batches",
        "fzero.resharding.plan",
        "fzero.checkpoint.layout",
        "fzero.runtime.trainability",
        "fzero.graph.analysis",
        "fzero.graph.reuse",
        "fzero.graph.buckets",
        "fzero.graph.weight_grads",
        "fzero.graph.schedule",
        "fzero.graph.remat",
        "fzero.graph.timeline",
        "fzero.graph.traffic",
    ),
    # what moves state, and what runs a model
    (
        *(
            "fzero.runtime.own_params",
            "fzero.verbs",
            "fzero.runtime.module_binding",
            "fzero.runtime.activation_checkpointing",
        ),
        *(
            "fzero.storage.host_memory",
            "fzero.storage.ownership",
            "fzero.checkpoint.folders",
            "fzero.checkpoint.safetensors",
            "fzero.checkpoint.dcp_format",
            "fzero.checkpoint.deepspeed.files",
            "fzero.checkpoint.deepspeed.flat",
            "fzero.checkpoint.deepspeed.universal",
            "fzero.checkpoint.deepspeed.source",
            "fzero.storage.direct_io",
            "fzero.storage.file_store",
            "fzero.storage.stream",
            "fzero.storage.movers",
            "fzero.storage.file_tensor",
            "fzero.storage.shard_io",
            "fzero.storage.buffer_sizes",
        ),
        *("fzero.comms.mesh", "fzero.runtime.eager", "fzero.runtime.offload"),
        *("fzero.graph.exchange", "fzero.graph.backends", "fzero.stacked", "fzero.comms.mesh_in_graph"),
    ),
    ("fzero.graph.capture", "fzero.graph.blocks"),
    # their composition
    (
        *(
            "fzero.estimation.ledger",
            "fzero.estimation.activation_trace",
            "fzero.estimation.unit_events",
            "fzero.estimation.dry_pass",
        ),
        *(
            "fzero.estimation.dry_update",
            "fzero.estimation.dry_run",
            "fzero.estimation.compare",
            "fzero.estimation.fit_search",
            "fzero.fit",
        ),
        *("fzero.profiling.reports", "fzero.profiling.module_timer", "fzero.profiling.profiler"),
        *("fzero.profiling.machine", "fzero.tuning.space", "fzero.tuning.probe"),
        "fzero.runtime.step_spec",
        "fzero.runtime.module_buffers",
        "fzero.runtime.update",
        "fzero.runtime.init_state",
        "fzero.runtime.metrics",
        "fzero.step",
        "fzero.simulate",
        "fzero.place",
        "fzero.profiling.comm_trace",
        "fzero.profiling.chrome_trace",
        "fzero.reshard",
        "fzero.checkpoint.save_load",
        "fzero.checkpoint.weights",
        "fzero.checkpoint.deepspeed.load",
        "fzero.checkpoint.deepspeed.export",
        "fzero.resharding.parameters",
    ),
    # what keeps state: the engine, and the names by which DeepSpeed scripts call for it
    (
        *(
            "fzero.engine.client_optimizers",
            "fzero.engine.config_keys",
            "fzero.engine.settings",
            "fzero.engine.step_log",
            "fzero.engine.optimizer",
            "fzero.engine.dataloader",
            "fzero.engine.monitor",
        ),
        *("fzero.engine.param_views", "fzero.engine.accessors", "fzero.engine.module", "fzero.engine.checkpoints"),
        *("fzero.engine.engine", "fzero.initialize"),
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
        *(
            "fzero.testing.laws",
            "fzero.testing.order_laws",
            "fzero.testing.transform_laws",
            "fzero.testing.collective_laws",
        ),
        *("fzero.testing.reference_trainer", "fzero.testing.training_machine", "fzero.testing.checks"),
    ),
    # starting ranks, and the command line
    (
        *(
            "fzero.launch.hostfile",
            "fzero.launch.environment",
            "fzero.launch.reaper",
            "fzero.launch.agent",
            "fzero.launch.launchers",
        ),
        *("fzero.launch.preflight", "fzero.launch.supervise", "fzero.launch.cli", "fzero.cli.plan_profile"),
        *("fzero.tuning.runs", "fzero.tuning.report", "fzero.tuning.cli", "fzero.__main__"),
    ),
)
"""From the lowest up. A module imports modules of lower layers, and those to its left in its own."""

BELOW_THE_SURFACE = {
    "benchmarks.nvme": {f"fzero.{name}" for name in ("file_store", "host_buffers", "movers", "stream")},
    "benchmarks.offload_timeline": {"fzero.storage.direct_io", "fzero.storage.stream"},
}
"""What measures parts that users do not call, and the modules of these."""

ORDER = [module for layer in LAYERS for module in layer]
INTEGERS_ONLY, PACKAGES = LAYERS[0], ("sharding", "fzero")
PUBLIC_MODULES = {"sharding", "sharding.views", "sharding.reference", "sharding.testing"}
"""What users may import of sharding; of fzero, the package itself and `fzero.testing.checks`."""


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
        "fzero.launch.agent",
        "fzero.comms.collectives",
        "fzero.deepspeed.comm",
    }  # agent starts ranks, and the last one is torch.distributed under another name
    assert users_of(module=checkpoints, but="-") == {"fzero.checkpoint.dcp_format"}


OTHERS = {"fzero.integrations.transformers": ["Trainer", "TrainingArguments"]}
"""What users import of modules that need a library of others."""


@pytest.mark.parametrize("path", files("examples", "benchmarks"), ids=name_of)
def test_examples_and_benchmarks_import_public_names_only(path: Path) -> None:
    for module, name in imports(path):
        if module in BELOW_THE_SURFACE.get(name_of(path), ()):
            continue
        if module.partition(".")[0] == "fzero":
            names = {"fzero": fzero.__all__, "fzero.testing.checks": fzero.testing.checks.__all__} | OTHERS
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
