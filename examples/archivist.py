"""An agent written with pydantic-ai. It looks up what it is asked, and remembers what it found by a note alone."""

from __future__ import annotations

from pydantic_ai import Agent, ModelMessage, ModelRequest, RunContext, ToolReturnPart, UserPromptPart
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.models import Model

scribe = Agent()


async def keep_a_note(context: RunContext[dict[str, str]], messages: list[ModelMessage]) -> list[ModelMessage]:
    """Replace the conversation by a note of it once something was looked up."""
    if not isinstance(messages[-1].parts[-1], ToolReturnPart):
        return messages
    note = await scribe.run("Write a note", model=context.model, message_history=messages)
    return [ModelRequest([UserPromptPart(f"{context.prompt}\n\nYour note :\n{note.output}")])]


archivist = Agent(deps_type=dict[str, str], capabilities=[ProcessHistory(keep_a_note)])


@archivist.tool
def look_up(context: RunContext[dict[str, str]], person: str) -> str:
    """Look up which animal a person keeps."""
    return context.deps.get(person, "not in the register")


async def ask(question: str, register: dict[str, str], model: Model) -> str:
    """Return the agent's answer to a question about a register."""
    return (await archivist.run(question, deps=register, model=model)).output
