"""The law of keys that ranks may have for themselves: each changes no number and no
collective, and all others are compared.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from engines import Net, assert_close, losses_of_steps, settings
from ranks import RankPool
from training import make

import fzero
from fzero.config.config import Config
from fzero.config.fields import PER_RANK, Block, block_of, compared
from fzero.deepspeed.comm import log_summary
from fzero.deepspeed.engine.config_keys import EngineKeys
from fzero.runtime.step_spec import MismatchError

FREE: dict[str, Any] = {
    "aio": {"block_size": 4096, "queue_depth": 2, "intra_op_parallelism": 2},
    "data_efficiency": {"data_sampling": {"dynamic_batching": {"verbose": True}}},
    "steps_per_print": 1,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "mine"},
    "tensorboard": {"enabled": True, "output_path": "tb", "job_name": "mine"},
    "wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"},
    "comet": {
        "enabled": True,
        "samples_log_interval": 1,
        "project": "p",
        "workspace": "w",
        "api_key": "k",
        "experiment_name": "n",
        "experiment_key": "e",
        "online": False,
        "mode": "create",
    },
    "flops_profiler": {
        "enabled": True,
        "recompute_fwd_factor": 1.0,
        "profile_step": 2,
        "module_depth": 1,
        "top_modules": 2,
        "detailed": False,
        "output_file": "flops.txt",
    },
    "comms_logger": {
        "enabled": True,
        "verbose": True,
        "prof_all": False,
        "debug": True,
        "prof_ops": ["all_reduce"],
    },
}
"""Another value than the default for every key that is marked `PER_RANK`."""


def leaves(
    block: type[Block], prefix: str = "", *, is_free: bool = False
) -> Iterator[tuple[str, bool]]:
    """The keys of a block and of those in it, by dotted name, each with whether it is
    marked.
    """
    for name, field in block.model_fields.items():
        marked = is_free or PER_RANK in field.metadata
        if (inner := block_of(field.annotation)) is None:
            yield f"{prefix}{name}", marked
        else:
            yield from leaves(inner, f"{prefix}{name}.", is_free=marked)


def _given(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield from (
            _given(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [f"{prefix}{name}"]
        )


def test_every_key_that_is_not_compared_is_tried_below() -> None:
    found = dict([*leaves(Config), *leaves(EngineKeys)])
    assert {name for name, marked in found.items() if marked} == {*_given(FREE)}
    read = Config.model_validate({key: FREE[key] for key in FREE if key in Config.model_fields})
    assert compared(read) == compared(Config.model_validate({"data_efficiency": {}}))
    keys = EngineKeys.model_validate(
        {key: FREE[key] for key in FREE if key in EngineKeys.model_fields}
    )
    assert compared(keys) == compared(EngineKeys())


class _Package(types.ModuleType):
    """Stands for a monitor's package: every call is accepted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__internal_api__log_metric__":
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def _trained(folder: str, stage: int, free: list[dict[str, Any]]) -> Any:
    rank = torch.distributed.get_rank()
    nvme = (
        {"offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/nvme"}}
        if stage == 3
        else {}
    )
    keys = settings(stage, data_efficiency={"enabled": False})
    keys["zero_optimization"] |= nvme
    packages = {
        name: _Package(name)
        for name in ("wandb", "comet_ml", "tensorboard", "torch.utils.tensorboard")
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, package in packages.items():
            patch.setitem(sys.modules, name, package)
        engine = fzero.initialize(model=make(Net), config=keys | free[rank])[0]
        sent: list[Any] = []
        engine.train_step = engine.train_step.observed(
            lambda r: sent.append((r.collective, r.axis, r.nbytes))
        )
        losses = losses_of_steps(engine)
        log_summary()
        weights = engine.module_state_dict()
        engine.destroy()
    return losses, weights, sent


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.filterwarnings("ignore")
def test_keys_that_are_not_compared_change_no_number_and_no_collective(
    ranks: RankPool, tmp_path: Any, stage: int
) -> None:
    wanted = ranks(2, _trained, str(tmp_path), stage, [{}, {}])
    for free in ([FREE, {}], [{}, FREE]):
        for (losses, weights, sent), (others, values, collectives) in zip(
            ranks(2, _trained, str(tmp_path), stage, free), wanted, strict=True
        ):
            assert losses == others and sent == collectives and sent
            assert_close(weights, values, 0.0)


OTHERS: dict[str, Any] = {
    "dataloader_drop_last": True,
    "managed_gradient_accumulation": False,
    "checkpoint": {"tag_validation": "FAIL"},
    "hybrid_engine": {"enabled": True},
}


def _differ() -> None:
    rank = torch.distributed.get_rank()
    for name, value in OTHERS.items():
        with pytest.raises(
            MismatchError, match=f"configuration: must be the same on all ranks, but '{name}"
        ):
            fzero.initialize(model=make(Net), config=settings(1) | ({name: value} if rank else {}))


def test_keys_of_the_engine_that_change_what_is_sent_are_compared(ranks: RankPool) -> None:
    ranks(2, _differ)
