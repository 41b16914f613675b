"""The vLLM generator beside the transformers generator and the definitions of the settings, on the same weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from engines import GREEDILY, GREEDY, agree, answers_of_a_program, make, on_transformers, policy, run, serve
from generated import EOS, SETTINGS, letters, observation, play, processed, uniforms
from peft import PeftModel, get_peft_model_state_dict

from agile_trainers.objectives.kept_sets import KeptSets, pad_sets
from agile_trainers.rollout.generators import (
    GenerationRequest,
    SamplingSettings,
)
from agile_trainers.rollout.generators.vllm.engine import VllmEngine, VllmGenerator

SETTINGS = {**SETTINGS, "hot": SamplingSettings(temperature=1.9), "all": replace(SETTINGS["all"], min_p=None)}
"""Within what vLLM takes: temperatures up to 2, and not min_p beside top_p."""


@pytest.fixture
def model(engine: VllmEngine) -> Iterator[PeftModel]:
    """The policy that the engine serves."""
    model = policy(1)
    serve(engine, model)
    yield model
    assert not engine.engine.has_unfinished_requests()


@pytest.mark.parametrize("settings", GREEDILY.values(), ids=GREEDILY)
def test_greedy_answers_are_those_of_the_transformers_generator(
    engine: VllmEngine, model: PeftModel, settings: SamplingSettings
) -> None:
    agree(play(make(engine, settings), range(8)), play(on_transformers(model, settings), range(8)))


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_settings_mean_what_their_definitions_say(name: str, engine: VllmEngine, model: PeftModel) -> None:
    """Whatever was sampled, its log-probability is the one the definitions give, and it ends where they say."""
    settings = SETTINGS[name]
    for episode, turns in play(make(engine, settings), range(6)).items():
        ids: list[int] = []
        for turn, output in enumerate(turns):
            ids += observation(episode, turn)
            start = len(ids)
            ids += output.token_ids
            logits, possible = model(input_ids=torch.tensor([ids])).logits[0], []
            for i, (token, logprob) in enumerate(zip(output.token_ids, output.logprobs)):
                expected = processed(logits[start + i - 1].clone(), ids[: start + i], i, settings)
                assert logprob == pytest.approx(expected[token].item(), abs=1e-4)
                possible.append(expected > -torch.inf)
            text = letters().decode(output.token_ids)
            stopped = output.token_ids[-1] in EOS or any(string in text for string in settings.stop_strings)
            assert output.finish_reason == ("stop" if stopped else "length")
            assert stopped or len(output.token_ids) == 7
            assert not set(output.token_ids[:-1]) & set(EOS)
            if settings.filters and (settings.top_k or (len(settings.filters) == 1 and settings.min_new_tokens)):
                assert output.kept is not None
                kept = KeptSets.of(*pad_sets([output.kept], len(possible))).mask(possible[0].numel())
                assert torch.equal(kept, torch.stack(possible))
            else:
                assert output.kept is None


@pytest.mark.parametrize(
    "limit", [20, 2], ids=["longer than vLLM's own limit", "more than the context leaves room for"]
)
def test_any_number_of_first_tokens_without_an_end(limit: int, engine: VllmEngine, model: PeftModel) -> None:
    settings = replace(GREEDY, min_new_tokens=17)
    ours, theirs = (
        play(generator, range(4), limit=limit)
        for generator in (make(engine, settings), on_transformers(model, settings))
    )
    for episode, turns in ours.items():
        assert [one.token_ids for one in turns] == [one.token_ids for one in theirs[episode]]
        assert [one.finish_reason for one in turns] == [one.finish_reason for one in theirs[episode]]
        assert min(len(one.token_ids) for one in turns) >= min(17, limit)


@pytest.mark.parametrize("settings", [{"temperature": 0.005}, {"temperature": 2.5}, {"min_p": 0.1, "top_p": 0.9}])
def test_settings_that_vllm_cannot_honour_are_refused(engine: VllmEngine, settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(settings))}.*{next(iter(settings.values()))}"):
        make(engine, SamplingSettings(**settings))


def test_stop_strings_need_a_tokenizer(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        VllmGenerator(engine, eos_token_ids=EOS, settings=SamplingSettings(stop_strings=("q",)))


@torch.no_grad()
def test_requests_with_seeds_of_their_own_sample_the_distribution(engine: VllmEngine, model: PeftModel) -> None:
    settings = SamplingSettings(temperature=1.3, top_k=6)
    draws, prompt = 3000, [5, 9, 11]
    generator, counts = make(engine, settings), Counter[int]()
    for episode in range(draws):
        generator.submit(GenerationRequest(episode, prompt, 1, uniforms(episode)))
    while generator.pending:
        counts.update(output.token_ids[0] for output in generator.step())
    probs = processed(model(input_ids=torch.tensor([prompt])).logits[0, -1], prompt, 0, settings).exp()
    assert set(counts) <= set(probs.nonzero()[:, 0].tolist())
    chi_square = sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in enumerate(probs.tolist()) if p)
    assert chi_square < 20.5  # .999 quantile at 5 degrees of freedom


def test_an_episode_depends_on_its_noise_and_not_on_its_neighbours(engine: VllmEngine, model: PeftModel) -> None:
    settings = SamplingSettings(temperature=1.5)
    together = play(make(engine, settings), range(12))
    for episode in (0, 5, 11):
        (alone,) = play(make(engine, settings), [episode]).values()
        assert [output.token_ids for output in alone] == [output.token_ids for output in together[episode]]
    answers = {
        tuple(run(make(engine, settings), GenerationRequest(0, [5, 6], 7, uniforms(seed))).token_ids)
        for seed in range(8)
    }
    assert len(answers) > 4


def test_requests_enter_and_leave_at_any_step(engine: VllmEngine, model: PeftModel) -> None:
    generator = make(engine, eos=[])
    assert generator.step() == [] and generator.pending == 0
    generator.submit(GenerationRequest(0, [5, 6], 6, uniforms(0)))
    assert generator.step() == [] == generator.step()
    generator.submit(GenerationRequest(1, [7], 1, uniforms(1)))
    generator.submit(GenerationRequest(2, [7], 9, uniforms(2)))
    (second,) = generator.step()
    assert second.episode == 1 and generator.pending == 2
    generator.release(2)
    assert generator.pending == 1
    (first,) = [output for _ in range(3) for output in generator.step()]
    assert first.episode == 0 and len(first.token_ids) == 6
    assert first.token_ids == run(make(engine, eos=[]), GenerationRequest(0, [5, 6], 6, uniforms(0))).token_ids
    generator.submit(GenerationRequest(2, [3], 9, uniforms(2)))
    generator.step()
    generator.close()
    assert generator.pending == 0 and not engine.engine.has_unfinished_requests()
    generator.release(77)


def test_malformed_requests_are_refused(engine: VllmEngine, model: PeftModel) -> None:
    generator = make(engine, eos=[])

    def submit(ids: list[int], limit: int = 2) -> None:
        generator.submit(GenerationRequest(4, ids, limit, uniforms(0)))

    with pytest.raises(ValueError, match=r"Episode 4: `token_ids` is empty"):
        submit([])
    with pytest.raises(ValueError, match=r"Episode 4: `max_new_tokens` is 0"):
        submit([5], 0)
    with pytest.raises(ValueError, match=r"Episode 4.*255.*max_model_length=256"):
        submit([5] * 255)
    assert generator.pending == 0
    submit([5, 6])
    with pytest.raises(ValueError, match="Episode 4 already has a pending request"):
        submit([5, 6])
    (answer,) = [output.token_ids for _ in range(2) for output in generator.step()]
    with pytest.raises(ValueError, match=r"Episode 4: .* at position 2 .*instead of encoding"):
        submit([5, 6, answer[0] + 1, *answer[1:], 8])
    submit([5, 6, *answer])
    generator.release(4)
    with pytest.raises(ValueError, match="`eos_token_ids` has 40"):
        make(engine, eos=[40])


def test_an_answer_may_fill_the_context(engine: VllmEngine, model: PeftModel) -> None:
    output = run(make(engine, eos=[]), GenerationRequest(0, [5] * 250, 6, uniforms(0)))
    assert len(output.token_ids) == 6 and output.finish_reason == "length"


def test_more_prompts_than_are_read_at_once(engine: VllmEngine, model: PeftModel) -> None:
    """A prompt that is read in pieces ends the engine on CPU, if its request has a seed."""
    generator = make(engine, SamplingSettings())
    for episode in range(60):
        generator.submit(GenerationRequest(episode, [2 + (i * episode) % 37 for i in range(130)], 2, uniforms(episode)))
    assert len([output for _ in range(8) for output in generator.step()]) == 60


def test_a_new_adapter_takes_nothing_from_what_was_cached_under_the_last(engine: VllmEngine, model: PeftModel) -> None:
    request = GenerationRequest(0, [2 + i % 30 for i in range(150)], 8, uniforms(0))
    before = run(make(engine, eos=[]), request)
    other = policy(2)
    moved = serve(engine, other)
    assert moved == sum(weight.nbytes for weight in get_peft_model_state_dict(other).values())
    after = run(make(engine, eos=[]), request)
    for output, adapter in ((before, model), (after, other)):
        generator = on_transformers(adapter, GREEDY, [])
        generator.submit(request)
        (reference,) = [output for _ in range(8) for output in generator.step()]
        assert output.token_ids == reference.token_ids
        assert output.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
    assert before.logprobs != pytest.approx(after.logprobs, abs=1e-2)
    assert len(engine.engine.list_loras()) == 1


def test_a_turn_reads_what_is_cached_of_the_turns_before(engine: VllmEngine, model: PeftModel) -> None:
    generator, prompt = make(engine, eos=[]), [3 + i % 30 for i in range(100)]
    answer = run(generator, GenerationRequest(0, prompt, 8, uniforms(0))).token_ids
    params = generator._params.clone()
    params.max_tokens = 1
    engine.submit({"type": "token", "prompt_token_ids": [*prompt, *answer, 5, 6]}, params)
    (output,) = engine.engine.step()
    assert output.num_cached_tokens == 96  # whole blocks of 32


def test_forks_and_requests_at_once_are_answered_as_by_transformers(engine: VllmEngine, model: PeftModel) -> None:
    answers_of_a_program(make(engine), on_transformers(model, GREEDY))


def test_a_fork_reads_what_follows_the_blocks_that_it_shares(engine: VllmEngine, model: PeftModel) -> None:
    generator, prompt = make(engine, eos=[]), [3 + (3 * i) % 31 for i in range(100)]
    assert run(generator, GenerationRequest(0, prompt, 2, uniforms(0))).read == 100
    fork = GenerationRequest(0, [*prompt[:70], 5, 6], 2, uniforms(0), call=1, extends=False)
    assert run(generator, fork).read == 72 - 64
    generator.submit(replace(fork, call=2))
    generator.submit(replace(fork, call=3))
    with pytest.raises(ValueError, match="pending request with call=3"):
        generator.submit(replace(fork, call=3))
    generator.release(0)
    assert generator.pending == 0


def test_weights_that_are_no_numbers_are_an_error(engine: VllmEngine, model: PeftModel) -> None:
    broken = policy(3)
    for name, weight in broken.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(torch.nan)
    serve(engine, broken)
    generator = make(engine)
    for episode in (6, 7):
        generator.submit(GenerationRequest(episode, [5], 2, uniforms(0)))
    with pytest.raises(ValueError, match=r"episode \d are not all numbers"):
        while generator.pending:
            generator.step()
    generator.close()
