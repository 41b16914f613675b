"""Every episode of a transformer over five tokens, also where a filter sampled, with the distributions behind its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from agile_trainers.objectives.kept_sets import encode_sets
from agile_trainers.objectives.segments import spread_to_tokens
from agile_trainers.packing.forward import PackedForward
from agile_trainers.packing.kept_head import KeptHead
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.generators import SamplingSettings
from agile_trainers.rollout.generators.transformers.decoding import Sampler
from agile_trainers.train_batch import TrainBatch
from agile_trainers.types import StopReason, Trajectory, Turn, TurnBatch

VOCAB, PROMPT, OBSERVED, END = 5, 4, 3, 1
LAYOUTS = {"two turns": (1, 2), "three turns": (1, 1, 1)}
FILTERS = {
    "top_k": SamplingSettings(top_k=3, temperature=0.8),
    "top_p": SamplingSettings(top_p=0.85),
    "min_p": SamplingSettings(min_p=0.1),
    "min_new_tokens": SamplingSettings(min_new_tokens=1),
    "all": SamplingSettings(top_k=4, top_p=0.95, min_p=0.1, min_new_tokens=2, temperature=1.3),
}


def policy(seed: int, temperature: float) -> Qwen2ForCausalLM:
    """In float64, with the head that the trainer adds."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(**shape, vocab_size=VOCAB, num_key_value_heads=1, initializer_range=0.6, pad_token_id=0)
    model = Qwen2ForCausalLM(config).double().eval()
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return model


def kept_by_definition(logits: torch.Tensor, made: int, settings: SamplingSettings) -> torch.Tensor:
    """(V,) bool, one filter after the other, each on what the one before has left."""
    scores = logits.detach().double() / settings.temperature
    if made < settings.min_new_tokens:
        scores[END] = -torch.inf
    kept = scores > -torch.inf
    best = scores.argsort(descending=True).tolist()
    for token in best[settings.top_k :] if settings.top_k else ():
        kept[token] = False
    mass, probs = 0.0, scores.masked_fill(~kept, -torch.inf).softmax(-1)
    for token in best:
        kept[token] &= mass < settings.top_p
        mass += float(probs[token])
    probs = scores.masked_fill(~kept, -torch.inf).softmax(-1)
    return kept & (probs >= (settings.min_p or 0.0) * probs.max())


@dataclass
class World:
    """All episodes of a policy under a filter."""

    model: Qwen2ForCausalLM
    settings: SamplingSettings
    lengths: tuple[int, ...]
    episodes: list[Trajectory]
    masks: list[torch.Tensor]
    """(T', V) bool each, the kept set of each action token."""

    @classmethod
    def of(cls, model: Qwen2ForCausalLM, settings: SamplingSettings, lengths: tuple[int, ...]) -> World:
        sampler, world = Sampler(settings, [END]), cls(model, settings, lengths, [], [])
        turns = [k for k, length in enumerate(lengths) for _ in range(length)]
        firsts = [i for i in range(len(turns)) if i == 0 or turns[i] != turns[i - 1]]

        def extend(completion: list[int], actions: list[int], sets: list[bytes], masks: list[torch.Tensor]) -> None:
            i = len(actions)
            if i == len(turns):
                world._add(completion, sets, masks)
                return
            if i and i in firsts:
                completion, sets = [*completion, OBSERVED], [*sets, b""]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[PROMPT, *completion]])).logits[:, -1]
            made = i - max(first for first in firsts if first <= i)
            hold = torch.tensor([made < settings.min_new_tokens])
            (kept,) = encode_sets(sampler.distribution(logits, None, hold) > -torch.inf)
            mask = kept_by_definition(logits[0], made, settings)
            for token in mask.nonzero()[:, 0].tolist():
                extend([*completion, token], [*actions, token], [*sets, kept], [*masks, mask])

        extend([], [], [], [])
        return world

    def _add(self, completion: list[int], sets: list[bytes], masks: list[torch.Tensor]) -> None:
        turns, start = [], 0
        for length in self.lengths:
            # Each reward is a number of its own for all that came before.
            noise = torch.Generator().manual_seed(hash(tuple(completion[: start + length])) % 2**31)
            turns.append(Turn(start, start + length, "", "stop", float(torch.randn((), generator=noise))))
            start += length + 1
        episode = Trajectory([PROMPT], completion, [0.0] * len(completion), turns, StopReason.TERMINATED, kept=sets)
        self.episodes.append(episode)
        self.masks.append(torch.stack(masks))

    def batch(self) -> TurnBatch:
        return collate(self.episodes, pad_token_id=0, end_token_id=END)

    def distributions(self, model: Qwen2ForCausalLM | None = None) -> torch.Tensor:
        """(N, T', V), log-probabilities over the recorded sets before each action token, of another policy if asked."""
        ids = torch.tensor([[PROMPT, *episode.completion_ids] for episode in self.episodes])
        logits = (model or self.model)(input_ids=ids[:, :-1]).logits / self.settings.temperature
        actions = self.batch().action_mask[0]
        return logits[:, actions].masked_fill(~torch.stack(self.masks), -torch.inf).log_softmax(-1)

    def log_probs(self, model: Qwen2ForCausalLM | None = None) -> torch.Tensor:
        """(N, T')."""
        batch = self.batch()
        actions = batch.completion_ids[:, batch.action_mask[0]]
        return self.distributions(model).gather(-1, actions[..., None])[..., 0]

    def probability(self) -> torch.Tensor:
        """(N,) of each episode."""
        return self.log_probs().sum(1).exp()

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(self.model.parameters()))])


def admit(trainer: Any, model: Qwen2ForCausalLM, settings: SamplingSettings) -> None:
    """Let the trainer's forward passes read a model of five tokens."""
    trainer.packer._forwards[id(model)] = PackedForward(model, KeptHead(settings.temperature))


def micro_batch(world: World, advantages: torch.Tensor, **columns: Any) -> dict[str, torch.Tensor]:
    batch = world.batch()
    fields: dict[str, Any] = {name: getattr(batch, name) for name in ("prompt_ids", "prompt_mask", "completion_ids")}
    return TrainBatch(
        **fields,
        completion_mask=batch.completion_mask,
        tool_mask=batch.action_mask.long(),
        turn_ids=batch.turn_ids,
        sampling_per_token_logps=torch.zeros_like(batch.sampling_logprobs),
        advantages=spread_to_tokens(advantages, batch.turn_ids),
        num_items_in_batch=batch.action_mask.sum().float(),
        kept_words=batch.kept_words,
        kept_sizes=batch.kept_sizes,
        **columns,
    ).to_trl()


class Stopping(World):
    """All episodes whose turns are of ``lengths`` tokens; one that begins with the end token is of that alone, the last."""

    @classmethod
    def of(cls, model: Any, settings: SamplingSettings, lengths: tuple[int, ...]) -> Stopping:
        world = cls(model, settings, lengths, [], [])

        def extend(completion: list[int], turns: list[Turn]) -> None:
            if len(turns) == len(lengths) or (turns and completion[-1] == END and turns[-1].end - turns[-1].start == 1):
                values, sets = [0.0] * len(completion), [b""] * len(completion)  # with sets the head is in float64
                episode = Trajectory([PROMPT], completion, values, turns, StopReason.TERMINATED, kept=sets)
                world.episodes.append(episode)
                return
            before = [*completion, OBSERVED] if turns else completion
            for first in range(VOCAB):
                answers = [[first]]
                if first != END:
                    for _ in range(lengths[len(turns)] - 1):
                        answers = [[*answer, token] for answer in answers for token in range(VOCAB)]
                for answer in answers:
                    turn = Turn(len(before), len(before) + len(answer), "", "stop")
                    extend([*before, *answer], [*turns, turn])

        extend([], [])
        return world

    def log_softmax(self, model: Any) -> torch.Tensor:
        """(N, T, V) of the distribution before each completion token."""
        batch = self.batch()
        ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
        mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
        logits = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1]).logits
        return (logits / self.settings.temperature).log_softmax(-1)


def taken(world: Any, distributions: torch.Tensor) -> torch.Tensor:
    """(N, T) of the sampled tokens, 0 elsewhere."""
    batch = world.batch()
    log_probs = distributions.gather(-1, batch.completion_ids[..., None])[..., 0]
    return torch.where(batch.action_mask, log_probs, 0.0)


def probabilities(world: Any) -> torch.Tensor:
    """(N,)."""
    return taken(world, world.log_softmax(world.model)).sum(1).exp()


@cache  # a model is made ready once
def forward_of(model: Any, temperature: float) -> PackedForward:
    return PackedForward(model, KeptHead(temperature))


PAID_LAYOUTS = {"one token": (1,), "two turns": (1, 1), "two tokens": (2,)}


def rewarded(lengths: tuple[int, ...]) -> Stopping:
    """All episodes, whose last turn is paid by an arbitrary table: half of them nothing."""
    world = Stopping.of(policy(2, 1.0), SamplingSettings(), lengths)
    for number, episode in enumerate(world.episodes):
        episode.turns[-1].reward = float((number * 7 + 3) % 4) / 2 if number % 2 else 0.0
    return world
