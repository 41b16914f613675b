"""A loss that an algorithm brings: equal to TRL's where it computes the same, however its rows are split into passes."""

from __future__ import annotations

import copy
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doc_blocks import ROOT, blocks
from errors import naming
from games import Gradients, loss_and_gradients, make_trainer, relative_error
from own_losses import TRLS, Together, Tokens
from peft import PeftModel
from several_processes import SCRIPT, launch
from split_passes import WHOLE, check_equal, drawn, measured
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from agile_trainers import LossInputs, LossOutput, MultiTurnTrainer
from agile_trainers.embedded import make_tokenizer
from agile_trainers.step.loss import averages, divisor
from agile_trainers.train_batch import TrainBatch

sys.path.insert(0, str(ROOT / "benchmarks"))
import architectures

DPPO, TRAINED = (block.text for block in blocks(ROOT / "docs" / "own_loss.md") if block.language == "python")
NAMES = {"tokens": "own_losses:Tokens", "episodes": "own_losses:Episodes", "constant": "own_losses:Constant"}


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the path with the file of the page, for this process and those that it starts."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "dppo.py").write_text(DPPO, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
        yield folder
    sys.modules.pop("dppo", None)


DOUBLE: dict[str, Any] = {"model_init_kwargs": {"dtype": "auto"}}


@pytest.fixture(scope="module")
def double(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in double precision, for comparisons at 1e-6: single precision makes errors of that size.

    Log-probabilities are still rounded to float32, by TRL.
    """
    folder = tmp_path_factory.mktemp("double") / "model"
    shutil.copytree(embedded_model, folder)
    AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float64).save_pretrained(folder)
    return folder


def as_trls(trainer: MultiTurnTrainer, loss_type: str) -> MultiTurnTrainer:
    """Make TRL compute the loss of a trainer with one of its own."""
    trainer.loss = None
    trainer.loss_type = trainer.args.loss_type = loss_type
    return trainer


# ------------------------------------------------------------------------------------------------------- equal to TRL


@pytest.mark.parametrize(
    ("denominator", "packing"),
    [("tokens", "prefix"), ("episodes", "none"), ("episodes", "prefix"), ("constant", "none")],
)
def test_grpo_as_a_loss_of_its_own_is_trls(embedded_model, tmp_path, denominator, packing):
    """Loss, gradient and metrics: in one pass and in several, with a KL term and the correction of the mismatch."""
    trainer = make_trainer(
        embedded_model, tmp_path, algorithm=NAMES[denominator], num_iterations=2, beta=0.1, sequence_packing=packing,
        vllm_importance_sampling_correction=True, mask_truncated_completions=True,
    )  # fmt: skip
    batch = drawn(trainer)
    batch["importance_sampling_ratio"] = 0.5 + torch.rand(
        batch["advantages"].shape, generator=torch.Generator().manual_seed(0)
    )
    small = 30 if packing == "prefix" else 120
    own = [measured(trainer, batch, budget) for budget in (WHOLE, small)]
    as_trls(trainer, TRLS[denominator])
    expected, gradients, metrics, _ = measured(trainer, batch, WHOLE)
    assert {name: pytest.approx(values, rel=1e-4, abs=1e-6) for name, values in own[0][2].items()} == own[1][2]
    for loss, found, logged, rows in own:
        assert loss == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)
        assert relative_error(found, gradients) < (1e-6 if len(rows) == 1 else 1e-5)
        for name, theirs in {"clipped": "clip_ratio/region_mean", "apart": "kl", "entropy": "entropy"}.items():
            assert logged[name] == pytest.approx(metrics[theirs], rel=1e-4, abs=1e-7) and logged[name][0] > 0
    assert len(own[0][3]) == 1 and len(own[1][3]) > 2 and trainer.packer.packs == (packing == "prefix")


@pytest.mark.parametrize(
    ("denominator", "window"),
    [
        ("constant", {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 2}),
        ("tokens", {"gradient_accumulation_steps": 2, "steps_per_generation": 4}),
        ("episodes", {"gradient_accumulation_steps": 2, "steps_per_generation": 1}),
    ],
    ids=["accumulated-constant", "two-steps-tokens", "two-batches-episodes"],
)
def test_a_run_takes_trls_steps(embedded_model, tmp_path, denominator, window):
    """Every gradient of a run: of a generation batch that is a part of an update, one, and several.

    What divides them is one function of denominator and window, which the sums by hand cover.
    """
    found = {}
    for name, own in {"own": {"algorithm": NAMES[denominator]}, "trl": {"loss_type": TRLS[denominator]}}.items():
        gradients = Gradients()
        trainer = make_trainer(
            embedded_model, tmp_path / name, callbacks=[gradients], max_steps=2, beta=0.1, log_rollouts=0,
            per_device_train_batch_size=4, max_tokens_per_micro_batch=120, **window, **own,
        )  # fmt: skip
        trainer.train()
        found[name] = gradients.steps, [entry["loss"] for entry in trainer.state.log_history[:-1]]
    (own_steps, own_losses), (steps, losses) = found["own"], found["trl"]
    assert own_losses == pytest.approx(losses, rel=1e-5, abs=1e-7) and len(steps) == 2
    for ours, theirs in zip(own_steps, steps, strict=True):
        assert relative_error(ours, theirs) < 1e-6


def test_an_entropy_bonus_is_a_term_of_the_numerator(embedded_model, tmp_path):
    """In one micro-batch the mean over its tokens, which TRL's bonus is, and that over the update's are the same."""
    trainer = make_trainer(embedded_model, tmp_path, algorithm=NAMES["tokens"], num_iterations=2)
    trainer.bonus = 0.3
    batch = drawn(trainer)
    loss, gradients, _, _ = measured(trainer, batch, 120)
    as_trls(trainer, "dapo")
    plain = measured(trainer, batch, WHOLE)[1]
    trainer.entropy_coef, trainer._entropy_bonus_enabled = 0.3, True
    expected, theirs, _, _ = measured(trainer, batch, WHOLE)
    assert loss == pytest.approx(expected.item(), rel=1e-5) and relative_error(gradients, theirs) < 1e-5
    assert relative_error(plain, theirs) > 0.01


def test_values_of_episodes_are_averaged_over_episodes(embedded_model, tmp_path):
    """A numerator (B,) is TRL's `grpo`; a metric (B,) has the weight of its episodes in each pass, whatever its name."""
    trainer = make_trainer(embedded_model, tmp_path, algorithm="own_losses:PerEpisode", num_iterations=2)
    batch = drawn(trainer)
    check_equal(trainer, batch)
    loss, gradients, metrics, _ = measured(trainer, batch, 120)
    assert metrics["tokens_max"] == [pytest.approx(TrainBatch.from_trl(batch).counted.sum() / 8)]
    expected, theirs, _, _ = measured(as_trls(trainer, "grpo"), batch, WHOLE)
    assert loss == pytest.approx(expected.item(), rel=1e-5) and relative_error(gradients, theirs) < 1e-5


def test_episodes_without_advantage_are_left_out_only_where_it_is_asked_for(embedded_model, tmp_path):
    rows = {}
    for skip in ("auto", True):
        trainer = make_trainer(
            embedded_model,
            tmp_path / str(skip),
            algorithm=NAMES["episodes"],
            num_iterations=2,
            skip_zero_advantage=skip,
        )
        batch = drawn(trainer)
        batch["advantages"][4:], batch["has_advantage"][4:] = 0.0, False
        rows[skip] = measured(trainer, batch, WHOLE)
    assert rows["auto"][3] == [8] and rows[True][3] == [4]
    assert rows[True][0] == pytest.approx(rows["auto"][0].item(), rel=1e-5)
    assert relative_error(rows[True][1], rows["auto"][1]) < 1e-5


def test_a_loss_over_the_micro_batch_is_never_split(embedded_model, tmp_path):
    """And its value is that of all rows."""
    trainer = make_trainer(embedded_model, tmp_path, algorithm="own_losses:Together")
    batch = drawn(trainer)
    loss, _, _, rows = measured(trainer, batch, 10)
    assert rows == [8]
    whole = TrainBatch.from_trl(batch)
    told = [logs[counted].sum().item() for logs, counted in zip(log_probs_of(trainer.model, batch), whole.counted)]
    mean = sum(told) / 8
    assert loss == pytest.approx(sum((value - mean) ** 2 for value in told) / 8, rel=1e-4)


# --------------------------------------------------------------------------------------------------------- arithmetic


def test_sums_divisors_and_averages_by_hand():
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    tokens = torch.tensor([[1.0, 2.0, math.nan], [4.0, 8.0, 8.0], [16.0, 16.0, 16.0]])
    episodes = torch.tensor([3.0, 5.0, 7.0])
    assert LossOutput(tokens, "tokens").total(mask) == LossOutput(tokens, "constant").total(mask) == 7.0
    assert LossOutput(tokens, "episodes").total(mask) == 1.5 + 4.0
    assert LossOutput(episodes, "episodes").total(mask) == LossOutput(episodes, "tokens").total(mask) == 8.0

    class Args:
        steps_per_generation, max_completion_length = 4, 20

    nothing = torch.zeros(3, 3)
    batch = TrainBatch(*([nothing] * 8), num_items_in_batch=torch.tensor(96.0))
    three: Any = SimpleNamespace(num_processes=3)
    # 96 tokens on 3 processes and in 4 micro-batches, of which an update is 2.
    assert divisor("tokens", batch, Args, three, 2) == 96 / 3 / 4 * 2
    assert divisor("episodes", batch, Args, three, 2) == 3 * 2
    assert divisor("constant", batch, Args, three, 2) == 3 * 20 * 2

    class Alone:
        @staticmethod
        def reduce(values: torch.Tensor, reduction: str) -> torch.Tensor:
            return values

    found = averages({"tokens": tokens, "episodes": episodes}, mask, Alone())
    assert found == {"tokens": (7 / 3, 3), "episodes": (4.0, 2)}
    assert averages({"x": tokens}, mask & False, Alone()) == {"x": (0.0, 0)}


# --------------------------------------------------------------------------------------------------------------- DPPO


def log_probs_of(model: PeftModel, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Log-probabilities of the completion of each episode, which is read alone and without padding, in plain PyTorch."""
    found, base = [], model.get_base_model()
    for row in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] > 0]
        completion = batch["completion_ids"][row][batch["completion_mask"][row] > 0]
        logits = base.lm_head(base.model(torch.cat([prompt, completion])[None]).last_hidden_state)
        told = log_softmax(logits[0, len(prompt) - 1 : -1], dim=-1)[torch.arange(len(completion)), completion]
        found.append(torch.cat([told, told.new_zeros(batch["completion_ids"].size(1) - len(completion))]))
    return found


def enumerated(
    trainer: MultiTurnTrainer, batch: dict[str, torch.Tensor], threshold: float
) -> tuple[float, dict[str, torch.Tensor], int]:
    """The DPPO objective as its definition has it, one token after the other.

    Returns:
        The sum over tokens divided by those of the update, its gradient, and the number of masked tokens.
    """
    model = copy.deepcopy(trainer.model)
    total, masked = torch.zeros((), dtype=torch.float64), 0
    for row, logs in enumerate(log_probs_of(model, batch)):
        for place in range(len(logs)):
            if not (batch["tool_mask"][row, place] and batch["completion_mask"][row, place]):
                continue
            old = batch["old_per_token_logps"][row, place] if "old_per_token_logps" in batch else logs[place].detach()
            advantage = batch["advantages"][row, place].item()
            new_probability, old_probability = math.exp(logs[place].item()), math.exp(old.item())
            outside = abs(new_probability - old_probability) > threshold
            away = (advantage > 0 and new_probability > old_probability) or (
                advantage < 0 and new_probability < old_probability
            )
            if outside and away:
                masked += 1
            else:
                total = total - torch.exp(logs[place] - old) * advantage
    loss = total / batch["num_items_in_batch"]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return loss.item(), dict(zip(trained, torch.autograd.grad(loss, list(trained.values())))), masked


@pytest.mark.parametrize("packing", ["none", "prefix"])
def test_dppo_is_its_definition(double, tmp_path, packing):
    """In one pass and in several, padded and packed."""
    trainer = make_trainer(
        double, tmp_path, algorithm="dppo:DPPOTrainer", num_iterations=2, sequence_packing=packing,
        divergence_threshold=2e-4, **DOUBLE,
    )  # fmt: skip
    batch = drawn(trainer)
    expected, gradients, masked = enumerated(trainer, batch, 2e-4)
    tokens = int((batch["tool_mask"] * batch["completion_mask"]).sum())
    assert 0.1 * tokens < masked < 0.9 * tokens and tokens == batch["num_items_in_batch"]
    for budget in (WHOLE, 120):
        loss, found, metrics, rows = measured(trainer, batch, budget)
        assert (len(rows) == 1) == (budget == WHOLE) and trainer.packer.packs == (packing == "prefix")
        assert loss == pytest.approx(expected, rel=1e-6)
        assert relative_error(found, gradients) < 1e-6
        assert metrics["dppo/masked"] == [pytest.approx(masked / tokens)]


def test_dppo_accumulates_its_definition(double, tmp_path):
    """The gradient of an update is that of the sum over its micro-batches, divided by all of its tokens."""
    gradients = Gradients()
    trainer = make_trainer(
        double, tmp_path, algorithm="dppo:DPPOTrainer", callbacks=[gradients], num_iterations=2, max_steps=2,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, divergence_threshold=2e-4, learning_rate=0.02,
        max_tokens_per_micro_batch=120, log_rollouts=0, **DOUBLE,
    )  # fmt: skip
    compute, expected, masked = trainer._compute_loss, [], []

    def enumerating(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        _, gradient, left_out = enumerated(trainer, inputs, 2e-4)
        expected.append(gradient)
        masked.append(left_out)
        return compute(model, inputs)

    trainer._compute_loss = enumerating
    trainer.train()
    assert masked[:2] == [0, 0] and sum(masked[2:]) > 0, "the policy moves after the first update"
    for step, found in enumerate(gradients.steps):
        both = expected[2 * step : 2 * step + 2]
        assert relative_error(found, {name: both[0][name] + both[1][name] for name in both[0]}) < 1e-6


def test_the_pages_probe_is_learned(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cpu = TRAINED.replace("output_dir=", 'use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, output_dir=')
    namespace: dict[str, Any] = {}
    exec(cpu, namespace)
    history = [entry for entry in namespace["trainer"].state.log_history if "return/mean" in entry]
    assert history[0]["return/mean"] < 0.3 and history[-1]["return/mean"] > 0.9
    assert max(entry.get("dppo/masked", 0.0) for entry in namespace["trainer"].state.log_history) > 0


# -------------------------------------------------------------------------------------------------- several processes

CASES = {
    name: {
        "algorithm": algorithm,
        "num_iterations": 2,
        "max_steps": 2,
        "max_tokens_per_micro_batch": 60,
        **DOUBLE,
        **options,
    }
    for name, algorithm, options in [
        ("tokens", NAMES["tokens"], {"beta": 0.1}),
        ("episodes", NAMES["episodes"], {"skip_zero_advantage": True, "zero_advantage_eps": 0.5}),
        ("constant", NAMES["constant"], {}),
        ("per-episode", "own_losses:PerEpisode", {}),
        ("dppo", "dppo:DPPOTrainer", {"divergence_threshold": 2e-4}),
    ]
}


@pytest.fixture(scope="module")
def runs(double, tmp_path_factory, page):
    folder = tmp_path_factory.mktemp("runs")
    cases = {name: {"per_device_train_batch_size": 8, **case} for name, case in CASES.items()}
    return [launch(SCRIPT, n, double, folder / str(n), cases) for n in (1, 2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(runs, case):
    one, two = (torch.load(run / case / "result.pt", weights_only=False) for run in runs)
    assert (one["processes"], two["processes"]) == (1, 2) and len(one["gradients"]) == 2
    for alone, both in zip(one["gradients"], two["gradients"], strict=True):
        assert relative_error(both, alone) < 1e-12
    for name in ("entropy", "clipped", "apart", "advantage_of_episodes", "tokens_max", "dppo/masked", "loss"):
        if name in one["logged"]:
            assert two["logged"][name] == pytest.approx(one["logged"][name], rel=1e-4, abs=1e-6), name


# -------------------------------------------------------------------------------------------------------------- errors


class Poisoned(Tokens):
    """NaN in the numerator of the first and third optimizer step."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        output = super().loss(inputs)
        return LossOutput(output.numerator * (math.nan if self.state.global_step in (0, 2) else 1.0))


class Wrong(Tokens):
    """Returns what the test puts here."""

    change = staticmethod(lambda output: output)

    def loss(self, inputs: LossInputs) -> LossOutput:
        return self.change(super().loss(inputs))


def made(model: Path, folder: Path, trainer: type[MultiTurnTrainer], **changes: Any) -> MultiTurnTrainer:
    sys.modules["made_here"] = sys.modules[__name__]
    return make_trainer(model, folder, algorithm=f"made_here:{trainer.__name__}", **changes)


def test_a_numerator_that_is_not_finite_costs_its_step(embedded_model, tmp_path):
    trainer = made(embedded_model, tmp_path, Poisoned, max_steps=3, log_rollouts=0)
    trainer.train()
    counts = [entry["skipped_steps"] for entry in trainer.state.log_history if "skipped_steps" in entry]
    assert counts == [1, 1, 2] and all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda out: LossOutput(out.numerator.mean()), ValueError, ("numerator", "shape ()", "(8,)")),
        (lambda out: LossOutput(out.numerator[:, 1:]), ValueError, ("numerator", "(8,)")),
        (lambda out: LossOutput(out.numerator[1:, 0]), ValueError, ("numerator", "(7,)", "(8,)")),
        (lambda out: LossOutput(out.numerator, "rows"), ValueError, ({"denominator": "rows"}, "'episodes'")),
        (lambda out: LossOutput(out.numerator, "tokens", {"x": out.numerator.mean()}), ValueError, ("x",)),
        (lambda out: LossOutput(out.numerator, "tokens", {"x": 0.5}), TypeError, ("x", "float")),
        (lambda out: LossOutput(0.5), TypeError, ("numerator", "float")),
        (lambda out: LossOutput(out.numerator.detach()), ValueError, ("numerator", "gradient")),
        (lambda out: out.numerator.mean(), TypeError, ("Wrong.loss", "LossOutput", "Tensor")),
    ],
)
def test_an_output_of_another_form_is_named(wrong, change, error, words):
    trainer, batch = wrong
    trainer.change = change
    with pytest.raises(error, match=naming(*words)):
        loss_and_gradients(trainer, batch)


@pytest.fixture(scope="module")
def wrong(embedded_model, tmp_path_factory):
    trainer = made(embedded_model, tmp_path_factory.mktemp("wrong"), Wrong)
    return trainer, drawn(trainer)


@pytest.mark.parametrize(
    "option",
    [
        {"loss_type": "grpo"}, {"epsilon": 0.1}, {"epsilon_high": 0.3}, {"delta": 2.0}, {"entropy_coef": 0.1},
        {"importance_sampling_level": "sequence"}, {"importance_sampling_level": "turn"}, {"top_entropy_quantile": 0.5},
        {"use_adaptive_entropy": True}, {"off_policy_mask_threshold": 0.5},
    ],
)  # fmt: skip
def test_options_of_trls_loss_are_refused(embedded_model, tmp_path, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=naming(f"{name}={value!r}", "declare it")):
        make_trainer(embedded_model, tmp_path, algorithm=NAMES["tokens"], **option)


@pytest.mark.parametrize(
    ("algorithm", "changes"), [("Returns", {"num_generations": 1}), ("Sequences", {"advantage_granularity": "turn"})]
)
def test_the_loss_gets_the_advantages_of_the_credit_rule(embedded_model, tmp_path, algorithm, changes):
    """Not divided by a turn's length for REINFORCE's ratios, nor averaged for GSPO's, which this loss does not compute."""
    trainer = make_trainer(embedded_model, tmp_path, algorithm=f"own_losses:{algorithm}", **changes)
    credits, passes = [], []
    assign, loss = trainer.assign_credit, trainer.loss
    trainer.rollouts._credit._rule = lambda turns: credits.append(assign(turns)) or credits[-1]
    trainer.loss = lambda inputs: passes.append(inputs) or loss(inputs)
    trainer.train()
    credit, checked = credits[0].advantages, 0
    of_turns = [  # of each row: its turns' advantages, as the loss has them
        [
            inputs.advantages[row][inputs.turn_ids[row] == k].unique().item()
            for k in range(int(inputs.turn_ids[row].max()) + 1)
        ]
        for inputs in passes
        for row in range(len(inputs.turn_ids))
    ]
    for values in of_turns:
        near = (credit[:, : len(values)] - torch.tensor(values)).abs().amax(1)
        checked += near.min() < 1e-6
    assert checked == len(of_turns) > 2 and len({value for values in of_turns for value in values}) > 3


def test_an_option_that_the_algorithm_declares_is_its_own(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, algorithm="own_losses:OwnEpsilon", epsilon=0.1)
    assert trainer.args.epsilon == 0.1
    with pytest.raises(ValueError, match=naming({"delta": 2.0})):
        make_trainer(embedded_model, tmp_path, algorithm="own_losses:OwnEpsilon", delta=2.0)


@pytest.mark.parametrize("option", [{"max_tokens_per_micro_batch": 99}, {"skip_zero_advantage": True}])
def test_options_that_split_a_micro_batch_are_refused(embedded_model, tmp_path, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=naming(f"{name}={value!r}", "loss_needs='micro_batch'")):
        make_trainer(embedded_model, tmp_path, algorithm="own_losses:Together", **option)


class NeedsAll(Together):
    loss_needs = "all"  # type: ignore[assignment]


def test_what_a_loss_needs_is_one_of_two(embedded_model, tmp_path):
    with pytest.raises(ValueError, match=naming("loss_needs", "'all'", "'micro_batch'")):
        made(embedded_model, tmp_path, NeedsAll)


def test_a_loss_without_an_environment_is_refused(embedded_model, tmp_path):
    with pytest.raises(ValueError, match=naming("Tokens", "environment")):
        make_trainer(embedded_model, tmp_path, algorithm=NAMES["tokens"], environment=None)


def test_the_routers_auxiliary_loss_is_refused(tmp_path):
    """TRL adds it to its own loss alone."""
    model = tmp_path / "model"
    architectures.make_model("mixtral").save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    with pytest.raises(ValueError, match=naming("Tokens", "router_aux_loss_coef=0.0", "got 0.5")):
        make_trainer(model, tmp_path, algorithm=NAMES["tokens"], lora=False, router_aux_loss_coef=0.5)
    trainer = make_trainer(model, tmp_path, algorithm=NAMES["tokens"], lora=False, router_aux_loss_coef=0.0)
    assert trainer.loss is not None and not trainer.aux_loss_enabled
