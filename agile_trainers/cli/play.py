"""``agile-trainers play``: lets a person play in place of the model, through the trainers' rollout engine."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer

from agile_trainers.adapters.loading import check_model
from agile_trainers.cli.errors import Terminated
from agile_trainers.cli.parser import json_object, seed_number
from agile_trainers.embedded import make_tokenizer
from agile_trainers.envs.agent import agent_of
from agile_trainers.envs.base import EnvironmentFactory, Observation
from agile_trainers.envs.registry import make_environment_factory
from agile_trainers.evaluation.scripted_policies import answer_calls, play_scripted
from agile_trainers.records.plain import to_json
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Message, Trajectory, text_of

_ABOUT = "Lets you play in place of the model, in the terminal, through the trainers' rollout engine."


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of ``agile-trainers play``. Options that it shares with training have the same names."""
    parser = argparse.ArgumentParser(prog="agile-trainers play", description=_ABOUT)
    parser.add_argument("--environment", required=True, metavar="ID", help="id of the environment, module.path:Name, or "
                        "agent:module.path:function, whose calls you answer")  # fmt: skip
    parser.add_argument("--environment_args", type=json_object, default={}, metavar="JSON", help="its arguments")
    parser.add_argument("--model", help="model whose tokenizer and template are used (default: the embedded model)")
    parser.add_argument("--training_chat_template", action="store_true", help="use a training version of the template")
    parser.add_argument("--history", metavar="NAME", help="function that rewrites the context, such as last:2")
    parser.add_argument("--system_prompt", help="system message before the first observation")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the first episode (default: 0)")
    parser.add_argument("--episodes", type=int, default=1, help="number of episodes (default: 1)")
    parser.add_argument("--max_turns", type=int, default=100, help="turns of an episode (default: 100)")
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="tokens of one answer (default: 1024)")
    parser.add_argument(
        "--max_model_length", type=int, default=1 << 20, help="tokens of an episode (default: 1 million)"
    )
    parser.add_argument("--record", metavar="FILE", help="append each episode to a .jsonl file of demonstrations")
    return parser


def main(argv: Sequence[str], console: Console | None = None, ask: Callable[[str], str] = input) -> int:
    """Parse the options and play.

    Args:
        argv: The options.
        console: Console for the observations.
        ask: Shows a prompt and returns the typed answer. ``EOFError`` and ``KeyboardInterrupt`` end the game.

    Returns:
        The exit code: 1 if the environment fails.

    Raises:
        ValueError: If the environment, the model or its template cannot be used.
        ImportError: If a library that the environment needs is missing.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    console = console or Console()
    factory = make_environment_factory(options.environment, **options.environment_args)
    agent = agent_of(factory)
    if agent is not None:
        agent.check_row(None)
    if options.record and (agent is not None or Path(options.record).suffix != ".jsonl"):
        raise ValueError(
            f"--record={options.record} writes demonstrations of an environment, no agent's, to a .jsonl file."
        )
    if options.model:
        check_model(options.model, option="--model")
    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else make_tokenizer()
    names = {one.name for one in fields(EpisodeOptions)}
    how = EpisodeOptions(**{name: value for name, value in vars(options).items() if name in names})

    def engine(recording: EnvironmentFactory) -> RolloutEngine:
        return build_engine(how, how.make_pool(recording), tokenizer)

    def hear(action: str | None, observation: Observation, reward: float | None) -> None:
        _show(console, observation, reward)

    def answer(messages: list[Message], rng: random.Random) -> str:
        return ask("you: ")

    def answer_call(prompt: str) -> str:
        console.print(Text.assemble(("the agent asks: ", "bold cyan"), prompt), soft_wrap=True)
        return ask("you: ")

    def play(seed: int) -> Trajectory:
        specs = [EpisodeSpec(seed, (seed,))]
        if agent is not None:
            return answer_calls(engine(factory), answer_call, specs, tokenizer)[0]
        return play_scripted(engine, factory, lambda _: answer, specs, tokenizer, hear)[0]

    console.print(Text("Ctrl-D ends the game.", style="dim"))
    for seed in range(options.seed, options.seed + options.episodes):
        console.rule(f"{options.environment}, seed {seed}", characters="-")
        try:
            episode = play(seed)
        except (EOFError, KeyboardInterrupt) as left:
            if isinstance(left, Terminated):
                raise
            console.print("\nYou left the game.")
            return 0
        _show_end(console, episode)
        if options.record and not episode.stop_reason.failed:
            conversation = [*episode.prompt, *(message for turn in episode.turns for message in turn.said)]
            with Path(options.record).open("a", encoding="utf-8") as file:
                record = {"seed": seed, "messages": conversation, "rewards": episode.rewards}
                file.write(to_json(record, shown=False) + "\n")
        if episode.stop_reason.failed:
            if not episode.turns and agent is None:
                console.print(
                    "reset gets no row here (options=None): an environment that needs one cannot be played so."
                )
            return 1
    return 0


def _show(console: Console, observation: Observation, reward: float | None) -> None:
    messages = [{"role": "environment", "content": observation}] if isinstance(observation, str) else observation
    for message in messages:
        console.print(Text.assemble((f"{message['role']}: ", "bold cyan"), text_of(message)), soft_wrap=True)
    if reward is not None:
        console.print(Text(f"reward {reward:+g}", style="green" if reward > 0 else "red" if reward < 0 else "dim"))


def _show_end(console: Console, episode: Trajectory) -> None:
    success = "" if episode.success is None else ", success" if episode.success else ", no success"
    turns, total = len(episode.turns), f"{episode.episode_return:+g}"
    ended = f"Over: {episode.stop_reason.value} after {turns} turns, return {total}{success}."
    console.print(Text(ended if episode.error is None else f"{ended}\n{episode.error}", style="bold"), soft_wrap=True)
    cut = sum(turn.finish_reason == "length" for turn in episode.turns)
    if cut:
        console.print(f"{cut} of your answers were cut at --max_new_tokens.", style="yellow")
