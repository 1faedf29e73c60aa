"""The pages that say where fzero runs say what `fzero env` says, and the batch file of
Slurm is one.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from pages import ROOT, blocks

import fzero
from fzero.common.optional import EXTRAS
from fzero.common.platforms import PLATFORMS, PYTHON, TORCH

START = (ROOT / "docs" / "start.md").read_text()
NODES = (ROOT / "docs" / "recipes" / "nodes.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_table_of_platforms_is_that_of_the_code() -> None:
    shown = re.findall(
        r"^\| ([^|]+) \| (works|not tested|does not) \| ([^|]+) \|$", START, re.MULTILINE
    )
    assert shown == [tuple(row) for row in PLATFORMS]


def test_the_versions_are_those_of_the_package() -> None:
    for page in (START, (ROOT / "README.md").read_text()):
        assert " to ".join(TORCH) in page and " to ".join(PYTHON) in page
    assert (
        f"torch>={TORCH[0]}" in PROJECT["dependencies"]
        and PROJECT["requires-python"] == f">={PYTHON[0]}"
    )
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert (classifiers[0], classifiers[-1]) == PYTHON


def test_every_optional_package_has_an_extra_that_pins_nothing() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        # these bring it
        by = {"yaml": "accelerate", "safetensors": "transformers"}.get(package, package)
        (wanted,) = [one for one in extras[extra] if one.startswith(by)]
        assert "==" not in wanted
    assert extras["tutorial"] == ["fzero[testing,pictures]"]


def test_the_batch_file_of_slurm_is_bash_and_sets_what_a_rank_reads(tmp_path: Path) -> None:
    (text,) = [block.text for block in blocks(NODES) if "train.sbatch" in block.info]
    script = tmp_path / "train.sbatch"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    # What srun sets for rank 9 of 16, and the line of the file that sets the port.
    fake = tmp_path / "srun"
    fake.write_text('#!/bin/bash\necho "$MASTER_PORT" "$OMP_NUM_THREADS" "$@"\n')
    fake.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "123456",
        "SLURM_CPUS_PER_TASK": "8",
    }
    ran = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=True
    )
    port, threads, *_ = ran.stdout.split()
    assert threads == options["cpus-per-task"] and 20000 <= int(port) < 40000
    found = fzero.launched(
        {
            "SLURM_PROCID": "9",
            "SLURM_STEP_NUM_TASKS": "16",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_NODELIST": "gpu[07-08]",
            "SLURM_CPUS_PER_TASK": "8",
            "MASTER_PORT": port,
        }
    )
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == (9, 16, 1)
    assert (found.master_addr, found.master_port) == ("gpu07", int(port))
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) == found.world_size
