"""The proof for episodes of several paths: returns, leave-one-out and GAE against the exact gradient of the expected return.

The programs rewrite the history, throw answers away, call helpers, call twice at once and come back to states. Every
expectation is over all of their episodes, in float64.
"""

from __future__ import annotations

import forest_bias
import pytest
import torch
from forest_bias import credited, drawn, estimates, in_pairs, returns, values
from forests import PROGRAMS, Forest, World, asked_again_inside, error, rejected, rejected_beginning

from agile_trainers.objectives.returns import token_gae

EXACT = 1e-10
SEEDS = pytest.mark.parametrize("seed", [0, 1])
every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@SEEDS
@every_program
def test_the_programs_are_what_they_say(program, seed):
    """All episodes are there, some have several paths, and answers matter."""
    forest = drawn(program, seed)
    assert forest.probabilities.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert forest.exact.norm() > 0.05
    assert (forest.following[forest.mask] == forest.shape[1]).any() and forest.rows.max() > 1


@SEEDS
@every_program
def test_raw_returns_are_the_exact_gradient(program, seed):
    forest = drawn(program, seed)
    assert error(forest.expected(returns(forest)), forest.exact) < EXACT


@SEEDS
@every_program
@pytest.mark.parametrize("granularity", ["trajectory", "turn"])
def test_leave_one_out_is_the_exact_gradient(program, granularity, seed):
    forest = drawn(program, seed)
    advantages = in_pairs(forest, granularity=granularity, trajectory_fallback=True)
    assert error(forest.expected(advantages), forest.exact) < EXACT


@SEEDS
@every_program
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
def test_gae_along_paths_with_exact_values_is_the_exact_gradient(program, gae_lambda, seed):
    """A value is that of the prompt, as a critic sees it: what the program has hidden is not in it."""
    forest = drawn(program, seed)
    assert error(credited(gae_lambda)(forest), forest.exact) < EXACT


@every_program
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
def test_gae_of_tokens_is_the_exact_gradient(program, gae_lambda):
    """Every symbol has a value of its own, that of the text before it."""
    forest = drawn(program, 0)
    turns = [[k for k, call in enumerate(calls) for _ in call.answer] for calls in forest.calls]
    width = max(map(len, turns))
    turn_ids = torch.tensor([row + [-1] * (width - len(row)) for row in turns])
    texts = [
        [call.prompt + call.answer[:n] for call in calls for n in range(len(call.answer))] for calls in forest.calls
    ]
    worth: dict[str, list[float]] = {}
    for e, row in enumerate(texts):
        for text, k in zip(row, turns[e]):
            chance = forest.probabilities[e].item()
            total = worth.setdefault(text, [0.0, 0.0])
            total[0] += chance * returns(forest)[e, k].item()
            total[1] += chance
    token_values = torch.tensor(
        [[worth[t][0] / worth[t][1] for t in row] + [0.0] * (width - len(row)) for row in texts]
    )
    lambda_returns = estimates(forest, gae_lambda) + values(forest)
    advantages = token_gae(lambda_returns, token_values, turn_ids)
    objective = forest.probabilities @ (advantages * forest.token_log_probabilities(turn_ids >= 0)).sum(1)
    (found,) = torch.autograd.grad(objective, forest.logits)
    assert error(found.flatten(), forest.exact) < EXACT


@SEEDS
@every_program
def test_calls_with_one_prompt_are_compared_between_episodes_without_bias(program, seed):
    """The part of ``anchor`` that is of calls: the exact gradient, as often as the other member comes to the prompt."""
    forest = drawn(program, seed)
    prompts = sorted({call.prompt for calls in forest.calls for call in calls})
    anchors = forest.table(lambda call, *_: prompts.index(call.prompt) + 1.0).long()
    part = in_pairs(forest, granularity="anchor", anchors=anchors) - in_pairs(forest, granularity="trajectory")
    for number, prompt in enumerate(prompts, start=1):
        share = forest.probabilities[(anchors == number).any(1)].sum()
        found = forest.of_prompt(forest.expected(part), prompt)
        assert (found - share * forest.of_prompt(forest.exact, prompt)).norm() < EXACT * forest.exact.norm()


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
def test_a_thrown_away_answer_counts(chance):
    """Asked again once when bad: p(1-p)(2-2p) by the logit of the good answer, and p(1-p)(2-p) without the bad one."""

    def program(world: World) -> None:
        answer = world.ask("Q")
        if answer != "a":
            world.calls[-1].kind = "discarded"
            answer = world.ask("Q")
        world.calls[-1].reward = float(answer == "a")
        world.calls[0].reward *= len(world.calls) == 1

    forest = Forest(program)
    with torch.no_grad():
        forest.logits.copy_(torch.tensor([[chance, (1 - chance) * 0.7, (1 - chance) * 0.3]]).log())
    exact = chance * (1 - chance) * (2 - 2 * chance)
    assert forest.exact[0].item() == pytest.approx(exact)
    assert forest.expected(returns(forest))[0].item() == pytest.approx(exact)
    without = forest_bias.without("discarded")(forest)[0].item()
    assert without == pytest.approx(chance * (1 - chance) * (2 - chance))
    if chance == 0.9:
        assert without / exact == pytest.approx(5.5)


@SEEDS
@pytest.mark.parametrize("program", [rejected, rejected_beginning], ids=lambda program: program.__name__)
def test_a_prompt_continues_one_call_only(program, seed):
    """The longest that fits, the last of equals. Its value would misjudge other answers that it begins with."""
    forest = drawn(program, seed)
    assert error(credited(0.0)(forest), forest.exact) < EXACT
    any_that_fits = forest.table(
        lambda call, k, calls: next(
            (j for j in range(k + 1, len(calls)) if call.continued_by(calls[j])), forest.shape[1]
        )
    ).long()
    assert error(forest.expected(estimates(forest, 0.0, following=any_that_fits)), forest.exact) > 5e-3


@SEEDS
def test_a_prompt_that_is_asked_twice_inside_a_path(seed):
    """Its value is a mean over both asks, and the call before bootstraps from it. The value of first asks is right."""
    forest = drawn(asked_again_inside, seed)
    for advantages in (returns(forest), estimates(forest, 1.0), in_pairs(forest, granularity="trajectory")):
        assert error(forest.expected(advantages), forest.exact) < EXACT
    assert error(credited(0.0)(forest), forest.exact) > 5e-3
    first = values(forest, first_asks=True)
    assert error(forest.expected(estimates(forest, 0.0, value=first)), forest.exact) < EXACT


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.__name__ != "at_once"], ids=lambda p: p.__name__)
def test_a_discount_counts_calls(program, gae_lambda):
    """Against the returns. The exception: no prompt shows whether a helper took one call or two; lambda 1 is exact there."""
    forest = drawn(program, 0)
    exact = forest.expected(returns(forest, 0.7))
    assert error(exact, forest.exact) > 0.1
    wrong = error(credited(gae_lambda, 0.7)(forest), exact)
    assert 1e-3 < wrong < 0.02 if program.__name__ == "helper" and gae_lambda < 1 else wrong < EXACT


def test_the_tables_of_the_page_are_up_to_date():
    """``python tests/objectives/forest_bias.py`` writes them."""
    page = forest_bias.PAGE.read_text(encoding="utf-8")
    assert forest_bias.with_tables(page) == page
