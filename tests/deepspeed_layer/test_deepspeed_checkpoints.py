"""The laws of DeepSpeed's checkpoints: what the real DeepSpeed wrote fzero goes on
from, and DeepSpeed from what fzero wrote.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from deepspeed_jobs import DECAY_FREE, VOCABULARY, Odd, batch, config, make
from ranks import RankPool
from test_reshard import assert_same
from torch import nn

import fzero
from fzero.__main__ import main
from fzero.checkpoint import dcp_format as checkpoint_format
from fzero.deepspeed.formats import files, load as deepspeed_checkpoint
from fzero.deepspeed.formats.flat import MASTER, of_ranks
from fzero.deepspeed.formats.source import DeepSpeedFiles

BEFORE, AFTER = 4, 4
"""Updates before a checkpoint and after it."""


class Job(NamedTuple):
    """A training with DeepSpeed that was saved."""

    stage: int
    precision: str
    world_size: int
    groups: bool = False
    has_scalar: bool = False
    """A 0-d parameter, which DeepSpeed's converter cannot take."""
    optimizer: str = "AdamW"

    @property
    def config(self) -> dict[str, Any]:
        return config(self.stage, self.precision, self.optimizer)


JOBS = (
    *(Job(1, "fp32", 1, True), Job(2, "bf16", 1, has_scalar=True), Job(3, "fp32", 1)),
    *(
        Job(1, "bf16", 2, True),
        Job(2, "fp32", 2),
        Job(3, "bf16", 2, True, True),
        Job(1, "fp16", 2),
        Job(3, "fp16", 2),
    ),
    *(Job(1, "bf16", 3, True, True), Job(2, "fp32", 3, True), Job(3, "fp32", 3, True)),
    *(
        Job(2, "fp32", 2, optimizer="Adam"),
        Job(1, "bf16", 2, optimizer="Adagrad"),
        Job(2, "fp32", 2, optimizer="SGD"),
    ),
)
NIGHTLY = tuple(
    job
    for stage in (1, 2, 3)
    for precision in ("fp32", "bf16", "fp16")
    for world_size in (1, 2, 3)
    for groups in (False, True)
    if (job := Job(stage, precision, world_size, groups)) not in JOBS
)


class DeepSpeed:
    """Runs jobs of the real DeepSpeed in processes of their own: of the installed one, or
    of the source in a folder.
    """

    def __init__(self, folder: Path, source: Path | None = None) -> None:
        self.folder = folder
        sources = [] if source is None else [str(source)]
        path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
        server = Path(__file__).parents[1] / "support" / "deepspeed_server.py"
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(server)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self._written: dict[Job, dict[str, Any]] = {}

    def run(self, world_size: int, jobs: list[dict[str, Any]]) -> list[Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"world_size": world_size, "jobs": jobs}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"DeepSpeed ended: {Path(self._log.name).read_text()[-3000:]}"
        answers = json.loads(line)
        assert not isinstance(answers, str), answers
        return answers

    def written(self, job: Job) -> dict[str, Any]:
        """What DeepSpeed reported of a job; its checkpoint is in `path(job)`."""
        if job not in self._written:
            (self._written[job],) = self.run(job.world_size, [request_of(job, self.path(job))])
        return self._written[job]

    def path(self, job: Job) -> Path:
        return self.folder / "-".join(map(str, job))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


def request_of(job: Job, path: Path) -> dict[str, Any]:
    return {
        "config": job.config,
        "groups": job.groups,
        "has_scalar": job.has_scalar,
        "before": BEFORE,
        "after": AFTER,
        "save": str(path),
    }


def ranks_of(
    job: Job, world_size: int | None = None, **changes: Any
) -> fzero.simulation.LockstepRanks:
    """The same training with fzero, from other weights, on ranks in lockstep."""
    groups = [{"params": DECAY_FREE, "weight_decay": 0.0}] if job.groups else ()
    step = fzero.make_train_step(
        make(seed=7, has_scalar=job.has_scalar), job.config | changes, param_groups=groups
    )
    return fzero.simulate(step, world_size or job.world_size, by="lockstep")


def batches(number: int, world_size: int) -> Any:
    return tuple(
        torch.stack(x)
        for x in zip(*(batch(number, rank, world_size) for rank in range(world_size)))
    )


def run(
    ranks: fzero.simulation.LockstepRanks, state: Any, start: int, stop: int
) -> tuple[Any, list[float]]:
    losses = []
    for number in range(start, stop):
        state, metrics = ranks(state, batches(number, ranks.world_size))
        losses.append(metrics.loss.item())
    return state, losses


def assert_close(ours: list[float], theirs: list[float], precision: str) -> None:
    """The first loss is of the same weights: it differs by the order in which the
    losses of ranks are added up. Those after it by the order in which gradients are: by
    an fp32 rounding, or by one of 16 bits, of 2**-8, in some of them."""
    rounding = 1e-6 if precision == "fp32" else 2e-3
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours == pytest.approx(theirs, rel=rounding)


# --- from DeepSpeed -------------------------------------------------------------------------------


def check_goes_on(deepspeed: DeepSpeed, job: Job) -> None:
    theirs, ranks = deepspeed.written(job), ranks_of(job)
    state, client, path = fzero.deepspeed.import_deepspeed(deepspeed.path(job), step=ranks)
    assert path == deepspeed.path(job) / f"global_step{BEFORE}"
    assert {key: client[key] for key in ("next", "words")} == {"next": BEFORE, "words": ["a", "b"]}
    assert client["deepspeed"]["global_steps"] == BEFORE
    state, losses = run(ranks, state, BEFORE, BEFORE + AFTER)
    assert_close(losses, theirs["losses"], job.precision)
    assert int(state.step[0]) == BEFORE + AFTER - theirs["skipped"]
    assert float(state.loss_scale.scale[0]) == theirs["scale"]


@pytest.mark.covering(0)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_training_goes_on_with_the_losses_that_deepspeed_has_itself(
    deepspeed: DeepSpeed, job: Job
) -> None:
    check_goes_on(deepspeed, job)


@pytest.mark.nightly
@pytest.mark.parametrize("job", NIGHTLY, ids=str)
def test_training_goes_on_with_the_losses_that_deepspeed_has_itself_in_all_cases(
    deepspeed: DeepSpeed, job: Job
) -> None:
    check_goes_on(deepspeed, job)


WAYS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "parameters in another order": (2, "fp32", {"round_robin_gradients": True}, {}),
    "no padding": (1, "fp32", {"elastic_checkpoint": True}, {}),
    "its BF16_Optimizer": (1, "bf16", {}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "sub-groups": (3, "fp32", {"sub_group_size": 150}, {}),
    "small parameters whole": (3, "bf16", {"stage3_param_persistence_threshold": 100}, {}),
}
"""How else DeepSpeed saves: stage, precision, keys of `zero_optimization`, and other
keys.
"""


Ways = dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]]


def check_ways(deepspeed: DeepSpeed, ways: Ways, tmp_path: Path) -> None:
    requests = []
    for way, (stage, precision, zero, keys) in ways.items():
        job = Job(stage, precision, 2, True)
        cfg = job.config | keys | {"zero_optimization": job.config["zero_optimization"] | zero}
        requests.append(request_of(job, tmp_path / way) | {"config": cfg})
    for (way, (stage, precision, _, keys)), theirs in zip(
        ways.items(), deepspeed.run(2, requests), strict=True
    ):
        ranks = ranks_of(Job(stage, precision, 2, True), **keys)
        state = fzero.deepspeed.import_deepspeed(tmp_path / way, step=ranks).state
        assert_close(run(ranks, state, BEFORE, BEFORE + AFTER)[1], theirs["losses"], precision)


@pytest.mark.long
def test_the_other_ways_of_deepspeed_to_save_are_read_as_well(
    deepspeed: DeepSpeed, tmp_path: Path
) -> None:
    check_ways(deepspeed, WAYS, tmp_path)


OTHER_VERSIONS: dict[str, Ways] = {
    "0.18.9": {},
    "0.19.8": {
        f"aligned {stage} {precision}": (stage, precision, {"parameter_alignment": True}, {})
        for stage, precision in ((1, "fp32"), (2, "bf16"))
    },
}
"""Versions beside the installed one, each with ways to save that are its own."""


@pytest.mark.nightly
@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_checkpoints_of_other_versions_are_read_and_written(version: str, tmp_path: Path) -> None:
    words = ["download", f"deepspeed=={version}", "--no-deps", "--no-binary", ":all:"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, *words, "-d", str(tmp_path)], check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (tmp_path / "jobs").mkdir()
    deepspeed = DeepSpeed(tmp_path / "jobs", tmp_path / f"deepspeed-{version}")
    try:
        for job in (Job(2, "bf16", 2, True), Job(3, "fp16", 2), Job(1, "fp32", 3)):
            check_goes_on(deepspeed, job)
        check_ways(deepspeed, WAYS | OTHER_VERSIONS[version], tmp_path)
        for index, job in enumerate((Job(2, "fp32", 2), Job(3, "bf16", 2))):
            check_back(deepspeed, job, tmp_path / f"back {index}")
    finally:
        deepspeed.close()


def test_elements_between_aligned_parameters_are_left_out(tmp_path: Path) -> None:
    """As DeepSpeed 0.19.8 saves with `parameter_alignment`: one element lies between."""
    values = torch.tensor([1.0, 2.0, 3.0, -1.0, 4.0, 5.0])
    model = {"param_shapes": [{"a": torch.Size([3]), "b": torch.Size([2])}]}
    for gaps, fits in (([[1, 0]], True), ([[1, 0, 0]], False)):
        files_of = {}
        for rank, shard in enumerate(values.chunk(2)):
            saved = {
                "zero_stage": 2,
                "partition_count": [2],
                "single_partition_of_fp32_groups": [shard],
                "base_optimizer_state": {"state": {}, "param_groups": [{"params": [0]}]},
                "param_alignment_paddings": gaps,
            }
            files_of[rank] = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": saved}, files_of[rank])
        if not fits:
            with pytest.raises(fzero.checkpoint.CheckpointError, match="take files of one save"):
                of_ranks(files_of, model, tmp_path / "mp_rank_00_model_states.pt")
            continue
        found = of_ranks(files_of, model, tmp_path / "mp_rank_00_model_states.pt")
        read = [
            found.flat(MASTER, rank, 0)[start : start + numel]
            for _, rank, start, numel in found.places["b"].spans(0, 2)
        ]
        assert torch.cat(read).tolist() == [4.0, 5.0]


@cache
def in_one_process(path: Path, job: Job) -> tuple[fzero.simulation.LockstepRanks, Any]:
    ranks = ranks_of(job, 1, zero_optimization={"stage": 0})
    return ranks, fzero.deepspeed.import_deepspeed(path, step=ranks).state


@pytest.mark.sample(5)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_what_is_imported_is_what_deepspeeds_own_tools_make_of_it(
    deepspeed: DeepSpeed, job: Job, tmp_path: Path
) -> None:
    deepspeed.written(job)
    path, weights, made = (
        deepspeed.path(job),
        tmp_path / "weights.pt",
        tmp_path / "global_step4_universal",
    )
    tag = str(path / f"global_step{BEFORE}")
    deepspeed.run(1, [{"input": str(path), "weights": str(weights)}])
    ranks, state = in_one_process(path, job)
    theirs, ours = torch.load(weights), ranks.gather(state)
    theirs["head.weight"] = theirs["embed.weight"]
    assert theirs.keys() == ours.keys() - (
        {"blocks.1.1.weight"} if job.stage == 1 else set()
    )  # frozen ones are left out
    assert_same(
        [{key: x.float() for key, x in theirs.items()}], [{key: ours[key] for key in theirs}]
    )
    if job.has_scalar or "Adam" not in job.optimizer:  # which DeepSpeed cannot convert
        return
    deepspeed.run(1, [{"input": tag, "output": str(made)}])
    for folder in (made, tmp_path):  # of which latest_universal names the former
        assert_same([fzero.deepspeed.import_deepspeed(folder, step=ranks).state], [state])


TARGETS = ((0, 2), (1, 4), (2, 1), (3, 3))


@pytest.mark.covering(0)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_any_ranks_and_stage_import_what_they_would_cut_of_the_whole_state(
    deepspeed: DeepSpeed, job: Job
) -> None:
    deepspeed.written(job)
    alone, state = in_one_process(deepspeed.path(job), job)
    for stage, world_size in TARGETS:
        ranks = ranks_of(job, world_size, train_batch_size=None, zero_optimization={"stage": stage})
        imported = fzero.deepspeed.import_deepspeed(deepspeed.path(job), step=ranks).state
        resharded = fzero.reshard(state, alone, ranks)
        assert_same([imported._replace(rng={})], [resharded._replace(rng={})])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_of_stage_0_is_read_where_all_parameters_are_of_one_group(
    deepspeed: DeepSpeed, precision: str, tmp_path: Path
) -> None:
    job = Job(0, precision, 2)
    request = request_of(job, tmp_path) | {"all": True}
    theirs = deepspeed.run(2, [request])[0]
    step = fzero.make_train_step(make(seed=7).requires_grad_(), job.config)
    ranks = fzero.simulate(step, 2, by="lockstep")
    state = fzero.deepspeed.import_deepspeed(tmp_path, step=ranks).state
    assert_close(run(ranks, state, BEFORE, BEFORE + AFTER)[1], theirs["losses"], precision)


def import_and_go_on(path: str, cfg: dict[str, Any], placements: Any) -> list[float]:
    step = fzero.make_train_step(make(seed=7), cfg, placements=placements)
    state, losses = fzero.deepspeed.import_deepspeed(path, step=step).state, []
    for number in range(BEFORE, BEFORE + AFTER):
        state, metrics = step(state, batch(number, step.rank, step.world_size))
        losses.append(metrics.loss.item())
    return losses


@pytest.mark.parametrize(("stage", "world_size", "in_files"), [(3, 3, False), (2, 2, True)])
def test_processes_go_on_from_it_with_their_state_in_files_too(
    deepspeed: DeepSpeed,
    ranks: RankPool,
    stage: int,
    world_size: int,
    in_files: bool,
    tmp_path: Path,
) -> None:
    job = Job(2, "fp32", 2)
    theirs = deepspeed.written(job)["losses"]
    placements = {"optimizer/*": fzero.Placement("nvme", path=str(tmp_path))} if in_files else None
    for losses in ranks(
        world_size, import_and_go_on, str(deepspeed.path(job)), config(stage), placements
    ):
        assert_close(losses, theirs, job.precision)


def test_a_rank_reads_what_it_holds_and_no_more(
    deepspeed: DeepSpeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(3, "fp32", 3, True)
    deepspeed.written(job)
    numels: list[int] = []
    runs = DeepSpeedFiles._runs

    def counted(self: Any, *where: Any) -> Iterator[Any]:
        for start, values in runs(self, *where):
            numels.append(values.numel())
            yield start, values

    monkeypatch.setattr(DeepSpeedFiles, "_runs", counted)
    ranks = ranks_of(job, 2)
    state = fzero.deepspeed.import_deepspeed(deepspeed.path(job), step=ranks).state
    held = sum(
        x.numel() for x in optree.tree_leaves([state.params, state.optimizer, state.buffers])
    )
    assert held / 2 < sum(numels) <= held


# --- as a checkpoint of fzero ---------------------------------------------------------------------


@pytest.mark.parametrize("job", [JOBS[0], JOBS[5], JOBS[6]], ids=str)
def test_a_converted_checkpoint_is_loaded_as_what_was_imported(
    deepspeed: DeepSpeed,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deepspeed.written(job)
    monkeypatch.setattr(deepspeed_checkpoint, "MOST_NBYTES", 1000)
    in_memory: list[int] = []

    def counted(folder: Path, number: int, fragments: Any) -> Any:
        in_memory.append(sum(flat.nbytes for _, flat in fragments))
        return write(folder, number, fragments)

    write = checkpoint_format.write
    monkeypatch.setattr("fzero.deepspeed.formats.load.write", counted)
    assert main(["import-deepspeed", str(deepspeed.path(job)), str(tmp_path)]) == 0
    made = Path(capsys.readouterr().out.strip())
    assert made == tmp_path / f"step-{int(json.loads((made / 'fzero.json').read_text())['step'])}"
    assert max(in_memory) <= 4 * VOCABULARY * 11  # the largest tensor
    ranks = ranks_of(job)
    imported, loaded = (
        fzero.deepspeed.import_deepspeed(deepspeed.path(job), step=ranks),
        fzero.load(tmp_path, step=ranks),
    )
    assert_same([loaded.state], [imported.state])
    assert repr(loaded.client) == repr(imported.client)
    weights = fzero.load_weights(tmp_path, step=ranks)
    assert_same([ranks.gather(weights)], [ranks.gather(imported.state)])
    assert main(["export", str(tmp_path), str(tmp_path / "weights"), "--dtype", "float32"]) == 0
    assert_same(
        [ranks.gather(fzero.load_weights(tmp_path / "weights", step=ranks))],
        [ranks.gather(imported.state)],
    )


# --- to DeepSpeed ---------------------------------------------------------------------------------

BACK = (
    *(Job(1, "fp32", 1), Job(2, "bf16", 2, True, True), Job(3, "fp32", 2), Job(1, "fp16", 2)),
    *(
        Job(3, "bf16", 3),
        Job(3, "fp16", 3),
        Job(2, "fp32", 3),
        Job(2, "fp32", 2, optimizer="Adagrad"),
    ),
)


@pytest.mark.covering(0)
@pytest.mark.parametrize("job", BACK, ids=str)
def test_deepspeed_goes_on_from_an_export_with_the_losses_that_fzero_has_itself(
    deepspeed: DeepSpeed, job: Job, tmp_path: Path
) -> None:
    check_back(deepspeed, job, tmp_path)


def check_back(deepspeed: DeepSpeed, job: Job, tmp_path: Path) -> None:
    ranks = ranks_of(job, 2, zero_optimization={"stage": 3 if job.stage < 3 else 1})
    middle, _ = run(ranks, ranks.init(make(has_scalar=job.has_scalar).state_dict()), 0, BEFORE)
    fzero.save(middle, tmp_path / "ours", step=ranks, client={"next": BEFORE, "words": ["c"]})
    out = tmp_path / "theirs"
    words = [
        "export",
        str(tmp_path / "ours"),
        str(out),
        "--format",
        "deepspeed-universal",
        "--torch-optimizer",
    ]
    assert main(words) == 0
    state, ours = run(ranks, middle, BEFORE, BEFORE + AFTER)
    request = request_of(job, out) | {
        "config": job.config | {"checkpoint": {"load_universal": True}}
    }
    theirs = deepspeed.run(job.world_size, [request | {"load": request.pop("save")}])[0]
    assert_close(theirs["losses"], ours, job.precision)
    assert theirs["scale"] == float(state.loss_scale.scale[0])
    assert_same(
        [fzero.deepspeed.import_deepspeed(out, step=ranks).state._replace(rng={})],
        [loaded_of(tmp_path / "ours", ranks)],
    )


def loaded_of(path: Path, ranks: fzero.simulation.LockstepRanks) -> Any:
    return fzero.load(path, step=ranks).state._replace(rng={})


# --- what goes wrong ------------------------------------------------------------------------------


class Runs:
    """Removes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return shutil.rmtree, (str(self.path),)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Changes what is in a file of torch.save, which then has no objects of DeepSpeed's
    any more.
    """
    content = files.read(path)
    reported = content.get("optimizer_state_dict", {})
    for key in ("loss_scaler", "param_slice_mappings"):
        reported.pop(key, None)
    if reported:
        reported["zero_stage"] = int(reported["zero_stage"])
    change(content)
    torch.save(content, path.with_suffix(".new"))  # what is in `content` is mapped from the old one
    path.with_suffix(".new").rename(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def optimizer_file(folder: Path, rank: int) -> Path:
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


MODEL = "mp_rank_00_model_states.pt"
SECOND_LAYER = "layer_02-model_00-model_states.pt"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank's file is missing": (
        lambda folder: optimizer_file(folder, 1).unlink(),
        r"the files of all 2 ranks .* 'zero_pp_rank_1_mp_rank_00_optim_states.pt' is missing .*; "
        r"copy it",
    ),
    "the first rank's file is missing": (
        lambda folder: optimizer_file(folder, 0).unlink(),
        r"'zero_pp_rank_0_mp_rank_00_optim_states.pt' is missing",
    ),
    "all ranks' files are missing": (
        lambda folder: [optimizer_file(folder, rank).unlink() for rank in (0, 1)],
        r"must hold the masters .* '\*_optim_states.pt', and has none; copy",
    ),
    "another save left a file": (
        lambda folder: shutil.copy(optimizer_file(folder, 1), optimizer_file(folder, 2)),
        r"files of the 2 ranks .* 'zero_pp_rank_2_mp_rank_00_optim_states.pt': one of another save",
    ),
    "a rank's file is cut": (
        lambda folder: cut(optimizer_file(folder, 1)),
        r"zero_pp_rank_1_mp_rank_00_optim_states.pt must be a whole file .* cannot be read: .*; "
        r"copy it again",
    ),
    "the model's file is cut": (
        lambda folder: cut(folder / MODEL),
        rf"{MODEL} must be a whole file .* cannot be read",
    ),
    "the model's file is missing": (
        lambda folder: (folder / MODEL).unlink(),
        rf"{MODEL} must be .* is missing; copy",
    ),
    "a class that runs code": (
        lambda folder: edit(folder / MODEL, lambda reported: reported.update(hooks=Runs(folder))),
        rf"{MODEL} .* needs the class 'shutil.rmtree' .* might run code; save the checkpoint again "
        rf"without it",
    ),
    "a mixture of experts": (
        lambda folder: (folder / "layer_0_expert_0_mp_rank_00_model_states.pt").touch(),
        r"layer_0_expert_0.* is of a mixture of experts .*; save the whole weights in the job that "
        r"trained it",
    ),
    "experts reported by a key": (
        lambda folder: edit(folder / MODEL, lambda reported: reported.update(num_experts=[4])),
        rf"{MODEL} with 'num_experts' is of a mixture of experts",
    ),
    "a pipeline": (
        lambda folder: (folder / SECOND_LAYER).touch(),
        rf"{SECOND_LAYER} is of a pipeline",
    ),
    "tensor parallelism": (
        lambda folder: (folder / MODEL.replace("00", "01")).touch(),
        r"mp_rank_01_model_states.pt is of tensor or pipeline parallelism",
    ),
    "state on NVMe": (
        lambda folder: (folder / "offloaded_tensors").mkdir(),
        r"is of optimizer state on NVMe",
    ),
    "files of two saves": (
        lambda folder: edit(
            folder / MODEL, lambda reported: reported["param_shapes"][0].pop("embed.weight")
        ),
        r"zero_pp_rank_0.* must have 1/2 of the \d+ elements that mp_rank_00.* gives for group 0",
    ),
    "a shorter shard": (
        lambda folder: edit(
            optimizer_file(folder, 1), lambda reported: shorten(reported["optimizer_state_dict"])
        ),
        r"zero_pp_rank_1.* must have at least \d+ elements of 'fp32' where .* is, and has 3",
    ),
    "another optimizer": (
        lambda folder: [edit(optimizer_file(folder, rank), add_amsgrad) for rank in (0, 1)],
        r"must be one of those known .* is exp_avg, exp_avg_sq, max_exp_avg_sq; take the weights "
        r"alone, fzero.load_weights",
    ),
    "no optimizer state": (
        lambda folder: [edit(optimizer_file(folder, rank), forget) for rank in (0, 1)],
        r"must be one of those known here .* and is none, as before the first update; take the "
        r"weights alone",
    ),
    "an old format": (
        lambda folder: edit(folder / MODEL, lambda reported: reported.pop("param_shapes")),
        rf"{MODEL} must have 'param_shapes'",
    ),
    "a tag that is not there": (
        lambda folder: (folder.parent / "latest").write_text("global_step9"),
        r"latest must name a folder beside it, and 'global_step9' is not there",
    ),
    "nothing": (
        lambda folder: shutil.rmtree(folder.parent),
        r"must hold a file 'latest' .* pass the folder",
    ),
}


def shorten(reported: Any) -> None:
    reported["single_partition_of_fp32_groups"] = [
        x[:3] for x in reported["single_partition_of_fp32_groups"]
    ]


def add_amsgrad(reported: Any) -> None:
    for state in reported["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()


def forget(reported: Any) -> None:
    reported["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_cannot_be_read_is_reported_with_file_and_fix(
    deepspeed: DeepSpeed, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(2, "fp32", 2)
    deepspeed.written(job)
    shutil.copytree(deepspeed.path(job), tmp_path / "theirs")
    folder = tmp_path / "theirs" / f"global_step{BEFORE}"
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises(fzero.CheckpointError, match=f"import_deepspeed: .*{message}"):
        fzero.deepspeed.import_deepspeed(tmp_path / "theirs", step=ranks_of(job))
    assert main(["import-deepspeed", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert {path.name for path in (tmp_path / "ours").glob("*")} <= {".job.json"}
    assert fault == "nothing" or folder.exists()


@pytest.mark.parametrize("job", [Job(2, "fp32", 2), Job(3, "bf16", 2, True, True)], ids=str)
def test_the_weights_can_be_taken_alone_whatever_the_optimizer_state(
    deepspeed: DeepSpeed, job: Job, tmp_path: Path
) -> None:
    deepspeed.written(job)
    shutil.copytree(deepspeed.path(job), tmp_path, dirs_exist_ok=True)
    ranks = ranks_of(job)
    whole = ranks.gather(fzero.deepspeed.import_deepspeed(tmp_path, step=ranks).state)
    if job.stage == 2:
        FAULTS["no optimizer state"][0](tmp_path / f"global_step{BEFORE}")
    for path in (tmp_path, tmp_path / f"global_step{BEFORE}"):
        state = fzero.load_weights(path, step=ranks)
        assert_same([ranks.gather(state)], [whole])
        assert int(state.step[0]) == 0


class Renamed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.unused
        del self.unused


OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "another width": (
        lambda: Odd(12),
        {},
        r"'.*' must have shape \(.*12.*\) in the checkpoint, and has \(.*11.*\)",
    ),
    "another name": (Renamed, {}, r"'model.unused' must be of this model, and is not"),
    "another optimizer": (
        Odd,
        {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
        r"must keep the same tensors in both jobs, and kept AdamState\(.exp_avg, .exp_avg_sq, "
        r".step\)",
    ),
    "a narrower master": (
        Odd,
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        r"must not become narrower, and is float32 in the checkpoint but bfloat16 in this step",
    ),
}


def test_what_was_frozen_there_begins_anew_and_what_is_frozen_here_keeps_its_values(
    deepspeed: DeepSpeed,
) -> None:
    job = Job(2, "fp32", 2)
    deepspeed.written(job)
    states = []
    for flag in (False, True):
        model = make()
        if flag:
            model.unused.requires_grad_(False)
            model.blocks[1][1].weight.requires_grad_(True)
        step = fzero.make_train_step(model, job.config, after=states[0][0] if flag else None)
        ranks = fzero.simulate(step, 2, by="lockstep")
        message = r"of 'blocks.1.1.weight' begins anew, .*; that of 'unused' is not loaded"
        with pytest.warns(UserWarning, match=message) if flag else nullcontext():
            states.append(
                (
                    step,
                    ranks,
                    fzero.deepspeed.import_deepspeed(deepspeed.path(job), step=ranks).state,
                )
            )
    (_, first, before), (_, second, after) = states
    assert_same([second.gather(after)], [first.gather(before)])
    (key,) = [b.key for b in second.plan.flat_buffers if b.layout.names == ("blocks.1.1.weight",)]
    assert not after.optimizer[key].step.any() and not after.optimizer[key].exp_avg.any()


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_or_optimizer_is_reported_by_its_name(
    deepspeed: DeepSpeed, other: str
) -> None:
    job = Job(2, "fp32", 2)
    deepspeed.written(job)
    make_model, changes, message = OTHERS[other]
    ranks = fzero.simulate(
        fzero.make_train_step(make_model(), job.config | changes), 2, by="lockstep"
    )
    with pytest.raises(ValueError, match=message):
        fzero.deepspeed.import_deepspeed(deepspeed.path(job), step=ranks)


@pytest.mark.parametrize("fault", ["a rank's file is cut", "a shorter shard"])
def test_what_is_wrong_with_one_ranks_part_is_reported_on_all(
    deepspeed: DeepSpeed, ranks: RankPool, fault: str, tmp_path: Path
) -> None:
    job = Job(2, "fp32", 2)
    deepspeed.written(job)
    shutil.copytree(deepspeed.path(job), tmp_path / "theirs")
    spoil, message = FAULTS[fault]
    spoil(tmp_path / "theirs" / f"global_step{BEFORE}")
    for reported in ranks(2, refused_import, str(tmp_path / "theirs")):
        assert re.search(message, reported)


def refused_import(path: str) -> str:
    step = fzero.make_train_step(make(), config(2))
    with pytest.raises(fzero.CheckpointError) as error:
        fzero.deepspeed.import_deepspeed(path, step=step)
    return str(error.value)


def test_an_export_does_not_replace_another_and_names_an_optimizer_that_deepspeed_does_not_know(
    tmp_path: Path,
) -> None:
    for kind in ("AdamW", "Lamb"):
        cfg = config(1) | {
            "optimizer": {"type": kind, "params": {"lr": 1e-2}},
            "train_batch_size": 12,
        }
        ranks = fzero.simulate(fzero.make_train_step(make(), cfg), 1, by="lockstep")
        fzero.save(ranks.init(), tmp_path / kind, step=ranks)
    fzero.deepspeed.export_deepspeed(tmp_path / "AdamW", tmp_path / "out")
    with pytest.raises(
        fzero.CheckpointError,
        match="global_step0_universal must not be there yet, and is; remove it",
    ):
        fzero.deepspeed.export_deepspeed(tmp_path / "AdamW", tmp_path / "out")
    with pytest.raises(
        ValueError,
        match=r"of parameter '.*' must be one that DeepSpeed knows \(AdamState, .*LambState",
    ):
        fzero.deepspeed.export_deepspeed(tmp_path / "Lamb", tmp_path / "out2")
    assert not (tmp_path / "out2").exists()
    for words in (["--format", "deepspeed-universal", "--dtype", "float32"], ["--torch-optimizer"]):
        with pytest.raises(SystemExit):
            main(["export", str(tmp_path / "AdamW"), str(tmp_path / "out3"), *words])


def test_learning_rates_that_differ_are_not_exported_and_a_warning_says_what_to_do(
    tmp_path: Path,
) -> None:
    groups = [{"params": DECAY_FREE, "lr": 1e-3}]
    step = fzero.make_train_step(make(), config(1, scheduler=None), param_groups=groups)
    ranks = fzero.simulate(step, 1, by="lockstep")
    fzero.save(ranks.init(), tmp_path / "ours", step=ranks)
    with pytest.warns(UserWarning, match="by the position of its groups"):
        fzero.deepspeed.export_deepspeed(tmp_path / "ours", tmp_path / "theirs")
