"""Episodes of several turns on a chat template, as a server of the model renders them."""

from __future__ import annotations

from typing import Any

from chat_templates import tokenizer_for
from episodes import Scripted, go_on, specs

from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.chat.template_check import THOUGHT, answers_as_sampled
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.base import GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import Limits
from agile_trainers.types import Message

SERVED = [
    "deepseek_r1_distill", "deepseekv3", "deepseekv3_training", "diffusion_gemma", "diffusion_gemma_training",
    "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "glm4moe", "glm4moe_training", "lfm2_2_5",
    "lfm2_2_5_v2", "lfm2_2_5_vl", "muse_glimmer", "muse_glimmer_training", "nemotron_3_5_lightning",
    "nemotron_3_5_lightning_training", "nemotron_3_nano", "nemotron_3_nano_training", "nemotron_3_super",
    "nemotron_3_super_training", "nemotron_3_ultra", "nemotron_3_ultra_training", "qwen3", "qwen3_5_nothink",
    "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_8_training",
]  # fmt: skip
"""The templates that rewrite earlier turns and are served."""


class Play:
    """Four turns of answers as the template lets them be sampled, and what a server would read at each.

    Args:
        name: The template's.
        role: Of the observations.
        thinking: Whether the answers think.
        said: Replaces the probes in the answers, for longer ones.
        options: Of the renderer.
    """

    def __init__(
        self, name: str, role: str, thinking: bool, said: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.tokenizer = tokenizer_for(name)
        self.chat = ChatRenderer(self.tokenizer, on_rewrite="fork", **options)
        self.requests: list[GenerationRequest] = []
        prompt: list[Message] = [{"role": "user", "content": "guess"}]
        kinds = list(answers_as_sampled(self.chat._render, prompt, self.chat._escaper.texts, thinking=thinking))
        thoughtful = [kind for kind in kinds if THOUGHT in kind.text]
        self.answer = (thoughtful or kinds)[-1] if thinking else kinds[-1]
        text = self.answer.text
        for probe, words in (said or {}).items():
            text = text.replace(probe, words)
        ended = self.tokenizer.encode(text, add_special_tokens=False)
        end = self.tokenizer.encode(self.answer.end, add_special_tokens=False) if self.answer.end else []
        ids = [*ended, *(end or self.chat.eos_token_ids[:1])]
        observations = ["higher, b", "lower:\nlook", "done", "word"] if said is None else ["guess higher " * 10] * 4
        answers = [go_on([{"role": role, "content": text}] if role != "user" else text, 1.0) for text in observations]
        engine = RolloutEngine(EnvironmentPool(Scripted), self.chat, Limits(4, 2000, 100_000))

        def script(request: GenerationRequest) -> list[int]:
            self.requests.append(request)
            return list(ids)

        (self.episode,) = engine.run(specs({"start": ("guess", {}), "answers": answers}), ScriptedGenerator(script))
        assert self.episode.error is None
        self.served: list[list[int]] = []
        for k in range(len(self.requests)):
            conversation = list(prompt)
            for turn in self.episode.turns[:k]:
                conversation += [{"role": "assistant", "content": turn.text}, *turn.said[1:]]
            self.served.append(self.rendered(conversation))

    def rendered(self, conversation: list[Message]) -> list[int]:
        text = self.chat._render(conversation)  # `apply_chat_template` with the options of this renderer
        return self.tokenizer.encode(text, add_special_tokens=False)
