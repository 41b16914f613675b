"""The transformers generator against re-reading the whole conversation, and the scripted generator."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from generated import (
    EOS,
    GREEDY,
    LETTERS,
    SETTINGS,
    SHAPE,
    VOCAB,
    Log,
    assert_same,
    gemma3,
    letters,
    make,
    mamba,
    observation,
    play,
    processed,
    qwen2,
    uniforms,
)
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    Qwen2ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import add_fused_lm_head

from agile_trainers.rollout.generators import (
    GenerationOutput,
    GenerationRequest,
    SamplingSettings,
    ScriptedGenerator,
    TransformersGenerator,
)
from agile_trainers.rollout.generators.base import LogitsError
from agile_trainers.rollout.generators.transformers import generator as generator_module


def lora() -> torch.nn.Module:
    model = get_peft_model(qwen2(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.eval()


def fused() -> torch.nn.Module:
    model = qwen2()
    add_fused_lm_head(model)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4}
    return GPT2LMHeadModel(GPT2Config(**shape, eos_token_id=1, bos_token_id=2)).eval()


def mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)).eval()


def lfm2() -> Lfm2ForCausalLM:
    torch.manual_seed(0)
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    return Lfm2ForCausalLM(Lfm2Config(**shape, layer_types=["conv", "full_attention"], conv_L_cache=3)).eval()


def mpt() -> MptForCausalLM:
    """No position ids: distances are counted in columns, so that a hole between tokens would count."""
    torch.manual_seed(3)
    shape = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "initializer_range": 0.4}
    return MptForCausalLM(MptConfig(**shape, max_seq_len=256)).eval()


def gpt_neo() -> GPTNeoForCausalLM:
    """Its local layers keep every key, and count columns."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256}
    layers = {"attention_types": [[["global", "local"], 1]], "window_size": 8}
    return GPTNeoForCausalLM(GPTNeoConfig(**shape, **layers, initializer_range=0.4)).eval()


def minimax() -> MiniMaxForCausalLM:
    """Its linear attention decodes otherwise than it reads."""
    torch.manual_seed(0)
    layers = ["linear_attention", "full_attention"]
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return MiniMaxForCausalLM(MiniMaxConfig(**SHAPE, **experts, layer_types=layers, block_size=8)).eval()


KEEPING = {"qwen2": qwen2, "lora": lora, "fused": fused, "gpt2": gpt2}
REREADING = {"mistral": mistral, "gemma3": gemma3, "lfm2": lfm2, "mpt": mpt, "gpt_neo": gpt_neo}
EVERY_TOKEN = {"mamba": mamba, "minimax": minimax}


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return qwen2()


@torch.no_grad()
def reread(
    model: torch.nn.Module,
    episode: int,
    settings: SamplingSettings = GREEDY,
    turns: int = 4,
    limit: int = 7,
    guessed: Sequence[GenerationOutput] = (),
) -> list[GenerationOutput]:
    """The same episode alone, by one plain forward pass over the whole conversation per token.

    A pass over the guessed answer of a turn is one for each of its tokens, up to the first that is not the right one.
    """
    ids, noise, outputs = [], uniforms(episode), []
    for turn in range(turns):
        ids += observation(episode, turn)
        tokens: list[int] = []
        logprobs: list[float] = []
        stop = False
        guess = guessed[turn].token_ids if guessed else []
        ahead = model(input_ids=torch.tensor([ids + guess])).logits[0, len(ids) - 1 :] if guess else []
        while len(tokens) < limit and not stop:
            if len(tokens) < len(guess) and tokens == guess[: len(tokens)]:
                logits = ahead[len(tokens)]
            else:
                logits = model(input_ids=torch.tensor([ids + tokens])).logits[0, -1]
            scores = processed(logits, ids + tokens, len(tokens), settings)
            token = int(scores.argmax())
            if settings.do_sample:
                (left,), token = noise(1), -1
                while left >= 0:
                    token += 1
                    left -= float(scores[token].exp())
            tokens.append(token)
            logprobs.append(float(scores[token]))
            text = "".join(LETTERS[token] for token in tokens)
            stop = token in EOS or any(string in text for string in settings.stop_strings)
        ids += tokens
        outputs.append(GenerationOutput(episode, tokens, logprobs, "stop" if stop else "length"))
    return outputs


# ------------------------------------------------------------------------------------------ the same as re-reading


@pytest.mark.parametrize(
    ("name", "sample"), [("qwen2", False), *((name, True) for name in (*KEEPING, *REREADING, *EVERY_TOKEN))]
)
def test_equals_rereading_the_whole_conversation(name: str, sample: bool) -> None:
    """How a token is chosen is no matter of the model: greedily on one of them."""
    model = {**KEEPING, **REREADING, **EVERY_TOKEN}[name]()
    settings = SamplingSettings(do_sample=sample)
    generator = make(model, settings)
    assert generator._keeps_cache == (name in KEEPING)
    outputs = play(generator, range(5))
    for episode, turns in outputs.items():
        # A token's logits depend on no later one, but where the model's own code may read otherwise than it decodes.
        assert_same(turns, reread(model, episode, settings, guessed=() if name in EVERY_TOKEN else turns))
    assert {output.finish_reason for turns in outputs.values() for output in turns} == {"stop", "length"}


@pytest.mark.parametrize("build", [qwen2, gemma3])
def test_an_episode_does_not_depend_on_its_neighbours(build: Callable[[], torch.nn.Module]) -> None:
    model, settings = build(), SamplingSettings()
    expected = play(make(model, settings), range(5))
    several: list[tuple[Sequence[int], int | None]] = [
        ([3], None), ([4, 3, 2, 1, 0], None), (range(3), 1), (range(5), 2), (range(9), 3)
    ]  # fmt: skip
    for order, max_batch_size in several:
        outputs = play(make(model, settings, max_batch_size=max_batch_size), order)
        for episode in expected.keys() & outputs.keys():
            assert_same(outputs[episode], expected[episode])


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_works_under_unwrap_model_for_generation(training: bool) -> None:
    accelerator = Accelerator(cpu=True)
    expected = reread(fused(), 0)
    model = accelerator.prepare(fused().train())
    model.gradient_checkpointing_enable()
    with unwrap_model_for_generation(model, accelerator) as unwrapped:
        unwrapped.train(training)
        if training:
            with pytest.raises(RuntimeError, match=r"training mode .*eval\(\)"):
                play(make(unwrapped), [0])
        else:
            assert_same(play(make(unwrapped), [0])[0], expected)


# -------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_mean_what_their_definitions_say(name: str, model: Qwen2ForCausalLM) -> None:
    settings = SETTINGS[name]
    outputs = play(make(model, settings, tokenizer=letters()), range(4))
    for episode, turns in outputs.items():
        assert_same(turns, reread(model, episode, settings, guessed=turns))
    plain = play(make(model, SamplingSettings(do_sample=settings.do_sample)), range(4))
    changed = any(o.token_ids != p.token_ids for e in outputs for o, p in zip(outputs[e], plain[e]))
    assert changed != name.startswith("greedy")


@pytest.mark.parametrize("name", [name for name in SETTINGS if "greedy" not in name])
def test_logprobs_are_those_of_generates_processed_scores(name: str, model: Qwen2ForCausalLM) -> None:
    settings, tokenizer = SETTINGS[name], letters()
    for episode, turns in play(make(model, settings, tokenizer=tokenizer), range(4)).items():
        ids: list[int] = []
        for turn, output in enumerate(turns):
            ids += observation(episode, turn)
            scores = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=max(1, settings.min_new_tokens),
                min_new_tokens=settings.min_new_tokens,
                eos_token_id=EOS,
                do_sample=True,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
                repetition_penalty=settings.repetition_penalty,
                return_dict_in_generate=True,
                output_scores=True,
            ).scores[0]
            token = output.token_ids[0]
            assert output.logprobs[0] == pytest.approx(scores.log_softmax(-1)[0, token].item(), abs=2e-5)
            ids += output.token_ids


def test_stop_strings_look_at_the_answer_only(model: Qwen2ForCausalLM) -> None:
    prompt, limit = observation(0, 0), 6
    plain = make(model, eos_token_ids=[])
    plain.submit(GenerationRequest(0, prompt, limit, uniforms(0)))
    (answer,) = [output for _ in range(limit) for output in plain.step()]
    text = [LETTERS[token] for token in answer.token_ids]
    across = LETTERS[prompt[-1]] + text[0]
    assert across not in "".join(text)
    for stop, length in ((across, limit), (text[0] + text[1], 2), (text[1][-1] + text[2], 3)):
        generator = make(
            model, SamplingSettings(do_sample=False, stop_strings=(stop,)), tokenizer=letters(), eos_token_ids=[]
        )
        generator.submit(GenerationRequest(0, prompt, limit, uniforms(0)))
        (output,) = [output for _ in range(length) for output in generator.step()]
        assert output.token_ids == answer.token_ids[:length]
        assert output.finish_reason == ("length" if length == limit else "stop")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "`temperature` is 0.0.*do_sample=False"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
        ({"top_p": 0.0}, "`top_p` is 0.0"),
        ({"top_p": 1.1}, "`top_p` is 1.1"),
        ({"top_k": -1}, "`top_k` is -1"),
        ({"min_p": 1.5}, "`min_p` is 1.5"),
        ({"min_p": -0.1}, "`min_p` is -0.1"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` is 0.0"),
        ({"min_new_tokens": -2}, "`min_new_tokens` is -2"),
        ({"stop_strings": "end"}, "`stop_strings`.*'end'.*tuple"),
        ({"stop_strings": ("",)}, "`stop_strings`"),
    ],
)
def test_settings_outside_their_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**settings)


def test_greedy_does_not_look_at_the_temperature() -> None:
    assert not SamplingSettings(temperature=0.0, do_sample=False).do_sample


# ------------------------------------------------------------------------------------- who decodes, what is kept


def test_every_token_is_read_once(model: Qwen2ForCausalLM) -> None:
    with Log(model) as log:
        outputs = play(make(model, SamplingSettings()), range(5))
    said = sum(len(observation(e, turn)) for e in range(5) for turn in range(4))
    sampled = sum(len(output.token_ids) for turns in outputs.values() for output in turns)
    assert log.read == said + sampled - 5  # the last token of an episode is never read


def test_a_request_joins_a_batch_that_is_decoding(model: Qwen2ForCausalLM) -> None:
    prompts = {e: [5 + e] * (3 + e) for e in range(3)}
    generator, outputs = make(model, eos_token_ids=[]), []

    def submit(episode: int) -> None:
        generator.submit(GenerationRequest(episode, prompts[episode], 8, uniforms(episode)))

    with Log(model) as log:
        submit(0)
        outputs += generator.step() + generator.step()
        submit(1)  # as many wait as are decoding: let in
        outputs += generator.step()
        submit(2)  # fewer: waits until a row is free
        while generator.pending:
            outputs += generator.step()
    assert log.shapes[:5] == [(1, 3), (1, 1), (2, 4), (2, 1), (2, 1)]
    assert log.shapes[8:10] == [(2, 5), (2, 1)]
    assert [output.episode for output in outputs] == [0, 1, 2]
    for output in outputs:
        alone = make(model, eos_token_ids=[])
        alone.submit(GenerationRequest(0, prompts[output.episode], 8, uniforms(0)))
        (expected,) = [answer for _ in range(8) for answer in alone.step()]
        assert output.token_ids == expected.token_ids
        assert output.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def test_finished_rows_leave_when_most_have_finished(model: Qwen2ForCausalLM) -> None:
    generator = make(model, eos_token_ids=[])
    for episode, limit in enumerate((2, 3, 4, 9)):
        generator.submit(GenerationRequest(episode, observation(episode, 0), limit, uniforms(episode)))
    with Log(model) as log:
        lengths = [len(output.token_ids) for _ in range(9) for output in generator.step()]
    assert lengths == [2, 3, 4, 9]
    assert [rows for rows, _ in log.shapes] == [4, 4, 4, 4, 1, 1, 1, 1, 1]
    assert generator.step() == [] and generator.pending == 0


def test_max_batch_size_caps_the_rows(model: Qwen2ForCausalLM) -> None:
    with Log(model) as log:
        play(make(model, max_batch_size=2), range(5))
    assert max(rows for rows, _ in log.shapes) == 2


def cached_rows(generator: TransformersGenerator) -> int:
    """Rows of all caches that are held."""
    held = {lineage.kv for lineage in generator._with_cache()}
    return sum(len(kv.mask) for kv in held)


def test_max_batch_size_caps_the_cached_rows_over_turns(model: Qwen2ForCausalLM) -> None:
    """An episode that has begun goes on before another begins."""
    for limit in (1, 2, 3):
        generator, held = make(model, max_batch_size=limit), list[int]()

        class Watched:
            submit, release = staticmethod(generator.submit), staticmethod(generator.release)
            pending = property(lambda _, generator=generator: generator.pending)

            def step(self, generator: Any = generator, held: list[int] = held) -> list[GenerationOutput]:
                outputs = generator.step()
                held.append(cached_rows(generator))
                return outputs

        outputs = play(Watched(), range(7))
        assert max(held) == limit
        for episode, turns in outputs.items():
            assert_same(turns, reread(model, episode, guessed=turns))


def test_waiting_episodes_take_the_room_of_those_whose_environment_steps(model: Qwen2ForCausalLM) -> None:
    generator = make(model, eos_token_ids=[], max_batch_size=2)
    for episode in range(3):
        generator.submit(GenerationRequest(episode, observation(episode, 0), 3, uniforms(episode)))
    answers = {output.episode: output.token_ids for _ in range(6) for output in generator.step()}
    assert answers.keys() == {0, 1, 2} and cached_rows(generator) == 2
    assert [len(generator._lineages[episode]) for episode in range(3)] == [1, 0, 1]
    for episode in (1, 0):
        ids = observation(episode, 0) + answers[episode] + observation(episode, 1)
        generator.submit(GenerationRequest(episode, ids, 3, uniforms(episode)))
    again = {output.episode: output.token_ids for _ in range(9) for output in generator.step()}
    for episode, tokens in again.items():
        ids = observation(episode, 0) + answers[episode] + observation(episode, 1)
        for token in tokens:
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
    assert again.keys() == {0, 1}


def test_release_frees_the_cache(model: Qwen2ForCausalLM) -> None:
    generator = make(model, eos_token_ids=[])
    for episode in range(4):
        generator.submit(GenerationRequest(episode, observation(episode, 0), 3, uniforms(episode)))
    answers = {output.episode: output.token_ids for _ in range(3) for output in generator.step()}
    keys = weakref.ref(generator._lineages[0][0].kv.cache.layers[0].keys)
    generator.release(0)
    generator.release(1)
    generator.release(77)
    assert keys() is not None  # still needed by episodes 2 and 3
    ids = observation(2, 0) + answers[2] + observation(2, 1)
    generator.submit(GenerationRequest(2, ids, 3, uniforms(2)))
    generator.step()
    assert keys() is None  # the idle episode's row was moved out of the batch that most have left
    assert len(generator._lineages[3][0].kv.mask) == 1
    ids = observation(3, 0) + answers[3] + observation(3, 1)
    generator.submit(GenerationRequest(3, ids, 3, uniforms(3)))
    finished = {output.episode: output.token_ids for _ in range(4) for output in generator.step()}
    for episode, tokens in finished.items():
        ids = observation(episode, 0) + answers[episode] + observation(episode, 1)
        for token in tokens:
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
    keys = weakref.ref(generator._lineages[3][0].kv.cache.layers[0].keys)
    generator.release(2)
    generator.release(3)
    assert keys() is None and not generator._lineages


def test_release_withdraws_a_request(model: Qwen2ForCausalLM) -> None:
    generator = make(model, max_batch_size=2, eos_token_ids=[])
    for episode in range(3):
        generator.submit(GenerationRequest(episode, observation(episode, 0), 4, uniforms(episode)))
    generator.step()
    generator.release(0)  # decoding
    generator.release(2)  # waiting
    assert generator.pending == 1
    (output,) = [output for _ in range(3) for output in generator.step()]
    assert output.token_ids == reread(model, 1, turns=1, limit=4)[0].token_ids
    assert generator.pending == 0


def test_rereading_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    generator_module._log_rereading.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            make(mistral())
        make(qwen2())
    (record,) = caplog.records
    assert "mistral" in record.getMessage() and "reads the whole conversation, once a turn" in record.getMessage()


# ------------------------------------------------------------------------------------------------------- bad input


def test_bad_options_are_refused(model: Qwen2ForCausalLM) -> None:
    with pytest.raises(ValueError, match="`max_batch_size` is 0"):
        make(model, max_batch_size=0)
    with pytest.raises(ValueError, match=r"\['x'\] need a tokenizer"):
        make(model, SamplingSettings(stop_strings=("x",)))
    with pytest.raises(ValueError, match=r"`eos_token_ids`.*40"):
        make(model, eos_token_ids=[1, VOCAB])
    with pytest.raises(ValueError, match="`pad_token_id` has None"):
        make(model, pad_token_id=None)
    with pytest.raises(ValueError, match=r"RwkvForCausalLM.*padding"):
        make(RwkvForCausalLM(RwkvConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=2)))
    prompt_tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="Prompt-learning"):
        make(get_peft_model(qwen2(), prompt_tuning))


def test_nan_logits_are_an_error() -> None:
    model = qwen2()
    model.lm_head.weight.data[3, 0] = torch.nan
    generator = make(model)
    generator.submit(GenerationRequest(6, [5], 2, uniforms(0)))
    with pytest.raises(LogitsError, match="episode 6 are not numbers"):
        generator.step()


@pytest.mark.parametrize("kind", ["transformers", "scripted"])
def test_malformed_requests_are_refused(kind: str, model: Qwen2ForCausalLM) -> None:
    generator = make(model) if kind == "transformers" else ScriptedGenerator(lambda request: [9, 9])

    def submit(ids: list[int], limit: int = 2) -> None:
        generator.submit(GenerationRequest(4, ids, limit, uniforms(0)))

    with pytest.raises(ValueError, match=r"Episode 4: `token_ids` is empty"):
        submit([])
    with pytest.raises(ValueError, match=r"Episode 4: `max_new_tokens` is 0"):
        submit([5], 0)
    assert generator.pending == 0
    submit([5, 6])
    with pytest.raises(ValueError, match="Episode 4 already has a pending request"):
        submit([5, 6])
    (answer,) = [output.token_ids for _ in range(2) for output in generator.step()]
    changed, shorter = [5, 6, answer[0] + 1, *answer[1:], 8], [5, 6]
    with pytest.raises(ValueError, match=r"Episode 4: .* at position 2 .*instead of encoding"):
        submit(changed)
    with pytest.raises(ValueError, match=r"Episode 4: .*the end at position 2"):
        submit(shorter)
    submit([5, 6, *answer])
    assert generator.pending == 1
    generator.release(4)
    submit(changed)
    assert generator.pending == 1


# -------------------------------------------------------------------------------------------------------- scripted


def request(episode: int, ids: list[int] | None = None, limit: int = 5) -> GenerationRequest:
    return GenerationRequest(episode, ids or [episode], limit, uniforms(episode))


def test_scripted_answers() -> None:
    given = GenerationOutput(1, [4], [-0.5], "length")
    generator = ScriptedGenerator(lambda r: given if r.episode == 1 else [r.token_ids[-1], 8, 9])
    generator.submit(request(0, [3, 7]))
    generator.submit(request(1))
    generator.submit(request(2, limit=2))
    assert generator.pending == 3
    assert generator.step() == [
        GenerationOutput(0, [7, 8, 9], [0.0] * 3, "stop", read=2),
        replace(given, read=1),
        GenerationOutput(2, [2, 8], [0.0] * 2, "length", read=1),
    ]
    assert generator.pending == 0 and generator.step() == []


def test_scripted_latency_orders_the_answers() -> None:
    generator = ScriptedGenerator(lambda r: [1], latency=lambda r: {0: 3, 1: 1, 2: 3, 3: 2}[r.episode])
    for episode in range(4):
        generator.submit(request(episode))
    steps = []
    while generator.pending:
        generator.release(3)
        steps.append([output.episode for output in generator.step()])
    assert steps == [[1], [], [0, 2]]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda r: [], "episode 0 with 0 ids"),
        (lambda r: GenerationOutput(0, [1, 2], [0.0], "stop"), "2 ids and 1 log-probabilities"),
        (lambda r: GenerationOutput(5, [1], [0.0], "stop"), "with episode 5"),
    ],
)
def test_scripted_mistakes_are_refused(script: Callable[..., object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScriptedGenerator(script).submit(request(0))


@pytest.mark.parametrize("kind", ["transformers", "scripted"])
def test_requests_of_an_episode_are_told_apart_by_their_call(kind: str, model: Qwen2ForCausalLM) -> None:
    generator = make(model, eos_token_ids=[]) if kind == "transformers" else ScriptedGenerator(lambda r: [9, 9])
    generator.submit(GenerationRequest(3, [5, 6, 7], 2, uniforms(0)))
    generator.submit(GenerationRequest(3, [8, 9], 2, uniforms(1), call=4, extends=False))
    with pytest.raises(ValueError, match=r"Episode 3 already has a pending request with call=4.*another `call`"):
        generator.submit(GenerationRequest(3, [8, 9], 2, uniforms(1), call=4, extends=False))
    assert generator.pending == 2
    outputs = [output for _ in range(2) for output in generator.step()]
    assert [(output.episode, output.call, output.read) for output in outputs] == [(3, 0, 3), (3, 4, 2)]
    side = [8, 9, *outputs[1].token_ids]
    with pytest.raises(ValueError, match=r"id 5 at position 0 where id 8 was read.*`extends=False`"):
        generator.submit(GenerationRequest(3, [5, 6, 7, *outputs[0].token_ids], 2, uniforms(0)))
    generator.submit(GenerationRequest(3, [*side, 4], 2, uniforms(0)))  # the last request, and its answer
    generator.submit(GenerationRequest(3, [5, 6], 2, uniforms(0), call=1, extends=False))
    generator.release(3)
    assert generator.pending == 0 and generator.step() == []
