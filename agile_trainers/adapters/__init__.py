"""Several adapters on one frozen base: the policy, its reference, a critic with a value head."""

from .critic import ActorCriticOutput, add_critic, add_value_head
from .roles import CRITIC, POLICY, REFERENCE, AdapterRouter, thaw

__all__ = [
    "CRITIC",
    "POLICY",
    "REFERENCE",
    "ActorCriticOutput",
    "AdapterRouter",
    "add_critic",
    "add_value_head",
    "thaw",
]
