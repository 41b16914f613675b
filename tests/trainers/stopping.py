"""A game of episodes of different length, small enough to list them all, and a policy for it that is a table of logits.

The vocabulary is two tokens. Turn 0 is the token 0, which ends the episode, or the token 1 and another; every later turn is
one token, of which 0 ends the episode; an observation stands between two turns. With three turns:

    0                    the shortest of the 7 episodes
    1 x | o | 0
    1 x | o | 1 | o | y  x and y are either token
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from agile_trainers.rollout.collate import collate
from agile_trainers.step.credit import Credit
from agile_trainers.step.critic import NoCritic
from agile_trainers.step.log_probs import BatchLogProbs
from agile_trainers.step.play import PlayedGroups
from agile_trainers.trainers.trainer import MultiTurnTrainer
from agile_trainers.types import StopReason, Trajectory, Turn, TurnBatch

Actions = tuple[tuple[int, ...], ...]
"""The turns of an episode, each of them its tokens."""

_TOKENS, _OBSERVATION = (5, 6), 7
"""Ids of the two tokens, and of what the environment says."""


def _episodes(num_turns: int) -> list[Actions]:
    episodes: list[Actions] = []
    going: list[Actions] = [()]
    for k in range(num_turns):
        turns = [(0,), (1, 0), (1, 1)] if k == 0 else [(0,), (1,)]
        played = [(*before, turn) for before in going for turn in turns]
        going = [episode for episode in played if episode[-1][0] == 1 and k < num_turns - 1]
        episodes += [episode for episode in played if episode not in going]
    return episodes


class Game:
    """All episodes, their rewards, and a policy with logits for every context, which is the tokens chosen before."""

    def __init__(self, num_turns: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.episodes = _episodes(num_turns)
        tokens = [tuple(itertools.chain(*episode)) for episode in self.episodes]
        contexts = sorted({chosen[:n] for chosen in tokens for n in range(len(chosen))})
        self._row = {context: row for row, context in enumerate(contexts)}
        self.logits = torch.randn(len(contexts), 2, generator=generator).requires_grad_()
        # A reward depends on all that was done until then.
        pasts = sorted({episode[: k + 1] for episode in self.episodes for k in range(len(episode))})
        reward = dict(zip(pasts, torch.randn(len(pasts), generator=generator).tolist()))
        self.rewards = [[reward[episode[: k + 1]] for k in range(len(episode))] for episode in self.episodes]

    # ---------------------------------------------------------------------------------------------------- the truth

    def token_log_probs(self, episode: int) -> list[list[torch.Tensor]]:
        """Of each token, by turn."""
        table, chosen, turns = self.logits.log_softmax(-1), (), []
        for turn in self.episodes[episode]:
            turns.append([])
            for token in turn:
                turns[-1].append(table[self._row[chosen], token])
                chosen = (*chosen, token)
        return turns

    def probabilities(self) -> list[float]:
        """Of each episode."""
        return [sum(sum(turn) for turn in self.token_log_probs(e)).exp().item() for e in range(len(self.episodes))]

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(value, self.logits, retain_graph=True)
        return gradient.flatten()

    def scores(self) -> list[list[torch.Tensor]]:
        """Gradient of the log-probability of each turn of each episode."""
        return [[self.gradient(sum(turn)) for turn in self.token_log_probs(e)] for e in range(len(self.episodes))]

    def returns(self, gamma: float) -> list[list[float]]:
        """Discounted, from each turn of each episode on."""
        return [
            [
                sum(gamma ** (later - k) * rewards[later] for later in range(k, len(rewards)))
                for k in range(len(rewards))
            ]
            for rewards in self.rewards
        ]

    def exact_gradient(self, gamma: float) -> torch.Tensor:
        """The policy gradient: each turn is credited with its discounted return from there on.

        At gamma 1 it is the gradient of the expected return, which a test checks.
        """
        return self.brute_force(1, lambda members: [self.returns(gamma)[members[0]]])

    def expected_return_gradient(self) -> torch.Tensor:
        terms = zip(range(len(self.episodes)), self.rewards)
        return self.gradient(sum(sum(map(sum, self.token_log_probs(e))).exp() * sum(rewards) for e, rewards in terms))

    def brute_force(self, size: int, advantages: Callable[[list[int]], list[list[float]]]) -> torch.Tensor:
        """Expectation over batches of the mean over episodes of the sum over turns of advantage times score.

        Args:
            size: Episodes of a batch.
            advantages: By turn, of the episodes of a batch, given by their indices.
        """
        probabilities, scores = self.probabilities(), self.scores()
        total = torch.zeros_like(scores[0][0])
        for members in itertools.product(range(len(self.episodes)), repeat=size):
            weight = math.prod(probabilities[e] for e in members) / size
            for e, row in zip(members, advantages(list(members))):
                total += sum(weight * a * score for a, score in zip(row, scores[e], strict=True))
        return total

    def values(self, gamma: float) -> Callable[[int, int, int], float]:
        """V, given episode, turn and tokens of it that are chosen already: the expected return from that turn on."""
        probabilities, returns = self.probabilities(), self.returns(gamma)

        def value(episode: int, turn: int, known: int) -> float:
            def past(e: int) -> Any:
                return self.episodes[e][:turn], self.episodes[e][turn : turn + 1] and self.episodes[e][turn][:known]

            alike = [e for e in range(len(self.episodes)) if len(self.episodes[e]) > turn and past(e) == past(episode)]
            return sum(probabilities[e] * returns[e][turn] for e in alike) / sum(probabilities[e] for e in alike)

        return value

    # ---------------------------------------------------------------------------------------------- what is estimated

    def trajectory(self, episode: int) -> Trajectory:
        """The episode as a rollout would hand it over."""
        ids: list[int] = []
        turns = []
        for k, (tokens, reward) in enumerate(zip(self.episodes[episode], self.rewards[episode])):
            ids += [_OBSERVATION] * bool(ids)
            info = {"anchor": self.state(episode, k + 1)}
            turns.append(Turn(len(ids), len(ids) + len(tokens), "", "stop", reward, info=info))
            ids += [_TOKENS[token] for token in tokens]
        info = {"anchor": self.state(episode, 0)}
        return Trajectory([1, 2], ids, [0.0] * len(ids), turns, StopReason.TERMINATED, reset_info=info)

    def state(self, episode: int, turn: int) -> str:
        """The name of the state that a turn starts from: the last token chosen."""
        past = self.episodes[episode][:turn]
        return f"after {past[-1][-1]}" if past else "start"

    def batch(self, members: list[int]) -> TurnBatch:
        return collate([self.trajectory(e) for e in members], pad_token_id=0, end_token_id=3)

    def score(self, completion_ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (B, T): the policy's of its own tokens, an arbitrary constant of all others."""
        table = torch.cat([self.logits.log_softmax(-1).flatten(), torch.full((1,), -7.0)])
        index = torch.full_like(completion_ids, len(table) - 1)
        for row, ids in enumerate(completion_ids.tolist()):
            chosen: tuple[int, ...] = ()
            for column, token in enumerate(ids):
                if token in _TOKENS:
                    index[row, column] = 2 * self._row[chosen] + _TOKENS.index(token)
                    chosen = (*chosen, _TOKENS.index(token))
        return table[index]

    def estimate(
        self, trainer: MultiTurnTrainer, members: list[int], advantages: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The trainer's gradient on one batch of episodes (as ascent), times Dr. GRPO's constant.

        From the collated batch on it is the trainer's own way: its credit rule, unless ``advantages`` (B, K) are given, its
        columns and TRL's loss.
        """
        trainer.current_gradient_accumulation_steps = 1
        batch = self.batch(members)
        critic = trainer.critic
        read = None if isinstance(critic, NoCritic) else critic.read(batch)  # the exact one
        rewards = batch.turn_rewards.sum(dim=1, keepdim=True)
        played = PlayedGroups([], [], [], rewards, batch)
        credit = trainer.batches.assign(played, read)[1] if advantages is None else Credit(advantages)
        columns = trainer.batches.finish(batch, credit, BatchLogProbs(torch.ones(len(members)) > 0), read).to_trl()
        trainer.critic = NoCritic()  # here it is exact, and has no loss
        loss = trainer._compute_loss(trainer.model, columns)
        trainer.critic = critic
        return -self.gradient(loss) * trainer.max_completion_length

    def expectation(self, trainer: MultiTurnTrainer, groups: int, size: int) -> torch.Tensor:
        """Of the gradient over all batches of ``groups`` groups of ``size``, whose order and whose members' is alike."""
        every = list(itertools.combinations_with_replacement(range(len(self.episodes)), size))
        probabilities = self.probabilities()
        chances = [_orders(group) * math.prod(probabilities[e] for e in group) for group in every]
        total: Any = 0.0
        for chosen in itertools.combinations_with_replacement(range(len(every)), groups):
            weight = _orders(chosen) * math.prod(chances[g] for g in chosen)
            total = total + weight * self.estimate(trainer, [e for g in chosen for e in every[g]])
        return total


def _orders(chosen: tuple[int, ...]) -> int:
    """In how many orders these can be drawn."""
    return math.factorial(len(chosen)) // math.prod(math.factorial(chosen.count(x)) for x in set(chosen))


def relative_error(estimated: torch.Tensor, exact: torch.Tensor) -> float:
    return float((estimated - exact).norm() / exact.norm())
