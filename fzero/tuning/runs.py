"""How is one configuration measured? The script is started with it, by the launcher, and ended after a few steps.

A run that fails, takes more memory or time than it may, or hangs, is a result as well: its reason in a few words. Every result is
one line of JSON, written at once, under a key made of the configuration and the command; a search that is started again finds it
there. The ranks' part is `fzero.tuning.probe`.
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
"""Keys of `autotuning` on which the candidates depend; the others say what is measured of them, and how."""
SECONDS_TO_END = 15  # which the launcher has between being asked to end its ranks, and being killed
OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|Cannot allocate memory|MemoryError|std::bad_alloc|can't start new thread",
    re.I,
)
ERROR = re.compile(
    r"^(?:\s*\[[^]]*\]:?)*\s*(?:(?:[\w.]+\.)?\w*(?:Error|Exception|Failure): .|MemoryError$|terminate called )"
)
"""A line with which an error is told; what follows is its message."""
OF_RANK = re.compile(r"^\[rank \d+\]")
OF_OTHERS = ("CollectiveError", "ChildFailedError")
"""Exceptions of ranks that only missed another one."""
RAISED = re.compile(r"^(?:\s*\[[^]]*\]:?)*\s*(?:[\w.]+\.)?(\w*(?:Error|Exception|Failure)): (.+)$", re.M)


@dataclass(frozen=True, slots=True)
class Script:
    """What is tuned: flags of the launcher, the script, its arguments, and which of these is the configuration.

    Attributes:
        launcher, args: words before and after the script.
        path: the script.
        flag: the argument whose value is the configuration.
        index: of that value in `args`; of `FLAG=VALUE` that of both.
    """

    launcher: tuple[str, ...]
    path: str
    args: tuple[str, ...]
    flag: str
    index: int

    @classmethod
    def of(cls, launcher: Sequence[str], path: str, args: Sequence[str]) -> Script:
        """Finds the argument that is the configuration.

        Raises:
            ConfigError: none is.
        """
        found = []
        for index, word in enumerate(args):
            name, equals, _ = word.partition("=")
            has_value = equals or (index + 1 < len(args) and not args[index + 1].startswith("-"))
            if name in CONFIG_FLAGS and has_value:
                found.append((name, index if equals else index + 1))
        if found:  # beside DeepSpeed's own flag another may be of the model
            name, index = min(found, key=lambda one: one[0] != "--deepspeed_config")
            return cls(tuple(launcher), path, tuple(args), name, index)
        raise ConfigError(
            f"{path}: must be given its configuration as a file, by one of {', '.join(CONFIG_FLAGS)}, got "
            f"{' '.join(args) or 'no arguments'}; add --config FILE"
        )

    @property
    def config(self) -> str:
        """The path of the configuration."""
        return self.args[self.index].removeprefix(f"{self.flag}=")

    def words(self, config: str, mapped: Mapping[str, Any] | None = None) -> list[str]:
        """The words after `fzero run` with another configuration; `mapped` are values of further arguments."""
        args = list(self.args)
        args[self.index] = f"{self.flag}={config}" if args[self.index].startswith(f"{self.flag}=") else config
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
    """The values of arguments that must say what the configuration says; keys are dotted.

    >>> mapped({"zero_optimization": {"stage": 2}}, {"zero_optimization.stage": "--stage", "bf16": "--bf16"})
    {'--stage': 2}
    """
    found = {}
    for name, flag in arg_mappings.items():
        value: Any = keys
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and not isinstance(value, Mapping):
            found[flag] = value
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    Attributes:
        key: of the configuration and the command.
        name: of the configuration, in words.
        seconds: of a step; None where it failed.
        samples: of all ranks in a step; 0 is unknown.
        nbytes: the most that a rank took from the start of the step on.
        error: why it failed, in few words.
        out_of_memory, timed_out: whether it was for want of these.
        time_limit: that it ran under.
        took: seconds of the whole run.
        config: that was measured.
    """

    key: str
    name: str
    seconds: float | None = None
    samples: int = 0
    nbytes: int = 0
    error: str = ""
    out_of_memory: bool = False
    timed_out: bool = False
    time_limit: float = 0.0
    took: float = 0.0
    config: Keys | None = None

    def as_dict(self) -> dict[str, Any]:
        """As a line of the file."""
        return asdict(self)


class Results:
    """The file of all results; lines that are torn or of other commands are left alone."""

    def __init__(self, folder: Path, *, overwrite: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        if overwrite:
            self.path.unlink(missing_ok=True)
        self._known: dict[str, dict[str, Any]] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with suppress(ValueError, KeyError, TypeError):
                found = json.loads(line)
                self._known[found["key"]] = found

    def find(self, key: str, time_limit: float) -> Result | None:
        """A result that stands; what ran out of a shorter time than is allowed now does not, nor what another version wrote."""
        found = self._known.get(key)
        if found is None or found.keys() != {field.name for field in fields(Result)}:
            return None
        result = Result(**found)
        return None if result.timed_out and result.time_limit < time_limit else result

    def described(self, key: str) -> dict[str, Any] | None:
        """The plan of all candidates."""
        found = self._known.get(key)
        return found if found and "candidates" in found else None

    def add(self, found: dict[str, Any]) -> None:
        """Writes a result, so that it is there whatever comes."""
        self._known[found["key"]] = found
        is_torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size
        with self.path.open("a") as file:
            file.write("\n" * bool(is_torn) + json.dumps(found) + "\n")
            file.flush()
            os.fsync(file.fileno())


def key_of(keys: Keys, words: Sequence[str], request: Request) -> str:
    """Equal for the same configuration, command and limits; of a plan also for the same search space."""
    asked = asdict(replace(request, out="", keys=None))
    space = {} if request.mode == "measure" else autotuning(keys).model_dump(include=set(OF_SPACE))
    text = json.dumps([changed(keys, {"autotuning": None}), list(words), asked, space], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Ended(NamedTuple):
    """What rank 0 wrote, or else the reason; and how long the run took."""

    found: dict[str, Any] | None
    took: float
    error: str = ""
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Runs:
    """Starts a script, again and again.

    Attributes:
        script: what.
        folder: of configurations and logs (`exps_dir`).
        arg_mappings: see `Autotuning`.
        time_limit: seconds of one run.
    """

    script: Script
    folder: Path
    arg_mappings: Mapping[str, str]
    time_limit: float

    def key(self, keys: Keys, request: Request) -> str:
        return key_of(keys, self.script.words("", mapped(keys, self.arg_mappings)), request)

    def measure(self, name: str, keys: Keys, request: Request, *, memory: float | None = None) -> Result:
        """One run with this configuration; a rank may take so much `memory` where the request says nothing."""
        key = self.key(keys, request)
        ended = self._run(key, keys, replace(request, memory=request.memory or memory))
        shown = changed(keys, {"autotuning": None})
        result = Result(key, name, time_limit=self.time_limit, took=ended.took, config=shown)
        if ended.found is None:
            is_short = ended.error.startswith("out of memory")
            return replace(result, error=ended.error, out_of_memory=is_short, timed_out=ended.timed_out)
        found = ended.found
        return replace(result, seconds=found["seconds"], samples=found["samples"] or 0, nbytes=found["nbytes"])

    def describe(self, keys: Keys, request: Request) -> tuple[dict[str, Any] | None, str]:
        """The plan of all candidates, or why there is none."""
        key = self.key(keys, request)
        ended = self._run(key, keys, request)
        return (None if ended.found is None else {"key": key} | ended.found), ended.error

    def _log(self, key: str) -> Path:
        return self.folder / f"{key}.log"

    def _run(self, key: str, keys: Keys, request: Request) -> _Ended:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Whole paths, for the script may change its folder.
        config, out = ((self.folder / f"{key}.{end}").resolve() for end in ("json", "out"))
        out.unlink(missing_ok=True)
        keys, folders = _with_own_files(changed(keys, {"autotuning": None}), key)
        config.write_text(json.dumps(keys, indent=2))
        words = self.script.words(str(config), mapped(keys, self.arg_mappings))
        began = time.monotonic()
        try:
            with self._log(key).open("wb") as log:
                code = _start(words, replace(request, out=str(out)), log, self.time_limit)
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        took = time.monotonic() - began
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            out.unlink()
            return _Ended(found, took)
        if code is None:
            return _Ended(None, took, f"no result in {self.time_limit:g} s", timed_out=True)
        return _Ended(None, took, reason(self._log(key).read_text(errors="replace"), code, request))


def _with_own_files(keys: Keys, key: str) -> tuple[Keys, list[Path]]:
    """The configuration with a folder of its own for files of state, which is removed after the run."""
    zero, folders = dict(keys.get("zero_optimization") or {}), []
    for name in ("offload_optimizer", "offload_param"):
        block = zero.get(name)
        if isinstance(block, Mapping) and block.get("device") == "nvme" and block.get("nvme_path"):
            folder = Path(block["nvme_path"]) / f"fzero-tune-{key}"
            zero[name] = {**block, "nvme_path": str(folder)}
            folders.append(folder)
    return (changed(keys, {"zero_optimization": zero}) if folders else keys), folders


def _start(words: Sequence[str], request: Request, log: Any, time_limit: float) -> int | None:
    """Runs the launcher to its end, or ends it; the exit code, None when it had no time left."""
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
    """Asks the launcher to end its ranks; one that does not is killed, and its keeper ends them."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def reason(log: str, code: int, request: Request) -> str:
    """Why a run failed, in few words, from what it wrote.

    >>> reason("fzero: rank 0 on a ended with code 1 …\\n    fzero.config.files.ConfigError: x: must be 1\\n", 1,
    ...        Request("measure", ""))
    'ConfigError: x: must be 1'
    """
    raised = list(_raised(log))
    if any(OUT_OF_MEMORY.search(text) for text in _last_errors(log)) or code == 128 + signal.SIGKILL:
        limit = "" if request.memory is None else f" of {request.memory / 1e9:.3g} GB"
        return f"out of memory{limit}"
    if raised:
        return raised[-1]
    if code == 0:
        return f"ended before step {request.end}" if request.mode == "measure" else "ended without a train step"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"ended with code {code}: {lines[-1] if lines else 'it wrote nothing'}"


def _last_errors(log: str) -> list[str]:
    """What each rank, and the launcher, told last of an error; without any error the last lines."""
    found: dict[str, list[str]] = {}
    lines = log.splitlines()
    for line in lines:
        rank = match[0] if (match := OF_RANK.match(line)) else ""
        if ERROR.match(line) and not any(f"{name}: " in line for name in OF_OTHERS):
            found[rank] = [line]
        elif rank in found:
            found[rank].append(line)
    return ["\n".join(told[:5]) for told in found.values()] or ["\n".join(lines[-5:])]


def _raised(log: str) -> Iterator[str]:
    """Exceptions that were told, but those of ranks that only missed another one."""
    for match in RAISED.finditer(log):
        name, message = match[1], match[2].strip()
        if name not in OF_OTHERS:
            yield f"{name}: {message if len(message) <= 160 else message[:159] + '…'}"
