"""Episodes with images on the viewer's page, in a real Chromium (``make test-viewer``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
import pytest
from written_page import shoot, texts

from agile_trainers.records.reader import open_records
from agile_trainers.records.writer import RecordWriter, episode_row
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.viewer.html import write_page

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from image_models import Gallery, make_image_model

pytestmark = pytest.mark.browser
SIZES = ((640, 400), (16, 16), (90, 360), (800, 60))
"""Of a screen, a square, a page and a strip."""


class Screens(Gallery):
    """Shows a screen and a square, then another of :data:`SIZES` in each turn."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.turn, self.shown = 0, 0
        return [self._message(["Press the button of", self._image(), "that has the colour of", self._image(), "."])], {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return [self._message([self._image(), "And now?"])], 0.5, self.turn == 3, False, {"success": True}

    def _image(self) -> Any:
        width, height = SIZES[self.shown % 4]
        self.shown += 1
        image = PIL.Image.new("RGB", (width, height), (235, 235, 240))
        draw = PIL.ImageDraw.Draw(image)
        for k, colour in enumerate(("crimson", "seagreen", "royalblue")):
            left = width * (2 * k + 1) // 8
            draw.rectangle((left, height // 3, left + width // 6, 2 * height // 3), fill=colour)
        return image


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An episode of three turns, and one that is shown the last image alone."""
    folder = tmp_path_factory.mktemp("images")
    model, processor = make_image_model("idefics3")
    ids = processor.tokenizer.encode("the red one<|im_end|>", add_special_tokens=False)
    episodes = []
    for history in (None, "images:1"):
        options = EpisodeOptions(max_turns=3, max_new_tokens=10, history=history)
        playing = build_engine(options, EnvironmentPool(Screens), processor, model_config=model.config)
        episodes += playing.run([EpisodeSpec(1, (1,))], ScriptedGenerator(lambda request: ids))
    writer = RecordWriter(folder, {"run": "run"}, max_bytes=10**7)
    writer.write_vocabulary(processor.tokenizer)
    writer.write_images(episodes)
    writer.write_train(0, [episode_row(episode, index=k) for k, episode in enumerate(episodes)])
    return write_page(open_records(folder), folder / "view.html").path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_images_stand_in_their_messages_small_and_whole_on_a_click(page_file: Path, visit: Any, scheme: str) -> None:
    page = visit(page_file, "#episode/0/0", scheme=scheme)
    images = page.locator("img.shown")
    page.wait_for_function("[...document.images].every((image) => image.complete)")
    natural = images.evaluate_all("all => all.map((image) => [image.naturalWidth, image.naturalHeight])")
    assert natural == [list(SIZES[k % 4]) for k in range(5)]
    sizes = [images.nth(k).bounding_box() for k in range(5)]
    assert [(round(size["width"]), round(size["height"])) for size in sizes[:4]] == [
        (160, 100), (48, 48), (30, 120), (160, 12)
    ]  # fmt: skip
    shoot(page, f"images_{scheme}")
    page.get_by_role("button", name="image").first.focus()
    page.keyboard.press("Enter")
    whole = images.first.bounding_box()
    assert (whole["width"], whole["height"]) == SIZES[0]
    shoot(page, f"images_whole_{scheme}")
    page.keyboard.press("Enter")
    assert images.first.bounding_box()["width"] <= 160


def test_images_fit_a_narrow_page(page_file: Path, visit: Callable[..., Any]) -> None:
    page = visit(page_file, "#episode/0/0", width=390, height=844)
    page.get_by_role("button", name="image").first.click()
    shoot(page, "images_narrow")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_rewritten_prompt_shows_the_images_that_it_kept(page_file: Path, visit: Callable[..., Any]) -> None:
    page = visit(page_file, "#episode/0/1")
    fold = page.locator("#turn-1 > details").first
    fold.locator("summary").first.click()
    page.wait_for_selector("#turn-1 > details img.shown")
    assert fold.locator("img.shown").count() == 1
    assert "(an image that is no longer shown)" in "".join(texts(page, "#turn-1 > details .message .text"))
    shoot(page, "images_kept")
