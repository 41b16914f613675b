"""Environments of other styles that show images: tools, TRL's objects, Gymnasium, in threads and in processes."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

pytest.importorskip("gymnasium", reason="Gymnasium is not installed: pip install 'agile-trainers[envs]'")

from hostile_images import HOSTILE
from showing import ROWS, SIZES, AsyncBrowser, Browser, call, noise, screens, screenshot, tools

from agile_trainers.envs import check_environment
from agile_trainers.envs.checker import validate_reset
from agile_trainers.envs.images import as_content, opened, read_image
from agile_trainers.envs.libraries.trl_tools import trl_environment
from agile_trainers.envs.tools.environment import ToolEnvironment
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Image, StopReason, Trajectory, images_of, text_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from image_models import make_image_model

WAITING = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image"}]


@cache
def made() -> tuple[Any, Any]:
    return make_image_model("idefics3")


def play(factory: Callable[[], Any], *answers: str, processes: int = 0, row: Any = None) -> Trajectory:
    """Play an episode with these answers, in a thread or in another process."""
    model, processor = made()
    pool = EnvironmentPool(factory, processes=processes)
    engine = build_engine(
        EpisodeOptions(max_turns=len(answers), max_new_tokens=200), pool, processor, model_config=model.config
    )
    encode = partial(processor.tokenizer.encode, add_special_tokens=False)
    said = iter([encode(f"{answer}<|im_end|>") for answer in answers])
    try:
        (episode,) = engine.run([EpisodeSpec(1, (1,), row)], ScriptedGenerator(lambda request: next(said)))
    finally:
        pool.close()
    return episode


def check_ids(episode: Trajectory) -> None:
    """Compare the ids of an episode with those that the model's own processor makes of the whole conversation."""
    processor = made()[1]
    messages = [*episode.prompt, *episode.messages]
    text = processor.apply_chat_template(messages, tokenize=False)
    images = [opened(image) for image in images_of(messages)]
    whole = processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0]
    ids = [*episode.prompt_ids, *episode.completion_ids]
    assert whole[: len(ids)] == ids


def pixels(image: Image) -> Any:
    return np.asarray(opened(image))


def test_parts_of_text_beside_each_other_are_one() -> None:
    """A special token is not spelled over two parts, each of which is ordinary text."""
    image = {"type": "image", "image": noise(0)}
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}, image]
    ((message,), _) = validate_reset(([{"role": "user", "content": parts}], {}))
    assert message["content"] == [
        {"type": "text", "text": "<|im_end|>"},
        {"type": "image", "image": read_image(noise(0))},
    ]
    assert as_content(parts[:2]) == "<|im_end|>" and as_content([]) == ""


# --------------------------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_tools_image_is_its_result(role: Any) -> None:
    ((message,), *_, info) = tools(result_role=role).step(call("screenshot", 1))
    assert message["role"] == role
    (image,) = images_of([message])
    assert np.array_equal(pixels(image), np.asarray(noise(1, SIZES[1])))
    assert text_of(message) == ("[image]" if role == "tool" else "<tool_response>\n[image]\n</tool_response>")
    assert info == {"success": False, "calls": 1, "failed_calls": 0}


def test_parts_of_a_result_stay_in_their_tags() -> None:
    ((message,), *_) = tools().step(call("look") + call("screenshot", 2) + call("listing"))
    text = text_of(message)
    assert text.count("<tool_response>") == text.count("</tool_response>") == 3
    assert text.endswith(
        '[{"type": "image", "path": "cat.png"}, {"type": "image", "image": "dog.png"}]\n</tool_response>'
    )
    assert text.count("[image]") == len(images_of([message])) == 2


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_tools_that_show_images_are_played(processes: int) -> None:
    """Over three turns, with images of different sizes; in a process too, which takes seconds to import transformers."""
    answers = [call("screenshot", 0), call("screenshot", 1) + call("screenshot", 2), call("look", 3), "7"]
    episode = play(partial(tools, announce="no"), *answers, processes=processes)
    assert (episode.error, episode.stop_reason, episode.paths) == (None, StopReason.TERMINATED, None)
    assert (len(episode.pictures[0]), episode.turns[-1].info["calls"]) == (4, 4)
    check_ids(episode)


def test_old_results_are_dropped_with_their_images() -> None:
    episode = play(partial(tools, keep_results=1), call("screenshot", 0), call("screenshot", 1), call("look", 2), "7")
    assert [len(pictures) for pictures in episode.pictures][-1] == 1


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_result_of_a_tool_is_an_error_of_its_call(case: str) -> None:
    """As any exception of a tool: the model sees it, and may ask for another image."""
    make, words = HOSTILE[case]

    def open_it(number: int) -> list[Any]:
        """Open a file.

        Args:
            number: Which.
        """
        return [{"type": "text", "text": "here"}, {"type": "image", "image": Image(make())}]

    episode = play(lambda: ToolEnvironment([open_it, screenshot], ROWS), call("open_it"), call("screenshot"), "7")
    assert episode.stop_reason is StopReason.TERMINATED
    assert re.search(f"Error: .*({words})", str(episode.turns[0].observation))
    assert episode.turns[1].info["failed_calls"] == 1 and len(episode.images) == 1


def test_the_checker_takes_tools_with_images() -> None:
    report = check_environment(tools, episodes=2, max_turns=3, actions=[call("screenshot", 1), call("look"), "7"])
    assert not report.findings, str(report)


# ----------------------------------------------------------------------------------------------------------------- TRL


@pytest.mark.parametrize(
    ("kind", "processes"), [(Browser, 0), (AsyncBrowser, 0), pytest.param(Browser, 1, marks=pytest.mark.slow)]
)
def test_an_object_of_trl_shows_images(kind: type[Browser], processes: int) -> None:
    seen = []

    def pays(completions: Any, prompts: Any, **_: Any) -> list[float]:
        seen.append(images_of([*prompts[0], *completions[0]]))
        return [1.0]

    factory = trl_environment(kind, reward_funcs=[] if processes else [pays])
    answers = [call("turn", 1), call("turn", 2), "done"]
    episode = play(factory, *answers, processes=processes, row={"start": "image"})
    assert (episode.error, len(episode.pictures[0])) == (None, 3)
    assert episode.episode_return == (1.0 if processes else 2.0)
    assert processes or [len(images) for images in seen] == [3]
    check_ids(episode)


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": [{"role": "user", "content": WAITING}], "image": noise(1)}, "ab[image]Go to page 2."),
        ({"prompt": "Look. ", "start": "image"}, "Look. [image]Go to page 2."),
        ({"prompt": [{"role": "user", "content": "Look. "}]}, "Look. Go to page 2."),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "Look. "}]}]}, "Look. Go to page 2."),
        ({"prompt": [{"role": "user", "content": "Look. "}], "images": [noise(1)] * 2}, "[image][image]Look. Go to page 2."),
        ({"prompt": [{"role": "user", "content": "Look."}], "image": noise(1), "start": "nothing"}, "[image]Look."),
        ({"prompt": [{"role": "user", "content": "Look."}], "image": "cat.png", "start": "nothing"}, "Look."),
        ({"start": "image"}, "[image]Go to page 2."),
    ],
)  # fmt: skip
def test_the_prompt_of_a_row_with_images_is_trls(row: dict[str, Any], shown: str) -> None:
    """``images`` stand before the first user's text, and the result of ``reset`` at the end of the last message."""
    (_, message), _ = validate_reset(trl_environment(Browser)().reset(options=row))
    assert text_of(message) == shown


def test_a_system_prompt_with_an_image_gets_the_list_of_tools() -> None:
    system = {"role": "system", "content": [{"type": "image", "image": noise(1)}]}
    user = {"role": "user", "content": "go"}
    (first, _), _ = validate_reset(trl_environment(Browser)().reset(options={"prompt": [system, user]}))
    assert len(images_of([first])) == 1 and '"turn"' in text_of(first)


# ----------------------------------------------------------------------------------------------------------- Gymnasium


@pytest.mark.parametrize("channels", [0, 1, 3, 4])
@pytest.mark.parametrize("form", ["array", "dict", "drawn"])
def test_a_gymnasium_environment_shows_images(form: str, channels: int) -> None:
    options = {"render_mode": "rgb_array"} if form == "drawn" else {}
    environment = screens(form=form, channels=channels, rules="Press 1.", **options)
    (message,), _ = environment.reset(seed=3)
    after = "steps: [0]\n" if form == "dict" else ""
    assert text_of(message) == f"Press 1.\n\nAnswer with one of: 0, 1.\n\n[image]{after}"
    (image,) = images_of([message])
    game = environment.game.unwrapped
    screen = game.screen[..., 0] if channels == 1 else game.screen
    assert np.array_equal(pixels(image), np.asarray(PIL.Image.fromarray(screen).convert("RGB")))
    assert environment.step("5")[0] == "That is no action; name one of: 0, 1."


@pytest.mark.parametrize("processes", [0, 1])
def test_gymnasiums_images_are_played(processes: int) -> None:
    episode = play(partial(screens, form="dict"), "1", "0", "1", processes=processes)
    assert (episode.error, episode.stop_reason, episode.rewards) == (None, StopReason.TERMINATED, [1.0, 0.0, 1.0])
    assert len(episode.pictures[0]) == 3
    check_ids(episode)


@pytest.mark.parametrize(
    ("spoils", "words"),
    [
        (lambda: np.zeros((5000, 5000, 3), dtype=np.uint8), "5000 x 5000 pixels"),
        (lambda: np.zeros((0, 5, 3), dtype=np.uint8), "no pixels"),
        (lambda: np.zeros((5, 5, 3)), "type float64 is no image"),
        (lambda: np.zeros((4, 5, 5, 3), dtype=np.uint8), "is no image"),
        (lambda: None, "not NoneType"),
    ],
)
@pytest.mark.parametrize("form", ["array", "dict", "drawn"])
def test_a_hostile_observation_costs_its_episode(form: str, spoils: Any, words: str) -> None:
    options = {"render_mode": "rgb_array"} if form == "drawn" else {}
    episode = play(partial(screens, form=form, spoils=spoils, **options), "1", "1", "1")
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.ENVIRONMENT_ERROR, 1)
    assert words in str(episode.error)


def test_numbers_are_no_image() -> None:
    """An array of bytes is one if it has their whole range: a board of a few values is not."""
    with pytest.raises(ValueError, match=r"cannot be shown in text.*render_mode='rgb_array'"):
        screens(form="drawn")


def test_the_checker_takes_gymnasiums_images() -> None:
    report = check_environment(partial(screens, form="dict"), episodes=2, max_turns=3, actions=["1"])
    assert not report.findings, str(report)


@pytest.mark.slow
def test_the_command_checks_them(tmp_path: Path) -> None:
    from rich.console import Console

    from agile_trainers.cli.check import command

    model, processor = make_image_model("idefics3")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    reports = []
    for options in (["--model_name_or_path", str(tmp_path)], []):
        console = Console(file=io.StringIO(), width=200)
        environment = ["--environment", "gymnasium:showing:Screen-v0", "--max_turns", "3", "--max_new_tokens", "4"]
        command.main([*environment, *options, "--episodes", "4"], console)
        reports.append(console.file.getvalue())
    for words in ("follows it: two episodes", "Play: 4 episodes", "gave the same results", "Memory of one process"):
        assert words in reports[0]
    assert "The weights are float32" in reports[0] and "cannot be planned" not in reports[0]
    assert "Train a model that reads images" in reports[1]
