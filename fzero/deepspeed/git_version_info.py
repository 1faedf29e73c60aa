"""`deepspeed.git_version_info`: the version of DeepSpeed whose names these are; no operators are built."""

from __future__ import annotations

version, git_hash, git_branch = "0.19.6", "fzero", "fzero"
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
accelerator_name = "cpu"
torch_info = {"version": "0.0", "cuda_version": "0.0", "hip_version": "0.0"}
