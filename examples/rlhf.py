"""Reinforcement learning from a reward model: an actor, a critic, a reference and a
reward model, by PPO on two ranks.

    fzero --num_procs 2 examples/rlhf.py
        five seeds, a minute on two cores
    fzero --num_procs 2 examples/rlhf.py --by engine --seeds 1
        the same loop by DeepSpeed's calls

An update has three parts. The actor answers prompts, on parameters that ZeRO-3 gathers
once for all tokens; actor, reference and critic look at the answers; actor and critic
learn from them (arXiv:1707.06347). The reward model is a table of the tokens' worth,
and the actor is paid for what it writes, less a price for the distance from where it
began. Draws the rewards: out/rlhf.png.
"""

import argparse
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

import fzero

VOCAB, PROMPT, ANSWER, ROWS = 32, 4, 12, 32
SIZES = {
    "vocab_size": VOCAB,
    "n_positions": PROMPT + ANSWER,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 = GPT2Config(**SIZES, **NO_DROPOUT, bos_token_id=0, eos_token_id=0)
ZERO_3 = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.0}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
# how far an update may move a probability, and the price of the distance from the reference
CLIP, PRICE = 0.2, 0.05


class Critic(nn.Module):
    """What an answer will be paid, said at each of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = GPT2Model(GPT2), nn.Linear(GPT2.n_embd, 1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(ids).last_hidden_state[:, PROMPT - 1 : -1]
        return self.head(hidden)[..., 0]


def log_probs(actor: nn.Module, ids: Tensor) -> Tensor:
    """The log probability of each token of the answers."""
    logits = actor(input_ids=ids).logits[:, PROMPT - 1 : -1]
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, PROMPT:], reduction="none")


def actor_loss(actor: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ratio = (log_probs(actor, batch["ids"]) - batch["before"]).exp()
    gain = batch["advantage"]
    return -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()


def critic_loss(critic: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(critic(batch["ids"]), batch["reward"])


class Functional:
    """A model under `make_train_step`."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.step = fzero.make_train_step(model, fzero.Config.load(ZERO_3), loss_fn=loss_fn)
        self.state = self.step.init()
        self.rank = self.step.rank

    def whole(self) -> AbstractContextManager[nn.Module]:
        """The model on full parameters, gathered once."""
        return fzero.generating(self.step, self.state)

    def learn(self, batch: dict[str, Tensor]) -> None:
        self.state, _ = self.step(self.state, batch)


class ByEngine:
    """A model under `initialize`, as a script for DeepSpeed has it."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.engine, self.loss_fn = fzero.initialize(model=model, config=ZERO_3)[0], loss_fn
        self.rank = self.engine.train_step.rank

    def whole(self) -> AbstractContextManager[nn.Module]:
        return fzero.deepspeed.zero.unwrap_model_for_generation(self.engine.module)

    def learn(self, batch: dict[str, Tensor]) -> None:
        self.engine.backward(self.loss_fn(self.engine, batch))
        self.engine.step()


def train(seed: int, num_updates: int, make: type[Functional] | type[ByEngine]) -> list[float]:
    """The mean reward of all ranks after each update."""
    torch.manual_seed(seed)
    worth = torch.randn(VOCAB)  # the reward model
    model, reference = GPT2LMHeadModel(GPT2), GPT2LMHeadModel(GPT2)
    reference.load_state_dict(model.state_dict())
    actor, critic, rewards = make(model, actor_loss), make(Critic(), critic_loss), []
    torch.manual_seed(1000 * seed + actor.rank)  # ranks draw different prompts and answers
    for _ in range(num_updates):
        prompts = torch.randint(1, VOCAB, (ROWS, PROMPT))
        with torch.no_grad():
            with actor.whole() as whole:
                ids = whole.generate(
                    prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0,
                    max_new_tokens=ANSWER, min_new_tokens=ANSWER, pad_token_id=0,
                )  # fmt: skip
                before = log_probs(whole, ids)
            with critic.whole() as whole:
                value = whole(ids)
            paid = worth[ids[:, PROMPT:]] - PRICE * (before - log_probs(reference, ids))
        reward = paid.flip(1).cumsum(1).flip(1)  # a token is paid with all that follow it
        gain = reward - value
        batch = {
            "ids": ids,
            "before": before,
            "advantage": (gain - gain.mean()) / gain.std(),
            "reward": reward,
        }
        for _ in range(2):
            actor.learn(batch)
            critic.learn(batch)
        rewards.append(worth[ids[:, PROMPT:]].mean().item())
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--by", choices=("step", "engine"), default="step")
    parser.add_argument("--out", type=Path, default=Path("out/rlhf.png"))
    options = parser.parse_args()
    rank = fzero.join().rank
    curves = []
    for seed in range(options.seeds):
        curves.append(
            train(seed, options.updates, Functional if options.by == "step" else ByEngine)
        )
        if rank == 0:
            print(
                f"seed {seed}: reward per token {curves[-1][0]:.2f} -> {curves[-1][-1]:.2f}",
                flush=True,
            )
    if rank == 0:
        draw(curves, options.out)
    fzero.shutdown()


def draw(curves: list[list[float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for seed, curve in enumerate(curves):
        axes.plot(range(1, len(curve) + 1), curve, label=f"seed {seed}")
    axes.set(
        xlabel="update", ylabel="reward per token, rank 0", title="PPO under ZeRO-3 on two ranks"
    )
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
