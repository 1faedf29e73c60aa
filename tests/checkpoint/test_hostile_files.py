"""The law of hostile files: nothing that is read runs code or leads out of its folder,
and the error names the file.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fzero
from fzero.checkpoint import folders as files
from fzero.checkpoint.dcp_metadata import read_metadata
from fzero.checkpoint.loading import starts
from fzero.checkpoint.safetensors import INDEX
from fzero.common.plain_values import UnsafePickleError, pack, unpack
from fzero.deepspeed.formats.files import MODEL
from fzero.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from fzero.storage import ownership as claims

CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
RAN = "it-ran"


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None: ...  # so that it may stand where a function does


def payloads(ran: Path) -> dict[str, bytes]:
    """Pickles that make the file `ran` when they are read as such."""
    command, code = f"touch {ran}", f"open({str(ran)!r}, 'w')"
    nested = (
        b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c"
        + bytes([len(command)])
        + command.encode()
        + b"\x85R."
    )
    chain = Calls(getattr, Calls(importlib.import_module, "os"), "system")
    state = b"\x80\x04cfzero.pickles\n_OF_METADATA\n."  # a module's own table
    return {
        "reduce os.system": pickle.dumps(Calls(os.system, command)),
        "builtins eval": pickle.dumps(Calls(eval, code)),
        "builtins exec, protocol 0": pickle.dumps(Calls(exec, code), protocol=0),
        "a chain of getattr": pickle.dumps(Calls(chain, command)),
        "a torch storage's loader": pickle.dumps(
            Calls(torch.storage._load_from_bytes, pickle.dumps(Calls(os.system, command)))
        ),
        "a nested attribute, torch.os.system": nested,
        "copyreg": b"\x80\x02ccopyreg\n_reconstructor\ncposix\nsystem\nc__builtin__\nobject\nN\x87R.",
        "a class's state": pickle.dumps(
            {"state_dict_metadata": Calls(setattr, torch.Size, "numel", print)}
        ),
        "a name of this package": state,
    }


NAMES = list(payloads(Path("x")))


def made() -> tuple[fzero.TrainStep, Any]:
    step = fzero.make_train_step(
        nn.Linear(3, 2), CONFIG, loss_fn=lambda model, x: model(x).square().mean()
    )
    return step, step.init()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every kind that is read: of fzero, of an engine, of another job,
    of DeepSpeed, and weights.
    """
    folder = tmp_path_factory.mktemp("saved")
    step, state = made()
    fzero.save(state, folder / "fzero", step=step)
    engine, *_ = fzero.initialize(model=nn.Linear(3, 2), config=CONFIG)
    engine.save_checkpoint(folder / "engine")
    weights = {name: x.detach().clone() for name, x in nn.Linear(3, 2).state_dict().items()}
    torch.distributed.checkpoint.save(
        {"model": weights}, checkpoint_id=folder / "dcp", no_dist=True
    )
    (folder / "weights").mkdir()
    torch.save(weights, folder / "weights" / "pytorch_model.bin")
    fzero.deepspeed.export_deepspeed(folder / "fzero", folder / "deepspeed")
    return folder


def replaced(path: Path, content: bytes) -> None:
    """Writes a file of a checkpoint, and mends the checksums, as whoever means harm
    does.
    """
    path.write_bytes(content)
    folder = path.parent
    if (folder / files.MANIFEST).exists():
        reported = json.loads((folder / files.MANIFEST).read_bytes())
        files.write_manifest(
            folder,
            {
                key: value
                for key, value in reported.items()
                if key not in ("format", "checksum", "files")
            },
        )


def engine_of() -> Any:
    return fzero.initialize(model=nn.Linear(3, 2), config=CONFIG)[0]


DOORS: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "load": (
        "fzero/step-0/.metadata",
        lambda folder, out: fzero.load(folder / "fzero", step=made()[0]),
    ),
    "load, the client's value": (
        "fzero/step-0/client.pt",
        lambda folder, out: fzero.load(folder / "fzero", step=made()[0]),
    ),
    "load_weights": (
        "fzero/step-0/.metadata",
        lambda folder, out: fzero.load_weights(folder / "fzero", step=made()[0]),
    ),
    "load_weights of another job": (
        "dcp/.metadata",
        lambda folder, out: fzero.load_weights(folder / "dcp", step=made()[0]),
    ),
    "load_weights of torch.save": (
        "weights/pytorch_model.bin",
        lambda folder, out: fzero.load_weights(folder / "weights", step=made()[0]),
    ),
    "export": (
        "fzero/step-0/.metadata",
        lambda folder, out: fzero.checkpoint.export(folder / "fzero", out),
    ),
    "export_deepspeed": (
        "fzero/step-0/.metadata",
        lambda folder, out: fzero.deepspeed.export_deepspeed(folder / "fzero", out),
    ),
    "export_deepspeed, the client's value": (
        "fzero/step-0/client.pt",
        lambda folder, out: fzero.deepspeed.export_deepspeed(folder / "fzero", out),
    ),
    "Engine.load_checkpoint": (
        "engine/global_step0/step-0/.metadata",
        lambda folder, out: engine_of().load_checkpoint(folder / "engine"),
    ),
    "Engine.load_checkpoint, the client's value": (
        "engine/global_step0/step-0/client.pt",
        lambda folder, out: engine_of().load_checkpoint(folder / "engine", load_module_only=True),
    ),
    "import_deepspeed": (
        f"deepspeed/global_step0_universal/{MODEL}",
        lambda folder, out: fzero.deepspeed.import_deepspeed(folder / "deepspeed", step=made()[0]),
    ),
    "convert_deepspeed": (
        f"deepspeed/global_step0_universal/{MODEL}",
        lambda folder, out: fzero.deepspeed.convert_deepspeed(folder / "deepspeed", out),
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_file_runs_code_whatever_is_in_it_and_whoever_reads_it(
    door: str, saved: Path, tmp_path: Path
) -> None:
    file, read = DOORS[door]
    folder, ran = tmp_path / "copy", tmp_path / RAN
    shutil.copytree(saved, folder)
    read(folder, tmp_path / "whole")
    for name, payload in payloads(ran).items():
        replaced(folder / file, payload)
        with pytest.raises(fzero.CheckpointError) as raised:
            read(folder, tmp_path / "out")
        assert Path(file).name in str(raised.value) and "weights_only" not in str(raised.value), (
            name
        )
        assert not ran.exists(), name
    # nothing was changed meanwhile
    assert fzero.save(made()[1], tmp_path / "after", step=made()[0])


# --- damage ---------------------------------------------------------------------------------------


JUNK: list[Any] = [None, True, -1, 1.5, float("nan"), 2**70, "x", "", "../x", [], [1], {}, {"a": 1}]
READERS: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda folder, out: fzero.load(folder, step=made()[0]),
    "load_weights": lambda folder, out: fzero.load_weights(folder, step=made()[0]),
    "starts": lambda folder, out: starts(folder),
    "export": lambda folder, out: fzero.checkpoint.export(folder, out),
    "export_deepspeed": lambda folder, out: fzero.deepspeed.export_deepspeed(folder, out),
    "zero_to_fp32": lambda folder, out: get_fp32_state_dict_from_zero_checkpoint(folder),
}


def places(value: Any, *before: Any) -> list[tuple[Any, ...]]:
    """The path of each value in a JSON value."""
    inner = (
        enumerate(value)
        if isinstance(value, list)
        else value.items()
        if isinstance(value, dict)
        else ()
    )
    return [before, *(place for key, part in inner for place in places(part, *before, key))]


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value that differs from `value` in one place, where something else is, or
    nothing.
    """
    place, other = draw(st.sampled_from(places(value))), draw(st.sampled_from(JUNK))
    if not place:
        return other
    value = inner = copy.deepcopy(value)
    for key in place[:-1]:
        inner = inner[key]
    if draw(st.booleans()):
        inner[place[-1]] = other
    else:
        del inner[place[-1]]
    return value


def checks(folder: Path, out: Path) -> None:
    """Every reader takes the checkpoint, or says which file is not what was written, or
    which parameter is not the step's.
    """
    for name, read in READERS.items():
        try:
            read(folder, out / name)
        except fzero.CheckpointError as error:
            assert str(folder) in str(error), (name, error)
        except ValueError as error:
            assert re.match(r"(load|reshard|export): ", str(error)), (name, repr(error))


@given(st.data())
def test_damage_of_a_file_whose_checksums_fit_is_an_error_that_names_it(
    saved: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([files.CONTENTS, files.MANIFEST]))
    with TemporaryDirectory() as out:
        folder = Path(out, "copy")
        shutil.copytree(saved / "fzero", folder)
        path = folder / "step-0" / name
        value = data.draw(damaged(json.loads(path.read_bytes())))
        if name == files.CONTENTS:
            replaced(path, json.dumps(value).encode())
        else:
            fields = (
                {k: v for k, v in value.items() if k != "checksum"}
                if isinstance(value, dict)
                else {}
            )
            path.write_text(
                json.dumps(fields | {"checksum": files._checksum(fields)} if fields else value)
            )
        checks(folder, Path(out))


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{}", b"[" * 9999, b"", b"null", b"{", b'{"numbers": "\xc3"}']
)
def test_a_file_that_is_no_json_is_an_error_that_names_it(
    content: bytes, saved: Path, tmp_path: Path
) -> None:
    for name in (files.CONTENTS, files.MANIFEST):
        folder = tmp_path / name
        shutil.copytree(saved / "fzero", folder)
        path = folder / "step-0" / name
        replaced(path, content) if name == files.CONTENTS else path.write_bytes(content)
        for read in READERS.values():
            with pytest.raises(fzero.CheckpointError, match=f"{path} must be what fzero wrote, "):
                read(folder, tmp_path / "out")


@pytest.mark.parametrize("name", NAMES)
def test_neither_metadata_nor_what_ranks_send_can_name_a_function(
    name: str, tmp_path: Path
) -> None:
    payload = payloads(tmp_path / RAN)[name]
    (tmp_path / "x").write_bytes(payload)
    with pytest.raises(
        UnsafePickleError, match=r"needs the class '[\w.]+' to be read, which might run code"
    ):
        unpack(payload)
    with pytest.raises(UnsafePickleError):
        read_metadata(tmp_path / "x")
    assert not (tmp_path / RAN).exists()


@pytest.mark.parametrize("value", [os.system, Path("x"), torch.zeros(1), Calls(os.system, "true")])
def test_ranks_send_plain_values_alone(value: Any) -> None:
    with pytest.raises(TypeError, match="must be numbers, strings, bytes and containers of these"):
        pack({"a": [value]})


# --- paths ----------------------------------------------------------------------------------------


OUT = "../../../../x"


def rename_parameter(folder: Path) -> None:
    path = folder / "fzero" / "step-0" / files.CONTENTS
    replaced(path, path.read_bytes().replace(b'"weight"', json.dumps(OUT).encode()))


def move_chunks(folder: Path, file: str) -> None:
    path = folder / file
    content = path.read_bytes()
    old, new = b"__0_0.distcp", b"/etc/passwd0"  # as long, for a pickle tells the length
    assert old in content
    replaced(path, content.replace(old, new))


def write(path: Path, content: bytes | str) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


LEADS_OUT = "leads out of it"
PATHS: dict[str, tuple[Callable[[Path], Any], Callable[[Path, Path], Any], str]] = {
    "a parameter's name in export_deepspeed": (
        rename_parameter,
        lambda folder, out: fzero.deepspeed.export_deepspeed(folder / "fzero", out),
        rf"contents.json must be what fzero wrote, and is not: 'model.{OUT}' is not stored beside "
        rf"it",
    ),
    "latest": (
        lambda folder: write(folder / "fzero" / "latest", "../fzero/step-0"),
        lambda folder, out: fzero.load(folder / "fzero", step=made()[0]),
        rf"latest must hold the name of a folder beside it.* '../fzero/step-0', .*{LEADS_OUT}",
    ),
    "an engine's latest": (
        lambda folder: write(folder / "engine" / "latest", "/tmp"),
        lambda folder, out: engine_of().load_checkpoint(folder / "engine"),
        rf"latest must .*'/tmp'.*{LEADS_OUT}",
    ),
    "DeepSpeed's latest": (
        lambda folder: write(
            folder / "deepspeed" / "latest_universal", "../deepspeed/global_step0_universal"
        ),
        lambda folder, out: fzero.deepspeed.import_deepspeed(folder / "deepspeed", step=made()[0]),
        rf"latest_universal must .*{LEADS_OUT}",
    ),
    "latest that is no text": (
        lambda folder: write(folder / "fzero" / "latest", b"\xff\xfe\x00"),
        lambda folder, out: fzero.load(folder / "fzero", step=made()[0]),
        r"latest must hold the name of a folder beside it, in UTF-8, and is not; write the name "
        r"into it",
    ),
    "a file in the metadata": (
        lambda folder: move_chunks(folder, "fzero/step-0/.metadata"),
        lambda folder, out: fzero.load(folder / "fzero", step=made()[0]),
        rf"metadata must .*'/etc/passwd0'.*{LEADS_OUT}",
    ),
    "a file in the contents": (
        lambda folder: move_chunks(folder, "fzero/step-0/contents.json"),
        lambda folder, out: fzero.load(folder / "fzero", step=made()[0]),
        rf"contents.json names '/etc/passwd0'.*{LEADS_OUT}",
    ),
    "a file in an index of weights": (
        lambda folder: write(
            folder / "weights" / INDEX, json.dumps({"weight_map": {"weight": "../x.safetensors"}})
        ),
        lambda folder, out: fzero.load_weights(folder / "weights", step=made()[0]),
        rf"{INDEX} names '../x.safetensors'.*{LEADS_OUT}",
    ),
    "an engine's folder": (
        lambda folder: None,
        lambda folder, out: fzero.load(folder / "engine", step=made()[0]),
        r"holds tags of an engine; pass .*engine/global_step0, the tag that 'latest' names",
    ),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_name_in_a_file_leads_nowhere_else(case: str, saved: Path, tmp_path: Path) -> None:
    change, read, match = PATHS[case]
    folder = tmp_path / "a" / "b" / "c" / "copy"
    shutil.copytree(saved, folder)
    change(folder)
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(fzero.CheckpointError, match=match):
        read(folder, folder / "out")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_no_link_is_written_through(tmp_path: Path) -> None:
    step, state = made()
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    folder = tmp_path / "checkpoints"
    fzero.save(state, folder, step=step)
    (folder / ".latest.new").symlink_to(theirs)
    with pytest.raises(
        fzero.CheckpointError,
        match=r"\.latest\.new: must not be a link, but leads to .*theirs; remove it",
    ):
        fzero.save(state, folder, step=step)
    out = tmp_path / "out"
    out.mkdir()
    (out / ".model.safetensors.new").symlink_to(theirs)
    with pytest.raises(FileExistsError, match=r"model\.safetensors\.new: must not be a link"):
        fzero.checkpoint.export(folder, out)
    (out / ".global_step0_universal.new").symlink_to(tmp_path)
    with pytest.raises(
        fzero.CheckpointError, match=r"\.global_step0_universal\.new: must not be a link"
    ):
        fzero.deepspeed.export_deepspeed(folder, out)
    rank = claims.folder_of(tmp_path, 0)
    rank.mkdir()
    (rank / claims.UNFINISHED).symlink_to(theirs)
    with pytest.raises(FileExistsError, match=r"owner\.new: must not be a link"):
        claims.claim(tmp_path, rank, "clean")
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("state", [0, 1])
def test_a_folder_of_another_user_is_not_taken(state: int, tmp_path: Path) -> None:
    folder = claims.folder_of(tmp_path, 0, state)
    folder.mkdir(parents=True)
    with (
        patch.object(os, "geteuid", lambda: os.getuid() + 1),
        pytest.raises(
            PermissionError,
            match=rf"{folder}: must belong to the user .* belongs to user {os.getuid()}",
        ),
    ):
        claims.claim(tmp_path, folder, "clean")
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match=rf"{folder}: must not be a link"):
        claims.claim(tmp_path, folder, "clean")


# --- several jobs ---------------------------------------------------------------------------------


def test_one_job_alone_saves_to_a_folder(tmp_path: Path) -> None:
    step, state = made()
    fzero.save(state, tmp_path, step=step)
    me = json.loads((tmp_path / files.JOB).read_text())
    before = sorted(tmp_path.rglob("*"))

    def owned_by(**changed: Any) -> None:
        (tmp_path / files.JOB).write_text(json.dumps(me | changed))

    parent = claims._started(os.getppid())
    owned_by(pid=os.getppid(), started=parent)  # lives
    with pytest.raises(
        fzero.CheckpointError,
        match=rf"only one job may save to .*, and process {os.getppid()} on .* does too",
    ):
        fzero.save(state, tmp_path, step=step)
    owned_by(host="another")  # came after this process had saved
    with pytest.raises(
        fzero.CheckpointError, match=r"and process \d+ on another does too; nothing was written"
    ):
        fzero.save(state, tmp_path, step=step)
    assert sorted(tmp_path.rglob("*")) == before
    files._CLAIMED.clear()  # as of a job that goes on where one on another machine stood
    assert fzero.save(state, tmp_path, step=step).name == "step-0-2"
    owned_by(pid=os.getppid(), started=-1)  # has ended
    assert fzero.save(state, tmp_path, step=step).name == "step-0-3"


def folders_that_differ(folder: str) -> list[str]:
    step, state = made()
    own, reported = Path(folder) / str(step.rank), []
    for call in (
        lambda: fzero.save(state, own, step=step),
        lambda: fzero.load(own, step=step),
        lambda: fzero.load_weights(own, step=step),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        reported.append(str(raised.value))
    return reported


def test_ranks_that_name_different_folders_are_refused_before_anything_is_written(
    ranks: Any, tmp_path: Path
) -> None:
    for reported in ranks(2, folders_that_differ, str(tmp_path)):
        for call, line in zip(("save", "load", "load_weights"), reported, strict=True):
            assert line.startswith(
                f"{call}: dir must be the same on all ranks, got {tmp_path}/0 on rank 0 and "
                f"{tmp_path}/1 on"
            )
    assert not list(tmp_path.iterdir())
