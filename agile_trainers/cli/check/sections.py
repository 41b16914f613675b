"""The sections of ``agile-trainers check``'s report, one function each."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from rich.table import Table
from safetensors import SafetensorError

from agile_trainers.cli.check.memory_plan import (
    MemoryPlan,
    PlannedServer,
    Serving,
    conversation_limit,
    estimate_memory,
    plan_memory,
    planned_server,
    readable,
    serving,
)
from agile_trainers.cli.check.plays import (
    call_lines,
    changes_every_call,
    check_determinism,
    check_rewards,
    demonstration_plays,
    first_difference,
    model_plays,
    policy_plays,
    policy_scores,
)
from agile_trainers.cli.check.report import Report, Run
from agile_trainers.cli.check.tracing import Step, trace
from agile_trainers.envs.agent import is_agent
from agile_trainers.envs.base import Environment
from agile_trainers.envs.checker import check_environment, describe_error
from agile_trainers.envs.scripted_policies import known_policies
from agile_trainers.evaluation.diagnosis import BY_NAME, findings_before
from agile_trainers.evaluation.statistics import within
from agile_trainers.judges.questions import GROUP
from agile_trainers.monitor.reporting import training_summary
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.environment_pool import declared_range
from agile_trainers.rollout.environment_probe import check_first_prompt, probe_environment
from agile_trainers.rollout.forest import Fork
from agile_trainers.rollout.metrics import episode_metrics, summarize
from agile_trainers.rollout.seeds import TRAINING, environment_seed
from agile_trainers.types import StopReason, Trajectory

OF_POLICY = ("solved", "too_hard", "zero_advantage_groups", "too_easy")
"""Findings about the policy that played, which tell of training only if that is the one to train."""
ALMOST = 0.85
"""Share of a GPU from which a plan is warned of: fragmentation and the libraries' own memory come on top of it."""
LOWER = (
    "What lowers it: dtype=bfloat16, use_peft, load_in_4bit, gradient_checkpointing, optim=adamw_bnb_8bit; less for "
    "max_tokens_per_micro_batch, generation_chunk_size or max_model_length; sharding (accelerate_config=zero3), or vLLM on "
    "other GPUs (vllm_mode=server) or asleep in updates (vllm_enable_sleep_mode)."
)
SERVER_SHARE = 0.9
"""Share of a GPU that a vLLM server is planned to take, as on docs/eight_gpus.md."""
POLICY_EPISODES = 16
"""Number of an agent's episodes that its policies play, which need no model."""


def check_run(report: Report, run: Run) -> None:
    """Write all sections; a problem skips those that depend on it."""
    if is_agent(run.factory):
        check_agent(report, run)
        return
    if not check_protocol(report, run) or not check_conversation(report, run):
        return
    instance = run.factory()
    policies = known_policies(instance)
    if run.policy == "random" and "random" not in policies:
        run.policy = "expert" if "expert" in policies and not run.named else "model"
    if run.policy != "model" and run.policy not in policies:
        report.problem(f"{run.environment} comes with no {run.policy} policy; choose --scripted_policy model.")
        return
    played = play_and_report(report, run)
    if played is None:
        return
    report_rewrites(report, run, played)
    sound = check_determinism(report, run, played)
    scores = {run.policy: played, **{name: policy_plays(run, name) for name in policies if name != run.policy}}
    check_scores(report, run, scores, sound=sound)
    if run.args.demonstrations is not None:
        check_demonstrations(report, run)
    check_declared(report, run, instance, [episode for episodes in scores.values() for episode in episodes])
    try_judges(report, run, played)
    report_memory(report, run, [episode for episodes in scores.values() for episode in episodes])


def play_and_report(report: Report, run: Run) -> list[Trajectory] | None:
    """Play the episodes with the run's policy, and report them; None if it cannot play."""
    report.section(f"Play: {run.episodes} episodes by the {run.policy}{'' if run.policy == 'model' else ' policy'}")
    try:
        played = model_plays(run) if run.policy == "model" else policy_plays(run, run.policy)
    except (OSError, ValueError, SafetensorError) as error:
        report.problem(f"The {run.policy} cannot play: {error}")
        return None
    check_play(report, run, played)
    return played


def check_agent(report: Report, run: Run) -> None:
    """Write the sections of an agent, which is played by the model alone."""
    if not check_conversation(report, run):
        return
    if run.policy != "model":
        report.problem(
            f"{run.environment} is an agent, whose calls the model answers here; choose --scripted_policy model."
        )
        return
    played = play_and_report(report, run)
    if played is None or not any(episode.turns for episode in played):
        return
    report.section("Calls")
    for label, line in call_lines(played, run.tokenizer):
        report.line(line, label)
    if changing := changes_every_call(played, run.tokenizer):
        report.warning(changing)
    _warn_of_paths(report, run, played)
    if played[0].stop_reason.failed:
        return
    again = model_plays(replace(run, episodes=1))
    if differs := first_difference(played[0], again[0], run.tokenizer):
        report.warning(f"the first episode, played again with the same noise, differs: {differs}.")
    else:
        report.line("the first episode, played again with the same noise, made the same calls", "repeats")
    others = replace(run, episodes=POLICY_EPISODES).specs()
    try:
        scores = policy_scores(run.factory, known_policies(run.factory()), others)
    except Exception as error:  # the agent's own, or its policy's
        report.warning(f"the agent's policies cannot play it: {describe_error(error)}")
        scores = {}
    check_scores(report, run, {"model": played}, scores)
    try_judges(report, run, played)
    report_memory(report, run, played)


def check_protocol(report: Report, run: Run) -> bool:
    """Check the protocol on a few turns of two episodes. Return whether the environment follows it."""
    report.section("Protocol")
    options = run.rows[0] if run.rows else None
    found = check_environment(
        run.factory, seed=run.args.seed, episodes=2, max_turns=3, options=options, timeout=run.time_limit,
        with_context=run.args.history is None,
    )  # fmt: skip
    for finding in found.findings:
        text = f"{found.environment}: {finding.message}"
        if finding.name:
            report.diagnosis(findings_before({}, run.args, {finding.name: f"{text}."}))
        else:
            (report.problem if finding.level == "error" else report.warning)(text)
    if not found.findings:
        report.line(f"{found.environment} follows it: two episodes of up to 3 turns, each on two instances.")
    return not found.errors


def check_conversation(report: Report, run: Run) -> bool:
    """Check the chat template and the first prompt. Return whether the model can be prompted."""
    report.section("Chat template")
    try:
        engine = run.engine(run.factory)
        needs_anchor = getattr(run.args, "advantage_granularity", None) == "anchor"
        start = probe_environment(
            engine.pool, environment_seed(run.args.seed, TRAINING, 0, 0), run.rows[0] if run.rows else None,
            with_context=None not in engine.histories,
        )  # fmt: skip
        check_first_prompt(engine, start, needs_anchor=needs_anchor)
        engine.pool.close()
    except ValueError as error:
        report.problem(str(error))
        return False
    form = "plain text (the tokenizer has no template)" if engine.chat.chat_template is None else "the template"
    if engine.chat.rewrite is None:
        report.line(f"Conversations are written by {form}; a longer one begins with the tokens of the shorter one.")
    else:
        report.line(
            f"Conversations are written by {form}, which rewrites earlier turns: where it does, a new path begins. With "
            "training_chat_template=True it keeps them, if the model is served so too."
        )
    ends = ", ".join(repr(run.tokenizer.decode([token])) for token in engine.chat.eos_token_ids) or "nothing"
    report.line(f"An answer is ended by {ends}.")
    return True


def check_play(report: Report, run: Run, played: Sequence[Trajectory]) -> None:
    """Report returns, rewards, lengths with their limits, and stop reasons."""
    args, rows = run.args, [episode_metrics(episode) for episode in played]
    summary = summarize(rows)
    failed = Counter(episode.error for episode in played if episode.stop_reason.failed)
    errors = "; ".join(f"{error} ({count} episodes)" for error, count in failed.items())
    found = findings_before(training_summary(rows, 0), args, {"environment_failing": errors})
    serious = {
        *(["environment_failing"] if 2 * failed.total() > len(played) else []),
        *(["episodes_cut"] if args.mask_truncated_completions else []),
    }
    # An environment that rewards episodes at a limit expects to be cut.
    meant = not args.mask_truncated_completions and all(episode.end_reward is not None for episode in played)
    hidden = (*OF_POLICY, "episodes_cut") if meant else OF_POLICY
    report.diagnosis((finding for finding in found if finding.name not in hidden), serious)
    turns = [turn for episode in played for turn in episode.turns if not episode.stop_reason.failed]
    if not turns:
        return
    report.line(
        f"mean {summary['return/mean']:.3f}, from {summary['return/min']:.3g} to {summary['return/max']:.3g}"
        + (f"; success {summary['success']:.0%}" if "success" in summary else "; no success is reported"),
        "return",
    )
    report.line(_rewards([turn.reward for turn in turns]), "rewards")
    report.line(
        f"mean {summary['turns/mean']:.1f}, at most {summary['turns/max']:.0f} (max_turns={args.max_turns})", "turns"
    )
    lengths, whole = [turn.end - turn.start for turn in turns], max(map(_longest, played))
    report.line(
        f"an answer has {fmean(lengths):.1f}, at most {max(lengths)} (max_new_tokens={args.max_new_tokens}); a first prompt "
        f"at most {_parts(played)[0]}; an episode at most {whole} "
        f"(max_model_length={conversation_limit(args, run.config)})",
        "tokens",
    )
    ends = {reason.value: summary[f"stop/{reason.value}"] for reason in StopReason}
    report.line(", ".join(f"{name} {share:.0%}" for name, share in ends.items() if share), "ended")
    cut = sum(share for name, share in ends.items() if StopReason(name).truncated)
    report.line(f"{cut:.0%} of the episodes", "cut short")
    if summary.get("success/unreported"):
        report.warning(
            f"{summary['success/unreported']:.0%} of the episodes end without info['success'], which others report, and "
            "count as unsuccessful: report it on every step."
        )
    if summary["observations_cut"]:
        report.warning(f"observations were cut at max_observation_length={args.max_observation_length} characters.")


def report_rewrites(report: Report, run: Run, played: Sequence[Trajectory]) -> None:
    """Report which turns begin new paths, why, and what these cost beside conversations that only grow."""
    turns = [turn for episode in played for turn in episode.turns]
    counts = {"because of the history": Fork.CONTEXT, "because of the template": Fork.TEMPLATE}
    shares = {why: sum(turn.fork == fork for turn in turns) for why, fork in counts.items()}
    shares["answer a question of the history"] = sum(turn.question for turn in turns)
    if not any(shares.values()):
        return
    chat = run.engine(run.factory).chat
    computed = fmean(episode.num_tokens for episode in played)
    plain = fmean(_tokens_of_one_path(episode, chat) for episode in played)
    begun = ", ".join(f"{count / len(turns):.0%} {why}" for why, count in shares.items() if count)
    report.line(
        f"of the turns {begun}. An episode has {computed:.0f} tokens to compute, {computed / plain:.2f} times the "
        f"{plain:.0f} of a conversation that only grows",
        "rewrites",
    )
    _warn_of_paths(report, run, played)


def _warn_of_paths(report: Report, run: Run, played: Sequence[Trajectory]) -> None:
    tokens = fmean(one.num_tokens for one in played)
    if run.args.max_tokens_per_micro_batch is None and tokens > 1.5 * max(map(_longest, played)):
        report.warning(
            "an update reads all paths of an episode at once, which the memory below does not count: set "
            "max_tokens_per_micro_batch, which divides them."
        )


def _tokens_of_one_path(episode: Trajectory, chat: ChatRenderer) -> int:
    """Return the tokens of an episode if nothing had been rewritten, nor asked: first prompt, answers and observations."""
    total = len(episode.prompt_ids)
    answered = [k for k, turn in enumerate(episode.turns) if not turn.question]
    for k in answered:
        action, observation = episode.action_of(k), episode.turns[k].observation
        total += len(action)
        if k != answered[-1] and observation is not None:
            total += len(chat.delimited(observation, action[-1]))
    return total


def _longest(episode: Trajectory) -> int:
    """Return the tokens of the longest path of an episode."""
    paths = episode.paths or [[*episode.prompt_ids, *episode.completion_ids]]
    return max(map(len, paths))


def _parts(played: Sequence[Trajectory]) -> tuple[int, int]:
    """Return the tokens of the longest prompt that goes on from no answer, and of the longest observation."""
    prompt = observation = 0
    for one in played:
        prompt, starts, ends = max(prompt, len(one.prompt_ids)), list[int](), list[int]()
        for k, (turn, parent) in enumerate(zip(one.turns, one.parents)):
            starts.append(len(one.prompt_of(k)))
            ends.append(starts[k] + turn.end - turn.start)
            prompt = max(prompt, starts[k] if parent is None else 0)
            observation = max(observation, 0 if parent is None else starts[k] - ends[parent])
        if one.turns:
            last = len(one.paths[one.turns[-1].path]) if one.paths else len(one.prompt_ids) + len(one.completion_ids)
            observation = max(observation, last - ends[-1])
    return prompt, observation


def _rewards(rewards: Sequence[float]) -> str:
    values = Counter(round(reward, 6) for reward in rewards)
    shown = ", ".join(f"{value:g} ({count} times)" for value, count in sorted(values.items())[:6])
    more = f" and {len(values) - 6} other values" if len(values) > 6 else ""
    rewarded = sum(reward != 0 for reward in rewards) / len(rewards)
    return f"from {min(rewards):g} to {max(rewards):g}: {shown}{more}; {rewarded:.0%} of {len(rewards)} turns are not 0"


def check_scores(
    report: Report,
    run: Run,
    scores: dict[str, list[Trajectory]],
    others: Mapping[str, tuple[float, float | None]] | None = None,
    *,
    sound: bool = True,
) -> None:
    """Report the policies' scores, and check that returns differ and pay for success.

    Args:
        report: Takes the scores.
        run: The run.
        scores: The episodes of each policy.
        others: Mean return and success of further policies.
        sound: False if something is known to be wrong with the environment that explains findings about the policy.
    """
    report.section("Policies")
    table = Table("", "return", "success", box=None, pad_edge=False)
    returns, means = list[float](), dict[str, float]()
    for name, episodes in scores.items():
        summary = summarize([episode_metrics(episode) for episode in episodes])
        if "return/mean" in summary:
            success = f"{summary['success']:.1%}" if "success" in summary else "-"
            table.add_row(f"  {name}", f"{summary['return/mean']:+.3f}", success)
            means[name] = summary["return/mean"]
            returns += [episode.episode_return for episode in episodes if not episode.stop_reason.failed]
    for name, (mean, solved) in (others or {}).items():
        table.add_row(f"  {name}", f"{mean:+.3f}", "-" if solved is None else f"{solved:.1%}")
        means[name] = mean
    report.show(table)
    if len(scores) == 1 and not others and run.policy == "model":
        report.line("There is no other policy to compare with.")
    for name in scores.keys() - {run.policy}:
        cut = sum(turn.finish_reason == "length" for episode in scores[name] for turn in episode.turns)
        if cut:
            report.warning(f"{cut} answers of the {name} policy were cut at max_new_tokens={run.args.max_new_tokens}.")
    if "expert" in means and means["expert"] <= means.get("random", float("-inf")):
        report.warning("the expert is not better than the random policy: check the limits and the rewards.")
    own = {episode.episode_return for episode in scores[run.policy] if not episode.stop_reason.failed}
    named = run.named and not is_agent(run.factory)  # whose few episodes may well have the same return
    of_model = run.policy == "model" and named
    found = findings_before(training_summary([episode_metrics(episode) for episode in scores[run.policy]], 0), run.args)
    causes = check_rewards(report, run, scores) if sound else {finding.name for finding in found}
    policy = [one for one in found if one.name in OF_POLICY and not causes & {one.name, *BY_NAME[one.name].unless}]
    told = "; ".join(f"[{finding.name}] {finding.advice}" for finding in policy)
    told = f"there is no learning signal.{f' {told} (docs/troubleshooting.md)' if told else ''} --episodes plays more."
    if run.args.teacher is not None or run.args.demonstrations is not None or run.reward_functions:
        own, returns = set(), []  # these give a signal, whatever the returns
    if of_model and len(own) == 1:
        # Scores of other policies do not matter: advantages compare the model's own episodes.
        report.problem(f"all {len(scores['model'])} episodes of the model returned {own.pop():g}: {told}")
    elif len(set(returns)) == 1:
        # Equal returns are expected of an untrained model or a random policy.
        tell = report.problem if named or "expert" in scores else report.warning
        tell(f"all {len(returns)} episodes returned {returns[0]:g}: {told}")
    elif of_model:
        report.diagnosis(policy)
    elif len(own) == 1:
        report.warning(
            f"every episode that the {run.policy} played has the same return; such a group gives no gradient."
        )


def check_demonstrations(report: Report, run: Run) -> None:
    """Replay demonstrations, and say what they return."""
    report.section(f"Demonstrations: {run.args.demonstrations}")
    try:
        found = summarize([episode_metrics(episode) for episode in demonstration_plays(run)])
    except ValueError as error:
        report.problem(str(error))
        return
    success = f", success {found['success']:.1%}" if "success" in found else ""
    report.line(
        f"{run.episodes} agree with the environment: return {found.get('return/mean', 0):+.3f}{success}", "replayed"
    )


def check_declared(report: Report, run: Run, environment: Environment, played: Sequence[Trajectory]) -> None:
    """Compare how episodes end, and what they return, with what the environment says of it.

    Args:
        report: Takes the findings.
        run: The run.
        environment: An instance.
        played: The episodes of all policies.
    """
    sound = [episode for episode in played if episode.turns and not episode.stop_reason.failed]
    try:
        limits = declared_range(environment, run.environment)
    except ValueError as error:
        report.problem(str(error))
        limits = None
    returns = [episode.episode_return for episode in sound]
    if limits is not None and returns and not within(returns, limits):
        report.warning(
            f"the environment declares return_range={limits}, but episodes return {min(returns):g} to {max(returns):g}: "
            "evaluations count failed episodes by it; correct it."
        )
    won = [episode for episode in sound if episode.success and episode.stop_reason == StopReason.TRUNCATED]
    longest = max((len(episode.turns) for episode in sound), default=0)
    # Where to hold out is the task, those who succeed play longest.
    if won and (longest == 1 or any(len(episode.turns) < longest for episode in won)):
        masked = run.args.mask_truncated_completions
        (report.problem if masked else report.warning)(
            f"{len(won)} episodes that succeeded ended as truncated, as if a limit had cut them short"
            f"{', which mask_truncated_completions=True leaves out' if masked else ''}: return terminated=True where the "
            "task is over."
        )


def report_memory(report: Report, run: Run, played: Sequence[Trajectory]) -> None:
    """Report the memory plan for the batch and the limits of the run."""
    prompt, observation = _parts(played)
    try:
        server = planned_server(run.args, run.model, run.config, run.launch, run.gpu_count)
    except ValueError as error:
        report.problem(str(error))
        return
    plan = plan_memory(
        run.config,
        run.args,
        run.model,
        critic=run.args.has_critic,
        prompt=prompt,
        observation=observation,
        launch=run.launch,
        gpu=run.gpu,
        shares=server is not None and server.shares,
    )
    report.section(f"Memory of one process, planned for episodes of {plan.tokens:,} tokens")
    report.line(
        f"These are the limits: max_turns={run.args.max_turns}, max_new_tokens={run.args.max_new_tokens}, "
        f"max_model_length={run.args.max_model_length}, with the longest first prompt ({prompt}) and observation "
        f"({observation}) of the episodes."
    )
    kind = f"{plan.quantization}, the others {plan.dtype}" if plan.quantization else f"{plan.dtype}"
    report.line(f"The weights are {kind.replace('torch.', '')}; --dtype changes it.")
    if run.launch.processes > 1:
        report.line(f"There are {run.launch.processes} processes, under {run.launch.engine}.")
    try:
        step = trace(run.config, plan)
        items = estimate_memory(run.config, plan, step)
    except (
        RuntimeError,
        NotImplementedError,
        AttributeError,
        TypeError,
    ) as error:  # a model whose forward pass depends on the data
        report.warning(f"{run.config.model_type} models cannot be planned: {str(error).partition(chr(10))[0]}")
        return
    table = Table("", "size", "formula", box=None, pad_edge=False)
    table.columns[1].justify, table.columns[1].no_wrap, table.columns[0].no_wrap = "right", True, True
    for item in items:
        table.add_row(f"  {item.name}", readable(item.size), item.formula)
    report.show(table)
    if server is not None:
        report_server(report, run, plan, step, server)
    elif plan.engine is not None:
        report_engine(report, run, plan, step)
    if run.gpu is None:
        return
    peak, size = items[-1].size, run.gpu
    if peak <= ALMOST * size:
        report.line(f"The planned peak is {peak / size:.0%} of the GPU's {readable(size)}.")
        return
    if peak > size:
        report.problem(f"the planned peak of {readable(peak)} is more than the GPU's {readable(size)}. {LOWER}")
    else:
        report.warning(
            f"The planned peak is {peak / size:.0%} of the GPU's {readable(size)}, and fragmentation and the libraries come "
            f"on top of it. {LOWER}"
        )


def report_server(report: Report, run: Run, plan: MemoryPlan, step: Step, server: PlannedServer) -> None:
    """Report where the server runs that the trainer starts, its command, and how many of the longest episodes fit."""
    assert plan.engine is not None
    on = f"GPU{'s' if len(server.gpus) > 1 else ''} {', '.join(server.gpus)}" if server.gpus else "the CPU"
    also = ", which the first process of the trainer uses too" if server.shares else ""
    report.line(
        f"The trainer starts a server on {on}{also}, with room for {plan.engine.slots} adapters "
        f"(batches_ahead={run.args.batches_ahead}).",
        "vLLM",
    )
    report.line(shlex.join(server.command), "")
    needed, played = serving(plan, step), plan.episodes * plan.launch.processes
    each = f"{readable(needed.weights)} of weights and adapters and {readable(needed.episode)} of cache for an episode"
    if run.gpu is None or not server.gpus:
        report.line(f"It needs {each}; {played:,} episodes are played at the same time.", "")
        return
    share = server.share or SERVER_SHARE
    size, room = int(share * run.gpu), f"{share:.0%} of {readable(run.gpu)}"
    fit = needed.episodes(size)
    if fit == 0:
        report.problem(
            f"The server needs {each} on each of its GPUs, and gets {room}. Raise vllm_gpu_memory_utilization or "
            "vllm_tensor_parallel_size, or lower max_model_length."
        )
        return
    _check_longest(report, run, plan, needed, size)
    report.line(
        f"It needs {each}. At {room}, {fit:,} of the longest episodes fit at the same time; {played:,} are played.", ""
    )


def report_engine(report: Report, run: Run, plan: MemoryPlan, step: Step) -> None:
    """Report how many of the longest episodes fit into vLLM's memory, beside how many are played at the same time."""
    assert plan.engine is not None
    needed, engine = serving(plan, step), plan.engine
    each = f"{readable(needed.weights)} of weights and {readable(needed.episode)} of cache for an episode"
    if not engine.server:
        if engine.share is None:
            report.line(f"vLLM needs {each}; --gpu_memory says how many fit.", "vLLM")
            return
        fit, played = needed.episodes(engine.share), plan.episodes * engine.parallel
        if fit == 0:
            report.problem(
                f"vLLM needs {each}, and vllm_gpu_memory_utilization={run.args.vllm_gpu_memory_utilization} leaves it "
                f"{readable(engine.share)}: raise it."
            )
            return
        _check_longest(report, run, plan, needed, engine.share)
        report.line(f"It holds {fit:,} of the longest episodes at the same time; {played:,} are played.", "vLLM")
        return
    played = plan.episodes * plan.launch.processes
    report.line(f"A server needs {each} on its own GPUs; {played:,} episodes are played at the same time.", "vLLM")
    if run.gpu is not None:
        share = int(SERVER_SHARE * run.gpu)
        counts = [(gpus, serving(plan, step, gpus).episodes(share)) for gpus in (1, 2, 4)]
        shown = ", ".join(f"{count:,} on {gpus}" for gpus, count in counts)
        report.line(
            f"Of the longest ones, these fit at the same time at {SERVER_SHARE:.0%} of {readable(run.gpu)}: {shown} GPUs "
            "(tensor parallelism). The others wait.",
            "",
        )


def _check_longest(report: Report, run: Run, plan: MemoryPlan, needed: Serving, share: int) -> None:
    """Report an engine whose share of a GPU does not hold the longest conversation that it is started for."""
    context = conversation_limit(run.args, run.config)
    if needed.weights + needed.episode * (context or 0) // plan.decoded > share:
        report.problem(
            f"vLLM starts only if its {readable(share)} hold a conversation of max_model_length={context} tokens "
            f"beside {readable(needed.weights)} of weights, and these limits end at {plan.decoded}: set "
            f"max_model_length={plan.decoded}."
        )


_SHOWN = 1000
"""Episodes whose price is told."""
_LABEL = f"{_SHOWN:,} episodes"


def try_judges(report: Report, run: Run, played: Sequence[Trajectory]) -> None:
    """Ask each judge about one of the episodes, or about two as a group; no answer, or a bad one, is a problem."""
    sound = [one for one in played if one.turns and not one.stop_reason.failed]
    for judge in run.judges:
        report.section(f"Judge: {judge.__name__}, one score for each {judge.per}")
        asked = [
            replace(one, seed=0, turns=[replace(turn, judgements={}) for turn in one.turns])
            for one in sound[: 2 if judge.per == GROUP else 1]
        ]
        if len(asked) < 1 + (judge.per == GROUP):
            report.warning("too few episodes had an answer to be judged.")
            continue
        metrics: dict[str, float] = {}
        try:
            scores = judge(asked, metrics.__setitem__)
        except Exception as error:  # the rubric's own
            report.problem(f"{judge.__name__} cannot be asked: {type(error).__name__}: {error}")
            continue
        finally:
            judge.close()
        said = asked[0].turns[-1].judgements.get(judge.__name__, {})
        if None in scores:
            report.problem(f"{judge.__name__} gave no score: {said.get('failed', 'the conversations are equal.')}")
            continue
        cost = {name.rpartition("/")[2]: value for name, value in metrics.items()}
        report.line(", ".join(f"{score:.3g}" for score in scores if score is not None), "score")
        report.line(str(said.get("reason", "")), "reason")
        sent, answered, seconds = (cost.get(name, 0.0) for name in ("tokens_asked", "tokens_answered", "seconds"))
        report.line(f"{sent:,.0f} tokens asked and {answered:,.0f} answered in {seconds:.1f} s", "a question")
        questions = _SHOWN / run.args.num_generations * judge.orders if judge.per == GROUP else _SHOWN
        # A question about a whole group is longer than this one about two of its members.
        times = questions * (run.args.num_generations / 2 if judge.per == GROUP else 1) / max(cost["questions"], 1)
        price = (
            f", which cost {cost['cost'] * times:,.2f} by prices" if cost["cost"] else "; set prices to know their cost"
        )
        report.line(f"about {questions:,.0f} questions and {(sent + answered) * times:,.0f} tokens{price}", _LABEL)
