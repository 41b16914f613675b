"""Several adapters on one frozen base: the policy, its reference, a critic with a value head."""

from agile_trainers.adapters.copies import add_reference, copy_adapter
from agile_trainers.adapters.critic import ActorCriticOutput, add_critic, add_value_head
from agile_trainers.adapters.loading import (
    SavedAdapters,
    find_adapters,
    load_frozen,
    load_policy,
    parent_of,
    restore_adapter,
    restore_left_out,
    start_critic,
)
from agile_trainers.adapters.lora_settings import (
    check_repeatable,
    explaining_scope,
    plain_copies,
    starts_elsewhere,
    within_scope,
)
from agile_trainers.adapters.roles import (
    CRITIC,
    POLICY,
    REFERENCE,
    TEACHER,
    AdapterRouter,
    belongs_to,
    check_adapter,
    running,
    unfreeze,
    without_teacher,
)
from agile_trainers.adapters.sharding import assign_parameter, gathered_once, gathering_adapters

__all__ = [
    "CRITIC",
    "POLICY",
    "REFERENCE",
    "TEACHER",
    "ActorCriticOutput",
    "AdapterRouter",
    "SavedAdapters",
    "add_critic",
    "add_reference",
    "add_value_head",
    "assign_parameter",
    "belongs_to",
    "check_adapter",
    "check_repeatable",
    "copy_adapter",
    "explaining_scope",
    "find_adapters",
    "gathered_once",
    "gathering_adapters",
    "load_frozen",
    "load_policy",
    "parent_of",
    "plain_copies",
    "restore_adapter",
    "restore_left_out",
    "running",
    "start_critic",
    "starts_elsewhere",
    "unfreeze",
    "within_scope",
    "without_teacher",
]
