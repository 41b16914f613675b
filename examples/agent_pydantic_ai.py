"""Train the agent of archivist.py, which is written with pydantic-ai: SFT teaches the format, multi-turn GRPO the work.

    pip install agile-trainers 'pydantic-ai-slim[openai]'
    python examples/agent_pydantic_ai.py     # a tiny model made in code, on CPU

Writes the adapter, its model card and the episodes to --output_dir, and prints the success before and after training.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tiny tensors a second thread costs more than it saves

import archivist
from httpx2 import AsyncClient
from peft import LoraConfig
from pydantic_ai import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agile_environments.archive import careless_policy, draw_register, expert_policy
from agile_trainers.embedded import make_embedded_model, sft_trainer, texts_of
from agile_trainers.envs.agent import Agent, Model, Task
from agile_trainers.evaluation.scripted_policies import demonstrate_agent
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.types import Message


async def solve(model: Model, task: Task) -> dict[str, Any]:
    """Ask the agent about a register, and reward the right answer."""
    register, person = draw_register(task, "easy")
    async with AsyncClient(verify=False) as http:  # http:// needs no certificates, which take 25 ms to load
        provider = OpenAIProvider(base_url=model.base_url, api_key=model.api_key, http_client=http)
        try:
            said = await archivist.ask(
                f"Which animal does {person} keep ?", register, OpenAIChatModel(model.name, provider=provider)
            )
        except UnexpectedModelBehavior:  # of the policy: a call of a tool that does not exist, again and again
            said = ""
    return {"reward": float(said == register[person]), "success": said == register[person]}


agent = Agent(solve)


def beginner(messages: list[Message], rng: random.Random) -> str:
    """Looks up anybody and notes down anything, but for one time in four, when it does what it should."""
    return (expert_policy if rng.random() < 0.25 else careless_policy)(messages, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/agent_pydantic_ai"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft_steps", type=int, default=200)
    parser.add_argument("--rl_steps", type=int, default=40)
    options = parser.parse_args()
    folder, seed = options.output_dir, options.seed

    rows = demonstrate_agent(agent, beginner, range(300))
    model = make_embedded_model(folder / "untrained", texts=texts_of(rows), seed=seed)
    sft = sft_trainer(model, rows, folder / "sft", seed=seed, max_steps=options.sft_steps)
    sft.train()
    sft.save_model()

    trainer = MultiTurnGRPOTrainer(
        model=str(folder / "sft"),
        environment=agent,
        args=MultiTurnGRPOConfig(
            output_dir=str(folder),
            seed=seed,
            max_steps=options.rl_steps,
            num_iterations=1,  # as the figures of docs/tutorial/agent.md were measured
            max_turns=5,
            max_new_tokens=40,
            per_device_train_batch_size=128,
            num_generations=16,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            beta=0.1,
            num_eval_episodes=256,
            use_cpu=True,
            bf16=False,
            logging_steps=5,
            report_to="none",
        ),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    before = trainer.evaluate()["eval_success"]
    trainer.train()
    after = trainer.evaluate()["eval_success"]
    trainer.save_model()
    print(f"success before {before:.2f}, after {after:.2f}")


if __name__ == "__main__":
    main()
