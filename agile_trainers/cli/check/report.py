"""The run that ``agile-trainers check`` checks, and the report that its sections write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from trl import ModelConfig

from agile_trainers.cli.launch_configs import SINGLE, Launch
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.envs.agent import is_agent
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.evaluation.diagnosis import Finding
from agile_trainers.evaluation.results import evaluation_episodes
from agile_trainers.judges.judge import Judge
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.spec import EpisodeSpec

TIME_LIMIT = 30.0
"""Seconds that a call of an environment may take without ``environment_timeout``; an agent's episode ``max_turns`` times."""


@dataclass
class Run:
    """The training run that is checked."""

    environment: str
    factory: EnvironmentFactory
    args: MultiTurnConfig
    model: ModelConfig
    config: PretrainedConfig
    named: bool
    """True if the user named the model; otherwise it is the untrained embedded model."""
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: list[int]
    rows: list[dict[str, Any]] | None
    """Data set rows, passed to ``reset``; None without a data set."""
    episodes: int
    policy: str
    """``model``, ``random`` or ``expert``."""
    reward_functions: bool = False
    """True if reward functions pay beside the environment, of which the check calls judges alone."""
    judges: Sequence[Judge] = ()
    """The judges among them."""
    gpu_memory: float | None = None
    """GiB of the GPU that the run is planned for; None for this machine's GPU, if there is one."""
    launch: Launch = SINGLE
    gpus: int | None = None
    """GPUs of the machine that the run is planned for; None for this machine's, or as many as the run needs."""
    processor: Any = None
    """The processor of a model that reads images."""

    @property
    def time_limit(self) -> float:
        """Return the seconds that a call of the environment may take."""
        return self.args.environment_timeout or TIME_LIMIT

    @property
    def gpu_count(self) -> int | None:
        """Return the number of GPUs of the machine that the run is planned for; None for a CPU."""
        if self.gpu is None or self.gpus is not None:
            return self.gpus
        if self.gpu_memory is None:
            return torch.cuda.device_count()
        return self.launch.processes + self.args.vllm_tensor_parallel_size

    @property
    def gpu(self) -> int | None:
        """Return the bytes of the GPU that the run is planned for; None if there is none."""
        if self.gpu_memory is not None:
            return int(self.gpu_memory * 2**30)
        return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None

    def specs(self, attempts: int = 1) -> list[EpisodeSpec]:
        """Return the episodes to play, the same in every check, each as often as ``attempts`` says."""
        return evaluation_episodes(self.args.seed, self.episodes, self.rows, attempts=attempts)

    @property
    def options(self) -> EpisodeOptions:
        """Return the training's options of episodes, with threads, so that a hanging call can be abandoned."""
        args, agent = self.args, is_agent(self.factory)
        return replace(
            EpisodeOptions.of_args(args),
            environment_processes=0,
            environment_workers=0 if agent else max(1, args.environment_workers),
            environment_timeout=args.environment_timeout or TIME_LIMIT * (args.max_turns if agent else 1),
        )

    def engine(self, factory: EnvironmentFactory, *, apart: bool = False) -> RolloutEngine:
        """Return the trainer's rollout engine; with ``apart``, for an environment in a new process."""
        options = self.options
        if apart:  # a process takes its time to start
            longer = 10 * (options.environment_timeout or self.time_limit)
            options = replace(
                options,
                environment_workers=0,
                environment_processes=1,
                max_environments=None,
                environment_timeout=longer,
            )
        return build_engine(
            options,
            options.make_pool(factory),
            self.processor or self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            model_config=self.config,
            append_final_observation=self.args.bootstrap_at_limits,
        )


@dataclass
class Report:
    """The report, printed line by line."""

    console: Console
    problems: list[str] = field(default_factory=list)
    """Reasons why training cannot start or would learn nothing."""
    warnings: int = 0
    """Number of warnings so far."""
    about: str = ""
    """Prefix of problems: the environment's name if there are several."""

    def section(self, title: str) -> None:
        """Start a section."""
        self.show(Text(f"\n{title}", style="bold"))

    def line(self, text: str, label: str = "", style: str = "") -> None:
        """Print one finding, wrapped with an indent in a terminal, in one line in a file."""
        if not self.console.is_terminal:
            self.show(Text(f"  {label:<12}{text}" if label else f"  {text}", style=style))
            return
        row = Table.grid("", "")
        row.columns[0].width = 14 if label else 2
        row.add_row(f"  {label}", Text(text, style=style))
        self.show(row)

    def warning(self, text: str) -> None:
        """Print a warning."""
        self.warnings += 1
        self.line(f"warning: {text}", style="yellow")

    def problem(self, text: str) -> None:
        """Print and record a reason why training cannot start or would learn nothing."""
        self.problems.append(f"{self.about}{text}")
        self.line(f"problem: {text}", style="bold red")

    def diagnosis(self, findings: Iterable[Finding], serious: Collection[str] = ()) -> None:
        """Print findings with the names and the advice of a run's own diagnosis; those named in ``serious`` as problems."""
        for finding in findings:
            (self.problem if finding.name in serious else self.warning)(str(finding))

    def show(self, what: RenderableType) -> None:
        """Print any object of rich."""
        self.console.print(what, soft_wrap=isinstance(what, Text))

    def verdict(self) -> int:
        """Print whether training can start, and return the exit code."""
        self.section("Verdict")
        if not self.problems:
            warned = f", with {self.warnings} warning{'s' if self.warnings > 1 else ''} above" if self.warnings else ""
            self.line(f"Ready to train{warned}.", style="bold green")
            return 0
        self.line("Not ready to train:", style="bold red")
        for problem in self.problems:
            self.line(f"- {problem}")
        return 1
