"""The laws of the profiler, and of the command line that plans and profiles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Odd, config, make, tokens

import fzero
from fzero.__main__ import COMMANDS, main
from fzero.common.text_tables import as_text
from fzero.comms.records import CommRecord, Label


class Slow(nn.Module):
    """Two maps, of which the second is many times the work."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(64, 512, bias=False), nn.Linear(512, 4096, bias=False)
        self.unused = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.small(self.norm(x))).square().mean()


def profiled() -> fzero.profiling.Profile:
    return fzero.profiling.profile(
        make(Slow), torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    )


def test_a_profile_reports_parameters_and_operations_of_every_module_that_ran() -> None:
    found = profiled()
    small, large = 32 * 64 * 512, 32 * 512 * 4096
    assert [module.name for module in found.modules] == ["", "small", "large", "norm"]
    assert (found["small"].num_params, found["large"].num_params) == (64 * 512, 512 * 4096)
    assert (found["small"].macs, found["large"].macs, found.model.macs) == (
        small,
        large,
        small + large,
    )
    # The backward has a product for the weight and one for the input, whose gradient the norm's
    # weight needs.
    assert found["small"].backward_flops == 4 * small and found.model.backward_flops == 4 * (
        small + large
    )
    assert found["norm"].flops == 0 and found.model.num_params == sum(
        p.numel() for p in Slow().parameters()
    )
    assert found.model.flops == found.model.forward_flops + found.model.backward_flops


def test_a_profile_finds_where_the_time_goes() -> None:
    found = profiled()
    small, large, whole = found["small"], found["large"], found.model
    assert large.forward > 2 * small.forward > 0 and large.backward > 2 * small.backward > 0, (
        "32 times the work"
    )
    assert large.forward + small.forward < whole.forward and large.backward < whole.backward
    assert min(found.forward, found.backward, found.update, found.ceiling) > 0
    assert found.seconds == found.forward + found.backward + found.update
    assert found.rate == pytest.approx(whole.flops / found.seconds)
    assert found.utilisation == pytest.approx(found.rate / found.ceiling)
    assert whole.rate == pytest.approx(whole.flops / (whole.forward + whole.backward))


def test_a_module_that_sleeps_takes_that_long_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a clock that only sleepers move, the seconds are exact."""
    from fzero.profiling import profiler

    now = [0.0]

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, forward, backward):  # type: ignore[no-untyped-def]
            ctx.backward = backward
            now[0] += forward
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            now[0] += ctx.backward
            return grad, None, None

    class Sleeper(nn.Module):
        def __init__(self, forward: float, backward: float) -> None:
            super().__init__()
            self.seconds, self.weight = (forward, backward), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return Sleep.apply(x * self.weight, *self.seconds)

    class Night(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early = Sleeper(1, 2)
            self.late = nn.Sequential(Sleeper(4, 8), Sleeper(16, 32))

        def forward(self, x: Tensor) -> Tensor:
            return self.late(self.early(x) + x).sum()

    monkeypatch.setattr(profiler._Clock, "now", lambda clock: now[0])
    monkeypatch.setattr(profiler, "matrix_rate", lambda *args: 1.0)
    found = fzero.profiling.profile(Night(), torch.ones(3))
    seconds = {module.name: (module.forward, module.backward) for module in found.modules}
    assert seconds == {
        "": (21, 42),
        "early": (1, 2),
        "late": (20, 40),
        "late.0": (4, 8),
        "late.1": (16, 32),
    }
    assert (found.forward, found.backward) == (21, 42)


def test_a_profile_leaves_the_model_as_it_was() -> None:
    model, batch = make(Slow), torch.randn(4, 64)
    model.small.weight.grad = torch.ones(512, 64)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()
    fzero.profiling.profile(model, batch)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(
        model.small.weight.grad, torch.ones(512, 64)
    )
    assert model.large.weight.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_models_with_tied_frozen_and_unused_parameters_are_profiled() -> None:
    found = fzero.profiling.profile(
        make(Odd), tokens(0), config(0, optimizer={"type": "Lamb", "params": {"lr": 1e-3}})
    )
    assert found.model.num_params == sum(p.numel() for p in Odd().parameters())
    assert found["blocks.1.up"].forward_flops == found["blocks.0.up"].forward_flops > 0
    assert found.update > 0
    depths = {module.name: module.depth for module in found.modules}
    assert (depths[""], depths["blocks.0"], depths["blocks.3.up"], depths["norm"]) == (
        0,
        1,
        2,
        1,
    ), "lists are not called"
    assert "\n   blocks.0 (Block)" in str(found) and "\n     up (Linear)" in str(found)


JOBS = {
    "batch": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    },
    "parameters in host memory": {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        }
    },
    "older keys": {"zero_optimization": {"stage": 2, "cpu_offload": True}},
    "two axes": {
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 4,
            "zero_quantized_weights": True,
        }
    },
    "elastic": {
        "elasticity": {
            "enabled": True,
            "max_train_batch_size": 64,
            "micro_batch_sizes": [2, 4],
            "min_gpus": 4,
            "version": 0.1,
        }
    },
}


@pytest.mark.parametrize("job", JOBS)
def test_the_configuration_of_a_job_of_many_ranks_is_profiled_on_one(job: str) -> None:
    found = fzero.profiling.profile(
        make(Slow), torch.randn(4, 64), JOBS[job] | {"optimizer": {"type": "AdamW"}}, num_runs=1
    )
    assert found.update > 0


def test_a_profile_is_shown_in_parts_and_written_to_a_file(tmp_path: Path) -> None:
    found = profiled()
    text = str(found)
    assert "large (Linear)" in text and "utilisation" in text and "by backward time" in text
    assert "large (Linear)" not in as_text(found.report(detailed=False))
    assert "large (Linear)" not in as_text(found.report(module_depth=0))
    found.show(
        output_file=str(tmp_path / "profile.txt"), module_depth=1, top_modules=1, detailed=True
    )
    assert (tmp_path / "profile.txt").read_text() == as_text(found.report(module_depth=1)) + "\n"


@pytest.mark.parametrize("device", ["meta", "frozen"])
def test_a_model_that_cannot_be_profiled_is_reported(device: str) -> None:
    model = make(Slow).to("meta") if device == "meta" else make(Slow).requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"^profile: needs a model with values and with trainable parameters"
    ):
        fzero.profiling.profile(model, torch.randn(4, 64))


def test_what_is_sent_is_summed_up_by_collective_axis_and_size() -> None:
    sent = [CommRecord("all_gather", "data", Label("gather"), n, 4 * n) for n in (10, 10, 20)]
    sent.append(CommRecord("reduce_scatter", "node", Label("reduce"), 5, 20))
    rows = [line.split() for line in as_text(fzero.profiling.comms_table(sent)).splitlines()[2:]]
    assert rows == [
        ["all_gather", "data", "40", "2", "80"], ["all_gather", "data", "80", "1", "80"],
        ["reduce_scatter", "node", "20", "1", "20"], ["all", "4", "180"],
    ]  # fmt: skip
    assert "reduce_scatter" not in as_text(fzero.profiling.comms_table(sent, only=["all_gather"]))


# --- the command line -----------------------------------------------------------------------------


def make_slow() -> nn.Module:
    return Slow()


def make_batch() -> Tensor:
    return torch.zeros(4, 64)


def heart() -> nn.Module:
    return Slow()


def make_wide_batch() -> Tensor:
    return torch.zeros(4, 65)


class Branching(Slow):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Looking(Slow):
    def forward(self, x: Tensor) -> Tensor:
        return {"y": x}["x"]


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_shows_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main([command, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    assert f"fzero {command} " in capsys.readouterr().out.partition("example")[2]


def test_a_word_that_is_nearly_a_command_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plam", "--model", "7B"]) == 2
    assert (
        capsys.readouterr().err
        == "fzero: 'plam' is no command and no file; did you mean fzero plan?\n"
    )


def test_help_names_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for command in COMMANDS:
        assert any(
            line.startswith(f"  {command} ") and f"fzero {command} " in f"{line} " for line in lines
        ), command


def test_fzero_plan_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "10M", "--world", "4"]) == 0
    table = capsys.readouterr().out
    assert (
        "a plain GPT of 9 blocks" in table
        and "sent along data" in table
        and "Activations are not" in table
    )
    assert main(["plan", "--model", "10M", "--world", "4", "--sequence", "64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    columns = {column["name"]: column for column in data["configurations"]}
    assert data["mesh"] == {"data": 4} and data["parameters"] == 9_976_704
    assert columns["stage 0"]["bytes"]["device"]["activations"] > 0
    for column in columns.values():
        planned = fzero.plan(
            fzero.estimation.models.named("10M").model, column["config"], world_size=4
        )
        for memory, parts in planned.bytes_by_memory.items():
            assert {name: column["bytes"][memory][name] for name in parts} == parts
        assert column["sent"] == {"data": sum(planned.sent_nbytes_per_step.values())}


@pytest.mark.parametrize("command", ["plan --world 2", "profile --depth 0"])
def test_the_batch_is_that_of_the_configuration_unless_one_is_given(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.json").write_text('{"train_micro_batch_size_per_gpu": 3}')
    words = [*command.split(), "--model", "1M", "--sequence", "16"]
    configured = [*words, "--config", str(tmp_path / "c.json")]
    for given, reported in (
        (words, "1 × 16 tokens (the default)"),
        (configured, "3 × 16 tokens (the configuration)"),
        ([*configured, "--batch", "2"], "2 × 16 tokens (--batch)"),
    ):
        assert main(given) == 0
        assert f"micro-batch of {reported}" in capsys.readouterr().out
    (tmp_path / "c.json").write_text('{"train_batch_size": 12, "gradient_accumulation_steps": 2}')
    if "plan" in command:
        assert main([*configured, "--json"]) == 0
        assert (
            json.loads(capsys.readouterr().out)["batch"]
            == "micro-batch of 3 × 16 tokens (the configuration)"
        )


def test_the_name_of_a_model_stands_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "test_profiler:heart"]) == 0
    assert capsys.readouterr().out.startswith("Slow of test_profiler:heart: 2.13M parameters\n")


def test_fzero_plan_writes_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text(
        '{"bf16": {"enabled": true}, "train_batch_size": 8, "gradient_clipping": 0.5}'
    )
    words = [
        "plan",
        "--model",
        "10M",
        "--world",
        "4",
        "--config",
        str(tmp_path / "c.json"),
        "--fit",
        "100MB",
    ]
    assert main([*words, "--out", str(tmp_path / "fits.json")]) == 0
    written = json.loads((tmp_path / "fits.json").read_text())
    assert written["train_batch_size"] == 8 and written["gradient_clipping"] == 0.5, (
        "the rest stays"
    )
    assert written["zero_optimization"]["stage"] in (1, 2) and "→" in capsys.readouterr().out
    assert main([*words[:-1], "1KB", "--json"]) == 1
    reported = capsys.readouterr()
    assert reported.out == "" and reported.err.splitlines()[-1].startswith(
        "fit: nothing fits into 1e-06 GB"
    )


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "command",
    [
        "plan --model 7.5B --world 64",
        "plan --model 7B --world 8 --sequence 4096 --fit 24GB --nvme /local",
    ],
)
def test_the_tables_of_the_documentation_are_what_is_printed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    assert f"`fzero {command}`" in page
    assert main(command.split()) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines())
    assert f"```\n{printed}\n```" in page


def test_fzero_profile_prints_a_tree_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "profile",
        "--model",
        "test_profiler:make_slow",
        "--sample",
        "test_profiler:make_batch",
    ]
    assert main(words) == 0
    assert "large (Linear)" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [module["name"] for module in data["modules"]] == ["", "small", "large", "norm"]


def test_fzero_config_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 8, "steps_per_print": 3}')
    assert main(["config", str(tmp_path / "c.json"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["given"] == ["train_batch_size"] and data["notes"][0]["key"] == "steps_per_print"


OTHER_MISTAKES = {
    "profile": [
        ("--model 1M", 2, "give a batch: --sequence T"),
        ("--model 1M --sequence 0", 2, "argument --sequence: must be a positive integer, got '0'"),
        ("--model LlamaForNothing --sequence 8", 1, "model: 'LlamaForNothing' must be a count"),
        ("--model 1M --sequence 8 --config {dir}/nope.json", 1, "Config.load: cannot read"),
        ("--model 1M --sample nowhere:batch", 1, "sample: 'nowhere:batch' must name a function"),
        ("--model 1M --sequence 8 --device abacus", 1, "on 'abacus' gave RuntimeError"),
        (
            "--model test_profiler:make_slow --sample test_profiler:make_batch --trace {dir}",
            1,
            "--trace: must be a file",
        ),
        (
            "--model test_profiler:make_slow --sample test_profiler:make_batch --depth deep",
            2,
            "argument --depth: invalid int",
        ),
    ],
    "config": [
        ("", 2, "give a FILE, or --reference"),
        ("{dir}/nope.json", 1, "Config.load: cannot read"),
        ("{dir}", 1, "Config.load: cannot read"),
        ("{dir}/broken.json", 1, "is not JSON or Hjson"),
        ("{dir}/wrong.json", 1, "train_batch_size: must be at least 1, got 0"),
        ("{dir}/unknown.json", 1, "zero_optimisation: unknown key"),
        ("{dir}/wrong.json --jason", 2, "unrecognized arguments: --jason"),
    ],
    "env": [
        ("--path {dir}/nowhere", 1, "--path {dir}/nowhere: [Errno 2]"),
        ("--path {dir}/wrong.json", 1, "--path {dir}/wrong.json: "),
        ("--path", 2, "argument --path: expected one argument"),
        ("here", 2, "unrecognized arguments: here"),
        ("--jason", 2, "unrecognized arguments: --jason"),
    ],
    "export": [
        ("", 2, "the following arguments are required: dir, out"),
        ("{dir}/nowhere {dir}/out", 1, "nowhere"),
        ("{dir} {dir}/out", 1, "{dir}"),
        ("{dir} {dir}/out --dtype int8", 2, "argument --dtype: invalid choice: 'int8'"),
        (
            "{dir} {dir}/out --max-file-nbytes some",
            2,
            "argument --max-file-nbytes: must be a number of bytes",
        ),
        (
            "{dir} {dir}/out --torch-optimizer",
            2,
            "--torch-optimizer is for --format deepspeed-universal",
        ),
    ],
    "import-deepspeed": [
        ("", 2, "the following arguments are required: dir, out"),
        ("{dir}/nowhere {dir}/out", 1, "nowhere"),
        ("{dir} {dir}/out", 1, "{dir}"),
        ("{dir}/wrong.json {dir}/out", 1, "wrong.json"),
        ("{dir} {dir}/out --strict", 2, "unrecognized arguments: --strict"),
    ],
    "run": [
        ("", 2, "the following arguments are required: script"),
        ("{dir}/nope.py", 2, "nope.py"),
        ("--num_procs many {dir}/nope.py", 2, "invalid int value: 'many'"),
        ("--num_procs 0 {dir}/wrong.json", 2, "num_procs"),
        ("--master_port 99999999 {dir}/wrong.json", 2, "argument --master_port"),
    ],
}


@pytest.mark.parametrize(
    "command, words, code, message",
    [(command, *row) for command, rows in OTHER_MISTAKES.items() for row in rows],
)
def test_no_command_answers_a_mistake_with_a_traceback(
    command: str,
    words: str,
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.json").write_text('{"train_batch_size": [')
    (tmp_path / "wrong.json").write_text('{"train_batch_size": 0}')
    (tmp_path / "unknown.json").write_text('{"zero_optimisation": {"stage": 1}}')
    try:
        found = main([command, *words.replace("{dir}", str(tmp_path)).split()])
    except SystemExit as ended:
        found = ended.code
    reported = capsys.readouterr()
    assert (found, reported.out) == (code, "") and "Traceback" not in reported.err
    assert message.replace("{dir}", str(tmp_path)) in " ".join(reported.err.split())


MISTAKES = {
    "no model": ([], 2, "the following arguments are required: --model"),
    "a model that is none": (
        ["--model", "nonsense"],
        1,
        "model: 'nonsense' must be a count of parameters",
    ),
    "no such file": (
        ["--model", "1M", "--config", "nope.json"],
        1,
        "Config.load: cannot read 'nope.json'",
    ),
    "no ranks": (
        ["--model", "1M", "--world", "0"],
        2,
        "argument --world: must be a positive integer, got '0'",
    ),
    "no bytes": (
        ["--model", "1M", "--fit", "much"],
        2,
        "argument --fit: must be a number of bytes, as 80GB",
    ),
    "no rate": (["--model", "1M", "--flops", "-1"], 2, "argument --flops: "),
    "a file that cannot be written": (
        ["--model", "1M", "--fit", "1GB", "--out", "{train}/x.json"],
        1,
        "--out: must be a file that can be written, got ",
    ),
    "nothing to write": (
        ["--model", "1M", "--out", "x.json"],
        2,
        "--out writes what fits: give --fit BYTES beside it",
    ),
    **{
        f"{flag} of nothing": (
            ["--model", "1M", f"--{flag}", "8"],
            2,
            f"--{flag} says where something may fit: give --fit BYTES beside it",
        )
        for flag in ("nvme", "host", "disk")
    },
    "a picture nowhere": (
        ["--model", "1M", "--picture", "{train}/x.png"],
        1,
        "--picture: must be a file that can be written",
    ),
    "a picture of nothing": (
        ["--model", "1M", "--picture", "{train}.abc"],
        1,
        "--picture: must be a file that can be written",
    ),
    "a picture of what fits": (
        ["--model", "1M", "--fit", "1GB", "--picture", "{train}.abc"],
        1,
        "--picture: must be a file that can be written",
    ),
    "another batch": (
        ["--model", "test_profiler:make_slow", "--sequence", "8"],
        1,
        "must take input_ids and labels for --batch",
    ),
    "a batch that does not fit": (
        ["--model", "test_profiler:make_slow", "--sample", "test_profiler:make_wide_batch"],
        1,
        "batch: Slow must run forward and backward on it, got RuntimeError: ",
    ),
    "a branch on data": (
        ["--model", "test_profiler:Branching", "--sample", "test_profiler:make_batch"],
        1,
        "it reads values of tensors, and a dry run has none",
    ),
    "an error of the model": (
        ["--model", "test_profiler:Looking", "--sample", "test_profiler:make_batch"],
        1,
        "got KeyError: 'x'; correct the",
    ),
    "no parameters": (
        ["--model", "test_profiler:Bare"],
        1,
        "Bare has no parameters; pass a model with parameters",
    ),
    "rates of nothing": (
        ["--model", "1M", "--rates", "{null}"],
        1,
        "host_copy must be a positive number, got None",
    ),
    "rates in words": (
        ["--model", "1M", "--rates", "{fast}"],
        1,
        "gather must be a positive number or null, got 'fast'",
    ),
    "ranks that do not fit": (
        ["--model", "1M", "--world", "3", "--config", "{train}"],
        1,
        "train_batch_size: must equal",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_the_command_line_is_one_message_and_no_traceback(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, code, message = MISTAKES[mistake]
    (tmp_path / "train.json").write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}'
    )
    rates = {
        "host_copy": 1e9,
        "device_copy": None,
        "to_device": None,
        "gather": "fast",
        "disk_write": None,
    }
    rates |= {"disk_read": None, "flops_fp32": 1e9, "flops_bf16": 1e9}
    (tmp_path / "fast.json").write_text(json.dumps({"rates": rates}))
    (tmp_path / "null.json").write_text(json.dumps({"rates": rates | {"host_copy": None}}))
    for name in ("train", "fast", "null"):
        words = [word.replace(f"{{{name}}}", str(tmp_path / f"{name}.json")) for word in words]
    try:
        found = main(["plan", *words])
    except SystemExit as ended:
        found = ended.code
    reported = capsys.readouterr()
    assert (
        found == code
        and message in reported.err
        and "Traceback" not in reported.err
        and reported.out == ""
    )


def test_a_plan_imports_no_compiler_and_nothing_that_it_does_not_need() -> None:
    heavy = {
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "transformers",
        "deepspeed",
        "matplotlib",
    }
    code = f"""if True:
        import sys
        from fzero.__main__ import main
        assert main(["plan", "--model", "10M", "--world", "4"]) == 0
        assert not {heavy!r} & sys.modules.keys(), {heavy!r} & sys.modules.keys()
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
