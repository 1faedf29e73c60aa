"""The demo, as a user runs it: in processes of its own, with the smallest model."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--size", "tiny", "--out"]


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.fixture
def text(examples):
    return importlib.import_module("text")


def processes_of(out: Path) -> list[psutil.Process]:
    """The demo's processes that write to this folder, its ranks included."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(out) in (process.info["cmdline"] or [])
    ]


@pytest.mark.long
def test_the_demo_learns_with_muon(tmp_path):
    run = subprocess.run(
        [*COMMAND, tmp_path, "--steps", "40", "--optimizer", "muon"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "each computed by one of 2 ranks" in run.stdout
    losses = json.loads((tmp_path / "demo.json").read_text())["training_bits_per_byte"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.long
def test_the_demo_learns_and_leaves_its_picture_and_its_numbers(tmp_path, examples):
    run = subprocess.run(
        [*COMMAND, tmp_path, "--steps", "40"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert (
        "gzip -9" in run.stdout
        and "Python by this model" in run.stdout
        and "step 40/40" in run.stdout
    )
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "demo.json").read_text())
    losses = result["training_bits_per_byte"]
    assert len(losses) == 40 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert (
        math.isfinite(result["validation_bits_per_byte"]) and 1 < result["gzip_bits_per_byte"] < 4
    )
    gpt = importlib.import_module("gpt")
    numel = sum(parameter.numel() for parameter in gpt.GPT(gpt.SIZES["tiny"]).parameters())
    # ZeRO-3 on two ranks, and a little padding
    assert 1 <= result["state_nbytes"] / (16 * numel / 2) < 1.01
    assert not processes_of(tmp_path)


@pytest.mark.long
def test_a_demo_of_some_seconds_ends_at_a_step_they_agree_on_and_shows_what_a_rank_holds(tmp_path):
    run = subprocess.run(
        [*COMMAND, tmp_path, "--seconds", "4"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result["training_bits_per_byte"][-1] < result["training_bits_per_byte"][0]
    (of_stage_3,) = [line for line in run.stdout.splitlines() if line.strip("│ ").startswith("3 ")]
    *_, planned, measured = of_stage_3.replace("│", " ").split()
    assert planned == measured == f"{result['state_nbytes'] / 1e6:.2f}"


@pytest.mark.long
def test_the_demo_learns_with_its_optimizer_state_in_files_which_go_at_the_end(tmp_path):
    run = subprocess.run(
        [*COMMAND, tmp_path, "--steps", "10", "--offload", "nvme"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "demo.json").read_text())
    assert (
        "in files: gradients" in run.stdout and result["nbytes_by_memory"]["nvme"]["optimizer"] > 0
    )
    losses = result["training_bits_per_byte"]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert not list(tmp_path.rglob("*.flat"))


@pytest.mark.long
def test_the_demo_goes_on_from_what_it_saved(tmp_path):
    losses = []
    for steps in ("4", "6"):
        command = [*COMMAND, str(tmp_path), "--steps", steps, "--save", str(tmp_path / "folder")]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        losses.append(json.loads((tmp_path / "demo.json").read_text())["training_bits_per_byte"])
    assert f"goes on from {tmp_path / 'folder' / 'step-4'}" in run.stdout
    assert len(losses[1]) == 6 and losses[1][:4] == losses[0] and losses[1][4] < losses[0][2]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_demo_learns_in_16_bits_and_keeps_what_the_paper_says(tmp_path, examples, dtype):
    run = subprocess.run(
        [*COMMAND, tmp_path, "--steps", "20", "--dtype", dtype],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert (
        f"parameters {'bfloat16' if dtype == 'bf16' else 'float16'}, master float32" in run.stdout
    )
    result = json.loads((tmp_path / "demo.json").read_text())
    losses = result["training_bits_per_byte"]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    gpt = importlib.import_module("gpt")
    numel = sum(parameter.numel() for parameter in gpt.GPT(gpt.SIZES["tiny"]).parameters())
    # 2 + 4 + 8 + 2 bytes, divided among two ranks
    assert 1 <= result["state_nbytes"] / (16 * numel / 2) < 1.01


@pytest.mark.nightly
def test_the_demo_sends_less_through_comm_hooks_and_shows_that_it_learns_as_well(tmp_path):
    command = [*COMMAND, tmp_path, "--steps", "40", "--comm-hooks", "zero++"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "gathers along data through quantize(8, 256)" in run.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    runs = json.loads((tmp_path / "demo.json").read_text())["runs"]
    exact, coded = runs["exact"], runs["zero++"]
    assert exact["sent_nbytes_per_step"] / coded["sent_nbytes_per_step"] > 4
    assert "bytes in a step" in run.stdout and f"{coded['sent_nbytes_per_step']:,}" in run.stdout
    losses = coded["training_bits_per_byte"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]) and losses != exact["training_bits_per_byte"]
    # Steps in 4 and 8 bits are others: a twentieth is many times what forty of them were found to
    # differ by.
    assert coded["validation_bits_per_byte"] == pytest.approx(
        exact["validation_bits_per_byte"], rel=0.05
    )


@pytest.mark.long
def test_the_demo_does_what_a_configuration_says(tmp_path):
    (tmp_path / "my.json").write_text(
        """{  # as for DeepSpeed
            train_batch_size: 12, gradient_accumulation_steps: 3, bf16: {enabled: true}, steps_per_print: 10
            optimizer: {type: "Muon", params: {lr: 0.01}}, zero_optimization: {stage: 2}
            scheduler: {type: "WarmupLR", params: {warmup_num_steps: 5}}
        }"""
    )
    command = [*COMMAND, tmp_path, "--steps", "10", "--config", tmp_path / "my.json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert (
        "ZeRO stage 2 on 2 ranks" in run.stdout
        and "bfloat16" in run.stdout
        and "muon" in run.stdout
    )
    losses = json.loads((tmp_path / "demo.json").read_text())["training_bits_per_byte"]
    assert losses[-1] < losses[0]
    assert (
        subprocess.run([*command, "--stage", "1"], capture_output=True, timeout=60).returncode == 2
    )


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_stops_every_rank_after_a_step_they_agree_on(tmp_path, number):
    run = subprocess.Popen(
        [*COMMAND, tmp_path, "--steps", "100000"],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        while "learn" not in (line := run.stdout.readline()):  # then every rank has its state
            assert line, run.communicate()[1]
        assert len(processes_of(tmp_path)) == 3  # two ranks and the one that started them
        time.sleep(0.5)
        run.send_signal(number)
        output, errors = run.communicate(timeout=20)
    finally:
        for process in processes_of(tmp_path):
            process.kill()
    assert "stopped at step" in output
    assert run.returncode == 130 and not errors
    assert not list(tmp_path.iterdir())


def test_the_split_is_by_file_and_the_same_every_time(text, tmp_path):
    for name in (
        "ast.py",
        "copy.py",
        "glob.py",
        "os.py",
        "test/copy.py",
        "site-packages/copy.py",
        "notes.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    training, held_out = text.read_text(tmp_path)
    assert (bytes(training), bytes(held_out)) == (b"ast.pyos.py", b"copy.pyglob.py")


def test_the_standard_library_gives_a_tenth_of_its_bytes_at_most_to_validation(text):
    training, held_out = text.read_text()
    assert len(training) > 1_000_000 and 0.01 < len(held_out) / len(training) < 0.1


def test_ranks_and_steps_draw_different_windows_and_the_same_ones_again(text):
    data = text.read_text()[0]

    def draw(**change):
        where = {"seed": 0, "step": 0, "rank": 0} | change
        return text.random_batch(data, context=16, batch_size=4, **where)[0].tolist()

    drawn = [draw(), draw(rank=1), draw(step=1), draw(seed=1)]
    assert drawn[0] == draw() and all(drawn.count(batch) == 1 for batch in drawn)
