"""Loads the teachers of a run: adapters on the policy's base, models of their own, servers, or the policy itself."""

from __future__ import annotations

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
from agile_trainers.adapters.roles import POLICY, REFERENCE, TEACHER, base_model
from agile_trainers.adapters.untrusted import naming_folder
from agile_trainers.config.rules import ITSELF, THE_REFERENCE, is_address, teachers_of
from agile_trainers.objectives.distillation import SAMPLED
from agile_trainers.packing.packer import adds_virtual_tokens
from agile_trainers.sampling.teacher_server import TeacherServer
from agile_trainers.step.dropout import switch_off_noise
from agile_trainers.step.teacher import LoadedTeacher

logger = logging.get_logger(__name__)


def load_teachers(args: Any, accelerator: Accelerator, policy: Any, tokenizer: Any) -> list[LoadedTeacher]:
    """Load the teachers that ``args.teacher`` names, each once. One adapter is named ``teacher``, several ``teacher_0``, ...

    Args:
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's.
        policy: The policy, which gets the adapter of a teacher that is one.
        tokenizer: The policy's.

    Raises:
        ValueError: If the teacher has another tokenizer, does not fit the policy, or cannot be loaded.
    """
    names = teachers_of(args)
    if names and args.teacher_gradient not in SAMPLED and adds_virtual_tokens(policy):
        raise ValueError(
            f"teacher_gradient={args.teacher_gradient!r} reads hidden states, whose columns a prompt-learning adapter "
            "shifts. Set teacher_gradient='immediate', or train a LoRA adapter."
        )
    adapters = [TEACHER] if len(names) == 1 else [f"{TEACHER}_{index}" for index in range(len(names))]
    return [_load(name, adapter, args, accelerator, policy, tokenizer) for name, adapter in zip(names, adapters)]


def _load(
    teacher: str, adapter: str, args: Any, accelerator: Accelerator, policy: Any, tokenizer: Any
) -> LoadedTeacher:
    if teacher == ITSELF:
        return LoadedTeacher()
    if teacher == THE_REFERENCE:
        return LoadedTeacher(adapter=REFERENCE)
    if is_address(teacher):
        return LoadedTeacher(server=TeacherServer(teacher, tokenizer))
    saved = find_adapters(teacher)
    if saved is not None:
        if not isinstance(policy, PeftModel):
            raise ValueError(
                f"teacher={teacher!r} is an adapter, and the policy is trained whole. Pass `peft_config`, so that both "
                "are adapters on one base, or merge the teacher into a model of its own (PEFT's merge_and_unload)."
            )
        if changes_base(policy.peft_config[POLICY]):
            raise ValueError(
                f"teacher={teacher!r} is an adapter on the base that the policy's initialization has changed "
                f"(init_lora_weights={policy.peft_config[POLICY].init_lora_weights!r}). Leave init_lora_weights unset."
            )
        named, own = saved.config.base_model_name_or_path, base_model(policy).name_or_path
        if named != own:
            logger.warning("The teacher %s was trained on %r, and runs on %r.", teacher, named, own)
        check_same_tokenizer(teacher, load_tokenizer(saved, args.trust_remote_code), tokenizer)
        load_frozen(policy, adapter, saved.folders[POLICY])
        fuse(policy)
        return LoadedTeacher(adapter=adapter)
    if args.deepspeed or args.fsdp:
        raise ValueError(
            f"teacher={teacher!r} is a model of its own, and DeepSpeed and FSDP divide the policy alone. Use a teacher "
            "that is an adapter on the policy's base, or several processes without them."
        )
    trusted = {"trust_remote_code": args.trust_remote_code}
    with naming_folder(teacher):
        check_same_tokenizer(teacher, AutoTokenizer.from_pretrained(teacher, **trusted), tokenizer)
        dtype = torch.float32 if args.cast_lm_head_to_fp32 else base_model(policy).dtype
        model = create_model_from_path(teacher, dtype=dtype, device_map=None, **trusted)
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
