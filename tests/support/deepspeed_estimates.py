"""What DeepSpeed's own estimators give for some jobs, as JSON. A program of its own:
DeepSpeed changes what imports it.
"""

import contextlib
import io
import itertools
import json
import sys

JOBS = [
    (10**9, 10**7, 1, 1),
    (2_851_000_001, 32_000_003, 8, 1),
    (7 * 10**9, 10**8, 8, 3),
    (123_457, 1_003, 4, 16),
]
"""Parameters, those of the largest layer, GPUs of a node, and nodes."""


def estimates(two: object, three: object) -> list[object]:
    """What the functions of two modules, DeepSpeed's or fzero's, give and print."""
    found: list[object] = []
    for total, layer, gpus, nodes in JOBS:
        for offload, params, init in itertools.product((True, False), repeat=3):
            if offload or not params:
                found.append(
                    three.estimate_zero3_model_states_mem_needs(
                        total, layer, gpus, nodes, offload, params, init
                    )  # type: ignore[attr-defined]
                )
            found.append(two.estimate_zero2_model_states_mem_needs(total, gpus, nodes, offload))  # type: ignore[attr-defined]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            two.estimate_zero2_model_states_mem_needs_all_cold(total, gpus, nodes)  # type: ignore[attr-defined]
            three.estimate_zero3_model_states_mem_needs_all_cold(total, layer, gpus, nodes)  # type: ignore[attr-defined]
        # Since Python 3.11 DeepSpeed prints the name of its enumeration where "cpu " is meant.
        lines = printed.getvalue().replace("OffloadDeviceEnum.cpu", "cpu ").splitlines()
        found.append([line.rstrip() for line in lines])
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


if __name__ == "__main__":
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    json.dump(estimates(stage_1_and_2, stage3), sys.stderr)
