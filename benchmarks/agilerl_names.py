"""Names of weights that AgileRL's model and ours have in common. Only the standard library is imported."""

from __future__ import annotations

import re

_ROLES = {"default": "policy", "actor": "policy", "ref": "reference", "reference": "reference", "critic": "critic"}
_MATRIX = re.compile(r".*?(layers\.\d+\..*)\.lora_([AB])\.(\w+)\.weight$")
_HEAD = re.compile(r".*(?:value_head\.modules_to_save\.critic|v_head\.summary)\.(weight|bias)$")


def common_name(name: str) -> str:
    """Return the name of an adapter's matrix or of the value head without the parts that one side alone has.

    ``policy:layers.0.self_attn.q_proj.A``, ``value:weight``; empty for all other parameters.
    """
    if found := _HEAD.match(name):
        return f"value:{found[1]}"
    if (found := _MATRIX.match(name)) and found[3] in _ROLES:
        return f"{_ROLES[found[3]]}:{found[1]}.{found[2]}"
    return ""
