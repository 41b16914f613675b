"""What the transformers generator keeps for requests that extend nothing, against reading everything anew."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from generated import GREEDY, SETTINGS, Log, assert_same, gemma3, letters, make, mamba, qwen2
from programs import noise_of, play_program
from transformers import Qwen2ForCausalLM

from agile_trainers.rollout.generators import GenerationOutput, GenerationRequest, SamplingSettings
from agile_trainers.rollout.generators.transformers import generator as generator_module


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    """In float64, so that rounding changes no token: the logits are the same in fp32."""
    return qwen2().double()


class Asked:
    """Asks a generator, and compares its answers with those of one that reads everything anew."""

    tolerance = 1e-6

    def __init__(self, model: torch.nn.Module, settings: SamplingSettings = GREEDY, **options: object) -> None:
        self.generator = make(model, settings, **options)
        self.anew = make(model, settings, **{**options, "max_batch_size": None})
        self.requests: dict[tuple[int, int], tuple[GenerationRequest, int]] = {}
        self.answered: list[tuple[GenerationRequest, int, GenerationOutput]] = []
        self.count = 0

    def submit(self, ids: list[int], limit: int = 6, call: int = 0, episode: int = 0, extends: bool = False) -> None:
        self.count += 1
        request = GenerationRequest(episode, ids, limit, noise_of(self.count), call, extends)
        self.generator.submit(request)
        self.requests[episode, call] = request, self.count

    def step(self) -> list[GenerationOutput]:
        outputs = self.generator.step()
        self.answered += [(*self.requests[output.episode, output.call], output) for output in outputs]
        return outputs

    def answers(self) -> list[GenerationOutput]:
        outputs = []
        while self.generator.pending:
            outputs += self.step()
        self.compare()
        return outputs

    def compare(self) -> None:
        """Compare what was answered, all at once: each request is an episode of its own, of which nothing is kept."""
        for place, (request, number, _) in enumerate(self.answered):
            self.anew.submit(replace(request, uniforms=noise_of(number), episode=place))
        anew: dict[int, GenerationOutput] = {}
        while self.anew.pending:
            anew |= {output.episode: output for output in self.anew.step()}
        expected = [anew[place] for place in range(len(self.answered))]
        assert_same([output for *_, output in self.answered], expected, self.tolerance)
        for place in anew:
            self.anew.release(place)
        self.answered.clear()

    def ask(self, ids: list[int], new: int, **options: object) -> list[int]:
        """Return the request with its answer, of which so many ids must have been read."""
        self.submit(ids, **options)
        (output,) = self.answers()
        assert output.read == new
        return [*ids, *output.token_ids]

    def cached(self, episode: int = 0) -> list[int]:
        return [lineage.cached for lineage in self.generator._lineages[episode]]


SAMPLED = {"greedy": GREEDY, "sampled": SamplingSettings()}
PROMPT, OTHER = [2 + (7 * i) % 37 for i in range(20)], [3 + (5 * i) % 31 for i in range(12)]


@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_a_lineage_is_cropped_to_a_prefix_of_at_least_half(settings: SamplingSettings, model: Qwen2ForCausalLM) -> None:
    asked = Asked(model, settings, eos_token_ids=[])
    whole = asked.ask(PROMPT, 20)
    assert asked.cached() == [25]
    changed = asked.ask([*whole[:13], 5, 6, 7], 3)
    assert asked.cached() == [21]
    again = asked.ask([*changed, 8, 9], 3, extends=True)  # the last sampled id has not been read
    asked.ask(again[:14], 1)  # nothing new: one id is read for its logits
    asked.ask(whole, 26 - 13)  # the rest was cropped


@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_a_shorter_prefix_is_copied(settings: SamplingSettings, model: Qwen2ForCausalLM) -> None:
    asked = Asked(model, settings, eos_token_ids=[])
    whole = asked.ask(PROMPT, 20)
    side = asked.ask([*whole[:12], 5, 6], 2)
    assert asked.cached() == [25, 19]
    more = asked.ask([*whole, 7], 2)
    asked.ask([*side, 8, 9], 3)
    asked.ask([*more, 3], 2)
    assert asked.cached() == [27, 39]


def test_a_fork_reads_new_ids_alone_and_the_model_too(model: Qwen2ForCausalLM) -> None:
    """Of prefixes that are cropped and copied."""
    asked = Asked(model, eos_token_ids=[])
    whole = asked.ask(PROMPT, 20)
    for shared in (3, 12, 24):
        asked.generator.submit(GenerationRequest(0, [*whole[:shared], 4, 5], 1, noise_of(0), extends=False))
        with Log(model) as log:
            (output,) = asked.generator.step()
        assert output.read == log.read == 2
        whole = asked.ask([*whole, 6], 2) if shared == 3 else whole


@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_a_lineage_that_is_decoded_is_copied_and_goes_on(settings: SamplingSettings, model: Qwen2ForCausalLM) -> None:
    asked = Asked(model, settings, eos_token_ids=[])
    asked.submit(PROMPT, limit=12)
    for _ in range(4):
        assert asked.step() == []
    sampled = asked.generator._lineages[0][0].ids
    asked.submit([*sampled[:23], 5], call=1)  # the prompt and three sampled ids, whose keys are there
    asked.submit([*PROMPT, 9, 9], call=2)
    assert {(output.call, output.read) for output in asked.answers()} == {(0, 20), (1, 1), (2, 2)}


def test_two_of_an_episode_at_once_read_for_themselves(model: Qwen2ForCausalLM) -> None:
    asked = Asked(model, SamplingSettings(), eos_token_ids=[])
    for call in range(3):
        asked.submit(PROMPT, call=call)
    outputs = asked.answers()
    assert [output.read for output in outputs] == [20] * 3
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert len(asked.cached()) == 2
    asked.submit([*PROMPT, *outputs[1].token_ids, 4])
    asked.submit([*PROMPT, *outputs[2].token_ids, 4], call=1)
    assert [output.read for output in asked.answers()] == [2, 2]


def test_a_conversation_and_a_helper_take_turns(model: Qwen2ForCausalLM) -> None:
    asked = Asked(model, SamplingSettings(), eos_token_ids=[])
    main, helper = asked.ask(PROMPT, 20), asked.ask([*PROMPT[:2], *OTHER], 12)
    for turn in range(4):
        main = asked.ask([*main, 5 + turn], 2)
        helper = asked.ask([*helper, 7, 8 + turn], 3)


def test_the_least_recently_used_lineage_is_freed(model: Qwen2ForCausalLM) -> None:
    asked = Asked(model, eos_token_ids=[])
    wholes = [asked.ask([3 + i] * 10, 10) for i in range(2)]
    keys = weakref.ref(asked.generator._lineages[0][1].kv.cache.layers[0].keys)
    wholes[0] = asked.ask([*wholes[0], 9], 2)
    asked.ask([9] * 10, 10)
    assert keys() is None and len(asked.cached()) == 2
    asked.ask([*wholes[0], 8], 2)
    asked.ask([*wholes[1], 8], 17)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_count_every_lineage(rows: int, model: Qwen2ForCausalLM) -> None:
    asked = Asked(model, eos_token_ids=[], max_batch_size=rows)
    main = asked.ask(PROMPT, 20)
    helper = asked.ask([*PROMPT[:2], *OTHER], 12)
    asked.ask([*main, 5], 2 if rows > 1 else 25)
    asked.submit(OTHER, episode=1)
    asked.submit([*helper, 5], call=1)
    assert {output.episode: output.read for output in asked.answers()} == {1: 12, 0: 2 if rows > 1 else 19}
    assert [len(kept) for kept in asked.generator._lineages.values()] == {1: [0, 1], 2: [1, 1], 3: [2, 1]}[rows]


def test_spare_lineages_make_room_while_others_decode(model: Qwen2ForCausalLM) -> None:
    asked = Asked(model, eos_token_ids=[], max_batch_size=3)
    asked.ask(PROMPT, 20)
    main = asked.ask(OTHER, 12)
    asked.submit([*main, 5], limit=9)
    asked.submit([6, 7], episode=1)
    asked.submit([8, 9], episode=2)
    asked.step()
    assert len(asked.generator._batch.active) == 3 and asked.cached() == [19]
    asked.answers()


@pytest.mark.parametrize(
    ("settings", "rows"),
    [("greedy", 1), ("all", None), ("all", 2), *(("sampled", rows) for rows in (None, 1, 2, 5))],
)
def test_random_programs_are_answered_as_if_all_was_read(
    settings: str, rows: int | None, model: Qwen2ForCausalLM
) -> None:
    """The settings act on logits; what is kept for a request depends on the rows."""
    settled = {**SAMPLED, "all": SETTINGS["all"]}[settings]
    program = Program(model, settled, max_batch_size=rows, tokenizer=letters())
    pairs = play_program(program, seed=rows or 0, requests=40, watch=program.check)
    assert len(program.answered) == len(pairs) > 25
    program.compare()
    if rows in (None, 5):
        assert sum(output.read for _, _, output in pairs) < 0.7 * sum(len(request.token_ids) for _, request, _ in pairs)
    for episode in range(3):
        program.release(episode)
    assert not program.generator._lineages and program.generator._batch is None


class Program(Asked):
    """A generator under a random program, and what must hold after each step."""

    def __init__(self, model: torch.nn.Module, settings: SamplingSettings, **options: object) -> None:
        super().__init__(model, settings, **options)
        self.release = self.generator.release
        self.rows = self.generator._max_batch_size or 99

    pending = property(lambda self: self.generator.pending)

    def submit(self, request: GenerationRequest) -> None:  # type: ignore[override]
        self.generator.submit(request)
        self.requests[request.episode, request.call] = request, self.count
        self.count += 1

    def check(self) -> None:
        generator = self.generator
        assert len(generator._with_cache()) <= self.rows
        assert generator._batch is None or len(generator._batch.active) <= self.rows
        for lineages in generator._lineages.values():
            assert sum(not lineage.busy for lineage in lineages) <= generator_module.KEPT
            for lineage in lineages:
                assert lineage.kv is None or lineage.cached <= int(lineage.kv.mask[lineage.row].sum())
        busy = [lineage for lineages in generator._lineages.values() for lineage in lineages if lineage.busy]
        assert {answer.lineage for answer in generator._conversations.pending.values()} == set(busy)
        assert len(busy) == len(generator._conversations.pending)


@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_a_random_program_in_single_precision(settings: SamplingSettings) -> None:
    model = qwen2(initializer_range=0.2)
    generator, anew = make(model, settings), make(model, settings)
    for number, request, output in play_program(generator, seed=11, requests=20):
        anew.submit(replace(request, uniforms=noise_of(number)))
        assert_same([output], [expected for _ in output.token_ids for expected in anew.step()], 1e-5)
        anew.release(request.episode)


def test_what_is_said_to_be_read_is_what_the_model_reads(model: Qwen2ForCausalLM) -> None:
    program = Program(model, SamplingSettings())
    with Log(model) as log:
        pairs = play_program(program.generator, seed=7, requests=40, releases=0)
    assert log.read == sum(output.read + len(output.token_ids) - 1 for _, _, output in pairs)


@pytest.mark.parametrize("build", [gemma3, mamba])
def test_models_that_keep_nothing_read_everything_again(build: Callable[[], torch.nn.Module]) -> None:
    program = Program(build(), SamplingSettings())
    program.tolerance = 1e-4
    pairs = play_program(program, seed=3, requests=12, releases=0, watch=program.check)
    program.compare()
    assert all(output.read == len(request.token_ids) for _, request, output in pairs)
    assert not any(program.generator._lineages.values())
