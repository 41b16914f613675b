"""Applies the health checks to a run: takes the metrics of every step, and measures the policy itself now and then.

The measurements are two: whether answers depend on their prompt (``prompt_information``), and whether updates move the
policy (``policy_change``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers.utils import logging

from agile_trainers.evaluation.diagnosis import Diagnosis, Finding
from agile_trainers.rollout.collate import collate
from agile_trainers.step.log_probs import LogProbPasses, Models
from agile_trainers.types import StopReason, Trajectory, Turn

logger = logging.get_logger(__name__)

PAIRS = 8
"""Largest number of prompts, and of answers, that are compared with each other."""
FEWEST_PAIRS = 4
"""Different prompts that a comparison needs."""
LANDMARKS = 4
"""Answers of the first measurement whose log-probabilities later ones compare."""
ANSWER_TOKENS = 256
"""Tokens of an answer that are read, at most."""
EARLY = (5, 15)
"""Generation batches of further measurements, so that a policy that is destroyed and weights that stay are named early."""
FIRST_TURNS = 4
"""Turns among which the one to compare is chosen."""


@dataclass(frozen=True)
class PromptedAnswer:
    """An answer and the whole conversation before it, in tokens."""

    prompt_ids: list[int]
    answer_ids: list[int]


def answers_of_turn(trajectories: Sequence[Trajectory], turn: int) -> list[PromptedAnswer]:
    """Return the answers of one turn, one for each different conversation before it, at most ``PAIRS``.

    Of episodes whose turns do not correspond by index (:attr:`~agile_trainers.types.Trajectory.linear`), only the first do.
    """
    found: dict[tuple[int, ...], PromptedAnswer] = {}
    for episode in trajectories:
        if len(episode.turns) > turn and not episode.stop_reason.failed and (episode.linear or turn == 0):
            before = episode.prompt_of(turn)
            found.setdefault(tuple(before), PromptedAnswer(before, episode.action_of(turn)[:ANSWER_TOKENS]))
    return list(found.values())[:PAIRS]


def compared_answers(trajectories: Sequence[Trajectory]) -> list[PromptedAnswer]:
    """Choose the answers to compare, of all processes: those of the first turn with enough different conversations.

    All are of the same turn, so that only the content of a conversation tells them apart. Empty if no turn has at least
    ``FEWEST_PAIRS``, as with a single prompt and one turn.
    """
    every = gather_object([[answers_of_turn(trajectories, turn) for turn in range(FIRST_TURNS)]])
    for turn in range(FIRST_TURNS):
        different = {tuple(answer.prompt_ids): answer for own in every for answer in own[turn]}
        if len(different) >= FEWEST_PAIRS:
            return list(different.values())[:PAIRS]
    return []


class PolicyMeasurements:
    """Measures the policy on answers of the latest episodes, without gradient.

    One measurement reads up to ``PAIRS`` squared plus ``LANDMARKS`` rows of a prompt and an answer, over all processes.

    Args:
        log_probs: Computes log-probabilities.
        accelerator: The trainer's.
        every: Generation batches from one measurement to the next, beside those of ``EARLY``; 0 for none.
        token_ids: Ids of the padding and of the end of an answer.
    """

    def __init__(
        self, log_probs: LogProbPasses, accelerator: Accelerator, every: int, token_ids: tuple[int, int]
    ) -> None:
        self._passes, self._accelerator, self._every, self._token_ids = log_probs, accelerator, every, token_ids
        self._landmarks: list[PromptedAnswer] = []
        self._first: list[list[float]] = []
        self.rows = 0
        """Rows that all measurements of this process read."""

    def take(self, generation: int, trajectories: Sequence[Trajectory], models: Models) -> dict[str, float]:
        """Measure if it is time to. Every rank must call it at the same point.

        Args:
            generation: Index of the generation batch.
            trajectories: Its episodes of this process.
            models: The policy.

        Returns:
            ``prompt_information`` if the batch has enough different prompts; ``policy_change``, from the second measurement
            on: mean absolute change of a token's log-probability since the first.
        """
        if not self._every or (generation % self._every and generation not in EARLY):
            return {}
        compared = compared_answers(trajectories)
        # Each answer after each prompt.
        crossed = [PromptedAnswer(other.prompt_ids, answer.answer_ids) for answer in compared for other in compared]
        if not self._landmarks:
            self._landmarks = self._choose_landmarks(trajectories)
        metrics = {}
        if compared:
            totals = [sum(values) for values in self._log_probs(crossed, models)]
            metrics["prompt_information"] = prompt_information(torch.tensor(totals).view(len(compared), -1))
        # Apart from the others: rounding depends on the rows of a forward pass.
        now = self._log_probs(self._landmarks, models)
        if self._first:
            changes = [abs(x - y) for row, before in zip(now, self._first) for x, y in zip(row, before)]
            metrics["policy_change"] = sum(changes) / len(changes)
        else:
            self._first = now
        return metrics

    def _choose_landmarks(self, trajectories: Sequence[Trajectory]) -> list[PromptedAnswer]:
        own = [
            PromptedAnswer(episode.prompt_ids, episode.action_of(0)[:ANSWER_TOKENS])
            for episode in trajectories
            if episode.turns and not episode.stop_reason.failed
        ][:LANDMARKS]
        return gather_object(own)[:LANDMARKS]

    def _log_probs(self, answers: Sequence[PromptedAnswer], models: Models) -> list[list[float]]:
        """Return the log-probability of each token of each answer; the processes share the work."""
        if not answers:
            return []
        ranks = self._accelerator.num_processes
        share = -(-len(answers) // ranks)
        # Every rank reads equally many rows: where weights are sharded, a forward pass is collective.
        padded = [*answers, *[answers[0]] * (share * ranks - len(answers))]
        own = padded[self._accelerator.process_index * share :][:share]
        pad, end = self._token_ids
        batch = collate(
            [_episode(answer) for answer in own],
            pad_token_id=pad,
            end_token_id=end,
            pad_to_multiple_of=self._passes.pad_to_multiple_of,
            device=self._accelerator.device,
        )
        computed = self._passes.compute(models, batch, old=True, reference=False).old
        assert computed is not None
        self.rows += share
        kept = [row[: len(answer.answer_ids)] for row, answer in zip(computed.tolist(), own)]
        return gather_object(kept)[: len(answers)]

    def state(self) -> dict[str, Any]:
        """Return the state as JSON can hold it, for a checkpoint."""
        return {"landmarks": [asdict(answer) for answer in self._landmarks], "first": self._first}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the :meth:`state` of a checkpoint."""
        self._landmarks = [PromptedAnswer(**answer) for answer in state["landmarks"]]
        self._first = state["first"]


def _episode(answer: PromptedAnswer) -> Trajectory:
    length = len(answer.answer_ids)
    return Trajectory(
        answer.prompt_ids, answer.answer_ids, [0.0] * length, [Turn(0, length, "", "stop")], StopReason.TERMINATED
    )


class HealthChecks:
    """The health checks of a run in training: its diagnosis, and measurements of its policy.

    Args:
        options: The run's configuration.
        measurements: Of the policy.
        speaks: True on the process that logs.
    """

    def __init__(self, options: Any, measurements: PolicyMeasurements, *, speaks: bool) -> None:
        self.diagnosis, self.measurements, self._speaks = Diagnosis(options), measurements, speaks
        self._taken: dict[str, int] = {}
        self._written = 0
        self.findings: list[Finding] = []
        """Everything that was reported since the trainer was made, in order."""

    @contextmanager
    def looking(self, step: int, metrics: Mapping[str, Sequence[float]]) -> Iterator[None]:
        """Take the new values of an optimizer step before a block in which they may be logged, and warn after it.

        Args:
            step: Optimizer steps taken.
            metrics: All values of each metric since the last log.
        """
        new = {name: values[self._taken.get(name, 0) :] for name, values in metrics.items()}
        means = {name: sum(values) / len(values) for name, values in new.items() if values}
        found = self.diagnosis.look(step, means)
        self.findings += found
        yield
        for finding in found if self._speaks else ():
            logger.warning(str(finding))
        self._taken = {name: len(values) for name, values in metrics.items()}

    def unwritten(self) -> list[Finding]:
        """Return the findings since the last call."""
        first, self._written = self._written, len(self.findings)
        return self.findings[first:]

    def state(self) -> dict[str, Any]:
        """Return the state as JSON can hold it, for a checkpoint."""
        return {"diagnosis": self.diagnosis.state(), "measurements": self.measurements.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the :meth:`state` of a checkpoint."""
        if state:
            self.diagnosis.restore(state["diagnosis"])
            self.measurements.restore(state["measurements"])


def prompt_information(log_probs: torch.Tensor) -> float:
    """Estimate the share of what answers could tell about their prompts that they do tell.

    For N prompts and an answer sampled under each, the estimate of the mutual information is the mean of
    ``log p(y_i | x_i) - log mean_j p(y_i | x_j)`` (RAGEN-2, https://huggingface.co/papers/2604.06268). It is at most
    ``log N``, by which it is divided.

    Args:
        log_probs: (N, N), row i column j: log-probability of answer i under prompt j; at least two.

    Returns:
        1 if each answer is likely under its own prompt alone, about 0 if the answers do not depend on the prompt; below 0
        by chance.

    Raises:
        ValueError: If the matrix is not square, or has a single row.
    """
    count = log_probs.size(0)
    if log_probs.dim() != 2 or log_probs.size(1) != count or count < 2:
        raise ValueError(f"log_probs must be (N, N) with N at least 2, got {tuple(log_probs.shape)}.")
    scores = log_probs.double()
    gains = scores.diagonal() - (scores.logsumexp(dim=1) - math.log(count))
    return gains.mean().item() / math.log(count)
