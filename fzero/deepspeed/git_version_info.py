"""`deepspeed.git_version_info`: the newest version of DeepSpeed whose names these are; no
operators are built.
"""

from __future__ import annotations

version, git_hash, git_branch = "0.19.8", "fzero", "fzero"
compatible_ops: dict[str, bool] = dict.fromkeys(
    [
        "async_io",
        "cpu_adam",
        "deepspeed_ccl_comm",
        "deepspeed_not_implemented",
        "deepspeed_shm_comm",
        "fused_adam",
        "pin_memory",
    ],
    False,
)
"""DeepSpeed's compiled operators by name, of which fzero has none."""
installed_ops = dict(compatible_ops)
accelerator_name = "cpu"
torch_info = {"version": "0.0", "cuda_version": "0.0", "hip_version": "0.0"}
