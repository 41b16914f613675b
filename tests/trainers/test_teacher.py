"""A teacher in real runs: what it costs, what it reads, and how its part of the loss joins the reward's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import check_resumed
from games import Chatter, Hinting, Long, Uneven, draw_batch, loss_and_gradients, make_trainer, relative_error
from path_episodes import measured as measured_episodes
from path_episodes import repeated
from ppo_games import make_ppo, wake
from scoring_server import changed_model, teaching
from split_passes import WHOLE, check_layouts, drawn, measured
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.adapters.roles import TEACHER, running
from agile_trainers.cli.check.memory_plan import teacher_bytes
from agile_trainers.objectives.distillation import FORWARD, GRADIENTS, IMMEDIATE, RETURN_TO_GO, REVERSE, SAMPLED
from agile_trainers.sampling.teacher_server import TeacherServer
from agile_trainers.step import teacher as teacher_module
from agile_trainers.step.teacher import WEIGHTS, _bounds, hint_of
from agile_trainers.train_batch import TrainBatch, read_inputs, with_hints
from agile_trainers.trainers import (
    MultiTurnCISPOConfig,
    MultiTurnDistillationTrainer,
    MultiTurnGRPOConfig,
    MultiTurnGSPOConfig,
)
from agile_trainers.types import StopReason, Trajectory, Turn

BY_SHAPE = [IMMEDIATE, RETURN_TO_GO, FORWARD]
"""Of a token alone, of an episode's later tokens, and of whole distributions: the two directions read the same tokens."""

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.3}


def changed_adapter(model: Path, folder: Path, seed: int, **changes: Any) -> str:
    """Save an adapter that differs from a fresh one, and return its folder."""
    trainer = make_trainer(model, folder, **changes)
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(trainer.model.named_parameters()):
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=noise) * 0.1
    trainer.save_model(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def teacher(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of an adapter that differs from a fresh one, whose training had dropout."""
    return changed_adapter(embedded_model, tmp_path_factory.mktemp("teacher") / "adapter", seed=1, lora=LORA)


def distill(model: Path, folder: Path, **changes: Any) -> MultiTurnDistillationTrainer:
    return make_trainer(model, folder, algorithm="distillation", num_generations=1, **changes)


def bytes_of(trainer: Any) -> int:
    """Of all weights that the trainer holds, each storage once."""
    teachers = [] if trainer.teacher is None else [one.model for one in trainer.teacher.loaded]
    models = [m for m in (trainer.model, trainer.ref_model, *teachers) if m is not None]
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for m in models for p in m.parameters()}
    return sum(weights.values())


def test_an_adapter_costs_no_second_copy_of_weights(embedded_model, tmp_path, teacher) -> None:
    with_teacher, without = (make_trainer(embedded_model, tmp_path, teacher=one) for one in (teacher, None))
    adapter = [p for n, p in with_teacher.model.named_parameters() if f".{TEACHER}." in n]
    assert bytes_of(with_teacher) - bytes_of(without) == sum(p.nbytes for p in adapter) > 0
    assert not any(p.requires_grad for p in adapter) and with_teacher.teacher.loaded[0].model is None
    whole = make_trainer(embedded_model, tmp_path, teacher=str(embedded_model))
    base = sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(embedded_model).parameters())
    assert bytes_of(whole) - bytes_of(without) == base
    # `check` plans for them.
    assert teacher_bytes(with_teacher.args, torch.float32) == sum(p.nbytes for p in adapter)
    assert teacher_bytes(whole.args, torch.float32) == base and teacher_bytes(without.args, torch.float32) == 0


def teachers_part(
    trainer: Any, batch: dict[str, torch.Tensor], gradient: str, adapter: str = TEACHER
) -> dict[str, torch.Tensor]:
    """The gradient of the divergence, averaged over tokens, from the model's own logits."""
    trainer.model.zero_grad()
    typed = TrainBatch.from_trl({n: v for n, v in batch.items() if n in TrainBatch.__dataclass_fields__})
    ids, mask = read_inputs(typed.to_trl()).values()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    length, counted = typed.completion_ids.size(1), typed.counted

    def log_softmax() -> torch.Tensor:
        logits = trainer.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        return logits[:, -length - 1 : -1].double().log_softmax(-1)

    mine = log_softmax()
    with torch.no_grad(), running(trainer.model, adapter):
        theirs = log_softmax()
    tokens = typed.completion_ids[..., None]
    taken, ratio = mine.gather(-1, tokens)[..., 0], (mine - theirs).detach().gather(-1, tokens)[..., 0] * counted
    if gradient in SAMPLED:
        values = (ratio if gradient == IMMEDIATE else ratio.flip(1).cumsum(1).flip(1)) * taken
    else:
        first, second = (theirs, mine) if gradient == FORWARD else (mine, theirs)
        values = (first.exp() * (first - second)).sum(-1)
    ((values * counted).sum() / counted.sum()).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("algorithm", "gradients"),
    [("grpo", GRADIENTS), ("reinforce", [RETURN_TO_GO]), ("ppo", [IMMEDIATE, FORWARD])],
    ids=["grpo", "reinforce", "ppo"],
)
def test_the_gradient_is_the_stated_mixture(embedded_model, tmp_path, teacher, algorithm, gradients) -> None:
    """Of the reward's gradient, as a run without the teacher has it, and the coefficient's share of the teacher's."""
    options = {"algorithm": algorithm, "num_generations": 1 if algorithm == "reinforce" else 4}

    def found(**changes: Any) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        if algorithm == "ppo":
            trainer = make_ppo(embedded_model, tmp_path, **changes)
        else:
            trainer = make_trainer(embedded_model, tmp_path, **options, **changes)
        trainer.model.double()
        trainer.state.max_steps = 1
        wake(trainer)
        batch = draw_batch(trainer)
        if algorithm == "ppo":
            trainer.critic.count_turns([batch])
            trainer.critic.learned = False
        _, gradient = loss_and_gradients(trainer, batch)
        return trainer, batch, {name: one.double() for name, one in gradient.items()}

    _, _, reward = found()
    for gradient in gradients:
        trainer, batch, mixed = found(teacher=teacher, teacher_coef=0.3, teacher_gradient=gradient)
        own = teachers_part(trainer, batch, gradient)
        mixture = {n: g + 0.3 * own[n] if n in own else g for n, g in reward.items()}
        assert relative_error(mixed, mixture) < 1e-6, gradient
        assert relative_error(mixed, reward) > 1e-2, gradient


@pytest.mark.parametrize(
    ("gradient", "loss_type"),
    [(IMMEDIATE, "dapo"), (RETURN_TO_GO, "grpo"), (FORWARD, "dr_grpo"), (FORWARD, "dapo")],
)
def test_split_into_passes_it_is_the_same(embedded_model, tmp_path, teacher, gradient, loss_type) -> None:
    options = {"teacher": teacher, "teacher_gradient": gradient, "teacher_turn_decay": 0.7, "loss_type": loss_type}
    trainer = make_trainer(embedded_model, tmp_path, **options)
    trainer.state.max_steps = 1
    batch = drawn(trainer)
    loss, gradients, metrics, _ = measured(trainer, batch, WHOLE)
    split, gradients_split, metrics_split, rows = measured(trainer, batch, 120)
    assert len(rows) > 4 and split == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert relative_error(gradients_split, gradients) < 1e-5 and metrics_split.keys() == metrics.keys()


@pytest.mark.parametrize("gradient", BY_SHAPE)
def test_micro_batches_and_packing_change_nothing(embedded_model, tmp_path, teacher, gradient) -> None:
    check_layouts(embedded_model, tmp_path, teacher=teacher, teacher_gradient=gradient, teacher_turn_decay=0.7)


def test_episodes_of_equal_rewards_are_taught(embedded_model, tmp_path, teacher) -> None:
    """Half of the groups have no advantage: the gradient is the teacher's of all, and not of the others alone."""
    trainer = make_trainer(embedded_model, tmp_path, teacher=teacher, environment=Uneven, num_generations=2)
    trainer.state.max_steps = 1
    wake(trainer)
    batch = draw_batch(trainer)
    assert 0 < int(batch["has_advantage"].sum()) < 8
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    own = teachers_part(trainer, batch, IMMEDIATE)
    assert relative_error(loss_and_gradients(trainer, batch)[1], own) < 1e-5


@pytest.mark.parametrize(("loss_type", "decay"), [("dapo", 0.5), ("grpo", 0.5), ("dr_grpo", 0.5), ("dapo", 0.0)])
def test_the_divisor_is_the_teachers_own_count(embedded_model, tmp_path, teacher, loss_type, decay) -> None:
    """Of tokens: the sum of their weights. With a decay of 0 that is the number of tokens of first turns."""
    trainer = make_trainer(embedded_model, tmp_path, teacher=teacher, teacher_turn_decay=decay, loss_type=loss_type)
    batch = draw_batch(trainer)
    counted, turns = batch["tool_mask"] > 0, batch["turn_ids"].clamp(min=0)
    raw = (decay ** turns.double()) * counted
    by = {"dapo": raw.sum() / counted.sum(), "grpo": raw.sum(1, keepdim=True), "dr_grpo": 1.0}[loss_type]
    assert int(turns.max()) > 0
    torch.testing.assert_close(batch[WEIGHTS].double(), raw / by, rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------------------- hints


def test_a_hint_is_the_last_that_was_given() -> None:
    turns = [Turn(0, 1, "", "stop", info={"hint": "one"}), Turn(1, 2, "", "stop", info={"hint": None})]
    episode = Trajectory([1], [2, 3], [0.0, 0.0], turns, StopReason.TERMINATED, reset_info={"hint": "zero", "x": 3})
    assert hint_of(episode, "hint") == "one" and hint_of(episode, "other") is None
    episode.turns.clear()
    assert hint_of(episode, "hint") == "zero"
    with pytest.raises(TypeError, match=r"teacher_hint='x': the environment's info\['x'\] must be a text, got a int"):
        hint_of(episode, "x")


def test_hints_stand_before_every_path() -> None:
    """By hand: prompts padded to the left, and an episode of two paths beside one of one."""
    part = {
        "prompt_ids": torch.tensor([[0, 5], [6, 7]]), "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[8, 9], [8, 0]]), "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "hint_ids": torch.tensor([[1, 2], [3, -1]]),
    }  # fmt: skip
    read = with_hints(part)
    assert read["prompt_ids"].tolist() == [[0, 1, 2, 5], [0, 3, 6, 7]]
    assert read["prompt_mask"].tolist() == [[0, 1, 1, 1], [0, 1, 1, 1]]
    part |= {
        "path_ids": torch.tensor([[5, 8, 6, 5, 9], [6, 7, 8, 0, 0]]), "path_lengths": torch.tensor([[2, 3], [3, 0]]),
        "places": torch.tensor([[1, 4], [2, -1]]),
    }  # fmt: skip
    read = with_hints(part)
    assert read["path_ids"].tolist() == [[1, 2, 5, 8, 1, 2, 6, 5, 9], [3, 6, 7, 8, 0, 0, 0, 0, 0]]
    assert read["path_lengths"].tolist() == [[4, 5], [4, 0]] and read["places"].tolist() == [[3, 8], [3, -1]]
    assert read["completion_ids"] is part["completion_ids"] and "hint_ids" not in read
    del part["hint_ids"]
    assert with_hints(part) == part


@pytest.mark.parametrize("history", [None, "games:takes_notes"], ids=["one path", "several"])
def test_the_teacher_reads_the_hint_before_the_exact_ids(embedded_model, tmp_path, history) -> None:
    """Its log-probabilities are the policy's on a row made by hand; episodes without a hint diverge from nothing."""
    trainer = make_trainer(
        embedded_model, tmp_path, environment=Hinting, teacher="policy", teacher_hint="hint", max_turns=6,
        history=history, num_generations=2,
    )  # fmt: skip
    wake(trainer)
    batch = TrainBatch.from_trl(trainer._generate_and_score_completions([{}] * 8))
    read = trainer.teacher.read(trainer.model, batch)
    hints = [ids[ids >= 0].tolist() for ids in batch.hint_ids]
    assert {bool(hint) for hint in hints} == {True, False}
    for row, hint in enumerate(hints):
        episode, own = trainer.rollout_log.unfinished[row], batch.turn_ids[row]
        for k in range(int(own.max()) + 1):
            places = (own == k).nonzero()[:, 0]
            if batch.path_ids is None:
                before = [*batch.prompt_ids[row][batch.prompt_mask[row] > 0].tolist()]
                before += batch.completion_ids[row, : places[0]].tolist()
            else:
                flat, ends = batch.path_ids[row], batch.path_lengths[row].cumsum(0)
                first = int(batch.places[row, places[0]])
                start = max([0, *(int(end) for end in ends if end <= first)])
                before = flat[start:first].tolist()
            answer = batch.completion_ids[row, places].tolist()
            ids = torch.tensor([[*hint, *before, *answer]])
            with torch.no_grad():
                logits = trainer.model(input_ids=ids).logits[0, -len(answer) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
            torch.testing.assert_close(read[row, places], expected, rtol=0, atol=1e-5)
        assert episode["completion_ids"]


@pytest.mark.parametrize("name", ["hint", "hnit"])
def test_a_hint_that_no_episode_has_is_told(embedded_model, tmp_path, monkeypatch, name) -> None:
    said: list[Any] = []
    monkeypatch.setattr(teacher_module.logger, "warning", lambda *told: said.append(told))
    make_trainer(
        embedded_model,
        tmp_path,
        environment=Hinting,
        teacher="policy",
        teacher_hint=name,
        max_steps=2,
        num_generations=2,
    ).train()
    assert [told[1] for told in said] == [name] * (name == "hnit")


def test_a_hint_is_rendered_as_a_message_of_its_own(embedded_model, tmp_path) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, environment=Hinting, teacher="policy", teacher_hint="hint", num_generations=2
    )
    batch = draw_batch(trainer)
    ids = next(row[row >= 0] for row in batch["hint_ids"] if (row >= 0).any())
    tokenizer = trainer.processing_class
    expected = tokenizer.apply_chat_template([{"role": "user", "content": Hinting.hint}], tokenize=False)
    assert tokenizer.decode(ids) == expected


# --------------------------------------------------------------------------------------------------- several teachers


@pytest.fixture(scope="module")
def other(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of another adapter."""
    return changed_adapter(embedded_model, tmp_path_factory.mktemp("other") / "adapter", seed=2)


BOTH = {"long": Long, "chatter": Chatter}


def noted(add_columns: Any, of: dict[str, str]) -> Any:
    """Check the index of each episode's teacher."""

    def checked(output: TrainBatch, trajectories: Any) -> None:
        add_columns(output, trajectories)
        names = [trajectory.environment_name for trajectory in trajectories]
        assert output.teachers.tolist() == [list(of).index(name) if name in of else -1 for name in names]

    return checked


@pytest.mark.parametrize(
    ("with_second", "gradient"), [(True, IMMEDIATE), (False, RETURN_TO_GO)], ids=["two", "one of two"]
)
def test_each_environment_has_its_own_teacher(embedded_model, tmp_path, teacher, other, with_second, gradient) -> None:
    """The gradient is that of all taught tokens together; an environment without a teacher adds the reward's alone."""
    of = {"long": teacher} | ({"chatter": other} if with_second else {})
    found = []
    for changes in ({}, {"teacher": of, "teacher_coef": 0.3, "teacher_gradient": gradient}):
        trainer = make_trainer(embedded_model, tmp_path, environment=BOTH, num_generations=2, **changes)
        trainer.model.double()
        trainer.state.max_steps = 1
        wake(trainer)
        if trainer.teacher is not None:
            trainer.teacher.add_columns = noted(trainer.teacher.add_columns, of)
        batch = draw_batch(trainer)
        found.append(loss_and_gradients(trainer, batch)[1])
    parts, counts = [], []
    for index in range(len(of)):
        rows = batch["teachers"] == index
        part = {name: value[rows] if value.ndim else value for name, value in batch.items()}
        adapter = f"{TEACHER}_{index}" if with_second else TEACHER
        parts.append(teachers_part(trainer, part, gradient, adapter))
        counts.append(int((part["tool_mask"] * part["completion_mask"]).sum()))
    assert all(counts)
    reward, mixed = ({n: g.double() for n, g in one.items()} for one in found)
    mixture = {
        n: g + 0.3 * sum(count * part[n] for count, part in zip(counts, parts)) / sum(counts) if n in parts[0] else g
        for n, g in reward.items()
    }
    assert relative_error(mixed, mixture) < 1e-6 and relative_error(mixed, reward) > 1e-2


@pytest.mark.parametrize(("loss_type", "share"), [("grpo", 0.5), ("dr_grpo", 1.0)])
def test_of_episodes_too_the_divisor_is_their_own_count(embedded_model, tmp_path, teacher, loss_type, share) -> None:
    """Half of the episodes have a teacher: of those alone is the mean."""
    trainer = make_trainer(
        embedded_model, tmp_path, environment=BOTH, num_generations=2, teacher={"long": teacher}, loss_type=loss_type
    )
    batch = draw_batch(trainer)
    counted, there = batch["tool_mask"] * batch["completion_mask"], (batch["teachers"] == 0).long()[:, None]
    assert there.float().mean() == 0.5
    by = counted.sum(1, keepdim=True) * share if loss_type == "grpo" else 1.0
    torch.testing.assert_close(batch[WEIGHTS], there * counted / by, rtol=1e-6, atol=0)


def test_several_are_not_saved(embedded_model, tmp_path, teacher, other) -> None:
    of = {"long": teacher, "chatter": other}
    trainer = make_trainer(embedded_model, tmp_path, environment=BOTH, num_generations=2, teacher=of)
    trainer.save_model(str(tmp_path / "saved"))
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(TEACHER)]
    assert {"teacher_0", "teacher_1"} <= trainer.model.peft_config.keys()


def reads_of_a_batch(trainer: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Train on one batch of two updates: how often its teacher reads, and the weights."""
    count, read = [], trainer.teacher._log_probs_of
    trainer.teacher._log_probs_of = lambda *given: count.append(1) or read(*given)
    trainer.train()
    assert trainer.state.global_step == 2
    return len(count), {n: p.detach() for n, p in trainer.model.named_parameters() if ".default." in n}


TWO_UPDATES: dict[str, Any] = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}


@pytest.mark.parametrize(
    "changes", [{}, {"teacher": "reference", "reference_adapter": True}], ids=["frozen", "reference"]
)
def test_a_frozen_teacher_reads_a_batch_once(embedded_model, tmp_path, teacher, changes) -> None:
    """The weights are those of a run that lets it read again, to the bit. A reference may move, and is read again."""
    trainer = make_trainer(embedded_model, tmp_path / "keeps", **{"teacher": teacher, **TWO_UPDATES, **changes})
    reads, weights = reads_of_a_batch(trainer)
    assert reads == (2 if changes else 1)
    if not changes:
        again = make_trainer(embedded_model, tmp_path / "again", teacher=teacher, **TWO_UPDATES)
        again.teacher._frozen = False
        reads, others = reads_of_a_batch(again)
        assert reads == 2 and weights and all(torch.equal(value, others[name]) for name, value in weights.items())


# ----------------------------------------------------------------------------------------------------------- servers


@pytest.mark.parametrize("history", [None, "games:takes_notes"], ids=["one path", "several"])
def test_a_server_gives_what_the_model_gives(embedded_model, tmp_path, history) -> None:
    """Whole episodes, hints, and paths; once for each batch."""
    options = {
        "environment": Hinting, "max_turns": 6, "history": history, "num_generations": 2, "teacher_hint": "hint",
        "num_iterations": 2, "max_steps": 2,
    }  # fmt: skip
    folder = changed_model(embedded_model, tmp_path / "model")
    with teaching(folder) as served:
        of_server = make_trainer(embedded_model, tmp_path / "served", teacher=served.url, **options)
        of_model = make_trainer(embedded_model, tmp_path / "loaded", teacher=str(folder), **options)
        read = []
        for trainer in (of_server, of_model):
            batch = TrainBatch.from_trl(trainer._generate_and_score_completions([{}] * 8))
            read.append(torch.where(batch.counted, trainer.teacher.read(trainer.model, batch), 0.0))
        torch.testing.assert_close(*read, rtol=0, atol=2e-5)
        assert read[0].abs().max() > 1
        before = served.scored
        of_server.train()
        assert 8 <= served.scored - before <= 8 * 6
    kl = [entry["teacher/kl"] for entry in of_server.state.log_history if "teacher/kl" in entry]
    assert len(kl) == 2 and all(value != 0 for value in kl)


def test_a_server_is_not_asked_when_the_coefficient_has_fallen(embedded_model, tmp_path) -> None:
    with teaching(changed_model(embedded_model, tmp_path / "model")) as served:
        make_trainer(embedded_model, tmp_path, teacher=served.url, teacher_steps=0.5, max_steps=2).train()
    assert served.scored == 8, "of two batches one is read"


def test_a_server_beside_an_adapter(embedded_model, tmp_path, teacher) -> None:
    with teaching(changed_model(embedded_model, tmp_path / "model")) as served:
        of = {"long": served.url, "chatter": teacher}
        trainer = make_trainer(embedded_model, tmp_path, environment=BOTH, num_generations=2, teacher=of)
        batch = TrainBatch.from_trl(trainer._generate_and_score_completions([{}] * 8))
        read = trainer.teacher.read(trainer.model, batch)
    assert served.scored == int((batch.teachers == 0).sum()) > 0
    assert not read[batch.counted].isnan().any()


def test_servers_that_do_not_fit(embedded_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(TeacherServer._ask.retry, "sleep", lambda seconds: None)
    with pytest.raises(ValueError, match=r"teacher='http://127.0.0.1:9' is no vLLM server that answers"):
        make_trainer(embedded_model, tmp_path, teacher="http://127.0.0.1:9")
    folder = changed_model(embedded_model, tmp_path / "model")
    with teaching(folder, longest=5) as served:
        trainer = make_trainer(embedded_model, tmp_path, teacher=served.url, environment=Long)
        with pytest.raises(ValueError, match=r"has max_model_len=5, and an episode has \d+ tokens"):
            trainer._generate_and_score_completions([{}] * 8)
    with teaching(folder) as served:
        trainer = make_trainer(embedded_model, tmp_path, teacher=served.url)
        served.breaks_off = True
        with pytest.raises(ConnectionError, match=r"has broken an answer off \(finish_reason='abort'\). Start it"):
            trainer._generate_and_score_completions([{}] * 8)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["guess"])
    larger = AutoModelForCausalLM.from_pretrained(folder)
    larger.resize_token_embeddings(len(tokenizer))
    for one in (larger, tokenizer):
        one.save_pretrained(tmp_path / "larger")
    with teaching(folder) as served, pytest.raises(ValueError, match="serves 'teacher', which has another tokenizer"):
        make_trainer(tmp_path / "larger", tmp_path, teacher=served.url)


# --------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("gradient", BY_SHAPE)
def test_distillation_comes_closer_to_its_teacher(embedded_model, tmp_path, teacher, gradient) -> None:
    """Without any reward; the divergence is logged by turn."""
    trainer = distill(
        embedded_model, tmp_path, teacher=teacher, teacher_gradient=gradient, max_steps=6, optim="adamw_torch",
        learning_rate=1e-2,
    )  # fmt: skip
    trainer.train()
    kl = [entry["teacher/kl"] for entry in trainer.state.log_history if "teacher/kl" in entry]
    print(gradient, kl)
    assert len(kl) == 6 and kl[0] > 0.1 and sum(kl[-2:]) / 2 < 0.8 * kl[0]
    first = trainer.state.log_history[0]
    assert first["turn/1/teacher_kl"] > 0 and first["turn/2/teacher_kl"] > 0 and first["teacher/coef"] == 1.0


@pytest.mark.parametrize(("steps", "expected"), [(1.0, [0.8, 0.4]), (2, [0.8, 0.4, 0])], ids=["all", "two"])
def test_the_coefficient_falls(embedded_model, tmp_path, teacher, steps, expected) -> None:
    """Then the teacher is not read, and the reward's gradient is alone."""
    trainer = make_trainer(
        embedded_model, tmp_path, teacher=teacher, teacher_coef=0.8, teacher_steps=steps, max_steps=len(expected)
    )
    reads, read = [], trainer.teacher._log_probs_of
    trainer.teacher._log_probs_of = lambda *given: reads.append(trainer.teacher.coefficient) or read(*given)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "teacher/coef" in entry]
    assert [entry["teacher/coef"] for entry in steps] == pytest.approx(expected)
    assert ["teacher/kl" in entry for entry in steps] == [coefficient > 0 for coefficient in expected]
    assert reads and min(reads) > 0


def test_the_teacher_is_not_saved_and_stays_as_it_is(embedded_model, tmp_path, teacher) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, teacher=teacher, max_steps=1, save_strategy="steps", save_steps=1, learning_rate=1.0
    )
    own = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if f".{TEACHER}." in n}
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert not list(tmp_path.rglob(f"{TEACHER}/*")) and TEACHER in trainer.model.peft_config
    assert all(torch.equal(p, own[n]) for n, p in trainer.model.named_parameters() if n in own)
    with trainer.use_adapter(TEACHER):
        assert trainer.evaluate(num_episodes=4)["eval_return"] is not None


def test_dropout_is_off(embedded_model, tmp_path, teacher) -> None:
    """The teacher's adapter was trained with dropout, and so is the policy's."""
    trainer = make_trainer(embedded_model, tmp_path, teacher=teacher, lora=LORA)
    trainer.model.train()
    batch = TrainBatch.from_trl(trainer._generate_and_score_completions([{}] * 8))
    assert torch.equal(*(trainer.teacher.read(trainer.model, batch) for _ in range(2)))


@pytest.mark.parametrize("gradient", [IMMEDIATE, FORWARD, REVERSE])
def test_a_model_with_a_padded_vocabulary_is_the_same_teacher(embedded_model, tmp_path, gradient) -> None:
    """Merged with the base; the logits of rows that no token has are left out, or hardly count."""
    padded = AutoModelForCausalLM.from_pretrained(embedded_model)
    noise = torch.Generator().manual_seed(1)
    for name, parameter in sorted(padded.named_parameters()):
        if name.endswith("q_proj.weight"):
            parameter.data += torch.randn(parameter.shape, generator=noise) * 0.1
    whole, found = padded.config.vocab_size, []
    for folder, size in (("plain", whole), ("padded", whole + 7)):
        if size > whole:
            padded.resize_token_embeddings(size, mean_resizing=False)
            padded.get_output_embeddings().weight.data[whole:] = 0.0 if gradient not in SAMPLED else -1e3
        padded.save_pretrained(tmp_path / folder)
        AutoTokenizer.from_pretrained(embedded_model).save_pretrained(tmp_path / folder)
        trainer = make_trainer(
            embedded_model, tmp_path, teacher=str(tmp_path / folder), teacher_gradient=gradient, teacher_coef=3.0
        )
        trainer.state.max_steps = 1
        found.append(loss_and_gradients(trainer, draw_batch(trainer))[1])
    if gradient not in SAMPLED:
        assert relative_error(found[1], found[0]) < 1e-5


def test_batches_ahead_weigh_the_teachers_credit(embedded_model, tmp_path, teacher) -> None:
    """The credit of a token has the weight of drift that the reward's has."""
    trainer = make_trainer(
        embedded_model, tmp_path, teacher=teacher, batches_ahead=1, max_steps=3, learning_rate=0.5,
        drift_correction="token_truncate",
    )  # fmt: skip
    seen, add_loss = [], trainer.teacher.add

    def spied(loss: torch.Tensor, handed: Any, *others: Any) -> Any:
        batch = handed.batch
        if batch.importance_sampling_ratio is not None:
            plain, _ = add_loss(torch.zeros(()), handed, *others)
            ratio, batch.importance_sampling_ratio = batch.importance_sampling_ratio, None
            unweighed, _ = add_loss(torch.zeros(()), handed, *others)
            batch.importance_sampling_ratio = ratio
            seen.append((plain.item(), unweighed.item()))
        return add_loss(loss, handed, *others)

    trainer.teacher.add = spied
    trainer.train()
    assert seen and any(abs(one - other) > 1e-6 for one, other in seen)


@pytest.mark.parametrize(
    ("gradient", "changes"),
    [
        (IMMEDIATE, {"batches_ahead": 1}),
        (RETURN_TO_GO, {"num_iterations": 2}),
        (REVERSE, {"environment": Hinting, "teacher": "policy", "teacher_hint": "hint"}),
        (FORWARD, {"environment": Long, "history": "games:takes_notes", "max_turns": 6}),
    ],
)
def test_a_killed_run_goes_on(embedded_model, tmp_path, teacher, gradient, changes) -> None:
    """In the middle of a generation batch too, to the bit."""
    settings = {
        "teacher": teacher, "teacher_gradient": gradient, "teacher_steps": 8, "num_generations": 2, "max_steps": 4,
        "per_device_train_batch_size": 4, "steps_per_generation": 2, "optim": "adamw_torch", "learning_rate": 1e-2,
        **changes,
    }  # fmt: skip
    whole, again = check_resumed(
        lambda name, **more: make_trainer(embedded_model, tmp_path / name, **settings, **more), 3
    )
    assert again.state.global_step == 4
    assert again.state.log_history[-2]["teacher/kl"] == whole.state.log_history[-2]["teacher/kl"]


@pytest.mark.parametrize("gradient", BY_SHAPE)
def test_an_episode_that_is_stored_as_paths_is_the_same(embedded_model, tmp_path, teacher, gradient) -> None:
    """Also where it is read in several passes, and an agent's episodes are trained on."""
    options = {"teacher": teacher, "teacher_gradient": gradient, "environment": Long, "sequence_packing": "none"}
    trainer = make_trainer(embedded_model, tmp_path, max_logprob_gap=1e9, **options)
    trainer.state.max_steps = 1
    episodes = trainer.rollout()
    loss, gradients, _ = measured_episodes(trainer, episodes)
    for budget in (None, 60):
        other, of_paths, _ = measured_episodes(trainer, [repeated(episode) for episode in episodes], budget)
        assert other.item() == pytest.approx(loss.item(), rel=1e-5) and relative_error(of_paths, gradients) < 1e-5


def test_an_agent_is_taught(embedded_model, tmp_path, teacher) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, teacher=teacher, environment="agent:environment_agents:gathers", max_turns=9,
        teacher_gradient="distribution_reverse",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["teacher/kl"] > 0


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher": "nowhere/to"}, "teacher='nowhere/to' is not a folder"),
        ({"teacher": "policy"}, "Set teacher_hint"),
        ({"teacher": {"sums": "policy"}, "teacher_hint": "hint"}, "teacher names 'sums'"),
        ({"teacher": {}}, "must have a folder, a Hub id or an address for each"),
        (
            {"teacher": {"long": "policy"}, "teacher_hint": "hint", "teacher_gradient": "distribution_forward",
             "environment": BOTH},
            "with those of one teacher",
        ),
        ({"teacher": "http://here:1", "teacher_gradient": "distribution_reverse"}, "of sampled tokens alone"),
        ({"teacher": "http://here:1", "temperature": 0.7}, "over the whole vocabulary at temperature 1"),
        ({"teacher_coef": 0.5}, "no effect with teacher=None"),
        ({"teacher_hint": "hint"}, "no effect with teacher=None"),
        ({"teacher": "policy", "teacher_hint": "hint", "teacher_coef": 0.0}, "teacher_coef must be positive"),
        ({"teacher": "policy", "teacher_hint": "hint", "teacher_turn_decay": 1.5}, r"must lie in \[0, 1\]"),
        ({"teacher": "policy", "teacher_hint": "hint", "teacher_steps": 0}, "teacher_steps must be positive"),
        ({"teacher": "policy", "teacher_hint": "hint", "teacher_gradient": "distribution"}, "must be one of 'immediate'"),
        ({"teacher": "policy", "teacher_hint": "hint", "skip_zero_advantage": True}, "trains episodes without advantage"),
        ({"teacher": "policy", "teacher_hint": "hint", "disable_dropout": False}, "read as a divergence"),
        (
            {"teacher": "policy", "teacher_hint": "hint", "batches_ahead": 1, "drift_correction": "decision_truncate"},
            "weighs rewards and no token",
        ),
        (
            {"teacher": "policy", "teacher_hint": "h", "teacher_gradient": "return_to_go",
             "environment": "agent:environment_agents:gathers"},
            "may ask for several answers at once",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(embedded_model, tmp_path, changes, said) -> None:
    with pytest.raises(ValueError, match=said):
        make_trainer(embedded_model, tmp_path, **changes)


def test_an_adapter_needs_an_adapter(embedded_model, tmp_path, teacher) -> None:
    with pytest.raises(ValueError, match="the policy is trained whole"):
        make_trainer(embedded_model, tmp_path, teacher=teacher, lora=False)


def test_another_tokenizer_is_refused(embedded_model, tmp_path, teacher) -> None:
    AutoModelForCausalLM.from_pretrained(embedded_model).save_pretrained(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    tokenizer.add_tokens(["guess"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"has another tokenizer: token 'guess' is \d+ there and None here"):
        make_trainer(embedded_model, tmp_path / "run", teacher=str(tmp_path / "other"))


def test_ratios_of_tokens_are_clipped_by_bounds_of_tokens(tmp_path) -> None:
    """Those of GSPO are of sequences, a thousandth of them, and CISPO's is that of a weight."""
    given = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    sequences, turns = MultiTurnGSPOConfig(**given), MultiTurnGSPOConfig(**given, importance_sampling_level="turn")
    for args in (sequences, turns, MultiTurnCISPOConfig(**given)):
        assert _bounds(args, own_loss=False) == (0.2, 0.2)
    assert _bounds(MultiTurnGRPOConfig(**given, epsilon=0.1, epsilon_high=0.3), own_loss=False) == (0.1, 0.3)
    assert _bounds(MultiTurnGRPOConfig(**given, epsilon=0.1), own_loss=False) == (0.1, 0.1)
    assert _bounds(MultiTurnGRPOConfig(**given, epsilon=0.1), own_loss=True) == (0.2, 0.2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Distillation needs a teacher"),
        ({"gamma": 0.5}, "Distillation needs a teacher"),
        (
            {"teacher": "policy", "teacher_hint": "hint", "gamma": 0.5},
            "gamma=0.5 has no effect: distillation trains on no advantage",
        ),
        (
            {"teacher": "policy", "teacher_hint": "hint", "importance_sampling_level": "turn"},
            "_level='turn' has no effect",
        ),
        ({"teacher": "policy", "teacher_hint": "hint", "delta": 2.0}, "delta=2.0 has no effect"),
        (
            {"teacher": "policy", "teacher_hint": "hint", "top_entropy_quantile": 0.5},
            "top_entropy_quantile=0.5 has no effect",
        ),
        (
            {"teacher": "policy", "teacher_hint": "hint", "teacher_gradient": REVERSE, "epsilon": 0.1},
            "epsilon=0.1 has no effect",
        ),
        ({"teacher": "policy", "teacher_hint": "hint", "num_generations": 4}, "num_generations=4 has no effect"),
    ],
)
def test_distillation_refuses_what_acts_on_rewards(embedded_model, tmp_path, changes, said) -> None:
    with pytest.raises(ValueError, match=said):
        make_trainer(embedded_model, tmp_path, algorithm="distillation", **{"num_generations": 1, **changes})
