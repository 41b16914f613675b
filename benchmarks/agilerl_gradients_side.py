"""AgileRL's side of ``agilerl_gradients.py``: a process in ``.venv-agilerl`` that runs docs/agilerl_scripts.md."""

# ruff: noqa: E402

from __future__ import annotations

import ast
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import agilerl
import numpy as np
import torch

agilerl.HAS_LIGER_KERNEL = False  # see agilerl_side.py

from agilerl_names import common_name
from counting import reading_gradients
from other_side import serve
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def run(script: str, algorithm: str, folder: str) -> dict[str, Any]:
    """Run a whole script; return the optimizer steps of each call of ``learn`` and the settings of each step.

    Args:
        script: Its source.
        algorithm: Class of its agent, in ``agilerl.algorithms``.
        folder: Where it runs.
    """
    from agilerl import algorithms

    os.chdir(folder)
    kind = getattr(algorithms, algorithm)
    learn, steps, learned = kind.learn, list[Any](), list[int]()

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(steps)
        result = learn(self, *args, **kwargs)
        learned.append(len(steps) - before)
        return result

    hook = register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(settings(optimizer)))
    kind.learn = counted
    try:
        exec(compile(script, "script", "exec"), {"torch": torch})
    finally:
        kind.learn = learn
        hook.remove()
    return {"steps_per_rollout": learned, "steps": steps}


def settings(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Rate, weight decay, betas, epsilon and number of parameters of each group that has some."""
    names = ("lr", "weight_decay", "betas", "eps")
    groups = [[*(group[name] for name in names), len(group["params"])] for group in optimizer.param_groups]
    return sorted([group for group in groups if group[-1]], key=str)


class Side:
    """The agent of a script."""

    def make(self, script: str, weights: str) -> None:
        """Make the agent of a script without training it, and give it weights by their common names."""
        tree = ast.parse(script)
        tree.body = [node for node in tree.body if "train_llm_rollout(" not in ast.unparse(node)]
        names: dict[str, Any] = {"torch": torch}
        exec(compile(tree, "script", "exec"), names)
        self.agent = names["agent"]
        wanted = load_file(weights)
        for name, parameter in self.agent.actor.named_parameters():
            if (common := common_name(name)) in wanted:
                parameter.data.copy_(wanted.pop(common))
        if wanted:
            raise ValueError(f"AgileRL's model lacks {sorted(wanted)[:3]}.")

    def learn(self, batch: str, order: list[list[int]], folder: str) -> dict[str, Any]:
        """Train once; write each step's gradient, before clipping and after it, and the weights in the end.

        Args:
            batch: An ``.npz`` with ``token_ids`` (B, T), ``action_masks`` (B, T-1), ``turn_ids`` (B, T-1), ``rewards``
                (B, K) and maybe ``sampling`` (B, T-1), log-probabilities of the sampler.
            order: Rows of each micro-batch of an epoch, in the order in which they are trained on.
            folder: For the files.
        """
        arrays = {name: torch.from_numpy(value) for name, value in np.load(batch).items()}
        rows = np.concatenate([np.array(one) for one in order])
        self.agent._epoch_orders = lambda batch_idxs, epochs, aligned: [rows.copy() for _ in range(epochs)]
        sampling = None
        if "sampling" in arrays:
            pairs = zip(arrays["sampling"], arrays["action_masks"], strict=True)
            sampling = [one[mask.bool()] for one, mask in pairs]
        model, steps = self.agent.actor, list[Any]()
        with reading_gradients(model) as found:

            def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                clipped = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
                number = len(steps)
                for kind, gradient in (("gradient", found), ("clipped", clipped)):
                    whole = {common_name(n): g.contiguous() for n, g in gradient.items() if common_name(n)}
                    save_file(whole, Path(folder) / f"{kind}-{number}.safetensors")
                steps.append(settings(optimizer))
                found.clear()

            hook = register_optimizer_step_pre_hook(step)
            try:
                self.agent.learn(
                    (arrays["token_ids"], arrays["action_masks"].bool(), arrays["rewards"]),
                    turn_ids=arrays["turn_ids"],
                    sampling_logps=sampling,
                )
            finally:
                hook.remove()
        weights = {common_name(n): p.detach().clone() for n, p in model.named_parameters() if common_name(n)}
        save_file(weights, Path(folder) / "weights.safetensors")
        return {"steps": steps}


def versions() -> dict[str, str]:
    """Versions of AgileRL and of the libraries below it."""
    return {name: version(name) for name in ("agilerl", "torch", "transformers", "peft")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    side = Side()
    serve({"versions": versions, "run": run, "make": side.make, "learn": side.learn})
