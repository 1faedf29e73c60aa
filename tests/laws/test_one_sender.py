"""The verbs are the step: nothing else sends parameters or gradients, and nothing else
updates. A walk over the source.

Small numbers that ranks compare (losses, norms, names of buffers) are sent with
`collectives.stack`, which this law leaves alone.
"""

from __future__ import annotations

import ast

from test_rooms import files, name_of, tree_of

COLLECTIVES = {
    f"{start}{name}"
    for name in (
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "exchange",
        "sum_replicas",
        "sum",
    )
    for start in ("start_", "")
} - {"start_sum_replicas", "sum_replicas", "sum", "exchange"}  # a verb; a sum of a tensor

SENDERS = {
    "fzero.verbs": "the verbs",
    "fzero.runtime.contents": "matrices to and from their owners",
    "fzero.deepspeed.engine.divided": (
        "parameters of a model under zero.Init, before there is a step"
    ),
    "fzero.profiling.machine": "measures what a collective costs",
    "fzero.testing.collective_laws": "laws of axes and comm hooks",
    "fzero.testing.conformance.training": "what ranks of any system hold, to compare it",
    "fzero.deepspeed.sequence.linear_cross_entropy": "the sum of a loss, and its number of labels",
    "fzero.sequence.exchange": "tokens and heads of attention: activations",
    "fzero.sequence.parts": "digests of a batch, which the ranks of a sequence compare",
    "fzero.deepspeed.comm.comm": "the collectives of DeepSpeed's names, for the user's tensors",
}
"""The modules outside of `fzero.comms` that call a collective, each with its reason."""

UPDATERS = {
    "fzero.verbs": "optimizer_update",
    "fzero.storage.offload_unsharded": "a buffer off the device that is updated in full",
    "fzero.storage.stream": "sub-groups of a buffer off the device",
    "fzero.optim": "transforms of transforms",
    "fzero.plans.param_groups": (
        "a transform of the user, tried on fixed numbers so that ranks can compare it"
    ),
    "fzero.profiling.profiler": "measures what an update costs",
    "fzero.testing": "laws of transforms",
    "fzero.deepspeed.integrations": "optimizers that are given as transforms",
}
"""The rooms and modules that call a transform's update, each with its reason."""


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def updates(call: ast.Call) -> bool:
    """Whether it is `transform.update(…)`, whatever the transform is called, or a form
    of it.
    """
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = ast.unparse(call.func.value).rpartition(".")[2]
    is_transform = "transform" in owner
    return call.func.attr == "update_each" or (
        call.func.attr in ("update", "update_skip_if") and is_transform
    )


def test_only_the_verbs_send_parameters_and_gradients() -> None:
    found = {
        name_of(path)
        for path in files("fzero")
        if any(called(call) in COLLECTIVES for call in calls(tree_of(path)))
    }
    assert {module for module in found if not module.startswith("fzero.comms")} == set(SENDERS)


def test_only_the_verb_and_streams_update() -> None:
    found = {name_of(path) for path in files("fzero") if any(map(updates, calls(tree_of(path))))}
    assert {
        module for module in found if not any(f"{module}.".startswith(f"{x}.") for x in UPDATERS)
    } == set()
