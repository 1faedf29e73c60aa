"""`TrainingMachine`: compares training with one plain process, under any sequence of
changes between steps.

A state machine of hypothesis holds a job (all its ranks in this process, with the bits
of as many processes) and the oracle, `fzero.testing.reference_trainer`. A *rule*
changes both in one way, and after each rule all *invariants* are checked. hypothesis
draws the model, the job and the rules, and reports the shortest run that breaks a law.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import optree
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor, nn

from fzero.checkpoint.loading import load
from fzero.checkpoint.saving import save
from fzero.optim.transforms import Transform, leaf_names, same_bits
from fzero.plans.param_groups import OwnTransform
from fzero.plans.plan import FlatParamPlan
from fzero.resharding.place import place
from fzero.resharding.reshard import reshard
from fzero.simulation import LockstepRanks, simulate
from fzero.state import Metrics, TrainState
from fzero.step import make_train_step
from fzero.storage.file_tensor import FileTensors, in_memory
from fzero.testing.comparisons import changed, copied, differs, full, names_of, near, raise_first
from fzero.testing.reference_trainer import (
    Job,
    Numbers,
    ReferenceLossScale,
    ReferenceOptimizer,
    ReferenceOutcome,
    ReferenceTrainer,
    optimizer_of_torch,
    optimizer_of_transform,
)
from sharding import Partial, Replicated, TensorSpec
from sharding.testing import models
from sharding.views import torch_dtype, unflatten

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""The folder of checkpoints, in memory if possible: waiting for a disk would take most
of the time.
"""

NUM_RULES = 8  # the most rules of one run


class Optimizer(NamedTuple):
    """An optimizer of a job, and the equivalent plain one.

    Learning rates and eps are such that no weight changes by more than its gradient, so
    that rounding is not amplified.
    """

    config: dict[str, Any]
    plain: ReferenceOptimizer


def _of_torch(
    kind: str, names: dict[str, str], params: dict[str, float], **further: Any
) -> Optimizer:
    plain = optimizer_of_torch(partial(getattr(torch.optim, kind), **params, **further), names)
    return Optimizer({"type": kind, "params": params}, plain)


_ADAM_NAMES = {"state.step": "step", "state.exp_avg": "exp_avg", "state.exp_avg_sq": "exp_avg_sq"}
OPTIMIZERS = {
    "sgd": _of_torch("SGD", {}, {"lr": 0.05}),
    "momentum": _of_torch(
        "SGD",
        {"state.momentum": "momentum_buffer"},
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    ),
    "adamw": _of_torch(
        "AdamW", _ADAM_NAMES, {"lr": 0.01, "eps": 0.1, "weight_decay": 0.1}, fused=True
    ),
}

jobs = st.builds(
    Job,
    stage=st.integers(0, 3),
    world_size=st.integers(1, 4),
    precision=st.sampled_from(("float32", "bfloat16", "float16")),
    num_micro_steps=st.integers(1, 3),
    micro_batch=st.integers(1, 2),
    clip=st.sampled_from((0.0, 0.5, 100.0)),
    units=st.sampled_from((None, ("blocks",), ("inlet", "outlet"))),
    threshold=st.sampled_from((0, 5)),
    order=st.sampled_from(("declaration", "round robin")),
    memory=st.sampled_from(("donated", "kept")),
    initial_scale_power=st.integers(0, 18),
    window=st.integers(1, 3),
    hysteresis=st.integers(1, 2),
    consecutive=st.booleans(),
)
"""Jobs on a few ranks."""


def configurations() -> st.SearchStrategy[dict[str, Any]]:
    """Configurations for `make_train_step`: stage, precision, micro-steps, clipping, loss
    scale and optimizer.

    >>> from hypothesis import find
    >>> find(configurations(), lambda cfg: cfg["zero_optimization"]["stage"] == 3)["optimizer"]
    {'type': 'AdamW', 'params': {'lr': 0.01, 'eps': 0.1, 'weight_decay': 0.1}}
    """
    optimizers = st.sampled_from([OPTIMIZERS[name].config for name in sorted(OPTIMIZERS)])
    return st.builds(lambda job, optimizer: job.config | {"optimizer": optimizer}, jobs, optimizers)


seeds = st.integers(0, 2**16)
steps = st.lists(seeds, max_size=2)
"""Seeds of batches that a rule trains on at its end: hypothesis drops rules from a run,
and would drop separate training.
"""


class TrainingMachine(RuleBasedStateMachine):
    """Trains, overflows, changes stage, world size, placement, layout, precision and
    batch, and restarts, in any order.

        class TestTraining(TrainingMachine.TestCase): ...            # pytest or unittest collects it

        class MyMachine(TrainingMachine):
            transform = staticmethod(lambda lr: my_optimizer(lr))

    `MyMachine.TestCase.settings` has the number of runs: that of hypothesis' profile
    when the class is made.

    Add a rule for another capability: a method that sets `self.state` and, with
    `self.step_of(job)`, `self.step` and `self.job`, does not change numbers, and may
    end with `self.train(then)` on some `steps`. If it changes numbers, it changes
    `self.plain` too.

    Attributes:
        transform: replaces the optimizers here: see `make_train_step`. It must be
            elementwise.
        lr: its learning rate.
        compares: `"numbers"` compares the results of a step up to rounding, in fp32 up
            to 2⁻¹⁸ of the gradient's norm: a BLAS sum may depend on a matrix's address.
            `"bits"` requires equal bits, except where gradients are clipped or
            parameters tied: for models so small that a sum has one order, and
            transforms that amplify small differences (a sign).
        job, model, step, state: the job being trained; the state is stacked
            (`fzero.simulate`), and in memory when a rule begins.
        held: the state in memory, whatever its placement.
        plain: the oracle.
    """

    transform: OwnTransform | None = None
    folder: TemporaryDirectory[str] | None = None  # for the files of this run
    lr: float = 0.05
    compares: Literal["bits", "numbers"] = "numbers"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        limit_rules(cls)

    # --- what a subclass may replace --------------------------------------------------------------

    def models(self) -> st.SearchStrategy[nn.Module]:
        """Models without module buffers that return their loss, a mean over samples."""
        return models()

    def jobs(self) -> st.SearchStrategy[Job]:
        """A step's arguments; units that the model does not have are left out."""
        return jobs

    def make_batch(self, num_samples: int, seed: int) -> Any:
        """A batch of `self.model`: tensors with a leading dimension of samples."""
        features: Any = self.model.features
        return torch.randn(num_samples, features, generator=torch.Generator().manual_seed(seed))

    def teardown(self) -> None:
        """Ends a run, and removes its files."""
        self.state: Any = None
        if self.folder is not None:
            self.folder.cleanup()

    # --- rules ------------------------------------------------------------------------------------

    @initialize(
        model=st.runner().flatmap(lambda machine: machine.models()),
        job=st.runner().flatmap(lambda machine: machine.jobs()),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        then=steps,
    )
    def start(self, model: nn.Module, job: Job, optimizer: str, then: list[int]) -> None:
        self.model, self.optimizer = model, self._optimizer(optimizer)
        self.job = self._fitting(job)
        self.step = self.step_of(self.job)
        self.state = self.step.init()
        self.plain = ReferenceTrainer(model, self.job, self.optimizer.plain, self.compares)
        self.train(then)

    @rule(seeds=st.lists(seeds, min_size=1, max_size=3))
    def train(self, seeds: list[int]) -> None:
        """Steps on batches of these seeds, with all laws after each."""
        for seed in seeds:
            self._step(self._batch(seed))
            self.every_law_holds()

    @rule(
        seed=seeds,
        rank=st.integers(0, 3),
        value=st.sampled_from((float("nan"), float("inf"), 1e30)),
        then=steps,
    )
    def overflow(self, seed: int, rank: int, value: float, then: list[int]) -> None:
        """Trains on a batch in which a sample of one rank overflows."""
        batch_W = self._batch(seed)
        for x_W in optree.tree_leaves(batch_W):
            if x_W.is_floating_point():
                x_W[rank % self.job.world_size, -1] = value
        self._step(batch_W)
        self.train(then)

    @rule(seed=seeds, then=steps)
    def evaluate(self, seed: int, then: list[int]) -> None:
        batch_W, before = self._batch(seed), copied(self.state)
        found, expected = (
            self.step.evaluate(self.state, batch_W).item(),
            self.plain.evaluate(self.job, batch_W),
        )
        is_near = near(found, expected, max(self.plain.rounding(), 1e-5))
        raise_first("evaluate gives the mean loss", None if is_near else f"{found}, not {expected}")
        raise_first("evaluate leaves the state as it was", changed(before, self.state))
        self.train(then)

    @rule(stage=st.integers(0, 3), then=steps)
    def change_stage(self, stage: int, then: list[int]) -> None:
        self.move(replace(self.job, stage=stage))
        self.train(then)

    @rule(world_size=st.integers(1, 4), then=steps)
    def change_world_size(self, world_size: int, then: list[int]) -> None:
        self.move(replace(self.job, world_size=world_size))
        self.train(then)

    @rule(
        placement=st.sampled_from(("host", "nvme", "parameters too")),
        stage=st.integers(0, 3),
        then=steps,
    )
    def train_elsewhere(
        self, placement: Literal["host", "nvme", "parameters too"], stage: int, then: list[int]
    ) -> None:
        """Trains with the state in host memory or files (in stage 3 with or without the
        parameters), and moves it back.
        """
        self._place(placement)
        self.train(then)
        self.every_law_holds()
        self.move(replace(self.job, stage=stage, placement="host"))
        self._place("device")

    @rule(other=st.runner().flatmap(lambda machine: machine.jobs()), then=steps)
    def change_all(self, other: Job, then: list[int]) -> None:
        """Changes everything but the precision at once, also layout, batch and
        clipping.
        """
        self.move(replace(self._with_scaling(other), precision=self.job.precision))
        self.train(then)

    @rule(other=st.runner().flatmap(lambda machine: machine.jobs()), then=steps)
    def change_precision(self, other: Job, then: list[int]) -> None:
        """Changes the precision; the loss scale is kept if it is dynamic before and
        after.
        """
        old = self.job
        self.move(replace(self.job, precision=other.precision))
        self._compute_as_the_job(old)
        self.train(then)

    @rule(other=st.runner().flatmap(lambda machine: machine.jobs()), then=steps)
    def save_and_load(self, other: Job, then: list[int]) -> None:
        """Loads on other ranks, in another stage, layout and precision; the loss scale
        is kept if dynamic before and after.
        """
        job = self._fitting(self._with_scaling(other))
        old, step, before = self.job, self.step_of(job), copied(self.state)
        with TemporaryDirectory(dir=MEMORY) as folder:
            save(self.state, folder, step=self.step)
            raise_first("saving leaves the state as it was", changed(before, self.state))
            state = load(folder, step=step).state
        self.job, self.step, self.state = job, step, state
        self._compute_as_the_job(old)
        self.train(then)

    @rule(then=steps)
    def gather_and_init_again(self, then: list[int]) -> None:
        """Keeps the weights, and initialises the rest."""
        self.state = self.step.init(self.step.gather(self.state))
        self.plain.begin(self.job.scaling)
        self.train(then)

    # --- laws, which hold after every rule --------------------------------------------------------

    @invariant()
    def every_law_holds(self) -> None:
        self.every_tensor_is_as_the_specs_say()
        self.all_ranks_agree_on_what_they_all_hold()
        self.padding_is_zero()
        self.the_numbers_are_those_of_a_plain_process()
        self.gather_gives_what_the_ranks_hold()
        self.counts_and_loss_scale_are_those_of_a_plain_process()

    def every_tensor_is_as_the_specs_say(self) -> None:
        def fault(spec: TensorSpec, x_W: Tensor) -> str | None:
            expected = (
                (self.job.world_size, *spec.local_shape(self.job.world_size)),
                torch_dtype(spec.dtype),
            )
            found = tuple(x_W.shape), x_W.dtype
            return f"is {found} and its spec says {expected}" if found != expected else None

        raise_first("every tensor is as the specs say", *self._faults(fault))
        specs = optree.tree_leaves(self.step.specs)
        for spec, x in zip(specs, optree.tree_leaves(self.state), strict=True):
            mismatch = (
                f"{spec} is {x!r}" if isinstance(x, FileTensors) != spec.placement.in_file else None
            )
            raise_first("every tensor lives where the specs say", mismatch)

    def all_ranks_agree_on_what_they_all_hold(self) -> None:
        def fault(spec: TensorSpec, x_W: Tensor) -> str | None:
            if not isinstance(spec.spec, Replicated):
                return None
            different = [rank for rank in range(len(x_W)) if not same_bits(x_W[rank], x_W[0])]
            return f"of rank {different[0]} is another than that of rank 0" if different else None

        raise_first("all ranks agree on what they all hold", *self._faults(fault))

    def padding_is_zero(self) -> None:
        for name, buffer, spec, x_W in self._flat_tensors():
            if not isinstance(spec.spec, Partial):
                padding = full(x_W, spec)[buffer.layout.numel :]
                raise_first(
                    "padding is zero",
                    f"{name} ends in {padding.tolist()[:4]}…" if padding.any() else None,
                )

    def the_numbers_are_those_of_a_plain_process(self) -> None:
        self._compare(rounding=0.0, norm=0.0)

    def gather_gives_what_the_ranks_hold(self) -> None:
        full, held = self.step.gather(self.state), self.weights()
        for key, name in self.step.steps[0].runtime.stored_names.items():
            mismatch = (
                None
                if torch.equal(full[key], held[name].to(full[key].dtype))
                else f"{key} is another"
            )
            raise_first("gather gives what the ranks hold, by the model's own names", mismatch)

    def counts_and_loss_scale_are_those_of_a_plain_process(self) -> None:
        scale, plain = self.state.loss_scale, self.plain.loss_scale
        found = [int(self.state.step[0]), *(x[0].item() for x in scale)]
        expected = [self.plain.num_updates, plain.scale, plain.left, plain.num_good]
        if not plain.rules.dynamic:
            found, expected = found[:2], expected[:2]
        mismatch = f"(updates, scale, hysteresis, good steps) are {found}, not {expected}"
        law = "an overflow makes no update, and the loss scale is DeepSpeed's"
        raise_first(law, mismatch if found != expected else None)

    # --- parts of rules ---------------------------------------------------------------------------

    def step_of(self, job: Job) -> LockstepRanks:
        """The step of a job."""
        cfg = job.config | {"optimizer": self.optimizer.config}
        if job.placement != "device":
            device = "cpu" if job.placement == "host" else "nvme"
            self.folder = self.folder or TemporaryDirectory(prefix="fzero-machine-")
            where = {"device": device, "nvme_path": self.folder.name}
            cfg["zero_optimization"]["offload_optimizer"] = where
            if job.placement == "parameters too" and job.stage == 3:
                cfg["zero_optimization"]["offload_param"] = where | {"max_in_cpu": 0}
        step = make_train_step(
            self.model,
            cfg,
            units=job.units,
            transform=type(self).transform,
            donate=job.memory == "donated",
        )
        return simulate(step, job.world_size, by="lockstep")

    def move(self, job: Job) -> None:
        """Continues with another job."""
        job = self._fitting(job)
        old, new = self.step, self.step_of(job)
        self.job, self.step, self.state = job, new, reshard(self.state, old, new)

    def _with_scaling(self, other: Job) -> Job:
        """Another job with the present rules of the loss scale."""
        kept = ("initial_scale_power", "window", "hysteresis", "consecutive")
        return replace(other, **{field: getattr(self.job, field) for field in kept})

    def _compute_as_the_job(self, old: Job) -> None:
        """Switches the oracle to the precision of the job after `old`; the loss scale
        is kept if it was and is dynamic.
        """
        self.plain.compute_in(self.job.precision)
        if not (old.scaling.dynamic and self.job.scaling.dynamic):
            self.plain.loss_scale = ReferenceLossScale(self.job.scaling)

    def _place(self, placement: Literal["device", "host", "nvme", "parameters too"]) -> None:
        self.job = self._fitting(replace(self.job, placement=placement))
        self.step, before = self.step_of(self.job), copied(self.state)
        self.state = place(self.state, self.step)
        raise_first("a state that moves stays as it was", changed(before, self.state))

    @property
    def held(self) -> TrainState[Tensor]:
        """The state in memory, whatever its placement."""
        found: TrainState[Tensor] = in_memory(self.state)
        return found

    def weights(self) -> Numbers:
        """The updated weight of every parameter, or the model's own where it is frozen."""
        found: Numbers = {}
        state, specs = self.held, self.step.specs
        for buffer in self.step.plan.flat_buffers:
            part = "master" if buffer.has_master else "params"
            flat_W, spec = getattr(state, part)[buffer.key], getattr(specs, part)[buffer.key]
            found |= unflatten(full(flat_W, spec), buffer.layout)
        return found

    def optimizer_state(self) -> dict[str, Numbers]:
        """The optimizer's tensors of every trained parameter."""
        found: dict[str, Numbers] = {}
        state = self.held
        for buffer in (buffer for buffer in self.step.plan.flat_buffers if buffer.trainable):
            tree, specs = state.optimizer[buffer.key], self.step.specs.optimizer[buffer.key]
            for leaf, x_W, spec in zip(
                leaf_names(tree), optree.tree_leaves(tree), optree.tree_leaves(specs)
            ):
                views = unflatten(full(x_W, spec), buffer.layout) if buffer.is_long(spec) else {}
                for name in buffer.layout.names:
                    found.setdefault(name, {})[leaf] = views.get(name, x_W[0])
        return found

    def _optimizer(self, name: str) -> Optimizer:
        transform = type(self).transform
        if transform is None:
            return OPTIMIZERS[name]
        make: Callable[[], Transform]
        make = (
            (lambda: transform) if isinstance(transform, Transform) else lambda: transform(self.lr)
        )
        return Optimizer({"type": "SGD", "params": {"lr": self.lr}}, optimizer_of_transform(make))

    def _fitting(self, job: Job) -> Job:
        names = [name for name, _ in self.model.named_parameters()]
        units = tuple(
            unit for unit in job.units or () if any(name.startswith(f"{unit}.") for name in names)
        )
        # In fp16 the sum of two parts of a gradient may overflow where the sum of the divided parts
        # does not.
        is_tied = len(names) < sum(1 for _ in self.model.named_parameters(remove_duplicate=False))
        precision = "bfloat16" if is_tied and job.precision == "float16" else job.precision
        # Files hold one generation only.
        in_files = job.placement in ("nvme", "parameters too")
        placement = "host" if job.memory == "kept" and in_files else job.placement
        return replace(job, units=units or None, precision=precision, placement=placement)

    def _batch(self, seed: int) -> Any:
        batch = self.make_batch(self.job.world_size * self.job.num_samples, seed)
        return optree.tree_map(
            lambda x: x.unflatten(0, (self.job.world_size, self.job.num_samples)), batch
        )

    def _step(self, batch_W: Any) -> None:
        """One step of the job and of the oracle."""
        given, before = self.state, copied(self.state)
        expected = self.plain.step(self.job, batch_W)
        found: Metrics | FloatingPointError
        try:
            self.state, found = self.step(given, batch_W)
            end = "skip" if found.overflow else "update"
        except FloatingPointError as error:
            end, found = "error", error
        mismatch = f"{end} with {found}, but {expected}" if expected.end != end else None
        raise_first("a step ends as that of a plain process", mismatch)
        if isinstance(found, Metrics):
            self._check_metrics(found, expected)
        else:
            raise_first(
                "a step that raises leaves the state as it was",
                changed(before, given, but=("grads",)),
            )
        if expected.end == "skip":
            raise_first(
                "a skipped step changes nothing",
                changed(before, self.state, but=("grads", "loss_scale")),
            )
        if self.job.memory == "kept":
            raise_first(
                "a step that donates nothing leaves the state as it was", changed(before, given)
            )
        if expected.end == "update" and expected.rounding:
            # The oracle then continues with these numbers, so that the rounding of two steps does
            # not add up.
            self._compare(rounding=expected.rounding, norm=expected.norm)
            self.plain.take(self.weights(), self.optimizer_state())

    def _check_metrics(self, metrics: Metrics, expected: ReferenceOutcome) -> None:
        pairs = {
            "loss": (metrics.loss, expected.loss),
            "loss_scale": (metrics.loss_scale, expected.scale),
        }
        if expected.end == "update":
            pairs["grad_norm"] = (metrics.grad_norm, expected.norm)
        for name, (found, value) in pairs.items():
            is_near = near(found.item(), value, max(expected.rounding, 1e-5))
            mismatch = None if is_near else f"{name} is {found.item()}, not {value}"
            raise_first("metrics are those of a plain process", mismatch)

    def _compare(self, *, rounding: float, norm: float) -> None:
        """Raises unless weights and optimizer state equal the oracle's, up to
        `rounding` times the gradient's norm.
        """
        sentence = "the numbers are those of a plain process"
        weights, state = self.weights(), self.optimizer_state()
        for name, expected in self.plain.weights.items():
            raise_first(
                sentence, differs(weights[name], expected, rounding, norm, f"weight {name!r}")
            )
        for name in self.plain.trained:
            for leaf, expected in self.plain.state[name].items():
                found = state[name][leaf]
                like = expected[: found.numel()].view(found.shape) if expected.ndim else expected
                raise_first(sentence, differs(found, like, rounding, norm, f"{leaf} of {name!r}"))

    def _faults(self, fault: Callable[[TensorSpec, Tensor], str | None]) -> Iterator[str | None]:
        """The faults of the state's tensors, without the random states, which differ
        between ranks.
        """
        specs, state = (tree._replace(rng={}) for tree in (self.step.specs, self.held))
        mismatch = None if names_of(specs) == names_of(state) else f"it has {names_of(state)}"
        raise_first("the state is as the specs say", mismatch)
        for name, spec, x_W in zip(
            names_of(specs), optree.tree_leaves(specs), optree.tree_leaves(state)
        ):
            found = fault(spec, x_W)
            yield f"{name} {found}" if found else None

    def _flat_tensors(self) -> Iterator[tuple[str, FlatParamPlan, TensorSpec, Tensor]]:
        specs, state = self.step.specs, self.held
        for buffer in self.step.plan.flat_buffers:
            for part in ("params", "master", "grads", "optimizer"):
                if buffer.key in getattr(specs, part):
                    tree, of_tree = (
                        getattr(state, part)[buffer.key],
                        getattr(specs, part)[buffer.key],
                    )
                    for x_W, spec in zip(
                        optree.tree_leaves(tree), optree.tree_leaves(of_tree), strict=True
                    ):
                        if part != "optimizer" or buffer.is_long(spec):
                            yield f"{part} of {buffer.key!r}", buffer, spec, x_W


def limit_rules(machine: type[TrainingMachine]) -> None:
    """Limits the runs of a machine's tests: many short runs find more than a few long
    ones.
    """
    ignored = list(HealthCheck)
    machine.TestCase.settings = settings(
        stateful_step_count=NUM_RULES, deadline=None, suppress_health_check=ignored
    )


limit_rules(TrainingMachine)
