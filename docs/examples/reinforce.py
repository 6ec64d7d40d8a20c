"""Reinforcement learning: workers play with the newest policy, the trainer learns from what they saw.

    python reinforce.py

The game is a pole on a cart, as Barto, Sutton and Anderson described it in 1983: it ends when the pole falls,
or after 200 steps, and each step is worth a point. The policy is learned by REINFORCE (Williams, 1992), where
what is expected of a state is the mean of all games at the same time. An item of a worker is some games; the
weights come with it, so that no worker plays with an old policy, and the seed of its random numbers.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import tp_runner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

LONGEST, GAMES = 200, 16


def make_policy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def push(state: Tensor, actions: Tensor) -> Tensor:
    """Return the states (n, 4) a fiftieth of a second later: place, speed, angle and its speed."""
    _, speed, angle, turn = state.unbind(1)
    force = 20.0 * actions - 10
    sine, cosine = angle.sin(), angle.cos()
    pushed = (force + 0.05 * turn**2 * sine) / 1.1
    turning = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    moving = pushed - 0.05 * turning * cosine / 1.1
    change = torch.stack([speed, moving, turn, turning], 1)
    return state + 0.02 * change


def play(policy: nn.Module, weights: dict[str, Tensor], seed: int, device: str) -> tuple[Tensor, ...]:
    """Play some games; return states (steps, 4), what was done in them, and how much longer it went on."""
    policy.load_state_dict(weights)
    torch.manual_seed(seed)
    state = 0.1 * torch.rand(GAMES, 4, device=device) - 0.05
    going = torch.ones(GAMES, dtype=torch.bool, device=device)
    states, actions, alive = [], [], []
    with torch.inference_mode():
        while going.any() and len(states) < LONGEST:
            chosen = torch.distributions.Categorical(logits=policy(state)).sample()
            states.append(state)
            actions.append(chosen)
            alive.append(going)
            state = push(state, chosen)
            going = going & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < math.radians(12))
    was_alive = torch.stack(alive)  # (time, games)
    returns = was_alive.float().flip(0).cumsum(0).flip(0)
    better = returns - returns.sum(1, keepdim=True) / was_alive.sum(1, keepdim=True)
    seen = (torch.stack(states), torch.stack(actions), better)
    return tuple(each[was_alive].cpu() for each in seen)


def step(policy: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    states, actions, better = batch
    chosen = torch.distributions.Categorical(logits=policy(states)).log_prob(actions)
    return {"loss": -(chosen * better).mean()}


def rounds(runner: Any, policy: nn.Module, count: int, items: int) -> Iterator[tuple[list[Tensor], float]]:
    """Yield what was seen in each round, with the mean length of its games."""
    for number in range(count):
        weights = {name: value.detach().cpu() for name, value in policy.state_dict().items()}
        played = runner.stream((weights, number * items + item) for item in range(items))
        states, actions, better = (torch.cat(part) for part in zip(*played, strict=True))
        yield [states, actions, better / (better.std() + 1e-6)], len(states) / (items * GAMES)


class Players(tp_runner.OrderedRunner):
    @staticmethod
    def producer_init(device: str, cfg: Any) -> None:
        cfg.policy = make_policy().to(device)

    @staticmethod
    def producer_work(device: str, cfg: Any, data: tuple[dict[str, Tensor], int]) -> tuple[Tensor, ...]:
        return play(cfg.policy, *data, device)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    lengths = []
    torch.manual_seed(0)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    with (
        Trainer(devices="cpu", seed=0, progress=False) as trainer,
        Players(n_workers=options.workers) as runner,
    ):
        for seen, length in rounds(runner, policy, options.rounds, items=2):
            loader = DataLoader(TensorDataset(*seen), batch_size=len(seen[0]))
            trainer.fit(policy, optimizer, loader, step=step)
            lengths.append(length)
    print(f"a game lasts {lengths[0]:.0f} steps in the first round, {lengths[-1]:.0f} in the last")
    return lengths


if __name__ == "__main__":
    main()
