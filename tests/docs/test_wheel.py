"""The wheel has every file that the package needs, and trains without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long

TRAIN = """
import torch, fzero
from torch import nn
step = fzero.make_train_step(nn.Linear(4, 1), {"zero_optimization": {"stage": 3}}, loss_fn=lambda m, x: m(x).square().mean())
state, metrics = step(step.init(), torch.ones(2, 4))
print(fzero.__file__, metrics.loss.item() >= 0)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no file of an earlier build helps; with this
    environment's setuptools, without network.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "out", ".*")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        ".",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    ours = {
        str(path.relative_to(ROOT))
        for package in ("fzero", "sharding")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name.partition("/")[0] + "/"
    }
    assert {name for name in packed if not name.startswith("fzero-")} == ours


def test_the_wheel_trains_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "installed" / "fzero" / "__init__.py"), "True"]
