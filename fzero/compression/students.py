"""`start_of_student`: layer reduction. A student with fewer layers begins with some of
a teacher's.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fzero.config.compression import LayerReduction


def start_of_student(
    student: Mapping[str, Tensor], teacher: Mapping[str, Tensor], reduction: LayerReduction
) -> dict[str, Tensor]:
    """The state dict of a student that begins with layers of its teacher, buffers
    included.

    Layer k of the student takes the tensors of layer `teacher_layer[k]`, and each
    module of `other_module_name` is copied whole; all other tensors are the student's
    own.

    Args:
        student, teacher: state dicts.
        reduction: the block `compression_training.layer_reduction`.

    Raises:
        ValueError: a layer or module has no tensors in either, or tensors differ in
            name or shape.
    """
    prefix = f"{reduction.module_name_prefix}." if reduction.module_name_prefix else ""
    pairs = [
        (f"{prefix}{own}.", f"{prefix}{theirs}.")
        for own, theirs in enumerate(reduction.teacher_layer)
    ]
    pairs += [(f"{name}.", f"{name}.") for name in reduction.other_module_name]
    taken: dict[str, Tensor] = {}
    for own, theirs in pairs:
        keys = {key.removeprefix(own) for key in student if key.startswith(own)}
        found = {key.removeprefix(theirs) for key in teacher if key.startswith(theirs)}
        if not keys or keys != found:
            differing = sorted(keys ^ found)[:3]
            what = (
                f"tensors {', '.join(differing)} in one of them only"
                if keys and found
                else "no tensors in one of them"
            )
            raise ValueError(
                f"layer_reduction: {own.rstrip('.')!r} of the student and {theirs.rstrip('.')!r} "
                f"of the teacher must have the same tensors, got {what}; correct "
                f"module_name_prefix, teacher_layer or other_module_name"
            )
        for key in keys:
            value = teacher[theirs + key]
            if value.shape != student[own + key].shape:
                raise ValueError(
                    f"layer_reduction: {own + key!r} of the student must have the teacher's shape "
                    f"{tuple(value.shape)}, got {tuple(student[own + key].shape)}; build the "
                    f"student with the teacher's sizes"
                )
            taken[own + key] = value.detach().to(student[own + key].dtype).clone()
    return {key: taken.get(key, value) for key, value in student.items()}
