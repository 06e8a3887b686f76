"""An actor and a critic, as in PPO: several updates of each from the games of one step.

    paceline run --workers 3 examples/actor_critic.py

A toy task: walk to the origin of a line. Every sample of the batch is the start of a game; a
worker plays those of its shards with the actor as it was before the step, then the actor and the
critic learn from them, two turns each. In each turn the games are played again from the same
starts with the same random numbers, so nothing has to be stored or sent.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

import paceline

MOVES, DISCOUNT, CLIP = 8, 0.9, 0.2


def play(policy: nn.Module, noise: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The states of every game, the actions taken, and the discounted rewards."""
    places, actions, rewards = [], [], []
    with torch.no_grad():
        for move in range(MOVES):
            action = policy(place) + 0.5 * noise[:, move, None]
            places.append(place)
            actions.append(action)
            place = place + 0.3 * action.tanh()
            rewards.append(-place.abs())
        for move in reversed(range(MOVES - 1)):
            rewards[move] = rewards[move] + DISCOUNT * rewards[move + 1]
    return torch.stack(places, 1), torch.stack(actions, 1), torch.stack(rewards, 1)


def main() -> None:
    paceline.seed_everything(0)
    starts = torch.randn(96, 1, dtype=torch.float64)
    beginnings = TensorDataset(starts, torch.randn(96, MOVES, dtype=torch.float64))
    actor = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    critic = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    models = {
        "actor": (actor, torch.optim.Adam(actor.parameters(), lr=3e-3)),
        "critic": (critic, torch.optim.Adam(critic.parameters(), lr=1e-2)),
    }
    options = paceline.RunOptions(clip_norm={"actor": 0.5})
    run = paceline.Run(
        models, beginnings, global_batch=24, epochs=5, seed=0, shards=6, options=options
    )
    for step in run:
        player = copy.deepcopy(actor)  # as it is before the step
        with step:
            for _ in range(2):
                with step.turn("critic"):
                    for place, noise in step.batches():
                        places, _, returns = play(player, noise, place)
                        step.backward((run.models["critic"](places) - returns).square().mean())
                with step.turn("actor"):
                    for place, noise in step.batches():
                        places, actions, returns = play(player, noise, place)
                        with torch.no_grad():
                            gain = returns - run.models["critic"](places)
                            before = Normal(player(places), 0.5).log_prob(actions)
                        now = Normal(run.models["actor"](places), 0.5).log_prob(actions)
                        ratio = (now - before).exp()
                        bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
                        step.backward(-torch.minimum(ratio * gain, bounded * gain).mean())
    if run.world.is_main:
        params = [*actor.parameters(), *critic.parameters()]
        total = sum(param.detach().abs().sum().item() for param in params)
        print(f"sum of all |weights| {total:.9f}, world size {run.world.size}")


if __name__ == "__main__":
    main()
