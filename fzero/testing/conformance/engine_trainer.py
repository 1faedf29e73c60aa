"""`EngineTrainer`: the adapter of DeepSpeed's engine, and of fzero's, which has the same
calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.testing.conformance.training import (
    Batches,
    GeneratorState,
    Norm,
    Setup,
    Weights,
    agreed_mean,
    dead_rank_named,
    in_real_parts,
    joined,
)


def config_of(setup: Setup, zero: Mapping[str, Any] = {}, **more: Any) -> dict[str, Any]:
    """The configuration of a training, with further keys of `zero_optimization`, and
    others.
    """
    fp16 = {
        "enabled": setup.precision == "fp16",
        "initial_scale_power": setup.scale_power,
        "loss_scale_window": setup.scale_window,
        "hysteresis": 1,
    }
    own_zero = {
        "stage": setup.stage,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 2**16,
    }
    return {
        "gradient_clipping": setup.clip,
        "gradient_accumulation_steps": setup.micro_steps,
        "zero_optimization": {**own_zero, **zero},
        "bf16": {"enabled": setup.precision == "bf16"},
        "fp16": fp16,
        **more,
    }


class EngineTrainer:
    """forward, backward and step of an engine.

    Args:
        package: `deepspeed`, or `fzero.deepspeed`.
        source: the folder that a job loads instead of one, and keys for that.
    """

    def __init__(
        self,
        setup: Setup,
        config: dict[str, Any],
        package: Any,
        rank: int,
        world_size: int,
        *,
        source: Callable[[Path, Setup, int, int], tuple[Path, dict[str, Any]]] | None = None,
    ) -> None:
        self._source = source
        self._setup, self._config, self._package = setup, config, package
        self._rank, self._generator = rank, GeneratorState(rank)
        self._engine = self._made(config)
        self._num_ranks = world_size

    def __del__(self) -> None:
        if self._package.__name__ == "deepspeed":
            self._engine.destroy()

    def _made(self, config: dict[str, Any]) -> Any:
        setup, model = self._setup, in_real_parts(self._setup.model())
        rates, scheduler = setup.rates, None
        if rates is not None:

            def scheduler(optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.LambdaLR(optimizer, rates)

        engine, *_ = self._package.initialize(
            model=model,
            optimizer=setup.make_optimizer(dict(model.named_parameters())),
            lr_scheduler=scheduler,
            config={"train_micro_batch_size_per_gpu": 1, **config},
        )
        return engine

    def step(self, batches: Batches, *, update: bool = True) -> float:
        with nullcontext() if self._package.__name__.startswith("fzero") else dead_rank_named():
            return self._step(batches, update=update)

    def _step(self, batches: Batches, *, update: bool) -> float:
        own, engine, setup = batches[self._rank], self._engine, self._setup
        if not update:
            engine.eval()
            with torch.no_grad():
                losses = [setup.loss(engine, batch).item() for batch in own]
            engine.train()
            return agreed_mean(losses)
        for batch in own:
            loss = setup.loss(engine, batch)
            if setup.count is not None:  # the engine takes means over ranks and micro-steps
                loss = loss * (setup.share(batches) * len(own) * self._num_ranks)
            engine.backward(loss)
            engine.step()
        return loss.item()  # type: ignore[no-any-return]

    def weights(self) -> Weights:
        module, utils = self._engine.module, self._package.utils
        found: dict[str, Tensor] = {}
        with self._package.zero.GatheredParameters(list(module.parameters())):
            for name, param in module.named_parameters():
                found[name] = param.detach().float().cpu().clone()
        if self._setup.precision != "fp32":
            for name, param in module.named_parameters():
                master = utils.safe_get_full_fp32_param(param)
                found[name] = found[name] if master is None else master.detach().clone()
        buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
        return {**joined(found), **buffers}

    def norm(self) -> Norm:
        grad_norm = self._engine.get_global_grad_norm()
        scale = getattr(self._engine.optimizer, "cur_scale", 1.0)
        return Norm(None if grad_norm is None else float(grad_norm), float(scale))

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), client_state={"stage": self._setup.stage})
        self._generator.save(folder)
        if self._rank == 0:
            job = [self._setup.stage, self._num_ranks]
            (folder / "job.json").write_text(json.dumps(job))

    def load(self, folder: Path) -> int:
        source, more = folder, dict[str, Any]()
        if self._source is not None:
            source, more = self._source(folder, self._setup, self._rank, self._num_ranks)
        if more:
            self._engine = self._made(self._config | more)
        path, _ = self._engine.load_checkpoint(str(source))
        if path is None:
            raise RuntimeError(f"load_checkpoint found nothing in {folder}")
        self._generator.load(folder)
        return int(self._engine.global_steps - self._engine.skipped_steps)
