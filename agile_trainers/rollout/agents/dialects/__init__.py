"""Dialects of chat clients: each reads a request's body, and writes an answer whole or as the events of a stream."""

from agile_trainers.rollout.agents.dialects.base import Dialect
from agile_trainers.rollout.agents.dialects.chat import CHAT
from agile_trainers.rollout.agents.dialects.messages import MESSAGES
from agile_trainers.rollout.agents.dialects.responses import RESPONSES

DIALECTS: tuple[Dialect, ...] = (CHAT, RESPONSES, MESSAGES)
