"""Adapts Gymnasium environments that can be shown in text or images (https://gymnasium.farama.org) to the protocol."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agile_trainers.envs.base import EnvironmentFactory, Observation, ResetResult, StepResult, read_options
from agile_trainers.envs.images import is_pixels, read_image
from agile_trainers.envs.libraries import LIBRARIES

_COLOURS = re.compile(r"\x1b\[([\d;]*)m([^\x1b]*)\x1b\[0m")


@dataclass(frozen=True)
class _ToyText:
    """Rules of a toy-text environment, from Gymnasium's documentation."""

    actions: tuple[str, ...]
    rules: str
    solved: float
    """Reward of the step that solves the task."""


_LAKE = _ToyText(
    ("left", "down", "right", "up"),
    "Walk over the frozen cells F from the start S to the goal G and into none of the holes H. [ ] is put around the cell "
    "you are on. The ice may be slippery.",
    1.0,
)
_TAXI = _ToyText(
    ("south", "north", "east", "west", "pickup", "dropoff"),
    "Drive the taxi, around which [ ] is put, to the passenger at the place in ( ), pick the passenger up and drop them off "
    "at the place in { }. Walls are |, and : can be passed.",
    20.0,
)
_CLIFF = _ToyText(
    ("up", "right", "down", "left"),
    "Walk from the bottom left to the target T at the bottom right without stepping onto the cliff C. x is where you are. "
    "Every step costs 1, the cliff 100 and the way back to the start.",
    -1.0,
)
_TOY_TEXT = {
    "FrozenLake-v1": _LAKE,
    "FrozenLake8x8-v1": _LAKE,
    "Taxi-v3": _TAXI,
    "Taxi-v4": _TAXI,
    "CliffWalking-v1": _CLIFF,
    "CliffWalkingSlippery-v1": _CLIFF,
}


def listed() -> list[str]:
    """List Gymnasium's own ids that can be played in text."""
    return [name for name in _TOY_TEXT if name in LIBRARIES["gymnasium"].load().registry]


def knows(name: str) -> bool:
    """Return whether the id is registered. ``module:id`` imports the module first, as ``gymnasium.make`` does.

    Raises:
        ImportError: If Gymnasium or the module is not installed.
    """
    registry = LIBRARIES["gymnasium"].load().registry
    module, _, short = name.rpartition(":")
    if module:
        importlib.import_module(module)
    return short in registry


def make_factory(name: str, **kwargs: Any) -> EnvironmentFactory:
    """Make a factory and one environment, so that invalid environments are rejected at once.

    Raises:
        Exception: See :class:`GymnasiumEnvironment`.
    """
    GymnasiumEnvironment(name, **kwargs).close()
    return functools.partial(GymnasiumEnvironment, name, **kwargs)


class GymnasiumEnvironment:
    """One Gymnasium environment whose actions can be written as text, and whose observations as text or images.

    Observations of a ``Text`` space are used unchanged. An environment that renders as ``ansi`` shows the drawing, with
    brackets in place of terminal colours. With ``render_mode="rgb_array"`` it shows the rendered image, and without
    either an observation that is an image: an array of a ``Box`` space of bytes, (height, width) or with 1, 3 or 4
    channels last, alone or in a ``Dict`` space, whose other entries are written as text. A ``Text`` action space takes
    the answer unchanged; for a ``Discrete`` one, the last action named in the answer is taken. An answer without a valid
    action is not a step: the observation then names the valid answers, with reward 0.

    ``info["success"]`` is the environment's own ``success`` or ``is_success`` if it reports one. For FrozenLake, Taxi and
    CliffWalking it is True if the goal was reached.

    Args:
        name: Gymnasium's id, for example ``FrozenLake-v1``, or ``module:id`` for one that a module registers.
        actions: Names of the actions of a ``Discrete`` space. Default: the documented ones for Gymnasium's own, otherwise
            numbers.
        rules: Text before the first observation. Default: the documented goal of Gymnasium's own. The actions are always
            listed.
        kwargs: Arguments of ``gymnasium.make``, for example ``is_slippery=False``.

    Raises:
        ImportError: If Gymnasium is not installed.
        ValueError: If its actions cannot be written as text, or its observations be shown.
        TypeError: Of Gymnasium, if the environment does not read one of ``kwargs``.
    """

    def __init__(self, name: str, *, actions: Sequence[str] | None = None, rules: str | None = None, **kwargs: Any):
        self.name = f"gymnasium:{name}"
        self._gym = LIBRARIES["gymnasium"].load()
        spec = self._gym.registry[name.rpartition(":")[2]]
        self._toy = _TOY_TEXT.get(spec.id)
        self.rules = rules if rules is not None else (self._toy.rules if self._toy else "")
        if "ansi" in _render_modes(spec):
            kwargs.setdefault("render_mode", "ansi")
        self.game = self._gym.make(name, **kwargs)
        self.actions = self._action_names(actions)
        self._check_observations()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode.

        Args:
            seed: Seed of all random numbers. None continues the last episode's random stream.
            options: ``{"seed": int}`` replaces ``seed``, ``{"options": dict}`` is passed to the environment; other options
                are not read.

        Raises:
            ValueError: If there is another option.
        """
        given = read_options(options, ("seed", "options"), self.name)
        seed = given.get("seed", seed)
        observation, info = self.game.reset(
            seed=None if seed is None else seed % 2**32, options=given.get("options")
        )  # NumPy's range of seeds
        expected = f"Answer with one of: {', '.join(self.actions)}." if self.actions else ""
        return self._shown(observation, self.rules, expected), info

    def step(self, action: str) -> StepResult:
        """Take the action that the answer names."""
        parsed = self._parse(action)
        if parsed is None:
            expected = (
                f"name one of: {', '.join(self.actions)}" if self.actions else f"stay within {self.game.action_space}"
            )
            return f"That is no action; {expected}.", 0.0, False, False, {"success": False} if self._toy else {}
        observation, reward, terminated, truncated, info = self.game.step(parsed)
        info = dict(info)
        if "is_success" in info:
            info.setdefault("success", bool(info["is_success"]))
        if self._toy:
            info["success"] = bool(terminated) and float(reward) >= self._toy.solved
        return self._shown(observation), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the environment."""
        self.game.close()

    def _action_names(self, names: Sequence[str] | None) -> list[str]:
        space = self.game.action_space
        if isinstance(space, self._gym.spaces.Text):
            if names is not None:
                raise ValueError(
                    f"{self.name} takes any text, so its actions cannot be named; got actions={list(names)}."
                )
            return []
        if not isinstance(space, self._gym.spaces.Discrete):
            raise ValueError(
                f"{self.name} has the action space {space}; an answer can be read as Text or Discrete only."
            )
        if names is None:
            names = self._toy.actions if self._toy else [str(space.start + n) for n in range(space.n)]
        if len({name.lower() for name in names}) != space.n:
            raise ValueError(
                f"{self.name} has {space.n} actions, which need different names; got actions={list(names)}."
            )
        return list(names)

    def _check_observations(self) -> None:
        spaces, space = self._gym.spaces, self.game.observation_space
        self._rendered = not isinstance(space, spaces.Text) and self.game.render_mode in ("ansi", "rgb_array")
        entries = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
        if not (self._rendered or isinstance(space, spaces.Text) or any(map(self._is_image, entries))):
            raise ValueError(
                f"{self.name} cannot be shown in text: its observation space is {space} and its render mode "
                f"{self.game.render_mode}. Use one with a Text space or the render mode 'ansi', or put a "
                "gymnasium.ObservationWrapper with a Text space around it and register the result. A model that reads "
                "images is shown what render_mode='rgb_array' draws."
            )

    def _is_image(self, space: Any) -> bool:
        return isinstance(space, self._gym.spaces.Box) and is_pixels(space.low) and bool((space.high == 255).all())

    def _parse(self, answer: str) -> Any:
        space = self.game.action_space
        if not self.actions:
            return answer if space.contains(answer) else None
        named = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, self.actions))})(?!\w)", answer, re.IGNORECASE)
        return space.start + [name.lower() for name in self.actions].index(named[-1].lower()) if named else None

    def _shown(self, observation: Any, *before: str) -> Observation:
        """Return what the model sees of an observation: a text, or one message with images."""
        if self._rendered and not isinstance(observation, str):
            observation = self.game.render()
            parts = [_without_colours(observation) if isinstance(observation, str) else observation]
        elif isinstance(observation, dict):
            parts = []
            for name, value in observation.items():
                parts += [value] if self._is_image(self.game.observation_space[name]) else [f"{name}: {value}\n"]
        else:
            parts = [observation]
        if all(isinstance(part, str) for part in parts):
            return "\n\n".join(filter(None, [*before, *parts]))
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": read_image(part)}
            for part in [*(f"{text}\n\n" for text in before if text), *parts]
        ]
        return [{"role": "user", "content": content}]


def _without_colours(drawn: str) -> str:
    """Replace terminal colours by brackets: [ ] around a highlighted cell, ( ) around a blue one, { } around others."""

    def bracket(match: re.Match[str]) -> str:
        codes, text = [int(code or 0) for code in match[1].split(";")], match[2]
        if any(40 <= code < 50 for code in codes):
            return f"[{text}]"
        return f"({text})" if 34 in codes else f"{{{text}}}"

    # Highlights may contain colours: replace from the inside out.
    while drawn != (drawn := _COLOURS.sub(bracket, drawn)):
        pass
    return drawn.strip("\n")


def _render_modes(spec: Any) -> list[str]:
    make = spec.entry_point if callable(spec.entry_point) else pkgutil.resolve_name(spec.entry_point)
    return list(getattr(make, "metadata", {}).get("render_modes", [])) if inspect.isclass(make) else []
