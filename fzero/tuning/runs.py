"""`Runs`: measures one configuration. The launcher starts the script with it, and the
probe ends the job after a few steps.

A run that fails, exceeds its memory or time, or hangs also has a result: the reason in
a few words. Every result is one line of JSON, written immediately, under a key made
from the configuration and the command; a restarted search finds it there. The part
inside the ranks is `fzero.tuning.probe`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fzero.config.autotuning import autotuning
from fzero.config.config import ConfigError
from fzero.config.files import changed
from fzero.estimation.compare import Keys
from fzero.launch.supervise import ends_with_us
from fzero.tuning.probe import VARIABLE, Request
from fzero.tuning.space import Result

CONFIG_FLAGS = ("--config", "--deepspeed_config", "--deepspeed", "--ds_config")
OF_SPACE = (
    "fast",
    "num_tuning_micro_batch_sizes",
    "min_train_micro_batch_size_per_gpu",
    "max_train_micro_batch_size_per_gpu",
    "min_train_batch_size",
    "max_train_batch_size",
    "arg_mappings",
)
"""Keys of `autotuning` on which the candidates depend; the others control the
measurement.
"""
SECONDS_TO_END = 15  # from the SIGTERM to the launcher until it is killed
OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|Cannot allocate memory|MemoryError|std::bad_alloc|can't "
    r"start new thread",
    re.I,
)
ERROR = re.compile(
    r"^(?:\s*\[[^]]*\]:?)*\s*(?:(?:[\w.]+\.)?\w*(?:Error|Exception|Failure): "
    r".|MemoryError$|terminate called )"
)
"""The first line of an error; the following lines are its message."""
OF_RANK = re.compile(r"^\[rank \d+\]")
# exceptions of ranks that failed only because another rank did
OF_OTHERS = ("CollectiveError", "ChildFailedError")
RAISED = re.compile(
    r"^(?:\s*\[[^]]*\]:?)*\s*(?:[\w.]+\.)?(\w*(?:Error|Exception|Failure)): (.+)$", re.M
)


@dataclass(frozen=True, slots=True)
class Script:
    """The tuned command: flags of the launcher, the script, its arguments, and which
    argument is the configuration.
    """

    launcher: tuple[str, ...]
    path: str
    args: tuple[str, ...]
    flag: str  # the argument whose value is the configuration
    index: int  # position in `args` of that value, or of the word `FLAG=VALUE`

    @classmethod
    def of(cls, launcher: Sequence[str], path: str, args: Sequence[str]) -> Script:
        """Finds the argument that is the configuration.

        Raises:
            ConfigError: no argument is.
        """
        flags = []
        for index, word in enumerate(args):
            name, equals, _ = word.partition("=")
            has_value = equals or (index + 1 < len(args) and not args[index + 1].startswith("-"))
            if name in CONFIG_FLAGS and has_value:
                flags.append((name, index if equals else index + 1))
        if flags:  # next to --deepspeed_config, another flag may be the model's configuration
            name, index = min(flags, key=lambda one: one[0] != "--deepspeed_config")
            return cls(tuple(launcher), path, tuple(args), name, index)
        raise ConfigError(
            f"{path}: must be given its configuration as a file, by one of "
            f"{', '.join(CONFIG_FLAGS)}, got {' '.join(args) or 'no arguments'}; add --config FILE"
        )

    @property
    def config(self) -> str:
        """The path of the configuration."""
        return self.args[self.index].removeprefix(f"{self.flag}=")

    def words(self, config: str, mapped: Mapping[str, Any] | None = None) -> list[str]:
        """The words after `fzero run` with another configuration; `mapped` has the
        values of other arguments.
        """
        args = list(self.args)
        args[self.index] = (
            f"{self.flag}={config}" if args[self.index].startswith(f"{self.flag}=") else config
        )
        for flag, value in (mapped or {}).items():
            _set(args, flag, str(value))
        return [*self.launcher, self.path, *args]


def _set(args: list[str], flag: str, value: str) -> None:
    for index, word in enumerate(args):
        if word == flag and index + 1 < len(args):
            args[index + 1] = value
            return
        if word.startswith(f"{flag}="):
            args[index] = f"{flag}={value}"
            return
    args += [flag, value]


def mapped(keys: Keys, arg_mappings: Mapping[str, str]) -> dict[str, Any]:
    """The values of script arguments that repeat keys of the configuration; keys are
    dotted.

    >>> mapped(
    ...     {"zero_optimization": {"stage": 2}},
    ...     {"zero_optimization.stage": "--stage", "bf16": "--bf16"},
    ... )
    {'--stage': 2}
    """
    values = {}
    for name, flag in arg_mappings.items():
        value: Any = keys
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and not isinstance(value, Mapping):
            values[flag] = value
    return values


class Results:
    """The file of all results; it keeps and ignores torn lines and results of other
    commands.
    """

    def __init__(self, folder: Path, *, overwrite: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        if overwrite:
            self.path.unlink(missing_ok=True)
        self._known: dict[str, dict[str, Any]] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                self._known[record["key"]] = record

    def find(self, key: str, time_limit: float) -> Result | None:
        """The result of this key, unless it timed out under a shorter limit or has
        another version's format.
        """
        record = self._known.get(key)
        if record is None or record.keys() != {field.name for field in fields(Result)}:
            return None
        result = Result(**record)
        return None if result.timed_out and result.time_limit < time_limit else result

    def described(self, key: str) -> dict[str, Any] | None:
        """The plan of all candidates; None if there is none."""
        record = self._known.get(key)
        return record if record and "candidates" in record else None

    def add(self, record: dict[str, Any]) -> None:
        """Writes a result and flushes it to the disk, so that it survives a crash."""
        self._known[record["key"]] = record
        is_torn = (
            self.path.exists()
            and not self.path.read_bytes().endswith(b"\n")
            and self.path.stat().st_size
        )
        with self.path.open("a") as file:
            file.write("\n" * bool(is_torn) + json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def key_of(keys: Keys, words: Sequence[str], request: Request) -> str:
    """A hash of the configuration, command and limits; for a plan, of the search space
    as well.
    """
    limits = asdict(replace(request, out="", keys=None))
    space = {} if request.mode == "measure" else autotuning(keys).model_dump(include=set(OF_SPACE))
    text = json.dumps(
        [changed(keys, {"autotuning": None}), list(words), limits, space], sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Ended(NamedTuple):
    """The result that rank 0 wrote, or the reason why there is none; and the seconds of
    the run.
    """

    result: dict[str, Any] | None
    took: float
    error: str = ""
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Runs:
    """Starts a script with one configuration after the other."""

    script: Script
    folder: Path  # for configurations and logs (`exps_dir`)
    arg_mappings: Mapping[str, str]  # see `Autotuning`
    time_limit: float  # seconds of one run

    def key(self, keys: Keys, request: Request) -> str:
        return key_of(keys, self.script.words("", mapped(keys, self.arg_mappings)), request)

    def measure(
        self, name: str, keys: Keys, request: Request, *, memory: float | None = None
    ) -> Result:
        """One run with this configuration; `memory` limits a rank if the request does
        not.
        """
        key = self.key(keys, request)
        ended = self._run(key, keys, replace(request, memory=request.memory or memory))
        shown = changed(keys, {"autotuning": None})
        result = Result(key, name, time_limit=self.time_limit, took=ended.took, config=shown)
        if (measured := ended.result) is None:
            is_short = ended.error.startswith("out of memory")
            return replace(
                result, error=ended.error, out_of_memory=is_short, timed_out=ended.timed_out
            )
        return replace(
            result,
            seconds=measured["seconds"],
            samples=measured["samples"] or 0,
            nbytes=measured["nbytes"],
        )

    def describe(self, keys: Keys, request: Request) -> tuple[dict[str, Any] | None, str]:
        """(the plan of all candidates, or None; why there is none)."""
        key = self.key(keys, request)
        ended = self._run(key, keys, request)
        return (None if ended.result is None else {"key": key} | ended.result), ended.error

    def _run(self, key: str, keys: Keys, request: Request) -> _Ended:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Absolute paths, because the script may change its working directory.
        config, out, log = (
            (self.folder / f"{key}.{end}").resolve() for end in ("json", "out", "log")
        )
        out.unlink(missing_ok=True)
        keys, folders = _with_own_files(changed(keys, {"autotuning": None}), key)
        config.write_text(json.dumps(keys, indent=2))
        words = self.script.words(str(config), mapped(keys, self.arg_mappings))
        began = time.monotonic()
        try:
            with log.open("wb") as written:
                code = _start(words, replace(request, out=str(out)), written, self.time_limit)
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        took = time.monotonic() - began
        if out.exists():
            result: dict[str, Any] = json.loads(out.read_text())
            out.unlink()
            return _Ended(result, took)
        if code is None:
            return _Ended(None, took, f"no result in {self.time_limit:g} s", timed_out=True)
        return _Ended(None, took, reason(log.read_text(errors="replace"), code, request))


def _with_own_files(keys: Keys, key: str) -> tuple[Keys, list[Path]]:
    """The configuration with separate folders for files of state, and these folders,
    which are removed after the run.
    """
    zero, folders = dict(keys.get("zero_optimization") or {}), []
    for name in ("offload_optimizer", "offload_param"):
        block = zero.get(name)
        if isinstance(block, Mapping) and block.get("device") == "nvme" and block.get("nvme_path"):
            folder = Path(block["nvme_path"]) / f"fzero-tune-{key}"
            zero[name] = {**block, "nvme_path": str(folder)}
            folders.append(folder)
    return (changed(keys, {"zero_optimization": zero}) if folders else keys), folders


def _start(words: Sequence[str], request: Request, log: Any, time_limit: float) -> int | None:
    """Runs the launcher until it ends or the time is up; returns its exit code, None
    after a timeout.
    """
    environment = os.environ | {VARIABLE: request.as_text(), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    process = subprocess.Popen(
        [*ends_with_us(), sys.executable, "-m", "fzero", "run", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(time_limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Sends the launcher SIGTERM to end its ranks. If it does not exit, it is killed,
    and the reaper ends the ranks.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def reason(log: str, code: int, request: Request) -> str:
    """Why a run failed, in a few words, from its output.

    >>> reason(
    ...     "fzero: rank 0 on a ended with code 1 …\\n    fzero.config.fields.ConfigError: x: must be 1\\n",
    ...     1,
    ...     Request("measure", ""),
    ... )
    'ConfigError: x: must be 1'
    """
    raised = list(_raised(log))
    if (
        any(OUT_OF_MEMORY.search(text) for text in _last_errors(log))
        or code == 128 + signal.SIGKILL
    ):
        limit = "" if request.memory is None else f" of {request.memory / 1e9:.3g} GB"
        return f"out of memory{limit}"
    if raised:
        return raised[-1]
    if code == 0:
        return (
            f"ended before step {request.end}"
            if request.mode == "measure"
            else "ended without a train step"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"ended with code {code}: {lines[-1] if lines else 'it wrote nothing'}"


def _last_errors(log: str) -> list[str]:
    """The last error of each rank and of the launcher; without any error, the last
    lines.
    """
    errors: dict[str, list[str]] = {}
    lines = log.splitlines()
    for line in lines:
        rank = match[0] if (match := OF_RANK.match(line)) else ""
        if ERROR.match(line) and not any(f"{name}: " in line for name in OF_OTHERS):
            errors[rank] = [line]
        elif rank in errors:
            errors[rank].append(line)
    return ["\n".join(error[:5]) for error in errors.values()] or ["\n".join(lines[-5:])]


def _raised(log: str) -> Iterator[str]:
    """The exceptions in a log, except those of ranks that failed only because another
    rank did.
    """
    for match in RAISED.finditer(log):
        name, message = match[1], match[2].strip()
        if name not in OF_OTHERS:
            yield f"{name}: {message if len(message) <= 160 else message[:159] + '…'}"
