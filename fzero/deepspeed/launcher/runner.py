"""`deepspeed.launcher.runner`: the names by which launchers pass the environment on."""

from __future__ import annotations

import os
from pathlib import Path

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [str(Path.home()), "."]
PDSH_MAX_FAN_OUT = 1024
