"""A small model that thinks before it answers, with Qwen3's own chat template."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.embedded import make_embedded_model

TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
THOUGHTS = ("low", "high", "odd")


def make_thinker(folder: Path) -> Path:
    """Fit a model to ``<think>\\n...\\n</think>\\n\\nDIGIT<|im_end|>`` after any prompt, in seconds on a CPU."""
    make_embedded_model(folder, texts=["guess again <think> </think> low high odd"] * 4, vocab_size=420, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rng = random.Random(0)
    for _ in range(60):
        rows = [_conversation(tokenizer, rng) for _ in range(6)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        labels = torch.tensor([[-100] * n + ids[n:] + [-100] * (width - len(ids)) for ids, n in rows])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def _conversation(tokenizer: Any, rng: random.Random) -> tuple[list[int], int]:
    """Return ids of a conversation as it is served, and the number of those before its last answer."""
    messages: list[dict[str, str]] = []
    for _ in range(rng.randint(1, 2)):
        messages += [{"role": "user", "content": rng.choice(["start", "again", "more"])}, _answer(rng)]
    before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(before, add_special_tokens=False)
    answer = tokenizer.encode(messages[-1]["content"] + "<|im_end|>", add_special_tokens=False)
    return prompt + answer, len(prompt)


def _answer(rng: random.Random) -> dict[str, str]:
    thought = " ".join(rng.choices(THOUGHTS, k=rng.randint(1, 4)))
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{rng.randint(0, 9)}"}


class ThreeTurns:
    """Three turns; odd digits are rewarded."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return "start", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        digit = action.strip()[-1:]
        return "again", float(digit in "13579"), self.turn == 3, False, {}
