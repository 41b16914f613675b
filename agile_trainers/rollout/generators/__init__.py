"""Samplers of actions: the protocol, and generators on transformers, on vLLM and from a script."""

from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator, SamplingSettings
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator

__all__ = [
    "GenerationOutput",
    "GenerationRequest",
    "Generator",
    "SamplingSettings",
    "ScriptedGenerator",
    "TransformersGenerator",
]
