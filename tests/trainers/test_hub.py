"""Pushing with the real client, to a server in this process; and the model card."""

from __future__ import annotations

import ast
import errno
import pickle
from copy import copy
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
import yaml
from cards import cards_of
from games import make_trainer
from hub_push import TOKEN
from hub_runs import SCRIPT, environment, run
from hub_server import running_hub
from huggingface_hub import close_session, get_session, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError
from matplotlib.backends.backend_agg import FigureCanvasAgg
from transformers import AutoTokenizer

from agile_trainers.checkpoints.hub import (
    SILENCE_SECONDS,
    HubPushes,
    HubUnreachableError,
    limit_silence,
    reporting_unreachable,
    retried,
)
from agile_trainers.checkpoints.integrity import check_complete
from agile_trainers.checkpoints.model_card import RunCards, draw_curve, hyperparameters, model_card, panels
from agile_trainers.trainers import MultiTurnGRPOConfig


@pytest.fixture(scope="module")
def pushed(embedded_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with running_hub() as hub:
        run(hub, "push", embedded_model, folder)
        run(hub, "load", embedded_model, folder)
        yield hub, folder


def test_a_new_process_loads_the_adapter_by_its_id(pushed, embedded_model):
    hub, folder = pushed
    loaded, logits = (torch.load(folder / name) for name in ("loaded.pt", "logits.pt"))
    torch.testing.assert_close(loaded["logits"], logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(loaded["continued"], logits, rtol=0, atol=1e-6)
    assert loaded["vocabulary"] == len(AutoTokenizer.from_pretrained(embedded_model))
    parent = loaded["parent"]
    assert parent["source"] == "tester/run" and parent["commit"] == hub.repositories["tester/run"][-1]["sha"]
    assert parent["algorithm"] == "Multi-turn PPO"


def test_what_is_pushed(pushed):
    """The policy, and whole checkpoints apart, with the critic; no episode or pickle."""
    hub, _ = pushed
    commits = hub.repositories["tester/run"]
    messages = [commit["message"] for commit in commits]
    assert messages[1:] == [
        "Training in progress, step 1", "Training in progress, step 1, checkpoint", "Training in progress, step 2",
        "Training in progress, step 2, checkpoint", "End of training",
    ]  # fmt: skip
    files = commits[-1]["files"]
    assert {name for name in files if not name.startswith("last-checkpoint/")} == {
        ".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", "agile_trainers.json",
        "learning_curve.png", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/complete.json"} < files.keys()
    assert {
        "last-checkpoint/critic/adapter_model.safetensors",
        "last-checkpoint/ref/adapter_config.json",
    } < files.keys()
    assert not any("rollouts" in name or "training_args" in name for name in files)
    inside = commits[2]["files"].keys()  # a generation batch, whose other half the next step trains on
    assert "last-checkpoint/rollout/position.json" in inside
    assert not any("rank-" in name for commit in commits for name in commit["files"] if "rng_state" not in name)
    assert all(commit["token"] == TOKEN for commit in commits)
    assert files["adapter_model.safetensors"] in hub.large.values(), "uploaded as a large file, as the Hub wants it"


def test_the_token_is_in_no_file(pushed):
    hub, folder = pushed
    contents = [content for commit in hub.repositories["tester/run"] for content in commit["files"].values()]
    contents += [path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()]
    assert len(contents) > 50 and not any(TOKEN.encode() in content for content in contents)
    args = MultiTurnGRPOConfig(output_dir=str(folder / "unused"), hub_token=TOKEN, bf16=False, use_cpu=True)
    assert copy(args).hub_token == args.with_environment().hub_token == TOKEN
    assert pickle.loads(pickle.dumps(args)).hub_token is None


def test_the_card_of_a_run(pushed):
    hub, _ = pushed
    card = hub.repositories["tester/run"][-1]["files"]["README.md"].decode()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["library_name"] == "peft" and set(metadata["tags"]) >= {"ppo", "agile-trainers"}
    assert "grpo" not in metadata["tags"] and metadata["model-index"][0]["results"][0]["metrics"]
    for text in (
        "Multi-turn PPO on the environment `Cut`: 2 updates", 'PeftModel.from_pretrained(base, "tester/run")',
        "| `learning_rate` | `0.1` |", "| `beta` | `0.1` |", "## Evaluation", "(learning_curve.png)",
        "[Proximal Policy Optimization Algorithms](https://huggingface.co/papers/1707.06347)",
    ):  # fmt: skip
        assert text in card, text


FAULTS = {
    "Training in progress, step 1": ["500", "500"],
    "Training in progress, step 2": ["429"],
    "Training in progress, step 3": ["cut"],
    "Training in progress, step 4": ["hang"],
    "Training in progress, step 5": ["401"],
    # The disk is full at step 6.
}


def test_a_hub_that_fails_in_six_ways(embedded_model, tmp_path):
    """What can arrive arrives, in order; the rest is said at once and at the end. No checkpoint is lost."""
    with running_hub() as hub:
        hub.fail = {message: list(faults) for message, faults in FAULTS.items()}
        script = SCRIPT.with_name("hub_faults.py")
        done = forks.run([script, embedded_model, tmp_path], env=environment(hub, tmp_path / "home"))
        assert done.returncode == 0, done.stderr[-4000:]
        commits = hub.repositories["tester/run"]
    messages = [commit["message"] for commit in commits[1:]]
    assert messages == [f"Training in progress, step {step}" for step in (1, 2, 3, 4, 7)] + ["End of training"]
    final = (tmp_path / "run" / "checkpoint-7" / "adapter_model.safetensors").read_bytes()
    assert commits[-1]["files"]["adapter_model.safetensors"] == final
    assert all(check_complete(tmp_path / "run" / f"checkpoint-{step}") for step in range(1, 8))
    assert not list((tmp_path / "run").glob(".push-*"))

    said = done.stderr + done.stdout
    for step, attempts in ((1, 2), (2, 1), (3, 1), (4, 1)):
        assert said.count(f"Pushing checkpoint-{step} to tester/run") == attempts, said[-4000:]
    assert said.count("Trying again") == 5
    for step, reason in ((5, "401"), (6, "No space left on device")):
        lines = [line for line in said.splitlines() if f"checkpoint-{step} to tester/run" in line]
        assert len(lines) == 2 and all(reason in line for line in lines), "at once, and in the summary"
    assert "2 of the run's pushes did not arrive" in said


@pytest.mark.parametrize(
    ("token", "name"),
    [
        ("hf_wrong", "tester/run"),
        pytest.param("hf_read_only", "tester/run", marks=pytest.mark.slow),
        pytest.param("hf_fine", "not//a name", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_token_or_name_shows_at_construction(embedded_model, tmp_path, token, name):
    program = (
        "import sys; from games import make_trainer\n"
        "make_trainer(sys.argv[1], sys.argv[2], push_to_hub=True, hub_token=sys.argv[3], hub_model_id=sys.argv[4])"
    )
    with running_hub() as hub:
        done = forks.run(
            ["-c", program, embedded_model, tmp_path, token, name],
            env=environment(hub, tmp_path / "home"),
            cwd=SCRIPT.parent,
        )
    assert done.returncode == 1
    assert f"ValueError: Cannot push to hub_model_id={name!r}" in done.stderr and "hub_token" in done.stderr
    assert token not in done.stderr


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process reaches."""
    from huggingface_hub import constants, hf_api

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("agile_trainers.checkpoints.hub.WAITS", (0.0, 0.0, 0.0))
    with running_hub() as running:
        monkeypatch.setattr(hf_api.api, "endpoint", running.url)
        running.repositories["tester/run"] = []
        running.commit("tester/run", "initial commit", {}, None)
        yield running
    close_session()


def pushes_of(folder, **options: Any) -> HubPushes:
    """The pushes of a trainer whose files are there."""
    chosen = {"output_dir": str(folder), "hub_token": TOKEN, "hub_revision": None, "hub_model_id": "tester/run",
              "hub_strategy": "checkpoint", "hub_always_push": True, **options}  # fmt: skip
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(**chosen), hub_model_id="tester/run", push_in_progress=None, control=None,
        processing_class=None, state=SimpleNamespace(global_step=1), is_world_process_zero=lambda: True,
        callback_handler=SimpleNamespace(on_push_begin=lambda *_: None),
    )  # fmt: skip
    return HubPushes(trainer)


def test_a_pushed_checkpoint_has_no_file_of_another_run(hub, tmp_path):
    """Of the main folder, a whole model takes the adapter's place; an adapter leaves what may be its base."""
    pushed = []
    for names in (
        (
            "adapter_config.json",
            "adapter_model.safetensors",
            "ref/adapter_config.json",
            "ref/adapter_model.safetensors",
        ),
        ("adapter_config.json", "adapter_model.safetensors"),
        ("config.json", "model.safetensors"),
        ("adapter_config.json", "adapter_model.safetensors"),
    ):
        folder = tmp_path / str(len(pushed))
        for name in names:
            (folder / "checkpoint-1" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "checkpoint-1" / name).write_text("{}")
        pushes = pushes_of(folder)
        pushes.push_checkpoint(folder / "checkpoint-1")
        pushes.wait()
        pushed.append(hub.repositories["tester/run"][-1]["files"].keys())
        assert {name for name in pushed[-1] if "/" in name} == {f"last-checkpoint/{name}" for name in names}
    main = [{name for name in files if "/" not in name} for files in pushed]
    adapter, whole = {"adapter_config.json", "adapter_model.safetensors"}, {"config.json", "model.safetensors"}
    assert main == [adapter, adapter, whole, adapter | whole]


def test_what_a_user_added_to_a_pushed_checkpoint_stays(hub, tmp_path):
    names = ("my_eval.json", "notes/plan.md", "ref/notes.txt", "ref/model.safetensors", "rollout/old.pt")
    hub.commit("tester/run", "mine", {f"last-checkpoint/{name}": b"" for name in names}, None)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "adapter_config.json").write_text("{}")
    pushes = pushes_of(tmp_path)
    pushes.push_checkpoint(tmp_path / "checkpoint-1")
    pushes.wait()
    kept = {name for name in hub.repositories["tester/run"][-1]["files"] if name.startswith("last-checkpoint/")}
    assert kept == {f"last-checkpoint/{name}" for name in (*names[:3], "adapter_config.json")}


def test_the_branch_is_made_where_pushes_begin(hub, tmp_path):
    def made(revision: str) -> Any:
        pushes = pushes_of(tmp_path, hub_revision=revision)
        pushes.begin(None, lambda token: None)
        return pushes.push("End of training", True, None, None)

    (tmp_path / "adapter_model.safetensors").write_text("{}")
    for revision in ("exp1", "exp1", "main"):
        assert made(revision).oid == hub.repositories["tester/run"][-1]["sha"]
    assert hub.branches == {"main", "exp1"}
    with pytest.raises(ValueError, match=r"Cannot push to hub_model_id='tester/run', revision 'refs/pr/1'"):
        made("refs/pr/1")
    hub.branches.add("refs/pr/1")
    made("refs/pr/1")
    pushes_of(tmp_path).push("End of training", True, None, "later")
    assert hub.branches == {"main", "exp1", "refs/pr/1", "later"}


def test_the_last_push_is_tried_again(hub, tmp_path):
    pushes = pushes_of(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_text("{}")
    hub.fail = {"End of training": ["500", "cut", "429"], "never": ["500"] * 4, "refused": ["401"]}
    pushes.push("End of training", True, None, None)
    assert [commit["message"] for commit in hub.repositories["tester/run"][1:]] == ["End of training"]
    with pytest.raises(HubUnreachableError, match=rf"the Hub failed \(500 .*The model is in {tmp_path}"):
        pushes.push("never", True, None, None)
    with pytest.raises(HfHubHTTPError) as refused:
        pushes.push("refused", True, None, None)
    assert refused.value.__notes__ == [f"Nothing was pushed to tester/run. The model is in {tmp_path}."]
    assert not hub.fail["never"] and not list(tmp_path.glob(".push-*"))


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (FileNotFoundError("gone"), 1),
        (LocalTokenNotFoundError("no token"), 1),
        (OSError(errno.ENOSPC, "full"), 1),
        (OSError(errno.ENETUNREACH, "no network"), 4),
        (TimeoutError("late"), 4),
        (HTTPError("cut"), 4),
    ],
)
def test_errors_of_this_machine_are_not_tried_again(monkeypatch, error, attempts):
    tried = []

    def upload() -> None:
        tried.append(1)
        raise error

    monkeypatch.setattr("agile_trainers.checkpoints.hub.WAITS", (0.0, 0.0, 0.0))
    with pytest.raises(type(error)):
        retried("x", upload)
    assert len(tried) == attempts


def test_construction_works_offline(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, push_to_hub=True, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    assert "checkpoint-1" in cards_of(tmp_path)
    for name in ("README.md", "learning_curve.png"):  # may be edited and deleted
        (checkpoint / name).unlink()
    assert check_complete(checkpoint)


def test_a_saved_run_says_how_to_push_it_later(embedded_model, tmp_path, monkeypatch):
    """Offline by the variable, and with an endpoint that nobody listens at."""
    import huggingface_hub
    from huggingface_hub import constants, hf_api

    said: list[str] = []
    monkeypatch.setattr("agile_trainers.checkpoints.hub.logger.warning", lambda text, *v: said.append(text % v))
    trainer = make_trainer(embedded_model, tmp_path / "run", push_to_hub=True, hub_model_id="me/run")
    assert len(said) == 1 and "HF_HUB_OFFLINE=1: nothing is pushed to me/run" in said[0]
    later = r"Nothing was pushed to me/run: {} The model is in .*/run\. .*hf upload me/run .* --exclude 'private.json'"
    with pytest.raises(HubUnreachableError, match=later.format(r"HF_HUB_OFFLINE=1\.")):
        trainer.push_to_hub()
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file() and "run" in cards_of(tmp_path)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("agile_trainers.checkpoints.hub.WAITS", (0.0,))
    monkeypatch.setattr(hf_api.api, "endpoint", "http://127.0.0.1:9")
    assert not huggingface_hub.is_offline_mode()
    with pytest.raises(HubUnreachableError, match=later.format(r"the Hub cannot be reached \(.+\)\.")) as raised:
        trainer.push_to_hub(token=TOKEN)
    assert TOKEN not in str(raised.value) and str(raised.value).count("me/run") == 2
    said.clear()
    for _ in range(2):
        trainer.save_model()
    assert len(said) == 1 and "hf upload me/run" in said[0], "the script goes on, after one warning"
    trainer.hub_model_id = "me/run"  # as if it had been reached at the start
    with pytest.raises(HubUnreachableError, match=later.format(r"the Hub cannot be reached \(.+\)\.")):
        trainer.push_to_hub()
    with pytest.raises(HubUnreachableError, match=later.format(r"the Hub cannot be reached \(.+\)\.")):
        trainer.push_to_hub(blocking=False).result()
    with pytest.raises(HubUnreachableError, match=r"Cannot push to me/run: .*HF_HUB_OFFLINE=1 to train now.*unset"):
        make_trainer(embedded_model, tmp_path / "other", push_to_hub=True, hub_model_id="me/run")


RECORD = {
    "algorithm": "Multi-turn GRPO", "environment": "agile:guess_number", "global_step": 7, "lora": {"r": 8},
    "base_model": {"name": "org/base", "commit": "c0ffee"}, "versions": {"trl": "1.16.0"},
    "parent": {
        "source": "org/dpo", "commit": "0123456789abcdef", "algorithm": "DPO", "environment": None,
        "parent": {"source": "org/sft", "commit": None, "algorithm": "SFT", "environment": None, "parent": None},
    },
}  # fmt: skip


def card(**changes) -> str:
    log = [
        {"step": step, "eval_return": step / 10, "eval_return_sem": 0.01, "eval_success": 0.5, "eval_episodes": 128.0}
        for step in range(1, 26)
    ]
    values = {
        "name": "model", "model_id": "org/model", "record": RECORD, "log_history": log, "options": {"seed": 3},
        "tags": ["trl"], "trainer": "MultiTurnGRPOTrainer", **changes,
    }  # fmt: skip
    return model_card(**values)


def test_the_card_tells_the_stages_and_the_base():
    text = card(dataset="org/rows", paper={"title": "A paper", "id": "1.2", "citation": "@misc{a}"})
    assert (
        "| this model | Multi-turn GRPO | `agile:guess_number` |\n| `org/dpo at 0123456789` | `DPO` |  |\n"
        "| `org/sft` | `SFT` |  |" in text
    )
    assert 'from_pretrained("org/base", revision="c0ffee")' in text and "base_model: org/base" in text
    assert "[org/rows](https://huggingface.co/datasets/org/rows)" in text and "@misc{a}" in text
    assert "learning_curve.png" not in text, "no training metrics, no picture"


def test_the_lines_of_a_card_load_the_model_and_generate(embedded_model, tmp_path, monkeypatch, capsys):
    trainer = make_trainer(embedded_model, tmp_path / "run", temperature=0.7, top_k=5, system_prompt="a secret")
    trainer.save_model()
    text = (tmp_path / "run" / "README.md").read_text()
    sampled = "do_sample=True, temperature=0.7, top_p=1.0, top_k=5, repetition_penalty=1.0, max_new_tokens="
    assert f"generate(**inputs, {sampled}{trainer.args.max_new_tokens})" in text
    assert (
        "sampled with `system_prompt` and `stop_strings` too, which are left out here" in text
        and "a secret" not in text
    )
    place = embedded_model.name
    assert f"The base model is not published. It was the folder `{place}` on the machine" in text
    assert "hf upload USER/BASE path/to/model" in text and str(embedded_model) not in text
    code = text.partition("```python\n")[2].partition("```")[0].replace(f"path/to/{place}", str(embedded_model))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out.strip(), "an answer"
    assert "generate(**inputs, max_new_tokens=64)" in card() and "left out here" not in card(), "of rows"
    assert "not published" not in card() and "path/to" not in card(), "a base of the Hub"


def test_the_evaluation_table_is_short_and_has_the_last_row():
    rows = [line for line in card().splitlines() if "± 0.010" in line]
    assert len(rows) <= 10 and rows[-1] == "| 25 | 2.500 ± 0.010 | 50.0% | 128 |"


def test_an_update_has_one_row_and_baselines_come_first():
    log = [
        {"step": step, "eval_return": value, "eval_return_sem": 0.01, "eval_episodes": 8.0}
        for step, value in ((0, 0.1), (5, 0.2), (5, 0.3))
    ]
    baselines = {"before training": {"eval_return": 0.1, "eval_episodes": 8.0}, "random play": {"eval_return": 0.05}}
    table = card(log_history=log, baselines=baselines).partition("## Evaluation")[2].partition("##")[0]
    assert [line.split("|")[1:3] for line in table.strip().splitlines()[2:]] == [
        [" before training ", " 0.100 "], [" random play ", " 0.050 "], [" 5 ", " 0.300 ± 0.010 "],
    ]  # fmt: skip
    kept = card(log_history=log).partition("## Evaluation")[2].partition("##")[0]
    assert len(kept.strip().splitlines()) == 4, "without a baseline, update 0 is a row"


@pytest.mark.parametrize(
    ("logs", "label"), [(7, None), (8, "training, mean of 3 logs"), (80, "training, mean of 9 logs")]
)
def test_a_short_curve_is_smoothed_less(monkeypatch, logs, label):
    """A mean over most of a run would be flat, whatever it did."""
    drawn = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.legend", lambda axes, **_: drawn.append(axes.get_legend_handles_labels()[1])
    )
    draw_curve(panels([{"step": step, "success": step / logs, "return/mean": 0.0} for step in range(logs)]))
    assert {one for labels in drawn for one in labels if "mean of" in one} == ({label} if label else set())


def test_the_curve_has_an_axis_from_0_to_1_for_a_share_alone(monkeypatch):
    log = [{"step": step, "return/mean": step - 3.0, "success": step / 10} for step in range(10)]
    shown = panels(log, {"random play": {"eval_success": 0.2, "eval_return": -1.0}})
    assert [(panel.name, panel.is_share) for panel in shown] == [
        ("success", True),
        ("mean return of an episode", False),
    ]
    assert [panel.baselines for panel in shown] == [{"random play": 0.2}, {"random play": -1.0}]
    drawn = []
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda self, file: drawn.append(self.figure))
    draw_curve(shown)
    success, episodes = drawn[0].axes
    assert success.get_ylim() == (0, 1.02) and episodes.get_ylim()[0] < -3
    raw, smoothed, baseline = success.lines
    assert list(raw.get_ydata()) == [step / 10 for step in range(10)]
    assert smoothed.get_ydata()[0] == pytest.approx(0.05) and smoothed.get_ydata()[5] == pytest.approx(0.5)
    assert smoothed.get_label() == "training, mean of 3 logs" and baseline.get_label() == "random play 0.20"
    sft, _ = panels([{"step": 1, "loss": 2.0, "mean_token_accuracy": 0.5}])
    assert sft.is_share and sft.training == [(1, 0.5)]


def test_a_run_with_reward_functions_is_judged_by_the_reward():
    log = [
        {"step": step, "eval_return": 0.0, "eval_return_sem": 0.0, "eval_reward": step / 10, "eval_reward_sem": 0.02,
         "eval_rewards/environment/mean": 0.0, "eval_rewards/judge/mean": step / 10, "eval_episodes": 4.0}
        for step in (1, 2)
    ]  # fmt: skip
    text = card(log_history=[*log, {"step": 2, "return/mean": 0.0, "reward": 0.2}])
    assert "| 2 | 0.200 ± 0.020 |  | 4 |" in text and "| update | reward (± standard error)" in text
    assert "value: 0.2\n" in text and "standard_error: 0.02" in text and "name: mean episode reward" in text
    (panel,) = panels([*log, {"step": 2, "return/mean": 0.0, "reward": 0.2}])
    assert panel.training == [(2, 0.2)] and panel.evaluations == [(1, 0.1, 0.02), (2, 0.2, 0.02)]


def test_each_of_several_data_sets_has_its_results():
    log = [
        {"step": step, **{f"eval_{name}_{metric}": value for metric, value in (
            ("return", step / of), ("return_sem", 0.02), ("reward", step / of), ("reward_sem", 0.02),
            ("success", 0.5), ("episodes", 4.0), ("web_return", 0.1), ("web_return_sem", 0.3),
        )}}
        for step in (1, 2) for name, of in (("easy", 5), ("hard", 10))
    ]  # fmt: skip
    trainer: Any = SimpleNamespace(engine=object(), state=SimpleNamespace(global_step=0))
    cards = RunCards(trainer, "GRPO", [], {}, None)
    for name, value in (("easy", 0.05), ("hard", 0.0)):
        cards.note_evaluation(f"eval_{name}", {f"eval_{name}_return": value, f"eval_{name}_reward_sem": 0.01})
    text = card(log_history=log, baselines=cards.baselines)
    table = text.partition("## Evaluation")[2].partition("##")[0].strip().splitlines()
    assert table[0].startswith("| update | return of easy (± standard error) | success of easy | episodes of easy | ")
    assert table[0].endswith(" | return of easy_web | return of hard_web |")
    assert [line.split("|")[1:6] for line in table[2:]] == [
        [" before training ", " 0.050 ", "  ", "  ", " 0.000 "],
        [" 1 ", " 0.200 ± 0.020 ", " 50.0% ", " 4 ", " 0.100 ± 0.020 "],
        [" 2 ", " 0.400 ± 0.020 ", " 50.0% ", " 4 ", " 0.200 ± 0.020 "],
    ]
    found = yaml.safe_load(text.split("---")[1])["model-index"][0]["results"][0]["metrics"]
    assert [(one["name"], one["value"]) for one in found] == [
        ("mean episode return of easy", 0.4), ("mean episode return of hard", 0.2)
    ]  # fmt: skip


def test_an_evaluation_whose_episodes_all_failed_is_no_result():
    nan = float("nan")
    log = [{"step": 1, "eval_return": nan, "eval_return_sem": nan, "eval_episodes": 4.0}]
    assert "nan" not in card(log_history=log).split("---")[1]
    one_episode = [{"step": 1, "eval_return": 0.5, "eval_return_sem": nan, "eval_episodes": 1.0}]
    metadata = card(log_history=one_episode).split("---")[1]
    assert "value: 0.5" in metadata and "nan" not in metadata


def test_the_lines_of_a_card_are_python_whatever_the_folder_is_called():
    code = card(model_id='run "a"').partition("```python\n")[2].partition("```")[0]
    strings = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert strings.count('run "a"') == 2


def test_a_whole_model_loads_as_one():
    text = card(record={**RECORD, "lora": None})
    assert 'AutoModelForCausalLM.from_pretrained("org/model")' in text and "peft" not in text


def test_hyperparameters_are_what_was_chosen(tmp_path):
    args = MultiTurnGRPOConfig(
        output_dir=str(tmp_path), bf16=False, use_cpu=True, max_turns=3, learning_rate=1e-3, hub_token=TOKEN,
        hub_model_id="a/b", system_prompt="Be brief.", log_rollouts=False,
    )  # fmt: skip
    found = hyperparameters(args)
    assert found["max_turns"] == 3 and found["learning_rate"] == 1e-3
    assert found["system_prompt"].startswith("<str, withheld: ")
    assert not {"output_dir", "hub_token", "hub_model_id", "log_rollouts", "use_cpu", "gamma"} & found.keys()
    assert TOKEN not in str(found)


def test_every_client_of_the_hub_has_a_timeout():
    """Also those that follow an error of the connection; one that the user has chosen stays."""
    close_session()
    own = get_session()
    hooks, made = own.event_hooks, type(own)
    try:
        set_client_factory(lambda: made(event_hooks=hooks, timeout=7.0))
        limit_silence()
        assert get_session().timeout.read == 7.0
        set_client_factory(lambda: made(event_hooks=hooks, follow_redirects=True, timeout=None))
        limit_silence()
        for _ in range(2):
            client = get_session()
            assert client.timeout.read == client.timeout.connect == SILENCE_SECONDS
            assert client.event_hooks == hooks and client.follow_redirects
            close_session()
    finally:
        set_client_factory(lambda: made(event_hooks=hooks, follow_redirects=True, timeout=None))


def test_a_hub_that_refuses_is_not_unreachable():
    refusal = HfHubHTTPError("403 Forbidden", response=SimpleNamespace(headers={}, status_code=403, request=None))
    for error, raised in ((refusal, HfHubHTTPError), (HTTPError("connection refused"), HubUnreachableError)):
        with pytest.raises(raised), reporting_unreachable("a/b"):
            raise error
