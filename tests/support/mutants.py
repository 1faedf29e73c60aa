"""How strong the tests are: small faults in the core rooms, one at a time, and the
tests that find each. `make mutants` runs it.

    python tests/support/mutants.py                      all faults; an hour on two cores
    python tests/support/mutants.py --drawn 10 --seed 7  the chosen faults and ten others
    python tests/support/mutants.py --only finish        those in functions of that name

Half of the faults are chosen (`faults.py`), the others are drawn by operators on the
syntax tree: first a function, each with the same probability, then a place in it, so
that nobody chooses the easy ones. The steps:

1. The tests of `make test` run once under coverage (`reached.py`), which says which
  tests reach which line.
2. For each fault tests that reach its line run in a copy of the tree for some minutes,
   the quickest of each file first; the first failure ends it. A run that hangs is a
   failure. A failure counts if the same test passes without the fault right afterwards,
   so that a slow machine kills nothing.
3. What survives meets the other tests that reach it, then the long tests of their
  files.

Results are in out/mutants/report.md, and in out/mutants/results.json as they come: a
run that was interrupted goes on there.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import accumulate, zip_longest
from pathlib import Path
from queue import SimpleQueue

from faults import CHOSEN, Fault
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "mutants"
CORE = (
    "sharding",
    *(
        f"fzero/{name}"
        for name in ("comms", "optim", "plans", "model", "runtime", "graph", "storage", "pipeline")
    ),
)
CORE_FILES = ("fzero/state.py", "fzero/verbs.py", "fzero/step.py")
NOT_CORE = (
    "sharding/testing.py",
    "sharding/toy_models.py",
    "sharding/reference.py",
    "fzero/comms/hangs/thread_dumps.py",
)
"""What tests use, and what only describes a hang."""

COPIED = (
    "fzero",
    "sharding",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "Makefile",
)
QUICK, LONG = "not long and not nightly", "long and not nightly"
SECONDS = 240.0
"""The recorded seconds of tests that meet one fault, at most; a run may take three
times that.
"""


# --- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault in one file.

    Attributes:
        path: the file, from the root of the repository.
        function: the qualified name of the function.
        line: where the fault is.
        start, stop: the characters that `new` replaces.
        old, new: the texts.
        why: what is wrong with it, or the operator that drew it.
    """

    path: str
    function: str
    line: int
    start: int
    stop: int
    old: str
    new: str
    why: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.old!r} -> {self.new!r}"

    def applied_to(self, source: str) -> str:
        assert source[self.start : self.stop] == self.old, self.name
        return source[: self.start] + self.new + source[self.stop :]


def core_files(root: Path = ROOT) -> list[Path]:
    found = [path for room in CORE for path in sorted((root / room).rglob("*.py"))] + [
        root / name for name in CORE_FILES
    ]
    return [
        path
        for path in found
        if str(path.relative_to(root)) not in NOT_CORE and path.name != "__init__.py"
    ]


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module by qualified name, without those that only
    describe.
    """

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.ClassDef):
                yield from within(part, f"{prefix}{part.name}.")
            elif isinstance(part, ast.FunctionDef) and part.name not in (
                "__repr__",
                "__str__",
                "__rich__",
            ):
                yield f"{prefix}{part.name}", part

    return within(tree, "")


COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


def swap_comparison(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    return None


def swap_arithmetic(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    return None


def swap_and_or(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    return None


def drop_not(node: ast.AST) -> ast.AST | None:
    return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else None


def change_constant(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    return None


def swap_arguments(node: ast.AST) -> ast.AST | None:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("max", "min")
    ):
        return None  # their order says nothing
    if (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and not any(isinstance(x, ast.Starred) for x in node.args[:2])
    ):
        first, second, *rest = node.args
        return (
            None
            if ast.dump(first) == ast.dump(second)
            else ast.Call(node.func, [second, first, *rest], node.keywords)
        )
    return None


def drop_call(node: ast.AST) -> ast.AST | None:
    return ast.Pass() if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


OPERATORS: tuple[Callable[[ast.AST], ast.AST | None], ...] = (
    swap_comparison,
    swap_arithmetic,
    swap_and_or,
    drop_not,
    change_constant,
    swap_arguments,
    drop_call,
)


def places(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a function in which a fault may be: none of an error, a check
    (`strict=`), a text, a type or a default.
    """
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign) and not (
        isinstance(node, ast.AnnAssign) and node.value is not None
    ):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    if isinstance(node, ast.AnnAssign):
        assert node.value is not None
        yield from places(node.value)
        return
    yield node
    parts = node.body if isinstance(node, ast.FunctionDef) else list(ast.iter_child_nodes(node))
    for part in parts:
        yield from places(part)


@cache
def mutants_of(path: str, source: str) -> dict[str, list[Callable[[], Mutant]]]:
    """All faults that the operators find in a file, by function; each is written out
    when it is called.

    >>> found = mutants_of("a.py", "def f(x):\\n    return x + 1 if x else 0\\n")["f"]
    >>> [mutant().new for mutant in found]
    ['x - 1', '2', '1']
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    def written(function: str, node: ast.AST, made: ast.AST, operator: str) -> Mutant:
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None
        start = offset(node.lineno, node.col_offset)
        stop = offset(node.end_lineno, node.end_col_offset or 0)
        new = ast.unparse(ast.fix_missing_locations(copy.deepcopy(made)))
        return Mutant(path, function, node.lineno, start, stop, source[start:stop], new, operator)

    found: defaultdict[str, list[Callable[[], Mutant]]] = defaultdict(list)
    for name, function in functions(ast.parse(source)):
        for node in places(function):
            for operator in OPERATORS:
                if (made := operator(node)) is not None:
                    found[name].append(partial(written, name, node, made, operator.__name__))
    return {name: of_function for name, of_function in found.items() if of_function}


def draw(number: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Faults at random places, in `number` different functions."""
    every = [
        of_function
        for path in core_files(root)
        for of_function in mutants_of(str(path.relative_to(root)), path.read_text()).values()
    ]
    chooser = random.Random(seed)
    return [chooser.choice(of_function)() for of_function in chooser.sample(every, number)]


@cache
def spans(source: str) -> list[tuple[str, int, int]]:
    """The functions of a file, each with its name and its first and last character."""
    starts = list(accumulate(map(len, source.splitlines(keepends=True)), initial=0))
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [(node.name, starts[node.lineno - 1], starts[node.end_lineno or 0]) for node in found]


def find(fault: Fault, root: Path = ROOT) -> Mutant:
    """The place of a chosen fault, in any file of its room.

    Raises:
        LookupError: its text is not there, or not once.
    """
    where = root / fault.room
    paths = sorted(where.rglob("*.py")) if where.is_dir() else [where]
    hits = []
    for path in paths:
        source = path.read_text()
        for name, start, stop in spans(source):
            if name == fault.function and source.count(fault.old, start, stop) == 1:
                at = source.index(fault.old, start)
                line = source.count("\n", 0, at) + 1
                stop = at + len(fault.old)
                place = str(path.relative_to(root)), fault.function, line, at, stop
                hits.append(Mutant(*place, fault.old, fault.new, fault.why))
    if len(hits) != 1:
        raise LookupError(
            f"faults.py: {fault.old!r} must be once in a function {fault.function!r} of "
            f"{fault.room}, and is {len(hits)} times; mend the table"
        )
    return hits[0]


# --- which tests reach a line ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reached:
    """Which tests reach which line, and how long each takes.

    Attributes:
        lines: by path and line, the tests.
        seconds: of each test.
    """

    lines: Mapping[str, Mapping[int, Sequence[str]]]
    seconds: Mapping[str, float]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that reach the line, or the function where the line is a
        continuation; one of each file in turn.
        """
        lines = self.lines.get(mutant.path, {})
        last = mutant.line + mutant.old.count("\n")
        tests = {test for line in range(mutant.line, last + 1) for test in lines.get(line, ())}
        nearest = max((line for line in lines if line <= mutant.line), default=0)
        by_file: defaultdict[str, list[str]] = defaultdict(list)
        for test in sorted(
            tests or lines.get(nearest, ()), key=lambda test: self.seconds.get(test, 0.0)
        ):
            by_file[test.partition("::")[0]].append(test)
        return [test for row in zip_longest(*by_file.values()) for test in row if test is not None]


def record(folder: Path, workers: int) -> Reached:
    """Runs the tests of `make test` once under coverage, if the tree has changed since
    that was done.
    """
    tree = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    if not (folder / "tree").exists() or (folder / "tree").read_text() != tree:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        environment = os.environ | {
            "REACHED": str(folder),
            "PYTHONPATH": f"{ROOT}/tests/support:{ROOT}",
        }
        command = [
            "-m",
            "pytest",
            "-p",
            "reached",
            "-n",
            str(workers),
            "--dist",
            "worksteal",
            "-m",
            QUICK,
        ]
        with (folder / "pytest.log").open("w") as log:
            subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        (folder / "tree").write_text(tree)
    return read(folder)


def read(folder: Path) -> Reached:
    import coverage

    lines: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("lines.*"):
        data = coverage.CoverageData(str(file))
        data.read()
        for path in data.measured_files():
            for line, tests in data.contexts_by_lineno(path).items():
                lines[str(Path(path).relative_to(ROOT))][line].update(
                    test for test in tests if test
                )
    seconds: dict[str, float] = {}
    for file in folder.glob("seconds-*.json"):
        seconds |= json.loads(file.read_text())
    return Reached(
        {path: {n: sorted(tests) for n, tests in found.items()} for path, found in lines.items()},
        seconds,
    )


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a fault: the first test that failed, of those of `make test` or
    the long ones; "" is none.
    """

    killed_by: str
    is_long: bool = False
    num_tests: int = 0


def within(tests: Sequence[str], seconds: Mapping[str, float], most: float) -> list[str]:
    """As many of the tests as take so long together."""
    taken, total = [], 0.0
    for test in tests:
        total += seconds.get(test, 1.0)
        if total > most and taken:
            break
        taken.append(test)
    return taken


def failures(log: str) -> list[str]:
    """The tests that failed, by pytest's short summary. The name of a case may have
    spaces.

    >>> failures(
    ...     "FAILED tests/a.py::test_b[two nodes] - assert 1 == 2\\nERROR tests/c.py::test_d\\n1 failed"
    ... )
    ['tests/a.py::test_b[two nodes]', 'tests/c.py::test_d']
    """
    lines = [line.partition(" ") for line in log.splitlines()]
    return [rest.partition(" - ")[0] for kind, _, rest in lines if kind in ("FAILED", "ERROR")]


def first_failure(tree: Path, tests: Sequence[str], marks: str, timeout: float) -> str:
    """Runs tests in a copy of the tree until one fails; returns its name, "hang" for a
    run without end, or "".
    """
    (tree / "tests.txt").write_text("\n".join(tests))
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-rfE",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
        "@tests.txt",
    ]
    with (tree / "pytest.log").open("w") as log:
        job = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = job.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    if code is None:
        return "hang"
    failed = failures((tree / "pytest.log").read_text())
    return "" if code in (0, 5) else (failed[0] if failed else f"exit {code}")


def try_one(mutant: Mutant, tree: Path, reached: Reached, *, survived: bool) -> Result:
    """Tries a fault on the first tests that reach it, or, if it has survived these, on
    the others and the long ones.
    """
    file = tree / mutant.path
    source, every = file.read_text(), reached.tests_of(mutant)
    first = within(every, reached.seconds, SECONDS)
    tests = every[len(first) :] if survived else first
    timeout = 60 + 3 * sum(reached.seconds.get(test, 1.0) for test in tests)

    def fails(tests: Sequence[str], marks: str, timeout: float) -> str:
        """The first of the tests that fails because of the fault: it passes without it,
        on the same busy machine.
        """
        left = list(tests)
        while left:
            file.write_text(mutant.applied_to(source))
            try:
                found = first_failure(tree, left, marks, timeout)
            finally:
                file.write_text(source)
            again = [found] if "::" in found else left  # a hang, or an error of pytest itself
            without = first_failure(tree, again, marks, timeout) if found else ""
            if not without:
                return found
            if without == "hang" and timeout < 3600:
                timeout *= 2  # of a busy machine
            elif "::" in without:
                left = [test for test in left if test not in (found, without)]
            else:
                raise RuntimeError(
                    f"{mutant.name}: {without} without the "
                    f"fault:\n{(tree / 'pytest.log').read_text()}"
                )
        return ""

    killed = fails(tests, QUICK, timeout)
    if killed or not survived or not every:
        return Result(killed, num_tests=len(every))
    files = list(dict.fromkeys(test.partition("::")[0] for test in every))
    return Result(fails(files, LONG, 60 + 3 * SECONDS), True, len(every))


def copy_tree(into: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, into / name)


def run(
    mutants: Sequence[Mutant], reached: Reached, workers: int, *, survived: bool
) -> dict[str, Result]:
    """Tries each fault, as many at a time as there are cores; results are written as
    they come.
    """
    file = OUT / "results.json"
    known = (
        {name: Result(**found) for name, found in json.loads(file.read_text()).items()}
        if file.exists()
        else {}
    )
    left = [
        mutant
        for mutant in mutants
        if mutant.name not in known or (survived and not known[mutant.name].killed_by)
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(workers) as pool,
        Progress() as progress,
    ):
        trees: SimpleQueue[Path] = SimpleQueue()
        for index in range(workers):
            (Path(folder) / str(index)).mkdir()
            copy_tree(Path(folder) / str(index))
            trees.put(Path(folder) / str(index))
        task = progress.add_task("survivors" if survived else "faults", total=len(left))

        def one(mutant: Mutant) -> tuple[Mutant, Result]:
            tree = trees.get()
            try:
                return mutant, try_one(mutant, tree, reached, survived=survived)
            finally:
                trees.put(tree)

        for future in as_completed([pool.submit(one, mutant) for mutant in left]):
            mutant, result = future.result()
            known[mutant.name] = result
            file.write_text(
                json.dumps({name: asdict(found) for name, found in known.items()}, indent=1)
            )
            progress.advance(task)
    return {mutant.name: known[mutant.name] for mutant in mutants}


def report(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> str:
    """The rate, and a table of the survivors, in Markdown."""
    quick = [m for m in mutants if results[m.name].killed_by and not results[m.name].is_long]
    survivors = [m for m in mutants if not results[m.name].killed_by]
    lines = [
        f"{len(quick)} of {len(mutants)} faults ({len(quick) / len(mutants):.0%}) are found by "
        f"`make test`, {len(mutants) - len(survivors)} with the long tests.",
        "",
        "| survivor | before | after | why | tests that met it |",
        "| --- | --- | --- | --- | --- |",
    ]
    for m in survivors:
        cells = (text.replace("\n", " ").replace("|", "\\|") for text in (m.old, m.new))
        before, after = (f"`{' '.join(cell.split())}`" for cell in cells)
        where = f"{m.path}:{m.line} {m.function}"
        lines.append(f"| {where} | {before} | {after} | {m.why} | {results[m.name].num_tests} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--drawn", type=int, default=len(CHOSEN), help="faults that are drawn")
    parser.add_argument("--seed", type=int, default=1, help="of the drawn faults")
    parser.add_argument("--only", default="", help="faults in functions with this in their name")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time")
    args = parser.parse_args()
    mutants = [*map(find, CHOSEN), *draw(args.drawn, args.seed)]
    mutants = [mutant for mutant in mutants if args.only in mutant.function]
    OUT.mkdir(parents=True, exist_ok=True)
    print(
        "which tests reach which line: runs the tests of `make test` once, if the commit is new",
        flush=True,
    )
    reached = record(OUT / "reached", args.workers)
    results = run(mutants, reached, args.workers, survived=False)
    survivors = [mutant for mutant in mutants if not results[mutant.name].killed_by]
    results |= run(survivors, reached, args.workers, survived=True)
    text = report(mutants, results)
    (OUT / "report.md").write_text(text)
    console, table = Console(), Table("survivor", "before", "after")
    for mutant in mutants:
        if not results[mutant.name].killed_by:
            table.add_row(f"{mutant.path}:{mutant.line}", mutant.old, mutant.new)
    console.print(text.partition("\n")[0], table)


if __name__ == "__main__":
    main()
