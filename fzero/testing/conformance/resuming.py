"""Laws of checkpoints: training that is saved and loaded goes on as if it never ended."""

from __future__ import annotations

from dataclasses import replace

import torch

from fzero.testing.conformance.averages import ADAMW, SGD
from fzero.testing.conformance.laws import (
    TORCH,
    Lab,
    NotApplicable,
    check_bits,
    check_close,
    check_near,
    law,
)
from fzero.testing.conformance.models import Dropped, TiedNet
from fzero.testing.conformance.norms import halved
from fzero.testing.conformance.precision import FP16, overflowing
from fzero.testing.conformance.training import Setup, Trainer

SAVING = f"Saving and loading a general checkpoint for resuming training, {TORCH}/tutorials"
DCP = f"torch.distributed.checkpoint, {TORCH}"


def resumed(lab: Lab, setup: Setup, updates: range) -> Trainer:
    """A new training that goes on from the checkpoint in the lab's folder."""
    trainer = lab.make(setup)
    torch.manual_seed(77)  # what the checkpoint does not restore is another
    made = trainer.load(lab.folder / "saved")
    check_close(made, updates.start, "the number of updates in the checkpoint")
    return lab.trained(setup, updates, trainer)  # type: ignore[no-any-return]


def check_unbroken(lab: Lab, setup: Setup) -> None:
    """Raises unless 3 + 3 updates give the bits of 6."""
    unbroken = lab.trained(setup, range(6)).weights()
    lab.trained(setup, range(3)).save(lab.folder / "saved")
    check_bits(resumed(lab, setup, range(3, 6)).weights(), unbroken, "those of unbroken training")


@law("save more than the model: the optimizer's state has buffers that training needs", SAVING)
def resumed_is_unbroken(lab: Lab) -> None:
    check_unbroken(lab, ADAMW)


@law("the same with momentum", SAVING)
def resumed_momentum(lab: Lab) -> None:
    check_unbroken(lab, SGD)


@law("the same with tied weights", SAVING)
def resumed_tied_weights(lab: Lab) -> None:
    check_unbroken(lab, replace(ADAMW, model=TiedNet))


@law("the same with groups, and a schedule in progress", SAVING)
def resumed_schedule(lab: Lab) -> None:
    groups = (("blocks", (("lr", 0.03),)),)
    check_unbroken(lab, replace(ADAMW, groups=groups, rates=halved))


@law("the same with dropout: the random state is saved", f"torch.get_rng_state, {TORCH}")
def resumed_random_state(lab: Lab) -> None:
    check_unbroken(lab, replace(ADAMW, model=Dropped))


@law("the scaler's state is saved, too", f"Automatic mixed precision, saving/resuming, {TORCH}")
def resumed_loss_scale(lab: Lab) -> None:
    setup = replace(FP16, scale_window=2)

    def begun() -> Trainer:
        trainer = lab.trained(setup, range(3))
        trainer.step(overflowing(lab, 9))
        return trainer  # type: ignore[no-any-return]

    unbroken = lab.trained(setup, range(3, 6), begun())
    begun().save(lab.folder / "saved")
    again = resumed(lab, setup, range(3, 6))
    check_close(again.norm().loss_scale, unbroken.norm().loss_scale, "the loss scale")
    check_bits(again.weights(), unbroken.weights(), "those of unbroken training")


@law("what is loaded is what was saved", DCP)
def loaded_weights_are_the_saved_ones(lab: Lab) -> None:
    trainer = lab.trained(ADAMW, range(3))
    trainer.save(lab.folder / "saved")
    check_bits(resumed(lab, ADAMW, range(3, 3)).weights(), trainer.weights(), "the saved ones")


@law("saving leaves training as it was", SAVING)
def saving_leaves_no_trace(lab: Lab) -> None:
    trainer = lab.trained(ADAMW, range(3))
    trainer.save(lab.folder / "saved")
    found = lab.trained(ADAMW, range(3, 6), trainer).weights()
    check_bits(found, lab.trained(ADAMW, range(6)).weights(), "those of training without a save")


@law("a checkpoint of one stage is loaded in another: load-time resharding", DCP)
def loaded_in_another_stage(lab: Lab) -> None:
    if len(lab.system.stages) == 1:
        raise NotApplicable("it has one stage")
    others = [stage for stage in lab.system.stages if stage != lab.stage]
    unbroken = lab.trained(ADAMW, range(6)).weights()
    begun = lab.trained(ADAMW, range(3), lab.make(ADAMW, stage=others[-1]))
    begun.save(lab.folder / "saved")
    check_near(resumed(lab, ADAMW, range(3, 6)).weights(), unbroken, "those of unbroken training")


def goes_on_with_fewer_ranks(lab: Lab) -> None:
    """On W - 1 ranks, the global batch divided among these."""
    trainer = resumed(lab, ADAMW, range(3, 3))
    saved = torch.load(lab.folder / "weights.pt")
    check_bits(trainer.weights(), saved, "the saved ones")
    for index in range(3, 6):
        trainer.step(_of_all(lab, index))
    expected = torch.load(lab.folder / "unbroken.pt")
    check_near(trainer.weights(), expected, "those of unbroken training")


def _of_all(lab: Lab, index: int) -> list[list[torch.Tensor]]:
    """The rows that one more rank had, divided among these."""
    more = replace(lab, world_size=lab.world_size + 1).batches(index)
    rows = torch.cat([batch for own in more for batch in own])
    return [[part] for part in rows.tensor_split(lab.world_size)]


@law(
    "load-time resharding: saving in one cluster topology, loading into another",
    DCP,
    then=goes_on_with_fewer_ranks,
)
def loaded_on_other_ranks(lab: Lab) -> None:
    trainer = lab.trained(ADAMW, range(3))
    weights = trainer.weights()
    trainer.save(lab.folder / "saved")
    unbroken = lab.trained(ADAMW, range(6)).weights()
    if lab.rank == 0:
        torch.save(dict(weights), lab.folder / "weights.pt")
        torch.save(dict(unbroken), lab.folder / "unbroken.pt")
    lab.others()
