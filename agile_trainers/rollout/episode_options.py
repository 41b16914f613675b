"""Options of an episode (limits, form of the conversation, where environments run), and the engine that plays by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from transformers import ProcessorMixin
from transformers.utils import logging

from agile_trainers.envs.base import EnvironmentFactory, check_no_text_for_booleans
from agile_trainers.envs.checker import LONG_OBSERVATION
from agile_trainers.envs.context import History, Summary, as_history
from agile_trainers.rollout.chat.pictures import Pictures
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.architecture import same_up_to
from agile_trainers.rollout.generators.images import image_token_id
from agile_trainers.rollout.spec import Limits

logger = logging.get_logger(__name__)

LIMITS = ("max_turns", "max_new_tokens", "max_model_length", "max_observation_length")
"""Limits of an episode, which each of several environments may have of its own."""
UNLIMITED = 1 << 30
"""``max_model_length`` of an engine if neither the run nor the model limits conversations."""
_NOT_OF_AGENTS = {
    "history": "it owns its context, and may rewrite it itself",
    "system_prompt": "it owns its context, and sends its own",
    "max_observation_length": "it sends whole prompts, which max_model_length bounds",
    "environment_workers": "it runs in an event loop or a thread of its own; max_environments says how many play at once",
}
"""Options without effect on an agent, and the reason."""


@dataclass(frozen=True)
class EpisodeOptions:
    """Options of the episodes. Every field has the name, default and meaning that it has in the trainers' configuration.

    Raises:
        ValueError: If a limit is no whole number of at least 1, ``environment_limits`` has another one, ``on_rewrite`` or
            ``history`` is unknown, or an argument of the template is the text of a boolean.
    """

    max_turns: int = 8
    max_new_tokens: int = 256
    max_model_length: int | None = None
    max_observation_length: int = LONG_OBSERVATION
    system_prompt: str | None = None
    training_chat_template: bool = False
    on_rewrite: str = "fork"
    history: str | History | Mapping[str, str | History] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    environment_workers: int = 0
    environment_processes: int = 0
    max_environments: int | None = None
    environment_timeout: float | None = None
    environment_limits: Mapping[str, Mapping[str, int]] | None = None

    def __post_init__(self) -> None:
        _check_limits({name: getattr(self, name) for name in LIMITS})
        limits = self.environment_limits
        for name, own in ({} if limits is None else _mapping("environment_limits", limits)).items():
            where = f"environment_limits[{name!r}]"
            _check_limits(_mapping(where, own), f"{where}: ")
        if self.on_rewrite not in ("fork", "refuse"):
            raise ValueError(f"on_rewrite={self.on_rewrite!r}: expected 'fork' or 'refuse'.")
        check_no_text_for_booleans(self.chat_template_kwargs or {}, "chat_template_kwargs")
        self.histories(())

    def histories(self, names: Iterable[str | None]) -> dict[str | None, History]:
        """Return the functions that rewrite contexts, by environment.

        Args:
            names: The environments, None in a run of one. Empty: they are not known yet.

        Raises:
            ValueError: If an option names no function, or none of the environments.
        """
        if not isinstance(self.history, Mapping):
            one = as_history(self.history)
            return {} if one is None else dict.fromkeys(names, one)
        if known := list(names):
            check_names("history", self.history, known)
        found = {name: as_history(value, f"history[{name!r}]") for name, value in self.history.items()}
        return {name: one for name, one in found.items() if one is not None}

    @classmethod
    def of_args(cls, args: Any) -> EpisodeOptions:
        """The options among a larger set, such as a ``MultiTurnConfig``."""
        return cls(**{one.name: getattr(args, one.name) for one in fields(cls)})

    def of(self, environment: str | None) -> EpisodeOptions:
        """The options as one of several environments has them, with its own limits."""
        own: dict[str, Any] = dict((self.environment_limits or {}).get(environment or "", {}))
        history = self.history.get(environment or "") if isinstance(self.history, Mapping) else self.history
        return replace(self, environment_limits=None, history=history, **own)

    def check_answers(self, min_new_tokens: int) -> None:
        """Check that answers of so many tokens are within the limits, those of each environment too.

        Raises:
            ValueError: If they are not.
        """
        for name in (None, *(self.environment_limits or {})):
            where, most = "" if name is None else f"environment_limits[{name!r}]: ", self.of(name).max_new_tokens
            if min_new_tokens > most:
                raise ValueError(
                    f"{where}max_new_tokens={most} is less than min_new_tokens={min_new_tokens}, which applies to every "
                    "answer. Raise the first or lower the second."
                )

    def make_pool(self, factory: EnvironmentFactory | Mapping[str, EnvironmentFactory]) -> EnvironmentPool:
        """Make the environment pool of one factory, or of several by name.

        Raises:
            ValueError: If the options contradict each other, have no effect on an agent, or the factory cannot be sent to
                another process.
        """
        pool = EnvironmentPool(
            factory,
            self.environment_workers,
            self.environment_timeout,
            processes=self.environment_processes,
            max_environments=self.max_environments,
        )
        self._check_agents(pool)
        return pool

    def _check_agents(self, pool: EnvironmentPool) -> None:
        """Refuse options that have no effect on an agent, unless another environment of the run heeds them.

        Raises:
            ValueError: For such an option.
        """
        agents = [name for name in pool.factories if pool.agent(name) is not None]
        given: list[tuple[str, str]] = []
        if len(agents) == len(pool.factories):
            given += [(name, why) for name, why in _NOT_OF_AGENTS.items() if getattr(self, name) != _DEFAULTS[name]]
        for name in agents:
            if isinstance(self.history, Mapping) and name in self.history:
                given.append((f"history[{name!r}]", _NOT_OF_AGENTS["history"]))
            own = (self.environment_limits or {}).get(name or "", {})
            given += [
                (f"environment_limits[{name!r}][{one!r}]", why) for one, why in _NOT_OF_AGENTS.items() if one in own
            ]
        for option, why in given:
            raise ValueError(f"{option} has no effect on an agent: {why}. Leave it unset.")


_DEFAULTS = {one.name: one.default for one in fields(EpisodeOptions)}


def check_names(option: str, given: Mapping[str, Any] | None, names: Iterable[str | None]) -> None:
    """Check the names in an option that has a value for each environment.

    Args:
        option: Its name.
        given: Its value.
        names: The environments, None in a run of one.

    Raises:
        ValueError: If an environment is named that is not there.
    """
    known = list(names)
    for name in given or {}:
        if name not in known:
            there = ", ".join(repr(one) for one in known if one is not None) or (
                'one without a name. Pass several environments by name, environment={"guess": ..., "sums": ...}, or leave '
                f"{option} unset"
            )
            raise ValueError(f"{option} names {name!r}, which is none of the environments: {there}.")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'{name} must be a mapping by name such as {{"guess": {{"max_turns": 4}}}}, got {value!r}.')
    return value


def _check_limits(limits: Mapping[str, Any], where: str = "") -> None:
    for name, value in limits.items():
        if name not in LIMITS:
            raise ValueError(f"{where}unknown limit {name!r}. Use any of {', '.join(LIMITS)}.")
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not (whole and value >= 1) and (value is not None or where or name != "max_model_length"):
            raise ValueError(f"{where}{name} must be {'at least 1' if whole else 'a whole number'}, got {value!r}.")


def build_engine(
    options: EpisodeOptions,
    pool: EnvironmentPool,
    tokenizer: Any,
    *,
    eos_token_ids: list[int] | None = None,
    model_config: Any = None,
    append_final_observation: bool = False,
) -> RolloutEngine:
    """Make a rollout engine.

    Args:
        options: Limits and template options.
        pool: Where the environments run.
        tokenizer: The policy's; or its processor, for episodes with images.
        eos_token_ids: Tokens that end an answer. Default: the tokenizer's.
        model_config: The model's, for the longest conversation it can read. Default: no limit but ``max_model_length``.
        append_final_observation: See :class:`~agile_trainers.rollout.engine.RolloutEngine`.

    Raises:
        ValueError: If the processor is of a model whose images are not supported, the template rewrites earlier turns and
            that is refused, ``max_model_length`` exceeds what the model can read, or limits are for an environment that is
            not there.
    """
    pictures, template = None, None
    if isinstance(tokenizer, ProcessorMixin):
        if model_config is None:
            raise ValueError(
                f"A {type(tokenizer).__name__} needs the model's configuration; pass its tokenizer for text."
            )
        pictures, template = Pictures(tokenizer, image_token_id(model_config)), tokenizer.chat_template
        tokenizer = tokenizer.tokenizer
    check_names("environment_limits", options.environment_limits, pool.factories)
    longest = options.max_model_length
    if model_config is not None:
        longest = longest_conversation(longest, model_config.get_text_config())
    chat = ChatRenderer(
        tokenizer,
        eos_token_ids=eos_token_ids,
        chat_template_kwargs=options.chat_template_kwargs,
        training_chat_template=options.training_chat_template,
        on_rewrite=options.on_rewrite,
        chat_template=template,
        pictures=pictures,
    )
    if chat.rewrite is not None:
        logger.warning(
            "The chat template rewrites earlier turns. Episodes are trained as they are served: a turn whose beginning is "
            "rewritten begins a path of its own, whose tokens are computed again:\n%s\ntraining_chat_template=True keeps "
            "earlier turns, if the model is served so too; on_rewrite='refuse' makes this an error.",
            chat.rewrite,
        )
    whole = _limits(options, longest or UNLIMITED)
    limits = {name: _limits(options.of(name), longest or UNLIMITED) for name in pool.factories if name is not None}
    histories = options.histories(pool.factories)
    for name, history in histories.items():
        room = limits.get(name or "", whole).max_model_length
        if isinstance(history, Summary) and history.tokens >= room:
            raise ValueError(
                f"history='summary:{history.tokens}' never asks for a summary: a conversation ends at "
                f"max_model_length={room} tokens. Choose fewer, so that an observation, the instruction and the summary "
                "still fit."
            )
    return RolloutEngine(
        pool,
        chat,
        whole,
        environment_limits=limits,
        histories=histories,
        system_prompt=options.system_prompt,
        append_final_observation=append_final_observation,
    )


def end_token_ids(of_model: int | list[int] | None, tokenizer: Any) -> list[int]:
    """Tokens that end an answer, as in TRL's trainers.

    Args:
        of_model: ``eos_token_id`` of the model's generation config.
        tokenizer: Its own is one of them.
    """
    known = [] if of_model is None else [of_model] if isinstance(of_model, int) else list(of_model)
    return sorted({*known, tokenizer.eos_token_id} - {None})


def _limits(options: EpisodeOptions, longest: int) -> Limits:
    return Limits(
        options.max_turns,
        options.max_new_tokens,
        min(options.max_model_length or longest, longest),
        options.max_observation_length,
    )


def longest_conversation(asked: int | None, config: Any) -> int | None:
    """``max_model_length``, or what the model can read, alike in every batch, if that is limited.

    Args:
        asked: ``max_model_length``, if it is set.
        config: The model's text configuration.

    Raises:
        ValueError: If ``max_model_length`` is more than that.
    """
    most = getattr(config, "max_position_embeddings", None)
    if asked is not None and most is not None and asked > most:
        raise ValueError(f"max_model_length={asked} is more than the model's max_position_embeddings={most}.")
    alike = same_up_to(config)
    if alike is None or alike >= (asked or most or alike):
        return asked or most
    why = (
        f"{config.model_type}'s rope_type='longrope' has other factors for every row of a batch with a row of more than "
        f"original_max_position_embeddings={alike} tokens, so that an episode would be trained with other "
        "log-probabilities than it was sampled with"
    )
    if asked is not None:
        raise ValueError(
            f"max_model_length={asked} is too long: {why}. Set max_model_length to at most {alike}, or give the model a "
            'rope that is the same at every length, for example model_init_kwargs={"rope_parameters": {"rope_type": "yarn", '
            f'"factor": ..., "original_max_position_embeddings": {alike}, "rope_theta": ...}}}}.'
        )
    logger.warning("Conversations end at max_model_length=%d: %s.", alike, why)
    return alike
