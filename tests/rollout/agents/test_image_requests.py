"""Images in the requests of agents: what is refused, what a prompt is made of, what counts once."""

from __future__ import annotations

import base64
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from clients import Client, echo
from hostile_images import HOSTILE, file_of

from agile_trainers.embedded import make_tokenizer
from agile_trainers.envs import images
from agile_trainers.envs.agent import Agent
from agile_trainers.envs.images import opened
from agile_trainers.records.reader import open_records
from agile_trainers.records.writer import RecordWriter, episode_row
from agile_trainers.rollout.agents.dialects import DIALECTS
from agile_trainers.rollout.agents.dialects.base import Dialect
from agile_trainers.rollout.agents.dialects.chat import CHAT
from agile_trainers.rollout.agents.dialects.messages import MESSAGES
from agile_trainers.rollout.agents.dialects.responses import RESPONSES
from agile_trainers.rollout.agents.requests import Answer, Refusal, Ticket
from agile_trainers.rollout.chat.pictures import Pictures
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.forest import Fork
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.types import Message, StopReason, Trajectory, images_of
from agile_trainers.viewer.parts import detail

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from image_models import make_image_model, noise

by_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


@cache
def made() -> tuple[Any, Any]:
    return make_image_model("idefics3")


def engine(environment: Any) -> RolloutEngine:
    model, processor = made()
    options = EpisodeOptions(max_turns=9, max_new_tokens=5)
    return build_engine(options, EnvironmentPool(environment), processor, model_config=model.config)


@pytest.fixture(scope="module")
def chat() -> ChatRenderer:
    return engine(Agent(lambda model, task: 0.0)).chat


@pytest.fixture
def client(chat: ChatRenderer) -> Client:
    tokenizer = made()[1].tokenizer
    ids = [*tokenizer.encode("7", add_special_tokens=False), tokenizer.eos_token_id]
    return Client(chat, lambda request: (ids, "stop"))


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shot(seed: int, size: tuple[int, int] = (16, 16)) -> bytes:
    return file_of(noise(seed, size))


def user(*parts: str | bytes) -> Message:
    """A message in the dialect of Chat Completions; bytes are images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def send(client: Client, *messages: Message) -> Ticket:
    body = {"model": "policy", "messages": messages}
    request = CHAT.read(json.loads(json.dumps(body)))
    request.body = json.dumps(body).encode()
    ticket = Ticket(request)
    client.requests += client.episode.ask(ticket)
    return ticket


def ask(client: Client, *messages: Message) -> Answer:
    ticket = send(client, *messages)
    client.answer()
    answer = ticket.answer.result(timeout=0)
    client.episode.delivered(ticket)
    return answer


def end(client: Client) -> Trajectory:
    client.episode.end(1.0, None)
    return client.episode.finished()


def processed(messages: list[Message], *, prompt: bool) -> list[int]:
    """What the model's own processor makes of a conversation."""
    processor = made()[1]
    text = processor.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    shown = [opened(image) for image in images_of(messages)]
    return processor(text=[text], images=[shown], add_special_tokens=False)["input_ids"][0]


# ------------------------------------------------------------------------------------------------------------ refusals


def body_of(dialect: Dialect, address: str, *, result: bool = False) -> dict[str, Any]:
    """A request with an image at an address, of a user or in the result of a tool."""
    data = address.partition("base64,")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data} if data else {"type": "url", "url": address}
    part: dict[str, Any] = {
        CHAT: {"type": "image_url", "image_url": {"url": address}},
        RESPONSES: {"type": "input_image", "image_url": address},
        MESSAGES: {"type": "image", "source": source},
    }[dialect]
    if not result:
        message: dict[str, Any] = {"role": "user", "content": [part]}
    else:
        message = {
            CHAT: {"role": "tool", "tool_call_id": "c", "content": [part]},
            RESPONSES: {"type": "function_call_output", "call_id": "c", "output": [part]},
            MESSAGES: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [part]}]},
        }[dialect]
    return {"model": "policy", "input" if dialect is RESPONSES else "messages": [message]}


@by_dialect
@pytest.mark.parametrize("result", [False, True], ids=["user", "tool"])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_images_are_refused(dialect: Dialect, case: str, result: bool) -> None:
    make, words = HOSTILE[case]
    with pytest.raises(Refusal) as raised:
        dialect.read(body_of(dialect, url(make()), result=result))
    assert raised.value.status == 400
    assert re.search(words, raised.value.message), raised.value.message
    assert "content[0]" in raised.value.message or "output[0]" in raised.value.message
    assert len(raised.value.message) < 400


@by_dialect
@pytest.mark.parametrize("kind", ["http", "path", "file", "odd data"])
def test_images_elsewhere_are_refused_files_of_this_machine_too(dialect: Dialect, kind: str, tmp_path: Path) -> None:
    """A program that plays in isolation must not read files through the endpoint."""
    there = tmp_path / "secret.png"
    there.write_bytes(shot(1))
    address = {
        "http": "https://example.com/shot.png",
        "path": str(there),
        "file": f"file://{there}",
        "odd data": "data:image/png," + "x" * 10_000,
    }[kind]
    with pytest.raises(
        Refusal, match="addresses are not fetched and files are not read: send the image itself, as data:"
    ):
        dialect.read(body_of(dialect, address))


def test_a_model_without_a_processor_says_so_to_the_client() -> None:
    text = ChatRenderer(make_tokenizer(), on_rewrite="fork")
    ticket = send(Client(text, lambda request: ([5], "stop")), user("look", shot(1)))
    refusal = ticket.answer.exception(timeout=0)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, "pass its processor" in refusal.message) == (400, True)


def test_a_hostile_request_costs_the_request_and_an_agent_without_an_answer_its_episode_alone() -> None:
    refusals = []

    def solve(model: Any, task: Any) -> float:
        def post(data: bytes) -> httpx.Response:
            body = {"model": model.name, "messages": [user("look", data)]}
            headers = {"Authorization": f"Bearer {model.api_key}"}
            return httpx.post(f"{model.base_url}/chat/completions", json=body, headers=headers, timeout=60)

        hostile = post(HOSTILE["bomb"][0]())
        refusals.append((hostile.status_code, hostile.headers["x-should-retry"], hostile.json()["error"]["message"]))
        if task.seed == 2:
            hostile.raise_for_status()
        return float(post(shot(task.seed)).status_code == 200)

    playing = engine(Agent(solve))
    episodes = playing.run([EpisodeSpec(seed, (seed,)) for seed in (1, 2, 3)], ScriptedGenerator(lambda request: [5]))
    assert [one.stop_reason for one in episodes] == [
        StopReason.TERMINATED, StopReason.ENVIRONMENT_ERROR, StopReason.TERMINATED,
    ]  # fmt: skip
    assert [one.episode_return for one in episodes if one.error is None] == [1.0, 1.0]
    assert {(status, retry) for status, retry, _ in refusals} == {(400, "false")}
    assert all("`messages[0].content[1]`: An image" in message for _, _, message in refusals)


# ------------------------------------------------------------------------------------------------------------- prompts


def test_prompts_are_those_that_the_processor_makes_of_the_whole_conversation(client: Client) -> None:
    """Three turns with images of different sizes: what was expanded before must not be expanded again."""
    messages: list[Message] = []
    for turn, size in enumerate(((40, 24), (24, 56), (33, 17))):
        messages.append(user(f"screen {turn}", shot(turn, size)))
        answer = ask(client, *messages)
        assert client.requests[-1].token_ids == processed(client.episode._samples[-1].shown, prompt=True)
        messages.append(echo(answer.choices[0]))
    episode = end(client)
    assert (episode.paths, len(episode.turns), len(episode.pictures[0])) == (None, 3, 3)
    assert [len(request.pictures) for request in client.requests] == [1, 2, 3]


def test_an_answer_keeps_its_ids_where_the_images_before_it_are_others(client: Client) -> None:
    """The agent shows the last image only: its prompt is rendered again around the sampled ids."""
    first, second = user("look", shot(1, (40, 24))), user("and now?", shot(2, (24, 56)))
    answer = echo(ask(client, first).choices[0])
    ask(client, user("look"), answer, second)
    shown = client.episode._samples[-1].shown
    assert client.requests[1].token_ids == processed(shown, prompt=True)
    episode = end(client)
    assert [len(pictures) for pictures in episode.pictures] == [1, 1]
    assert {turn.fork for turn in episode.turns} == {None, Fork.CONTEXT}


def test_another_image_of_the_same_size_is_another_prompt(client: Client) -> None:
    """The ids are equal: it is not the same question asked again, and draws other numbers."""
    ask(client, user("look", shot(1)))
    ask(client, user("look", shot(2)))
    ask(client, user("look", shot(2)))
    one, two, again = client.requests
    assert one.token_ids == two.token_ids == again.token_ids
    assert [sample.occurrence for sample in client.episode._samples] == [(0,), (0,), (1,)]
    assert one.uniforms(4) != two.uniforms(4) != again.uniforms(4)
    episode = end(client)
    assert [len(pictures) for pictures in episode.pictures] == [1, 1]
    assert sorted(str(turn.fork) for turn in episode.turns) == ["None", str(Fork.AGAIN), str(Fork.NEW)]
    assert len({picture.key for pictures in episode.pictures for picture in pictures}) == 2


def test_the_same_image_counts_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """By content, in echoes of earlier requests and in later messages."""
    processed_ones = []
    process = Pictures._process
    monkeypatch.setattr(Pictures, "_process", lambda self, image: processed_ones.append(image) or process(self, image))
    monkeypatch.setattr(images, "MOST_IMAGES", 1)
    messages = [user("look", shot(50)), user("again", shot(50))]
    answer = echo(ask(client, *messages[:1]).choices[0])
    ask(client, messages[0], answer, messages[1])
    assert len(processed_ones) == 1
    assert len({id(image) for one in client.episode._samples for image in images_of(one.shown)}) == 1
    refused = send(client, messages[0], answer, user("another", shot(2))).answer.exception(timeout=0)
    assert "The conversation has 2 different images" in str(refused)


def test_records_hold_each_image_once_and_the_page_shows_it(client: Client, tmp_path: Path) -> None:
    first = user("look", shot(1))
    answer = echo(ask(client, first).choices[0])
    ask(client, first, answer, user("and now?", shot(2)))
    ask(client, user("new", shot(1)))
    episode = end(client)
    writer = RecordWriter(tmp_path, {"run": "run"}, max_bytes=10**6)
    writer.write_images([episode])
    writer.write_train(0, [episode_row(episode, index=0)])
    assert len(list((writer.folder / "images").iterdir())) == 2
    (run,) = open_records(tmp_path)
    page = detail(run.episode(run.index()[0]["key"]), run.image)
    assert page["images"].keys() == episode.images.keys()
    assert all(address.startswith("data:image/png;base64,") for address in page["images"].values())
