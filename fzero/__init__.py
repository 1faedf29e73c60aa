"""fzero: ZeRO stages 0–3 as pure functions on PyTorch.

cfg = fzero.Config.load("config.json")
step = fzero.make_train_step(model, cfg)
state = step.init()
for batch in loader:
    state, metrics = step(state, batch)
"""

from fzero.collectives import CollectiveError, Real, Sent, Sim, join, shutdown
from fzero.config import Config, ConfigError, ConfigWarning
from fzero.plan import Plan, plan
from fzero.schedule import Event, ScheduleError
from fzero.state import Metrics, TrainState
from fzero.step import MismatchError, TrainStep, make_train_step
from fzero.transforms import Transform, adagrad, adam, adamw, chain, lion, scale, sgd
from fzero.verbs import gather, optimizer_update, reduce_scatter_grads, shard, specs_of

__all__ = [
    "CollectiveError",
    "Config",
    "ConfigError",
    "ConfigWarning",
    "Event",
    "Metrics",
    "MismatchError",
    "Plan",
    "Real",
    "ScheduleError",
    "Sent",
    "Sim",
    "TrainState",
    "TrainStep",
    "Transform",
    "adagrad",
    "adam",
    "adamw",
    "chain",
    "gather",
    "join",
    "lion",
    "make_train_step",
    "optimizer_update",
    "plan",
    "reduce_scatter_grads",
    "scale",
    "sgd",
    "shard",
    "shutdown",
    "specs_of",
]
