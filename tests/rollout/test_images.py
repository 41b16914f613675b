"""Images in observations: what is rendered, sampled and refused, compared with the processors and models themselves."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import hostile_images
import numpy as np
import PIL.Image
import pytest
import torch
from PIL.ImageOps import exif_transpose
from transformers.image_utils import load_image

from agile_environments.colours import Colours, bitmap, expert_policy
from agile_trainers.envs import images
from agile_trainers.envs.context import Context, as_history, name_of_history
from agile_trainers.envs.images import MOST_PIXELS, opened
from agile_trainers.envs.scripted_policies import play as play_scripted
from agile_trainers.records.reader import open_records
from agile_trainers.records.writer import RecordWriter, episode_row
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.generators.base import SamplingSettings
from agile_trainers.rollout.generators.images import axis_positions, prepare_for_images
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Image, StopReason, Trajectory, images_of
from agile_trainers.viewer.parts import detail

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from image_models import IMAGE_ARCHITECTURES, Gallery, make_image_model, noise

NAMES = [name for name in IMAGE_ARCHITECTURES if name != "llava_onevision"]
NEED_VIDEOS = ("qwen", "smolvlm")
"""Models whose processors need torchvision, for videos."""
ORIENTATION = 0x112
TURNED = PIL.Image.Exif()
"""The metadata of a photo that is to be turned by 90 degrees."""
TURNED[ORIENTATION] = 6


@cache
def made(name: str) -> tuple[Any, Any]:
    if name.startswith(NEED_VIDEOS):
        pytest.importorskip("torchvision")
    if name == "smolvlm":
        pytest.importorskip("num2words")
    model, processor = make_image_model(name)
    prepare_for_images(model)
    return model.eval(), processor


def engine(name: str, factory: Callable[[], Any] = Gallery, **options: Any) -> RolloutEngine:
    model, processor = made(name)
    options = {"max_turns": 3, "max_new_tokens": 5, **options}
    return build_engine(EpisodeOptions(**options), EnvironmentPool(factory), processor, model_config=model.config)


def sampler(name: str, chat: Any) -> TransformersGenerator:
    model, processor = made(name)
    settings = SamplingSettings(stop_strings=("a", "e", "o"))
    return TransformersGenerator(
        model, eos_token_ids=chat.eos_token_ids, pad_token_id=processor.tokenizer.pad_token_id, settings=settings,
        tokenizer=processor.tokenizer,
    )  # fmt: skip


def play(name: str, factory: Callable[[], Any] = Gallery, seeds: tuple[int, ...] = (1, 2, 3), **options: Any) -> Any:
    playing = engine(name, factory, **options)
    specs = [EpisodeSpec(seed, (seed, place)) for place, seed in enumerate(seeds)]
    return playing.run(specs, sampler(name, playing.chat))


def scripted(name: str, answer: str, factory: Callable[[], Any] = Gallery, **options: Any) -> Trajectory:
    playing = engine(name, factory, **options)
    tokenizer = made(name)[1].tokenizer
    ids = tokenizer.encode(answer, add_special_tokens=False)
    (episode,) = playing.run([EpisodeSpec(1, (1,))], ScriptedGenerator(lambda request: ids))
    return episode


def processed(name: str, messages: list[dict[str, Any]], *, prompt: bool = False) -> Any:
    """What the model's own processor makes of a whole conversation."""
    processor = made(name)[1]
    text = processor.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    images = [opened(image) for image in images_of(messages)]
    return processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)


# ---------------------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_that_the_processor_makes_of_the_whole_conversation(name: str) -> None:
    """Three turns, with images of different sizes: what was expanded before must not be expanded again."""
    episode = scripted(name, "7<|im_end|>")
    assert len(episode.turns) == 3
    assert episode.error is None
    conversation = [*episode.prompt, *episode.messages[:-1]]  # the last observation ends the episode
    whole = processed(name, conversation)["input_ids"][0].tolist()
    ids = [*episode.prompt_ids, *episode.completion_ids]
    assert whole[: len(ids)] == ids
    assert len({image.digest for image in images_of(conversation)}) == len(episode.pictures[0]) >= 3


def test_an_image_token_in_a_text_becomes_ordinary_text() -> None:
    class Forger(Gallery):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            image = {"type": "image", "image": noise(0)}
            return [{"role": "user", "content": [{"type": "text", "text": "<image><image>"}, image]}], {}

    episode = scripted("idefics3", "7", Forger, max_turns=1)
    token = made("idefics3")[1].image_token_id
    assert episode.prompt_ids.count(token) == episode.pictures[0][0].count == 20


def test_a_template_that_writes_no_images_is_refused_by_what_it_writes() -> None:
    model, processor = make_image_model("idefics3")
    processor.chat_template = processor.chat_template.replace("'<image>'", "''")
    playing = build_engine(EpisodeOptions(), EnvironmentPool(Gallery), processor, model_config=model.config)
    (episode,) = playing.run([EpisodeSpec(1, (1,))], ScriptedGenerator(lambda request: [5]))
    assert "writes 0 image(s)" in episode.error


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("name", NAMES)
def test_sampled_log_probs_are_those_of_the_whole_conversation_read_by_the_model_itself(name: str) -> None:
    """The independent reference: transformers' own forward pass, from pixels, without a cache and without padding."""
    model = made(name)[0]
    token = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    episodes = play(name)
    assert sum(len(episode.turns) for episode in episodes) == 9
    for episode in episodes:
        ids = torch.tensor([[*episode.prompt_ids, *episode.completion_ids]])
        shown = [*episode.prompt, *episode.messages[:-1]]
        inputs = {key: value for key, value in processed(name, shown).items() if "mask" not in key or "pixel" in key}
        inputs["input_ids"] = ids
        for key in {"mm_token_type_ids", "token_type_ids"} & inputs.keys():
            inputs[key] = (ids == token).long()
        with torch.no_grad():
            log_probs = model(**inputs).logits[0, :-1].log_softmax(-1)
        start = len(episode.prompt_ids) - 1
        for turn in episode.turns:
            for place in range(turn.start, turn.end):
                expected = log_probs[start + place, episode.completion_ids[place]]
                assert abs(episode.sampling_logprobs[place] - float(expected)) < 1e-4


def test_an_image_is_encoded_once_for_a_group_that_shares_it() -> None:
    model = made("idefics3")[0]
    encoded = []
    connector = model.model.connector.register_forward_hook(lambda *_: encoded.append(1))
    episodes = play("idefics3", seeds=(4, 4, 4, 4))
    connector.remove()
    shown = {picture.key for episode in episodes for picture in episode.pictures[0]}
    assert len(encoded) == len(shown) < sum(len(episode.pictures[0]) for episode in episodes)


def test_an_image_token_is_never_sampled() -> None:
    model, _ = make_image_model("idefics3")
    token = model.config.image_token_id
    with torch.no_grad():
        model.lm_head.weight[token] = 0
        model.lm_head.weight -= 5  # all others are unlikely
    prepare_for_images(model.eval())
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert (logits.softmax(-1)[..., token] == 0).all()
    assert "lm_head.bias" not in model.state_dict()


def test_another_image_of_the_same_size_is_another_conversation() -> None:
    """A rewritten context may hold the same ids: the keys and values of another image must not be read again."""

    class Last(Gallery):
        turns = 3

        def context(self, messages: Any) -> Any:
            return messages if len(messages) < 3 else [messages[-1]]

        def _image(self) -> Any:
            return noise(self.random.randrange(10**6))

        def step(self, action: str) -> Any:
            self.turn += 1
            return [self._message(["look", self._image(), "and", self._image()])], 1.0, self.turn >= 3, False, {}

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed)
            return [self._message(["look", self._image(), "and", self._image()])], {}

    model = made("idefics3")[0]
    (episode,) = play("idefics3", Last, seeds=(1,))
    assert episode.paths is not None
    assert len(episode.paths) == len(episode.turns) == 3
    prompts = [episode.prompt_of(k) for k in range(3)]
    assert prompts[0] == prompts[1] == prompts[2]
    assert episode.parents == [None, None, None]
    for k, turn in enumerate(episode.turns):
        inputs = processed("idefics3", turn.messages or episode.prompt, prompt=True)
        assert inputs["input_ids"][0].tolist() == prompts[k]
        ids = torch.tensor([[*prompts[k], *episode.action_of(k)]])
        with torch.no_grad():
            logits = model(
                input_ids=ids, pixel_values=inputs["pixel_values"], pixel_attention_mask=inputs["pixel_attention_mask"]
            ).logits[0]
        expected = logits[len(prompts[k]) - 1 : -1].log_softmax(-1).gather(1, ids[0, len(prompts[k]) :, None])[:, 0]
        sampled = torch.tensor(episode.sampling_logprobs[turn.start : turn.end])
        assert torch.allclose(sampled, expected, atol=1e-4)


def test_positions_of_several_axes_by_the_models_own_code() -> None:
    model, _ = made("qwen2_vl")
    reader, token = prepare_for_images(model), model.config.image_token_id
    episodes = play("qwen2_vl", seeds=(1, 5))
    width = max(len(ids) for episode in episodes for ids, _ in episode.shown)
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    cells, offsets, grids = [], [], []
    for row, episode in enumerate(episodes):
        ((own, pictures),) = episode.shown
        ids[row, width - len(own) :], mask[row, width - len(own) :] = torch.tensor(own), 1
        cells += [(row, int(column)) for column in (ids[row] == token).nonzero()]
        offsets += [picture.offsets for picture in pictures]
        shown = processed("qwen2_vl", [*episode.prompt, *episode.messages[:-1]])
        grids.append(shown["image_grid_thw"])
    expected, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=(ids == token).long(), image_grid_thw=torch.cat(grids), attention_mask=mask
    )
    rows, columns = torch.tensor(cells).T
    found = axis_positions(mask, rows, columns, torch.cat(offsets))
    assert torch.equal(torch.where(mask.bool(), found, 0), torch.where(mask.bool(), expected, 0))
    assert reader is prepare_for_images(model)


@pytest.mark.parametrize("name", ["idefics3", "qwen2_vl"])
def test_runs_of_image_tokens_are_the_conversations_and_keyed_by_content(name: str) -> None:
    """What vLLM gets: text between the tiles of an image divides it, and the same image has the same keys everywhere."""
    reader = prepare_for_images(made(name)[0])
    first, second = play(name, seeds=(1, 2))
    keys: dict[str, bytes] = {}
    for episode in (first, second):
        ((ids, pictures),) = episode.shown
        runs = reader.runs(ids, [*pictures])
        places = [place for run in runs for place in range(run.start, run.start + len(run.features))]
        assert places == [place for place, token in enumerate(ids) if token == reader.token_id]
        assert torch.equal(torch.cat([run.features for run in runs]), torch.cat([one.features for one in pictures]))
        for run in runs:
            assert keys.setdefault(run.key, run.features.numpy().tobytes()) == run.features.numpy().tobytes()
            assert (run.grid is None) == (name == "idefics3")
        assert (len(runs) > len(pictures)) == (name == "idefics3")
        again = reader.runs([reader.token_id] * len(places), [*pictures])
        assert [run.key.split("-")[0] for run in again] == list(dict.fromkeys(run.key.split("-")[0] for run in runs))
    assert len(set(keys.values())) == len(keys)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_a_model_that_is_not_supported_is_refused_by_name() -> None:
    pytest.importorskip("torchvision")
    model, processor = make_image_model("llava_onevision")
    with pytest.raises(ValueError, match=r"not shown to 'llava_onevision': only to gemma3, .*processor's tokenizer"):
        build_engine(EpisodeOptions(), EnvironmentPool(Gallery), processor, model_config=model.config)


def test_a_processor_that_writes_other_placeholders_beside_another_image_is_refused(monkeypatch: Any) -> None:
    pytest.importorskip("torchvision")
    from agile_trainers.rollout.chat.pictures import Pictures

    model, processor = make_image_model("llava_onevision")
    with pytest.raises(ValueError, match="an earlier turn would change when the next image is shown"):
        Pictures(processor, model.config.image_token_index)


def test_without_a_processor_an_image_costs_its_episode() -> None:
    model, processor = made("idefics3")
    playing = build_engine(EpisodeOptions(), EnvironmentPool(Gallery), processor.tokenizer, model_config=model.config)
    (episode,) = playing.run([EpisodeSpec(1, (1,))], ScriptedGenerator(lambda request: [5]))
    assert episode.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "pass its processor" in episode.error


HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    **hostile_images.HOSTILE,
    "huge, open": (lambda: noise(0).resize((5000, 5000)), f"5000 x 5000 pixels; expected 1 to {MOST_PIXELS:,}"),
    "zero-sized, open": (lambda: noise(0).crop((0, 0, 0, 5)), "0 x 5 pixels"),
    "made by hand": (lambda: Image(b"hello"), "cannot be read"),
    "broken off, open": (
        lambda: PIL.Image.open(BytesIO(hostile_images.file_of(noise(0), "JPEG")[:-100])),
        "message 0 with a bad part: An open image cannot be read: OSError",
    ),
    "a row of pixels": (lambda: np.zeros((5, 3), dtype=np.uint8)[:0], "no pixels"),
    "two channels": (lambda: np.zeros((5, 5, 2), dtype=np.uint8), "shape .5, 5, 2. and type uint8 is no image"),
    "numbers": (lambda: np.zeros((5, 5)), "type float64 is no image"),
    "a long name": (lambda: "x" * 10_000, "is no file"),
    "elsewhere": (lambda: "https://example.com/image.png", "addresses are not fetched"),
    "missing": (lambda: "/no/such/file.png", "is no file"),
    "a number": (lambda: 7, "not int"),
    **{
        f"mode {mode}": (lambda mode=mode: PIL.Image.new(mode, (4, 4)), f"of mode {mode} .* array of uint8")
        for mode in ("I", "F", "I;16", "I;16B")
    },
    "mode I;16, a file": (lambda: hostile_images.file_of(PIL.Image.new("I;16", (4, 4))), "of mode I(;16)? .* array of"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_images_cost_their_episode(case: str) -> None:
    make, expected = HOSTILE[case]

    class Hostile(Gallery):
        def step(self, action: str) -> Any:
            return [{"role": "user", "content": [{"type": "image", "image": make()}]}], 0.0, False, False, {}

    episodes = [scripted("idefics3", "7", Hostile), scripted("idefics3", "7")]
    assert [episode.stop_reason for episode in episodes] == [StopReason.ENVIRONMENT_ERROR, StopReason.TERMINATED]
    assert re.search(expected, episodes[0].error), episodes[0].error


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("source", ["path", "bytes", "open", "by hand"])
def test_a_turned_image_is_shown_upright(tmp_path: Path, kind: str, source: str) -> None:
    """As transformers and datasets show it. What is kept is upright for a reader that knows no orientation."""
    (path := tmp_path / "photo").write_bytes(hostile_images.file_of(noise(0, (24, 40)), kind, exif=TURNED))
    given = {
        "path": lambda: (str(path), "path"),
        "bytes": lambda: (path.read_bytes(),),
        "open": lambda: (PIL.Image.open(path),),
        "by hand": lambda: (Image(path.read_bytes()),),
    }[source]
    image = images.read_image(*given())
    expected = load_image(str(path))
    assert expected.size == images.size_of(image) == tuple(reversed(PIL.Image.open(path).size))
    assert opened(image).tobytes() == expected.tobytes() == PIL.Image.open(BytesIO(image.data)).convert("RGB").tobytes()
    assert PIL.Image.open(BytesIO(image.data)).getexif().get(ORIENTATION, 1) == 1
    assert images.read_image(*given()) is images.read_image(image) is image


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_turned_as_by_transformers(tmp_path: Path, orientation: int) -> None:
    (exif := PIL.Image.Exif())[ORIENTATION] = orientation
    (path := tmp_path / "photo").write_bytes(hostile_images.file_of(noise(0, (24, 40)), exif=exif))
    assert opened(images.read_image(path)).tobytes() == load_image(str(path)).tobytes()


(WIDTH := PIL.Image.Exif()).update({ORIENTATION: 6, 271: "Maker"})
BROKEN = {
    "all": (b"Exif\0\0garbage", (24, 40)),
    "a width that is text": (WIDTH.tobytes().replace(b"\x01\x0f", b"\x01\0"), (40, 24)),
}
"""Metadata to the size of their picture."""


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("what", BROKEN)
def test_broken_metadata_cost_no_picture(what: str, kind: str) -> None:
    exif, size = BROKEN[what]
    data = hostile_images.file_of(noise(0, (24, 40)), kind, exif=exif)
    for given in (data, PIL.Image.open(BytesIO(data))):
        assert images.size_of(images.read_image(given)) == size


@pytest.mark.parametrize("exif", [b"", TURNED])
def test_the_first_picture_of_a_phones_photo_is_the_photo(exif: Any) -> None:
    """Phones add a preview or a depth map, and write the same format as a camera of two lenses (MPO)."""
    photo, preview = noise(0, (24, 40)), noise(1, (24, 40))
    data = hostile_images.file_of(photo, "MPO", save_all=True, append_images=[preview], exif=exif)
    assert PIL.Image.open(BytesIO(data)).n_frames == 2
    expected = PIL.Image.open(BytesIO(hostile_images.file_of(photo, "JPEG", exif=exif)))
    for given in (data, PIL.Image.open(BytesIO(data))):
        assert opened(images.read_image(given)).tobytes() == exif_transpose(expected).tobytes()


def test_an_upright_photo_is_kept_as_it_is() -> None:
    data = hostile_images.file_of(noise(0), "JPEG", exif=b"Exif\0\0" + PIL.Image.Exif().tobytes()[6:])
    assert images.read_image(data).data == data


def test_images_of_an_episode_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in the first observation, and one in the second: a third turn would have a fourth image, or too many pixels."""
    monkeypatch.setattr(images, "MOST_IMAGES", 2)
    episode = scripted("idefics3", "7")
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.ENVIRONMENT_ERROR, 1)
    assert "The conversation has 3 different images of" in episode.error
    monkeypatch.undo()
    monkeypatch.setattr(images, "MOST_PIXELS", 40 * 56)
    episode = scripted("idefics3", "7", max_turns=20)
    assert episode.error is None  # three images of at most 40 x 24 or 24 x 56 pixels are fewer than four of the largest


# ------------------------------------------------------------------------------------------- histories, tasks, records


def test_a_history_keeps_the_last_images() -> None:
    shown = [{"type": "image", "image": images.read_image(noise(k))} for k in range(4)]
    first = {"role": "user", "content": [shown[0], {"type": "text", "text": "look"}, shown[1]]}
    context = Context([first, {"role": "assistant", "content": "a"}, {"role": "user", "content": shown[2:]}])
    note = {"type": "text", "text": "(an image that is no longer shown)"}
    assert as_history("images:4")(context) == context
    kept = as_history("images:3")(context)
    assert kept[0]["content"] == [note, *first["content"][1:]]
    assert kept[1:] == context[1:]
    assert images_of(as_history("images:1")(context)) == [shown[3]["image"]]
    assert name_of_history(as_history("images:3")) == "images:3"
    last = as_history("summary:1")(Context([*context[:2], {"role": "assistant", "content": "note"}], [first]))
    assert images_of(last) == images_of([first])


def test_an_episode_with_the_last_images_alone_has_paths_of_its_own() -> None:
    whole, last = (scripted("idefics3", "7<|im_end|>", history=history) for history in ("images:9", "images:2"))
    assert whole.paths is None
    assert last.paths is not None
    for path, pictures in last.shown:
        assert len(pictures) == 2
        assert path.count(pictures[0].token_id) == sum(picture.count for picture in pictures)
    for k, turn in enumerate(last.turns):
        expected = processed("idefics3", turn.messages or last.prompt, prompt=True)["input_ids"][0].tolist()
        assert last.prompt_of(k) == expected


def test_the_expert_of_the_ready_task_sees_and_chance_does_not() -> None:
    """With images of other code words, what the expert sees is chance: 1 in 16."""
    assert all(play_scripted(Colours(), expert_policy, seed).success for seed in range(50))

    class Shuffled(Colours):
        def _question(self) -> Any:
            code, self.code = self.code, [*self.code]
            other = random.Random(f"{self.turns} {code}")
            self.code = [other.choice(self.colours) if item in self.colours else item for item in code]
            question = super()._question()
            self.code = code
            return question

    won = sum(play_scripted(Shuffled(), expert_policy, seed).success for seed in range(500))
    assert 12 < won < 52  # 31 of 500 on average; four standard deviations


def test_a_square_is_the_same_file_everywhere() -> None:
    image = opened(Image(bitmap((10, 20, 30))))
    assert image.size == (16, 16)
    assert image.getcolors() == [(256, (10, 20, 30))]
    assert Image(bitmap((10, 20, 30))).digest == "077b52544cb579edaddc47c6f7df8ff0"


def test_records_hold_each_image_once_and_the_page_shows_it(tmp_path: Path) -> None:
    episodes = play("idefics3", seeds=(1, 1))
    writer = RecordWriter(tmp_path, {"run": "run"}, max_bytes=10**6)
    shown = {text: image for episode in episodes for text, image in episode.images.items()}
    writer.write_images(episodes)
    writer.write_train(0, [episode_row(episode, index=k) for k, episode in enumerate(episodes)])
    files = sorted(path.name for path in (writer.folder / "images").iterdir())
    assert files == sorted(image.digest for image in shown.values())
    assert len(files) == len(episodes[0].pictures[0])
    (run,) = open_records(tmp_path)
    record = run.episode(run.index()[0]["key"])
    page = detail(record, run.image)
    assert page["images"].keys() == shown.keys()
    assert all(address.startswith("data:image/png;base64,") for address in page["images"].values())
    (writer.folder / "images" / files[0]).write_bytes((writer.folder / "images" / files[1]).read_bytes())
    assert len(detail(record, run.image)["images"]) == len(files) - 1
    small = RecordWriter(tmp_path, {"run": "small"}, max_bytes=max(len(image.data) for image in shown.values()))
    small.write_images(episodes)
    assert 1 <= len(list((small.folder / "images").iterdir())) < len(shown)


def test_processes_may_write_the_same_images_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One writes all of them while another has written, and not yet moved, its first; the limit is all that there is."""
    episodes = play("idefics3", seeds=(1,))
    images = episodes[0].images.values()
    size = sum(len(image.data) for image in images)
    first, second = (RecordWriter(tmp_path, {"run": "run"}, rank=rank, max_bytes=size) for rank in range(2))
    write, others = Path.write_bytes, [second]

    def written(path: Path, data: bytes) -> int:
        count = write(path, data)
        while others:
            others.pop().write_images(episodes)
        return count

    monkeypatch.setattr(Path, "write_bytes", written)
    first.write_images(episodes)
    assert sorted(path.name for path in (first.folder / "images").iterdir()) == sorted(image.digest for image in images)
