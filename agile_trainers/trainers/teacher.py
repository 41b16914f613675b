"""Loads the teacher of a run: an adapter on the policy's base, a model of its own, or the policy itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from transformers import AutoTokenizer
from transformers.utils import logging
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from agile_trainers.adapters.fused import fuse
from agile_trainers.adapters.loading import find_adapters, load_frozen, load_tokenizer
from agile_trainers.adapters.lora_settings import changes_base
from agile_trainers.adapters.roles import POLICY, TEACHER, base_model
from agile_trainers.adapters.untrusted import naming_folder
from agile_trainers.config.rules import ITSELF
from agile_trainers.objectives.distillation import SAMPLED
from agile_trainers.packing.packer import adds_virtual_tokens
from agile_trainers.step.dropout import switch_off_noise

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class LoadedTeacher:
    """A teacher's weights: a model's, an adapter's or the policy's own."""

    model: Any = None
    """A frozen model; None where it is an adapter of the policy, or the policy."""
    adapter: bool = False
    """True if it is the policy's adapter ``teacher``."""


def load_teacher(args: Any, accelerator: Accelerator, policy: Any, tokenizer: Any) -> LoadedTeacher:
    """Load the teacher that ``args.teacher`` names.

    Args:
        args: A ``MultiTurnConfig`` with a teacher.
        accelerator: The trainer's.
        policy: The policy, which gets the adapter of a teacher that is one.
        tokenizer: The policy's.

    Raises:
        ValueError: If the teacher has another tokenizer, does not fit the policy, or cannot be loaded.
    """
    if args.teacher_gradient not in SAMPLED and adds_virtual_tokens(policy):
        raise ValueError(
            f"teacher_gradient={args.teacher_gradient!r} reads hidden states, whose columns a prompt-learning adapter "
            "shifts. Set teacher_gradient='immediate', or train a LoRA adapter."
        )
    if args.teacher == ITSELF:
        return LoadedTeacher()
    saved = find_adapters(args.teacher)
    if saved is not None:
        if not isinstance(policy, PeftModel):
            raise ValueError(
                f"teacher={args.teacher!r} is an adapter, and the policy is trained whole. Pass `peft_config`, so that both "
                "are adapters on one base, or merge the teacher into a model of its own (PEFT's merge_and_unload)."
            )
        if changes_base(policy.peft_config[POLICY]):
            raise ValueError(
                f"teacher={args.teacher!r} is an adapter on the base that the policy's initialization has changed "
                f"(init_lora_weights={policy.peft_config[POLICY].init_lora_weights!r}). Leave init_lora_weights unset."
            )
        named, own = saved.config.base_model_name_or_path, base_model(policy).name_or_path
        if named != own:
            logger.warning("The teacher %s was trained on %r, and runs on %r.", args.teacher, named, own)
        check_same_tokenizer(args.teacher, load_tokenizer(saved, args.trust_remote_code), tokenizer)
        load_frozen(policy, TEACHER, saved.folders[POLICY])
        fuse(policy)
        return LoadedTeacher(adapter=True)
    if args.deepspeed or args.fsdp:
        raise ValueError(
            f"teacher={args.teacher!r} is a model of its own, and DeepSpeed and FSDP divide the policy alone. Use a teacher "
            "that is an adapter on the policy's base, or several processes without them."
        )
    trusted = {"trust_remote_code": args.trust_remote_code}
    with naming_folder(args.teacher):
        check_same_tokenizer(args.teacher, AutoTokenizer.from_pretrained(args.teacher, **trusted), tokenizer)
        dtype = torch.float32 if args.cast_lm_head_to_fp32 else base_model(policy).dtype
        model = create_model_from_path(args.teacher, dtype=dtype, device_map=None, **trusted)
    model.requires_grad_(False).eval()
    switch_off_noise(model)
    add_fused_lm_head(model, temperature=args.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    return LoadedTeacher(model=accelerator.prepare_model(model, evaluation_mode=True))


def check_same_tokenizer(teacher: str, theirs: Any, ours: Any) -> None:
    """Check that a teacher reads the ids of the policy's tokens as the same tokens.

    Args:
        teacher: Its name, for the error.
        theirs: Its tokenizer; None if it has none of its own.
        ours: The policy's.

    Raises:
        ValueError: If a token has another id, or is in one of them only.
    """
    if theirs is None:
        return
    known, own = theirs.get_vocab(), ours.get_vocab()
    if known == own:
        return
    token = next(token for token in (*own, *known) if own.get(token) != known.get(token))
    raise ValueError(
        f"teacher={teacher!r} has another tokenizer: token {token!r} is {known.get(token)} there and {own.get(token)} here. "
        "The teacher scores the policy's own ids: choose one with the same tokenizer."
    )
