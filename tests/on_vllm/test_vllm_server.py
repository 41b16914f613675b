"""Rollouts on a real vLLM server, through TRL's client: an engine's answers in this process, and the adapter alone moves."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import requests
import torch
from engines import (
    GREEDILY,
    GREEDY,
    agree,
    answers_of_a_program,
    on_transformers,
    policy,
    run,
    serve,
)
from engines import make as make_colocated
from games import make_trainer, relative_error
from generated import EOS, SETTINGS, VOCAB, letters, play, qwen2, uniforms
from killed_run import ENDS_IN, UPDATES, Fatal, middle_of_the_last_rollout
from peft import PeftModel, get_peft_model_state_dict
from requests.adapters import HTTPAdapter
from serving import Served, serving
from several_processes import SCRIPT, episodes, launch

from agile_trainers.rollout.generators import GenerationRequest, SamplingSettings
from agile_trainers.rollout.generators.vllm.engine import VllmEngine
from agile_trainers.rollout.generators.vllm.server import ServerGenerator, VllmServer
from agile_trainers.rollout.generators.vllm.servers import VllmServers
from agile_trainers.trainers.trainer import MultiTurnTrainer

MISMATCH = "sampling/sampling_logp_difference"


@pytest.fixture(scope="module")
def letters_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("base") / "model"
    qwen2(hidden_size=128, intermediate_size=64).save_pretrained(folder)
    tokenizer = letters()
    # Without these a Qwen2 tokenizer adds one of its own, outside the vocabulary.
    tokenizer.unk_token, tokenizer.eos_token = tokenizer.pad_token, tokenizer.convert_ids_to_tokens(EOS[0])
    tokenizer.save_pretrained(folder)
    with serving(folder, 256, more=["--enable-prompt-tokens-details"]) as served:
        yield served


@pytest.fixture(scope="module")
def server(letters_served: Served) -> VllmServers:
    return VllmServers([VllmServer(letters_served.url, timeout=0, max_batch_size=32, vocab_size=VOCAB)])


@pytest.fixture
def model(server: VllmServers) -> PeftModel:
    """The policy that the server serves."""
    model = policy(1)
    hand_over(server, model)
    return model


def hand_over(server: VllmServers, model: PeftModel) -> int:
    return server.load_adapter(get_peft_model_state_dict(model), model.peft_config["default"])


def make(server: VllmServers, settings: SamplingSettings = GREEDY, eos: list[int] = EOS) -> ServerGenerator:
    return ServerGenerator(server, eos_token_ids=eos, settings=settings, tokenizer=letters())


@pytest.mark.parametrize("settings", GREEDILY.values(), ids=GREEDILY)
def test_greedy_answers_are_those_of_the_transformers_generator(
    server: VllmServers, model: PeftModel, settings: SamplingSettings
) -> None:
    agree(play(make(server, settings), range(8)), play(on_transformers(model, settings), range(8)))


@pytest.mark.parametrize("name", ["top_p", "all", "stop_strings"])
def test_sampled_answers_are_those_of_an_engine_in_this_process(
    name: str,
    server: VllmServers,
    model: PeftModel,
    engine: VllmEngine,
) -> None:
    settings = {**SETTINGS, "stop_strings": SamplingSettings(stop_strings=("q", "jx"))}[name]
    settings = replace(settings, min_p=None, stop_strings=() if name == "all" else settings.stop_strings)
    serve(engine, model)
    ours, theirs = (
        play(generator, range(8)) for generator in (make(server, settings), make_colocated(engine, settings))
    )
    for episode, turns in ours.items():
        assert [output.token_ids for output in turns] == [output.token_ids for output in theirs[episode]]
        assert [output.finish_reason for output in turns] == [output.finish_reason for output in theirs[episode]]


def test_requests_enter_and_leave_when_they_like(server: VllmServers, model: PeftModel) -> None:
    generator = make(server, eos=[])
    assert generator.step() == [] and generator.pending == 0
    for _ in range(20):  # a busy machine may send the short one too late
        generator.submit(GenerationRequest(0, [5, 6], 200, uniforms(0)))
        generator.submit(GenerationRequest(1, [7], 200, uniforms(1)))
        generator.release(1)
        generator.submit(GenerationRequest(2, [7], 1, uniforms(2)))
        answers = []
        while generator.pending:
            answers += generator.step()
            assert generator.pending == 2 - len(answers)
        assert {answer.episode: len(answer.token_ids) for answer in answers} == {0: 200, 2: 1}
        if answers[0].episode == 2:
            break
    else:
        pytest.fail("The short answer has never left before the long one.")
    generator.submit(GenerationRequest(3, [3], 200, uniforms(3)))
    generator.close()
    assert generator.pending == 0


def test_forks_and_requests_at_once_are_answered_as_by_transformers(server: VllmServers, model: PeftModel) -> None:
    answers_of_a_program(make(server), on_transformers(model, GREEDY))


def test_a_fork_reads_what_follows_the_blocks_that_it_shares(server: VllmServers, model: PeftModel) -> None:
    generator, prompt = make(server, eos=[]), [3 + (3 * i) % 31 for i in range(100)]
    assert run(generator, GenerationRequest(0, prompt, 2, uniforms(0))).read == 100
    fork = GenerationRequest(0, [*prompt[:70], 5, 6], 2, uniforms(0), call=1, extends=False)
    assert run(generator, fork).read == 72 - 64


def test_a_new_adapter_takes_the_place_of_the_last(server: VllmServers, model: PeftModel) -> None:
    request = GenerationRequest(0, [2 + i % 30 for i in range(150)], 8, uniforms(0))
    before = run(make(server, eos=[]), request)
    other = policy(2)
    assert hand_over(server, other) == sum(weight.nbytes for weight in get_peft_model_state_dict(other).values())
    after = run(make(server, eos=[]), request)
    for output, adapter in ((before, model), (after, other)):
        reference = run(on_transformers(adapter, GREEDY, []), request)
        assert output.token_ids == reference.token_ids
        assert output.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
    assert before.logprobs != pytest.approx(after.logprobs, abs=1e-2)
    served = [entry["id"] for entry in requests.get(f"{server.servers[0].url}/v1/models").json()["data"]]
    assert [name for name in served if name.startswith("policy-")] == [server.adapter]
    assert server.files.names() == [server.adapter]


def test_what_a_request_comes_to_is_not_lost(server: VllmServers, model: PeftModel) -> None:
    generator = make(server)
    with pytest.raises(ValueError, match=r"Episode 4.*255.*max_model_length=256"):
        generator.submit(GenerationRequest(4, [5] * 255, 2, uniforms(0)))
    generator.submit(GenerationRequest(4, [VOCAB + 5], 2, uniforms(0)))
    with pytest.raises(Exception, match="Request failed: 400"):
        while True:
            generator.step()
    generator.close()
    with pytest.raises(ValueError, match="`eos_token_ids` has 40"):
        make(server, eos=[40])
    with pytest.raises(ValueError, match="need a tokenizer"):
        ServerGenerator(server, eos_token_ids=EOS, settings=SamplingSettings(stop_strings=("q",)))
    with pytest.raises(ValueError, match="vLLM samples at a temperature between"):
        make(server, SamplingSettings(temperature=2.5))
    with pytest.raises(ValueError, match=r"4 stop strings.* 5"):
        make(server, SamplingSettings(stop_strings=tuple("abcde")))
    with pytest.raises(ValueError, match="min_new_tokens=2"):
        make(server, SamplingSettings(stop_strings=("a",), min_new_tokens=2))


def test_an_adapter_that_the_server_cannot_see(server: VllmServers, model: PeftModel) -> None:
    with pytest.raises(ValueError, match=r"did not load .* /nowhere: choose an output_dir"):
        server.servers[0]._lora("load", {"lora_name": "lost", "lora_path": "/nowhere"})


@pytest.fixture(scope="module")
def embedded_served(embedded_model: Path) -> Iterator[Served]:
    with serving(embedded_model, 4096) as served:
        yield served


def test_a_server_that_does_not_report_its_cache(embedded_served: Served) -> None:
    server = VllmServer(embedded_served.url, timeout=0, max_batch_size=1, vocab_size=VOCAB)
    generator = ServerGenerator(VllmServers([server]), eos_token_ids=[], settings=GREEDY)
    assert run(generator, GenerationRequest(0, [5, 6], 2, uniforms(0))).read is None


def options(served: Served) -> dict[str, Any]:
    return {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": served.url, "vllm_server_timeout": 0.0,
        "stop_strings": None,
    }  # fmt: skip


def logs(trainer: MultiTurnTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
def test_training(embedded_model: Path, embedded_served: Served, tmp_path: Path, algorithm: str) -> None:
    changes = {"max_steps": 5, "learning_rate": 0.5, "algorithm": algorithm}
    changes |= {"num_generations": 1} if algorithm == "reinforce" else {}
    trainer = make_trainer(embedded_model, tmp_path, **changes, **options(embedded_served))
    trainer.train()
    assert len(logs(trainer, f"{MISMATCH}/max")) == 5 and max(logs(trainer, f"{MISMATCH}/max")) < 1e-3
    adapter = sum(weight.nbytes for weight in get_peft_model_state_dict(trainer.model).values())
    assert set(logs(trainer, "vllm/sync_bytes")) == {adapter}
    assert "eval_return" in trainer.evaluate()


def test_two_processes_are_one(embedded_model: Path, embedded_served: Served, tmp_path: Path) -> None:
    """On one server."""
    case = {"per_device_train_batch_size": 8, "max_steps": 2, "evaluated": True, **options(embedded_served)}
    cases = {"lora": case}
    one, two = (
        launch(SCRIPT, processes, embedded_model, tmp_path / str(processes), cases) / "lora" for processes in (1, 2)
    )
    for kind, count in (("train", 16), ("eval", 5)):
        played = [[record["completion_ids"] for record in episodes(run, kind)] for run in (one, two)]
        assert len(played[0]) == count and played[0] == played[1]
    ours, theirs = (torch.load(run / "result.pt", weights_only=False) for run in (one, two))
    assert (ours["processes"], theirs["processes"]) == (1, 2)
    for single, double in zip(ours["gradients"], theirs["gradients"], strict=True):
        assert relative_error(double, single) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": False}, "takes a model that is trained whole over NCCL, which needs GPUs"),
        ({"vllm_server_base_url": "http://127.0.0.1:9"}, "can't be reached at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be(
    embedded_model: Path, embedded_served: Served, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, requests.exceptions.ConnectionError), match=re.escape(message)):
        make_trainer(embedded_model, tmp_path, **{**options(embedded_served), **changes})


def test_a_server_of_another_model(letters_served: Served, embedded_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"would not serve this policy: it serves .*, and this trains"):
        make_trainer(embedded_model, tmp_path, **options(letters_served))


def test_a_server_without_its_switches(embedded_model: Path, tmp_path: Path) -> None:
    message = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    with (
        serving(embedded_model, 4096, switches={"VLLM_SERVER_DEV_MODE": "1"}) as served,
        pytest.raises(ValueError, match=message),
    ):
        make_trainer(embedded_model, tmp_path, **options(served))


def test_a_server_that_dies_leaves_a_checkpoint(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a rollout; the run goes on at another one that listens at the same address."""

    def make_run(served: Served, output: str, happens: Callable[[], None] | None = None) -> MultiTurnTrainer:
        monkeypatch.setattr(Fatal, "steps", 0)
        run = make_trainer(
            embedded_model,
            tmp_path / output,
            environment=Fatal,
            max_steps=UPDATES,
            save_strategy="steps",
            save_steps=1,
            learning_rate=0.5,
            **options(served),
        )
        monkeypatch.setattr(Fatal, "happens", happens, raising=False)
        # TRL's client would ask for a minute.
        run.sampler.vllm.engine.servers[0].client.session.mount("http://", HTTPAdapter(max_retries=0))  # type: ignore[union-attr]
        return run

    monkeypatch.setattr(Fatal, "at", None)
    with serving(embedded_model, 4096) as served:
        whole = make_run(served, "whole")
        whole.train()
        run = make_run(served, "killed", served.kill)
        monkeypatch.setattr(Fatal, "at", middle_of_the_last_rollout(whole))
        with pytest.raises(requests.exceptions.RequestException):
            run.train()
        assert served.process.returncode == -signal.SIGKILL
    monkeypatch.setattr(Fatal, "at", None)
    with serving(embedded_model, 4096, port=int(served.url.rpartition(":")[2])) as again:
        run = make_run(again, "killed")
        saved = {path.parent.name for path in (tmp_path / "killed").glob("checkpoint-*/complete.json")}
        assert saved == {f"checkpoint-{step}" for step in range(1, ENDS_IN)}
        run.train(resume_from_checkpoint=True)
    expected = get_peft_model_state_dict(whole.model)
    for name, weight in get_peft_model_state_dict(run.model).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)


def test_the_oldest_episode_is_sent_next() -> None:
    """Whatever came first; batches that are trained first have the lower numbers."""
    begun, meanwhile, asked = threading.Event(), threading.Event(), list[int]()

    class Slow:
        url, files, max_batch_size, vocab_size, max_model_length = "", None, 1, 100, 64

        def generate(self, ids: list[int], *_: Any) -> Any:
            begun.set()
            assert meanwhile.wait(60)
            asked.append(ids[0])
            return [EOS[0]], [0.0], "stop", None

    servers: list[Any] = [Slow()]
    with closing(ServerGenerator(VllmServers(servers), eos_token_ids=EOS, settings=GREEDY)) as generator:
        generator.submit(GenerationRequest(9, [9], 4, uniforms(9)))
        assert begun.wait(60)
        for episode in (7, 2, 5):
            generator.submit(GenerationRequest(episode, [episode], 4, uniforms(episode)))
        meanwhile.set()
        answered: list[int] = []
        while generator.pending:
            answered += [output.episode for output in generator.step()]
    assert asked == answered == [9, 2, 5, 7]


def test_a_request_asks_for_no_more_tokens_than_fit() -> None:
    """A server refuses a minimum above the maximum."""
    asked = list[tuple[int, int]]()

    class Quick:
        url, files, max_batch_size, vocab_size, max_model_length = "", None, 1, 100, 64

        def generate(self, ids: list[int], fields: dict[str, Any], *_: Any) -> Any:
            asked.append((fields["min_tokens"], fields["max_tokens"]))
            return [EOS[0]], [0.0], "stop", None

    servers, settings = list[Any]([Quick()]), SamplingSettings(min_new_tokens=3)
    with closing(ServerGenerator(VllmServers(servers), eos_token_ids=EOS, settings=settings)) as generator:
        for episode, most in enumerate([5, 1]):
            generator.submit(GenerationRequest(episode, [9], most, uniforms(episode)))
            while generator.pending:
                generator.step()
    assert asked == [(3, 5), (1, 1)]
