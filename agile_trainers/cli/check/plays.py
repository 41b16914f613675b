"""Plays the episodes of ``agile-trainers check``: by a policy, by the model, and again with the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agile_trainers.cli.check.report import Report, Run
from agile_trainers.envs.base import Environment
from agile_trainers.envs.checker import check_environment
from agile_trainers.envs.scripted_policies import ScriptedPolicy, known_policies
from agile_trainers.evaluation import evaluate_policy
from agile_trainers.rollout.scripted_policies import play_scripted
from agile_trainers.sampling.sampler import sampling_settings
from agile_trainers.types import Trajectory

REPLAYED = 4
"""Number of episodes that are replayed with the same answers."""


def policy_plays(run: Run, name: str) -> list[Trajectory]:
    """Play the episodes with one of the environment's policies."""

    def choose(environment: Environment) -> ScriptedPolicy:
        return known_policies(environment)[name]

    return play_scripted(run.engine, run.factory, choose, run.specs(), run.tokenizer)


def model_plays(run: Run) -> list[Trajectory]:
    """Play the episodes with the model, sampling as in training."""
    return evaluate_policy(
        str(run.model.model_name_or_path),
        run.tokenizer,
        run.factory,
        run.episodes,
        rows=run.rows,
        seed=run.args.seed,
        held_out=False,
        options=run.options,
        sampling=sampling_settings(run.args),
        generation_chunk_size=run.args.generation_chunk_size,
        append_final_observation=run.args.has_critic,
        model_init_kwargs={
            "revision": run.model.model_revision,
            "dtype": run.model.dtype,
            "trust_remote_code": run.args.trust_remote_code,
        },
    ).trajectories


def check_determinism(report: Report, run: Run, played: Sequence[Trajectory]) -> None:
    """Replay the first episodes with the same answers on new instances, and compare."""
    report.section("Determinism")
    again = [(spec, episode) for spec, episode in zip(run.specs(), played) if episode.turns][:REPLAYED]
    messages: dict[str, None] = {}
    for spec, episode in again:
        texts = [turn.text for turn in episode.turns]
        check = partial(check_environment, run.factory, max_turns=len(texts), actions=texts, timeout=run.time_limit)
        found = check(seed=spec.seed, options=spec.options)
        messages |= dict.fromkeys(f"{found.environment}: {finding.message}" for finding in found.findings)
    for message in messages:
        report.warning(message)
    if not messages:
        report.line(f"{len(again)} episodes, each played twice more with the same answers, gave the same results.")
