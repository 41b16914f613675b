"""One training of ``learning.py`` or ``learning_suite.py``, in a process of its own: ours, TRL's or AgileRL's.

``python learning_side.py SIDE TRAINING`` takes a JSON object and prints one as its last line. Each side imports what it
needs and nothing more. All play the same classes of environments, which import the standard library alone.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

BORN = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from learning_tasks import EVERY, GROUP

WINDOW = 3
"""Rollouts over which success is averaged."""

_NUMBERS = count()
"""Numbers of the environments of a training."""


class Scored:
    """An environment that adds the success of each episode to a list at its end.

    Args:
        task: Name of a task.
        outcomes: The list, which all environments of a training share.
        begun: Gets the options of ``reset`` of the same episodes.
    """

    def __init__(self, task: str, outcomes: list[bool], begun: list[Any] | None = None):
        self._outcomes, self._begun = outcomes, [] if begun is None else begun
        self._game: Any = EVERY[task].make(next(_NUMBERS))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; the seed chooses the start state."""
        self._options = options
        return self._game.reset(seed, options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an answer."""
        observation, reward, terminated, truncated, info = self._game.step(action)
        if terminated or truncated:
            self._outcomes.append(bool(info["success"]))
            self._begun.append(self._options)
        return observation, reward, terminated, truncated, info


class Progress:
    """The success of each rollout, and whether the training has arrived.

    Args:
        episodes: Of a rollout.
        goal: Mean success over the last ``WINDOW`` rollouts that ends the training.
        budget: Episodes after which it ends anyway.
    """

    def __init__(self, episodes: int, goal: float, budget: int):
        self.outcomes: list[bool] = []
        self.begun: list[Any] = []
        self._episodes, self._goal, self._budget = episodes, goal, budget

    def forget(self) -> None:
        """Forget all episodes."""
        self.outcomes.clear()
        self.begun.clear()

    def curve(self) -> list[float]:
        """Return the success of each rollout."""
        size = self._episodes
        return [sum(self.outcomes[i : i + size]) / size for i in range(0, len(self.outcomes) - size + 1, size)]

    def by_start(self, rows: Sequence[Any], rollouts: int) -> list[float | None]:
        """Return the success of each start state over the last rollouts; None where none began."""
        last = rollouts * self._episodes
        pairs = list(zip(self.begun, self.outcomes, strict=True))[-last:]
        found = [[success for begun, success in pairs if begun == row] for row in rows]
        return [round(sum(one) / len(one), 3) if one else None for one in found]

    def arrived(self) -> bool:
        """Return True if the goal is reached."""
        last = self.curve()[-WINDOW:]
        return len(last) == WINDOW and sum(last) / WINDOW >= self._goal

    def ended(self) -> bool:
        """Return True if the goal is reached or the budget is spent."""
        return self.arrived() or len(self.outcomes) >= self._budget


def _arguments(folder: str, episodes: int, budget: int, rate: float, seed: int) -> dict[str, Any]:
    """Arguments that ours and TRL's share."""
    return {
        "output_dir": folder,
        "max_steps": 16 * budget // episodes,  # the budget ends it
        "per_device_train_batch_size": episodes,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "seed": seed,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _stopping(progress: Progress) -> Any:
    """A callback that ends the training when it has arrived."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.forget()  # an episode that ours plays when it is made, to try the environment

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = progress.ended()

    return Stop()


def ours(
    task: str, model: str, folder: str, lora: dict[str, Any], progress: Progress, imported: Callable[[], None],
    options: dict[str, Any], algorithm: str = "grpo", **common: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train with this package's trainer of an algorithm, and return its log."""
    from datasets import Dataset
    from peft import LoraConfig

    from agile_trainers.trainers import find_algorithm

    kind = find_algorithm(algorithm)  # which imports it
    imported()
    game = EVERY[task]
    arguments = _arguments(folder, **common) | {"max_turns": game.turns, "max_new_tokens": game.new_tokens}
    rows = list(game.rows)
    if kind.config_class.groupless:  # an episode of each row in place of a group
        arguments["num_generations"], rows = 1, rows * GROUP
    trainer = kind(
        model=model,
        environment=lambda: Scored(task, progress.outcomes, progress.begun),
        args=kind.config_class(**arguments | options),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM"),
        callbacks=[_stopping(progress)],
    )
    trainer.train()
    return trainer.state.log_history


class Rollout:
    """A ``rollout_func`` as a user of TRL writes it: ``model.generate`` on the conversations so far, turn by turn.

    Args:
        task: Name of the task.
        progress: Takes the outcomes.
        episodes: Of a batch.
    """

    def __init__(self, task: str, progress: Progress, episodes: int):
        self._environments = [Scored(task, progress.outcomes, progress.begun) for _ in range(episodes)]
        self._rows, self._new_tokens = EVERY[task].rows, EVERY[task].new_tokens

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play an episode for each prompt, which is the number of a start state."""
        import torch
        from trl.models.utils import unwrap_model_for_generation

        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
            model.eval()
            played = self._play(model, trainer.processing_class, [int(prompt) for prompt in prompts])
            model.train()
        return played

    def _play(self, model: Any, tokenizer: Any, starts: list[int]) -> dict[str, Any]:
        games = list(zip(self._environments, starts, strict=True))
        firsts = [game.reset(None, self._rows[start])[0] for game, start in games]
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": first}], add_generation_prompt=True, return_dict=False
            )
            for first in firsts
        ]
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        returns = [0.0] * len(prompts)
        active = list(range(len(prompts)))
        while active:
            answers = self._answers(model, tokenizer, [prompts[i] + completions[i] for i in active])
            still = []
            for i, answer in zip(active, answers, strict=True):
                completions[i] += answer
                masks[i] += [1] * len(answer)
                text = tokenizer.decode(answer, skip_special_tokens=True)
                observation, reward, terminated, truncated, _ = self._environments[i].step(text)
                returns[i] += reward
                if not (terminated or truncated):
                    end = "" if answer[-1] == tokenizer.eos_token_id else tokenizer.eos_token
                    delimited = f"{end}\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"
                    between = tokenizer.encode(delimited)
                    completions[i] += between
                    masks[i] += [0] * len(between)
                    still.append(i)
            active = still
        return {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
            "episode_return": returns,
        }

    def _answers(self, model: Any, tokenizer: Any, conversations: list[list[int]]) -> list[list[int]]:
        inputs = tokenizer.pad({"input_ids": conversations}, padding_side="left", return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=self._new_tokens, do_sample=True)
        answers = ids[:, inputs["input_ids"].size(1) :].tolist()
        end = tokenizer.eos_token_id
        return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]


def trl(
    task: str, model: str, folder: str, lora: dict[str, Any], progress: Progress, imported: Callable[[], None],
    options: dict[str, Any], **common: Any,
) -> None:  # fmt: skip
    """Train with TRL's ``GRPOTrainer``."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    imported()

    def episode_return(episode_return: list[float], **_: Any) -> list[float]:
        return episode_return

    starts = range(len(EVERY[task].rows))
    GRPOTrainer(
        model=model,
        reward_funcs=episode_return,
        args=GRPOConfig(**_arguments(folder, **common) | {"disable_dropout": True} | options),
        train_dataset=Dataset.from_dict({"prompt": [str(start) for start in starts]}),
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM"),
        rollout_func=Rollout(task, progress, common["episodes"]),
        callbacks=[_stopping(progress)],
    ).train()


class _Ended(Exception):
    """AgileRL's loop has no other way to be ended by success."""


def agilerl(
    task: str, model: str, folder: str, lora: dict[str, Any], progress: Progress, imported: Callable[[], None],
    options: dict[str, Any], episodes: int, budget: int, rate: float, seed: int,
) -> None:  # fmt: skip
    """Train with AgileRL's ``GRPO`` and ``train_llm_rollout``, with the cheapest of its settings for this."""
    from agilerl_side import make_agent  # it sets a switch of AgileRL

    # isort: split
    from agilerl.llm_envs import RolloutHarness
    from agilerl.training.llm.rollout import train_llm_rollout
    from peft import LoraConfig
    from transformers import AutoTokenizer

    imported()
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = EVERY[task].turns
    agent = make_agent(
        "GRPO",
        model,
        lr=rate,
        seed=seed,
        lora_config=LoraConfig(**lora, task_type="CAUSAL_LM"),
        batch_size=episodes // GROUP,
        group_size=GROUP,
        micro_batch_size_per_gpu=episodes,
        mini_batch_size=episodes,
        max_output_tokens=EVERY[task].new_tokens,
        max_model_len=256,
        max_grad_norm=1.0,
        top_k=0,
        **options,
    )
    learn = agent.learn

    def learn_and_stop(*args: Any, **kwargs: Any) -> Any:
        result = learn(*args, **kwargs)
        if progress.ended():
            raise _Ended
        return result

    agent.learn = learn_and_stop
    with suppress(_Ended):
        train_llm_rollout(
            pop=[agent],
            max_turns=turns,
            env_factory=lambda: RolloutHarness.local(
                env=Scored(task, progress.outcomes), tokenizer=tokenizer, max_turns=turns, max_model_len=256
            ),
            max_steps=2 * budget * turns,
            evaluation_interval=budget,  # never
            verbose=False,
        )


SIDES: dict[str, Callable[..., Any]] = {"ours": ours, "TRL": trl, "AgileRL": agilerl}


def main() -> None:
    """Train as the arguments say, and print what came of it."""
    side, training = sys.argv[1], json.loads(sys.argv[2])
    goal, episodes = training.pop("goal"), training["episodes"]
    progress = Progress(episodes, goal, training["budget"])
    imported: list[tuple[float, float]] = []
    SIDES[side](
        progress=progress, imported=lambda: imported.append((time.process_time(), time.perf_counter())), **training
    )
    processor, clock = imported[0]
    result = {
        "arrived": progress.arrived(),
        "episodes": len(progress.outcomes),
        "curve": [round(success, 4) for success in progress.curve()],
        "cpu": round(time.process_time() - processor, 2),
        "wall": round(time.perf_counter() - clock, 2),
        "imports": round(processor, 2),
        "version": "" if side == "ours" else version(side.lower()),
    }
    print(f"\n{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
