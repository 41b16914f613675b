"""Populations: members with hyperparameters of their own on one frozen base, selected and copied while they train."""

from agile_trainers.populations.hyperparameters import HyperparameterConfig, Range
from agile_trainers.populations.lineage import Lineage, LineageEvent, Round
from agile_trainers.populations.members import Processes, split_processes
from agile_trainers.populations.population import Population, PopulationError
from agile_trainers.populations.selection import Halving, Score, Selection, Strategy, Successor, Tournament

__all__ = [
    "Halving", "HyperparameterConfig", "Lineage", "LineageEvent", "Population", "PopulationError", "Processes", "Range",
    "Round", "Score", "Selection", "Strategy", "Successor", "Tournament", "split_processes",
]  # fmt: skip
