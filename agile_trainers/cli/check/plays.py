"""Plays the episodes of ``agile-trainers check``, also with the same answers; judges rewards; describes an agent's calls."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from agile_trainers.cli.check.report import Report, Run
from agile_trainers.cli.errors import cut
from agile_trainers.envs.agent import is_agent
from agile_trainers.envs.base import Environment, EnvironmentFactory
from agile_trainers.envs.checker import check_environment, random_state
from agile_trainers.envs.scripted_policies import ScriptedPolicy, known_policies
from agile_trainers.evaluation import evaluate_policy
from agile_trainers.evaluation.diagnosis import BY_NAME, Finding, returns_differ, unpaid
from agile_trainers.evaluation.scripted_policies import play_agent, play_scripted
from agile_trainers.monitor.reporting import reward_success_correlation
from agile_trainers.rollout.forest import Fork
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.metrics import episode_metrics, with_success
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.sampling.sampler import sampling_settings
from agile_trainers.trainers.demonstrations import Demonstrations
from agile_trainers.types import Trajectory, common_prefix

REPLAYED = 4
"""Number of episodes that are replayed with the same answers."""
CERTAIN = 3
"""Number of times that these must be played again with equal results before they are blamed on others."""
CROSSED, STARTS = 4, 8
"""Answers of as many episodes that are given at so many starts."""
SLOW = 60.0
"""Seconds of the replays from which they are not."""


def policy_plays(run: Run, name: str, attempts: int = 1) -> list[Trajectory]:
    """Play the episodes with one of the environment's policies, each as often as ``attempts`` says."""

    def choose(environment: Environment) -> ScriptedPolicy:
        return known_policies(environment)[name]

    return play_scripted(run.engine, run.factory, choose, run.specs(attempts), run.tokenizer)


def demonstration_plays(run: Run) -> list[Trajectory]:
    """Replay as many demonstrations as episodes are played, each as that of a group.

    Raises:
        ValueError: If there is nothing to demonstrate, or the environment does not agree with it.
    """
    engine, rows = run.engine(run.factory), run.rows is not None
    with ExitStack() as closing:
        closing.callback(engine.pool.close)
        experts = Demonstrations(run.args, engine, {None: run.factory}, run.tokenizer, rows_are_options=rows)
        closing.callback(experts.close)
        specs = experts.placed(run.specs(), [-1] * run.episodes)
        return engine.run(specs, ScriptedGenerator(lambda request: []))  # every answer is given


def model_plays(run: Run, attempts: int = 1) -> list[Trajectory]:
    """Play the episodes with the model, sampling as in training, each as often as ``attempts`` says."""
    return evaluate_policy(
        str(run.model.model_name_or_path),
        run.processor or run.tokenizer,
        run.factory,
        run.episodes,
        rows=run.rows,
        seed=run.args.seed,
        attempts=attempts,
        held_out=False,
        options=run.options,
        sampling=sampling_settings(run.args),
        generation_chunk_size=run.args.generation_chunk_size,
        append_final_observation=run.args.bootstrap_at_limits,
        model_init_kwargs={
            "revision": run.model.model_revision,
            "dtype": run.model.dtype,
            "trust_remote_code": run.args.trust_remote_code,
        },
    ).trajectories


def check_determinism(report: Report, run: Run, played: Sequence[Trajectory]) -> bool:
    """Play the first episodes again with the same answers, and compare.

    They are played alone on new instances, all together, and one after the other on instances that have played before.

    Returns:
        False if an episode depends on those that are played beside or before it.
    """
    report.section("Determinism")
    again = [(spec, one) for spec, one in zip(run.specs(), played) if one.turns and not one.stop_reason.failed]
    games = [Game(spec, episode) for spec, episode in again[:REPLAYED]]
    started = time.monotonic()
    if problem := _dependence(run, games) if games else None:
        report.problem(problem)
        return False
    slow = time.monotonic() - started
    messages: Counter[str] = Counter()
    for game in games:
        texts = [turn.text for turn in game.episode.turns]
        check = partial(check_environment, run.factory, max_turns=len(texts), actions=texts, timeout=run.time_limit)
        found = check(seed=game.spec.seed, options=game.spec.options)
        messages.update(f"{found.environment}: {finding.message}" for finding in found.findings)
    _tell(report, messages)
    if messages or not games:
        return True
    if problem is None:
        report.warning(
            "the same answers gave different results when an episode was played again: members of a group would not play "
            "the same task; let results depend on the seed and the answers alone."
        )
        return True
    report.line(
        f"{len(games)} episodes, each played again with the same answers (alone, beside the others, and on an instance "
        "that had played before), gave the same results."
    )
    if slow > SLOW:
        report.line(f"These took {slow:.0f} s, so that answers were not tried at other starts.")
    else:
        report.diagnosis(_indifference(run, played))
    return True


def _tell(report: Report, messages: Counter[str]) -> None:
    """Report the warnings of several episodes; of those that differ in the seed alone, the first."""
    kinds: dict[str, list[str]] = {}
    for message in messages:
        kinds.setdefault(re.sub(r"'[^']*'|\d+", "", message), []).append(message)
    for several in kinds.values():
        more = f" ({len(several) - 1} more such episodes)" if len(several) > 1 else ""
        report.warning(f"{several[0]}{more}")


@dataclass(frozen=True)
class Game:
    """An episode that is played again with the same answers."""

    spec: EpisodeSpec
    episode: Trajectory


def _dependence(run: Run, games: Sequence[Game]) -> str | None:
    """Return a problem if episodes depend on others, "" if they are repeatable, and None if they differ otherwise.

    Episodes depend on others if the same answers give twice one result alone, and always the same other one beside them; or
    if new processes agree with each other, and not with this one, in which others have been played. Always is in
    ``CERTAIN`` plays more, since two of a random environment with few results may agree.
    """
    own = [_result(game.episode) for game in games]
    beside, after = _together(run, games), _in_turn(run, games)
    if own == beside == after:
        return ""
    alone, twice = ([_in_turn(run, [game])[0] for game in games] for _ in range(2))
    for others, again, why in ((beside, _together, _SHARED), (after, _in_turn, _LEFT)) if alone == twice else ():
        differ = [n for n in range(len(games)) if others[n] != alone[n]]
        if differ and all(others == again(run, games) for _ in range(CERTAIN)):
            differs = _differs(others[differ[0]], alone[differ[0]], why[1])
            return f"{why[0]}: with the same answers, an episode {differs}. {why[2]}"
    state = random_state()
    _in_turn(run, games)
    if state != random_state():
        return None  # drawn from the process's own generators, with which new processes may begin alike
    alone_in = [[n] for n in range(len(games))]
    try:
        new = _replayed(run, games, alone_in, apart=True)
    except ValueError:  # a factory that cannot be sent to another process
        return None
    differ = [n for n, result in enumerate(new) if result != after[n]]
    if len(new) < len(games) or not differ:
        return None
    if not all(new == _replayed(run, games, alone_in, apart=True) for _ in range(CERTAIN)):
        return None
    differs = _differs(after[differ[0]], new[differ[0]], ("after others", "in a new process"))
    return f"{_SHARED[0]}: with the same answers, an episode {differs}. {_SHARED[2]}"


_SHARED = (
    "instances share state",
    ("beside others", "alone"),
    "A run plays many episodes at the same time: keep what belongs to an episode in self, set by reset, and not in the "
    "class, the module or a default argument.",
)
_LEFT = (
    "reset leaves state behind",
    ("on an instance that had played before", "on a new one"),
    "A run plays many episodes on an instance: let reset set everything that belongs to an episode.",
)
_Result = tuple[Any, ...]
"""The answers of an environment in an episode: prompt, rewards and observations, reason of the end, success, return."""
_RETURN = 5


def _result(episode: Trajectory) -> _Result:
    said = [(turn.reward, turn.observation) for turn in episode.turns]
    return episode.prompt, said, episode.stop_reason, episode.end_reward, episode.success, episode.episode_return


def _differs(other: _Result, alone: _Result, where: tuple[str, str]) -> str:
    """Say in what two results of an episode differ."""
    names = {4: "success", _RETURN: "returns"}
    for index, name in sorted(names.items(), reverse=True):
        if other[index] != alone[index]:
            verb = f"{name} {{:.4g}}" if index == _RETURN else f"has {name}={{}}"
            return f"{verb.format(other[index])} {where[0]} and {verb.format(alone[index]).split(' ', 1)[1]} {where[1]}"
    for turn, (theirs, ours) in enumerate(zip(other[1], alone[1]), start=1):
        if theirs != ours:
            return (
                f"is told {cut(repr(theirs[1]), 80)} in turn {turn} {where[0]} and {cut(repr(ours[1]), 80)} {where[1]}"
            )
    return f"begins with {cut(repr(other[0]), 80)} {where[0]} and {cut(repr(alone[0]), 80)} {where[1]}"


def _together(run: Run, games: Sequence[Game]) -> list[_Result]:
    """Play the games at the same time, each on a new instance."""
    return _replayed(run, games, [list(range(len(games)))])


def _in_turn(run: Run, games: Sequence[Game]) -> list[_Result]:
    """Play the games one after the other, from the second one on on an instance that has played before."""
    return _replayed(run, games, [[n] for n in range(len(games))])


def _indifference(run: Run, played: Sequence[Trajectory]) -> list[Finding]:
    """Play starts with the answers of other episodes, and name answers or starts that make no difference.

    The answers are those of the lowest and of the highest returns, and the starts theirs and some others.
    """
    games = [Game(spec, one) for spec, one in zip(run.specs(), played) if one.turns and not one.stop_reason.failed]
    several = {tuple(turn.text for turn in game.episode.turns): game for game in games}
    by_return = sorted(several.values(), key=lambda game: game.episode.episode_return)
    half = CROSSED // 2
    given = [*by_return[:half], *by_return[half:][-half:]]
    starts = [game.spec for game in (*given, *(one for one in games if one not in given))][:STARTS]
    if len(given) < 2 or len(starts) < 2:
        return []
    crossed = [Game(spec, game.episode) for game in given for spec in starts]
    flat = _replayed(run, crossed, [[*range(len(crossed))][n : n + REPLAYED] for n in range(0, len(crossed), REPLAYED)])
    by_answers = [flat[n : n + len(starts)] for n in range(0, len(flat), len(starts))]
    if len({result[_RETURN] for result in flat}) == 1:
        return []  # which has a finding of its own
    if all(len({result[_RETURN] for result in of_start}) == 1 for of_start in zip(*by_answers)):
        text = f"{len(given)} different ones have the same return at each of {len(starts)} starts."
        return [_finding("zero_advantage_groups", f"Answers make no difference: {text}")]
    rows = [spec.options for spec in starts]
    varied = None in rows or any(row != rows[0] for row in rows)
    if varied and all(result == results[0] for results in by_answers for result in results):
        what = "seeds" if None in rows else "rows"
        text = f"Different {what} give the same task: equal answers have equal results at each of {len(starts)}."
        return [_finding("one_task", text)]
    return []


def _replayed(
    run: Run, games: Sequence[Game], rounds: Sequence[Sequence[int]], *, apart: bool = False
) -> list[_Result]:
    engine, results = run.engine(run.factory, apart=apart), list[_Result]()
    try:
        for chosen in rounds:
            asked: Counter[int] = Counter()

            def answer(
                request: GenerationRequest, chosen: Sequence[int] = chosen, asked: Any = asked
            ) -> GenerationOutput:
                episode = games[chosen[request.episode]].episode
                k = min(asked[request.episode], len(episode.turns) - 1)
                asked[request.episode] += 1
                ids = episode.action_of(k)
                return GenerationOutput(request.episode, ids, [0.0] * len(ids), episode.turns[k].finish_reason)

            played = engine.run([games[n].spec for n in chosen], ScriptedGenerator(answer))
            if apart and any(episode.stop_reason.failed for episode in played):
                break  # of a process that cannot play it; the next one would take as long
            results += map(_result, played)
    finally:
        engine.pool.close()
    return results


# ------------------------------------------------------------------------------------------------- what the rewards say


PAID = 0.5
"""Correlation of return and success in the first episodes from which there is no doubt that the reward pays for success."""
LIKELY = 2.0
"""Standard errors by which the correlation must lie below the diagnosis' bound for a warning."""
AGAIN, ATTEMPTS, OF_MODEL = 16, 16, 4
"""Starts that are played again where the first episodes leave a doubt, and how often each is, by a policy and by a model."""
_FEWEST = 4
"""Episodes that must have succeeded, and that must not have."""


def check_rewards(report: Report, run: Run, scores: Mapping[str, Sequence[Trajectory]]) -> set[str]:
    """Report a reward that does not pay for success, and a success that says nothing.

    Where the first episodes leave a doubt, ``AGAIN`` starts are played several times each, so that episodes of equal
    starts are compared, as in training. Nothing is said with reward functions, whose rewards are not known here.

    Args:
        report: Takes the findings.
        run: The run.
        scores: The episodes of each policy.

    Returns:
        The names of the findings.
    """
    pairs = [pair for episodes in scores.values() for pair in _pairs(episodes)]
    if run.reward_functions or len(pairs) < 2 * _FEWEST:
        return set()
    if all(success for _, success in pairs):
        return _doubt(report, [value for value, _ in pairs], certain=any(name != "expert" for name in scores))
    if not _mixed(pairs) or (_correlation(pairs, len(pairs)) or 0.0) >= PAID:
        return set()
    attempts = OF_MODEL if run.policy == "model" else ATTEMPTS
    more = [] if is_agent(run.factory) else _more(run, attempts)
    within = _correlation(more, attempts) if more and _mixed(more) else None
    told, degrees = (pairs, len(pairs) - 1) if within is None else (more, len(more) - AGAIN)
    found = _correlation(pairs, len(pairs)) if within is None else within
    told_of = f"{len(told)} episodes{f' of {AGAIN} starts' if told is more else ''}"
    won, lost = ([value for value, success in told if success is which] for which in (True, False))
    if found is None:  # every return is that of the others of its start
        found, error = 0.0, 0.0
        text = (
            f"The return is the same whether an episode succeeds or not, in {told_of}, of which {len(won)} succeeded."
        )
    else:
        error = (degrees - 2) ** -0.5  # of the inverse hyperbolic tangent, by Fisher
        text = (
            f"Return and success correlate by {found:.2f} in {told_of}: the {len(won)} that succeeded returned "
            f"{fmean(won):.3g} on average, the others {fmean(lost):.3g}."
        )
    if not unpaid(found, error, LIKELY):
        return set()
    serious = ["reward_misses_success"] if unpaid(found, error) else []
    report.diagnosis([_finding("reward_misses_success", text)], serious)
    return {"reward_misses_success"}


def _doubt(report: Report, returns: Sequence[float], *, certain: bool) -> set[str]:
    """Report episodes that all count as a success although their returns differ much."""
    low, high = min(returns), max(returns)
    if not returns_differ(low, high):  # a little may be for the number of turns
        return set()
    text = f"All {len(returns)} episodes count as a success, but their returns go from {low:.3g} to {high:.3g}."
    report.diagnosis([_finding("success_doubtful", text)], ["success_doubtful"] if certain else [])
    return {"success_doubtful"}


def _finding(name: str, text: str) -> Finding:
    return Finding(name, 0, text, BY_NAME[name].advice)


def _pairs(episodes: Sequence[Trajectory]) -> list[tuple[float, bool]]:
    """Return and success of each episode whose environment did not fail."""
    rows = with_success([episode_metrics(episode) for episode in episodes if not episode.stop_reason.failed])
    return [(row["return"], row["success"]) for row in rows if row["success"] is not None]


def _mixed(pairs: Sequence[tuple[float, bool]]) -> bool:
    won = sum(success for _, success in pairs)
    return min(won, len(pairs) - won) >= _FEWEST


def _correlation(pairs: Sequence[tuple[float, bool]], group_size: int) -> float | None:
    values, successes = zip(*pairs)
    return reward_success_correlation(values, successes, group_size)


def _more(run: Run, attempts: int) -> list[tuple[float, bool]]:
    """Play ``AGAIN`` starts several times each; nothing if an episode fails, since groups would not be whole."""
    again = replace(run, episodes=AGAIN)
    played = model_plays(again, attempts) if run.policy == "model" else policy_plays(again, run.policy, attempts)
    pairs = _pairs(played)
    return pairs if len(pairs) == len(played) else []


_BEFORE, _AFTER = 24, 32
"""Characters that are shown before and after the place where a prompt parts from an earlier one."""
_OFTEN = 2
"""Forks at the same place from which that place is said to change at every call."""


@dataclass(frozen=True)
class Parting:
    """The place where a prompt parts from the earlier prompt or answer that it shares most with."""

    number: int
    """Number of the call in its episode, by the time that it was asked."""
    token: int
    """Tokens that both begin with."""
    shared: str
    """The end of what both begin with."""
    was: str
    """The earlier one's text from there."""
    now: str
    """This one's text from there."""

    @classmethod
    def of(cls, number: int, was: Sequence[int], now: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Parting:
        """Find the place where the prompt of a call parts from an earlier one, and write both as text."""
        place = common_prefix(was, now)
        shared, before, after = (tokenizer.decode(ids) for ids in (now[:place], was[place:], now[place:]))
        return cls(number, place, shared[-_BEFORE:], before[:_AFTER], after[:_AFTER])

    def __str__(self) -> str:
        return f"{self.shared!r} went on with {self.was!r}, now with {self.now!r}"


def partings(episode: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[Parting]:
    """Return where the prompts of an episode part from the earlier ones, but for those that are new from the start.

    Args:
        episode: An agent's.
        tokenizer: Writes the tokens as text.
    """
    found: list[Parting] = []
    before: list[list[int]] = []
    for number, turn in _in_time(episode):
        prompt = episode.prompt_of(turn)
        if episode.turns[turn].fork == Fork.CONTEXT and before:
            nearest = max(before, key=lambda ids: common_prefix(ids, prompt))
            found.append(Parting.of(number, nearest, prompt, tokenizer))
        before.append([*prompt, *episode.action_of(turn)])
    return found


def call_lines(played: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str]]:
    """Yield labels and lines about the calls of an agent's episodes.

    Args:
        played: The episodes.
        tokenizer: Writes the tokens as text.
    """
    calls = [turn.call for episode in played for turn in episode.turns]
    if not calls:
        return
    clients = Counter(str(call.get("client", "an unnamed client")) for call in calls)
    by = ", ".join(f"{name} ({count})" if len(clients) > 1 else name for name, count in clients.most_common())
    yield "calls", f"{len(calls) / len(played):.1f} an episode, by {by}"
    notes = {
        "sent again by the client and answered once": sum(call.get("repeated", 0) > 0 for call in calls),
        "given up by the client": sum(bool(call.get("hung_up")) for call in calls),
    }
    if any(notes.values()):
        yield "", ", ".join(f"{count} {what}" for what, count in notes.items() if count)
    if asked := _overridden(calls):
        yield "", f"settings that the run decides instead: {asked}"
    forks = Counter(turn.fork for episode in played for turn in episode.turns if turn.fork is not None)
    if not forks:
        yield "forks", "none: each prompt goes on from the answer before it"
        return
    begun = ", ".join(f"{count} ({count / len(calls):.0%}) {why}" for why, count in forks.most_common())
    yield "forks", f"of {len(calls)} answers these begin a path of their own: {begun}"
    yield from _where(played, tokenizer)
    computed = fmean(episode.num_tokens for episode in played)
    longest = fmean(
        max(len(episode.prompt_of(k)) + len(episode.action_of(k)) for k in range(len(episode.turns)))
        for episode in played
        if episode.turns
    )
    cost = (
        f"an update computes {computed:.0f} tokens an episode, {computed / longest:.2f} times the {longest:.0f} of its "
        "longest path"
    )
    yield "cost", cost
    again = [episode.read_again for episode in played if episode.read_again is not None]
    if again and any(again):
        yield "", f"sampling read {fmean(again):.0f} tokens an episode again, which were no longer in the cache"


def changes_every_call(played: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Describe what changes in the prompt from call to call, such as a clock, and begins a path each time; None if nothing.

    Args:
        played: The episodes.
        tokenizer: Writes the tokens as text.
    """
    for episode in played:
        found = partings(episode, tokenizer)
        often = Counter(one.token for one in found).most_common(1)
        if often and often[0][1] >= _OFTEN and 2 * often[0][1] >= len(found):
            token, count = often[0]
            example = next(one for one in found if one.token == token)
            return (
                f"{count} of {len(episode.turns)} calls of an episode change token {token} of the prompt, and so begin a "
                f"path each: {example}. Leave out what changes at every call, such as a time or a random id, or put it at "
                "the end."
            )
    return None


def policy_scores(
    factory: EnvironmentFactory, policies: Mapping[str, ScriptedPolicy], specs: Sequence[EpisodeSpec]
) -> dict[str, tuple[float, float | None]]:
    """Play an agent's episodes with functions in the model's place. Return each one's mean reward and success, if reported.

    Args:
        factory: The agent.
        policies: Functions by name.
        specs: The episodes.
    """
    scores = {}
    for name, policy in policies.items():
        episodes = [play_agent(factory, policy, [spec.seed], spec.options)[0] for spec in specs]
        told = any("success" in episode.info for episode in episodes)
        success = fmean(episode.success for episode in episodes) if told else None
        scores[name] = fmean(episode.reward for episode in episodes), success
    return scores


def _where(played: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str]]:
    """Yield the first place of each episode where a prompt parts from an earlier one, without repeating a place."""
    seen: set[int] = set()
    for episode in played:
        for parting in partings(episode, tokenizer):
            if parting.token not in seen:
                seen.add(parting.token)
                yield "", f"call {parting.number + 1}, at token {parting.token}: {parting}"
                break


def first_difference(one: Trajectory, other: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Describe where the calls of two episodes of the same seed and answers differ; None if they are equal.

    Args:
        one: An episode.
        other: The same, played again.
        tokenizer: Writes the tokens as text.
    """
    for (number, turn), (_, again) in zip(_in_time(one), _in_time(other)):
        was, now = one.prompt_of(turn), other.prompt_of(again)
        if was != now:
            parting = Parting.of(number, was, now, tokenizer)
            return f"call {number + 1} differs at token {parting.token}: {parting}"
    if len(one.turns) != len(other.turns):
        return f"it made {len(one.turns)} calls, then {len(other.turns)}"
    if (one.episode_return, one.error) != (other.episode_return, other.error):
        return f"the calls are equal, but the return was {one.episode_return:g}, then {other.episode_return:g}"
    return None


def _in_time(episode: Trajectory) -> list[tuple[int, int]]:
    """Return the calls in the order in which they were asked, each as its number and its turn."""
    numbers = [int(turn.call.get("number", k)) for k, turn in enumerate(episode.turns)]
    return sorted((number, turn) for turn, number in enumerate(numbers))


def _overridden(calls: Sequence[Mapping[str, Any]]) -> str:
    asked: dict[str, None] = {}
    for call in calls:
        asked |= dict.fromkeys(f"{name}={value}" for name, value in call.get("asked", {}).items())
    return ", ".join(asked)
