"""Several adapters on one frozen base: the policy, its reference, a critic with a value head."""

from .critic import ActorCriticOutput, add_critic, add_value_head
from .reference import add_reference, copy_adapter
from .roles import CRITIC, POLICY, REFERENCE, AdapterRouter, belongs_to, thaw
from .scope import explaining_scope, within_scope
from .sharding import every_adapter_trainable, gathered_once, write
from .start import check_repeatable, plain_copies, starts_elsewhere
from .warm_start import (
    SavedAdapters,
    find_adapters,
    load_policy,
    load_reference,
    parent_of,
    restore_adapter,
    start_critic,
)

__all__ = [
    "CRITIC",
    "POLICY",
    "REFERENCE",
    "ActorCriticOutput",
    "AdapterRouter",
    "SavedAdapters",
    "add_critic",
    "add_reference",
    "add_value_head",
    "belongs_to",
    "check_repeatable",
    "copy_adapter",
    "every_adapter_trainable",
    "explaining_scope",
    "find_adapters",
    "gathered_once",
    "load_policy",
    "load_reference",
    "parent_of",
    "plain_copies",
    "restore_adapter",
    "start_critic",
    "starts_elsewhere",
    "thaw",
    "within_scope",
    "write",
]
