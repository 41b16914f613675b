"""Searches hyperparameters with optuna: each trial trains a trainer of its own, from the same start."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list, release_memory
from transformers import TrainerCallback, set_seed
from transformers.trainer_utils import BestRun, SaveStrategy
from transformers.utils import logging

from agile_trainers.config.launch_checks import uses_deepspeed
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.rules import check_values
from agile_trainers.imports import nearest
from agile_trainers.sampling.sampler import shared_engine

if TYPE_CHECKING:
    from agile_trainers.trainers.trainer import MultiTurnTrainer

logger = logging.get_logger(__name__)

BACKEND = "optuna"
"""The only backend: the others of transformers start processes of their own or change a trainer in place."""
FIXED = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
         "num_generations"),
        "the batch is laid out when the configuration is made",
    ),
    "output_dir": "each trial has a folder of its own below it",
}  # fmt: skip
"""Options that trials cannot differ in, and why."""
SPREAD = 10.0
"""Factor by which the default space goes below and above the trainer's own learning rate."""


def initial_model(model: Any, model_init: Callable[..., Any] | None, args: Any, trial: Any = None) -> Any:
    """Return the model that a trainer starts from: the given one, or a new one from ``model_init``.

    Args:
        model: The trainer's.
        model_init: Makes the model; a function of nothing, or of the trial.
        args: The trainer's configuration, whose ``seed`` is set before ``model_init`` is called.
        trial: The trial, None outside of a search.

    Raises:
        ValueError: If both are given or none, or ``model_init`` returns None.
        TypeError: If ``model_init`` takes several arguments.
    """
    if model_init is None:
        if model is None:
            raise ValueError("The trainer needs a model. Pass `model` (a name, a folder or a model) or `model_init`.")
        return model
    if model is not None:
        raise ValueError("`model` and `model_init` are both given, and each says what to train. Leave one of them out.")
    number = len(inspect.signature(model_init).parameters)
    if number > 1:
        raise TypeError(f"model_init must take no argument, or the trial alone; {model_init!r} takes {number}.")
    set_seed(args.seed)
    made = model_init(trial) if number else model_init()
    if made is None:
        raise ValueError(f"model_init must return a model, its folder or its name; {model_init!r} returned None.")
    return made


class TrainerRecipe:
    """Makes further trainers with the arguments of a given one.

    Args:
        trainer: The trainer.
        arguments: Arguments of its constructor by name, as the caller gave them.
    """

    def __init__(self, trainer: MultiTurnTrainer, arguments: dict[str, Any]) -> None:
        self._kind = type(trainer)
        # PEFT writes into it.
        self.arguments = {**arguments, "peft_config": copy.deepcopy(arguments["peft_config"])}

    def check(self, base: type) -> None:
        """Reject trainers that cannot be made a second time.

        Args:
            base: The class whose constructor the arguments are those of.

        Raises:
            ValueError: For a model or optimizer object, which the first trial would change, or a constructor of the
                user's, whose own arguments are unknown.
        """
        given, name = self.arguments, self._kind.__name__
        if given["model"] is not None and not isinstance(given["model"], str):
            raise ValueError(
                "hyperparameter_search() starts every trial from the same model, but `model` is an object, which the "
                f"first trial would train: {type(given['model']).__name__}. Pass the model's name or folder, or a "
                "function that makes it as `model_init`."
            )
        if tuple(given["optimizers"]) != (None, None):
            raise ValueError(
                "hyperparameter_search() makes an optimizer for every trial, but `optimizers` holds one. Leave "
                "`optimizers` unset, and choose it by `optim` and `learning_rate`."
            )
        if self._kind.__init__ is not base.__init__:  # type: ignore[misc]
            raise ValueError(
                f"hyperparameter_search() makes a trainer for every trial, but {name} has a constructor of its own, whose "
                "further arguments are not known. Remove its __init__, for example by options of a configuration class."
            )
        args = given["args"]
        if args.push_to_hub:
            raise ValueError(
                "push_to_hub=True would push every trial to one repository. Leave it unset, and push the best run's folder."
            )
        if getattr(args, "max_wall_seconds", None) is not None:
            raise ValueError(
                f"max_wall_seconds={args.max_wall_seconds} would end trials at different steps, which cannot be compared. "
                "Leave it unset; `timeout` limits the whole search."
            )
        if uses_deepspeed(args):
            raise ValueError(
                "hyperparameter_search() cannot change the options that DeepSpeed has read. Leave `deepspeed` unset."
            )

    def make(self, args: Any, trial: Any) -> MultiTurnTrainer:
        """Make a trainer.

        Args:
            args: Its configuration.
            trial: Its trial, for ``model_init``.
        """
        given = {**self.arguments, "args": args, "peft_config": copy.deepcopy(self.arguments["peft_config"])}
        if given["model_init"] is not None:
            given["model"] = initial_model(None, given.pop("model_init"), args, trial)
        return self._kind(**given)


@dataclass(frozen=True)
class HyperparameterSearch:
    """A search: where its trials come from, and how they are compared."""

    recipe: TrainerRecipe
    space: Callable[[Any], dict[str, Any]]
    objective: Callable[[dict[str, float]], float | Sequence[float]]
    directions: list[str]
    folder: Callable[[Any], Path]
    catch: tuple[type[Exception], ...] = (FloatingPointError,)
    """Errors that end a trial and not the search."""

    def run(self, trials: int, study: dict[str, Any], optimize: dict[str, Any]) -> Any:
        """Run the trials and return the study; None on all processes but the main one.

        Args:
            trials: Number of trials.
            study: Arguments of ``optuna.create_study``.
            optimize: Arguments of ``Study.optimize``.
        """
        if self.recipe.arguments["args"].process_index != 0:
            while (sent := _from_main(None)) is not None:
                self._follow(*sent)
            return None
        import optuna

        goal = {"directions": self.directions} if len(self.directions) > 1 else {"direction": self.directions[0]}
        made = optuna.create_study(**goal, **study)
        made.optimize(self._lead, n_trials=trials, catch=self.catch, **optimize)
        _from_main(None)
        return made

    def _lead(self, trial: Any) -> float | Sequence[float]:
        """Run a trial on the main process."""
        import optuna

        try:
            values, folder = self.space(trial), self.folder(trial)
            changed(self.recipe.arguments["args"], values)
        except Exception as error:
            _from_main(error)
            raise
        _from_main((values, folder, trial.params, trial.number))
        return self._play(values, folder, trial, optuna.TrialPruned)

    def _follow(self, values: dict[str, Any], folder: Path, params: dict[str, Any], number: int) -> None:
        """Run a trial of the main process on another one."""
        import optuna

        try:
            self._play(values, folder, optuna.trial.FixedTrial(params, number), optuna.TrialPruned)
        except optuna.TrialPruned:
            pass
        except self.catch as error:
            logger.info("Trial %d ended: %s", number, error)

    def _play(
        self, values: dict[str, Any], folder: Path, trial: Any, pruned: type[Exception]
    ) -> float | Sequence[float]:
        args = changed(self.recipe.arguments["args"], values)
        args.output_dir = str(folder)
        trainer = self.recipe.make(args, trial)
        try:
            trainer.hp_name = lambda _: folder.name  # names the run for trackers
            reports = _Reports(trial, self.objective)
            if len(self.directions) == 1 and not isinstance(trainer.eval_dataset, dict):
                trainer.add_callback(reports)
            trainer.train(trial=trial)
            trainer.remove_callback(reports)
            if reports.pruned:
                raise pruned(f"at step {trainer.state.global_step}")
            # The last evaluation may be of an earlier policy, or of one that was not the best.
            current = reports.step == trainer.state.global_step and not args.load_best_model_at_end
            value = reports.value if current else self.objective(trainer.evaluate())
            if args.save_strategy != SaveStrategy.NO:
                trainer.save_model()
            return value
        finally:
            del trainer
            release_memory()


class _Reports(TrainerCallback):
    """Reports the evaluations of a trial to its study, which may end the trial early."""

    def __init__(self, trial: Any, objective: Callable[[dict[str, float]], Any]) -> None:
        self._trial, self._objective = trial, objective
        self.step, self.value, self.pruned = -1, 0.0, False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.step, self.value = state.global_step, self._objective(dict(metrics))
        self._trial.report(self.value, self.step)
        self.pruned = bool(_from_main(self._trial.should_prune()))
        control.should_training_stop |= self.pruned


def _from_main(value: Any) -> Any:
    """Return the main process's value on all processes; raise it there if it is an error."""
    sent = [value]
    broadcast_object_list(sent)
    if isinstance(sent[0], Exception) and sent[0] is not value:
        raise RuntimeError(f"The main process ended the search: {sent[0]}")
    return sent[0]


def changed(args: Any, values: dict[str, Any]) -> Any:
    """Copy a configuration with other values of some options.

    Args:
        args: The configuration, which stays as it is.
        values: Values by option, as a space returns them. They become what the option is: 2.0 is 2 for an integer.

    Raises:
        ValueError: For an unknown option, one that trials cannot differ in, or a value that it does not accept.
        TypeError: If the values are no dictionary.
    """
    if not isinstance(values, dict):
        raise TypeError(
            f"hp_space must return a dictionary of options, such as {{'learning_rate': 1e-4}}; got {values!r}."
        )
    names = [field.name for field in fields(args)]
    copied = copy.copy(args)
    for name, value in values.items():
        if name not in names:
            raise ValueError(
                f"hp_space names {name!r}, which is no option of {type(args).__name__}"
                f"{nearest(name, names, count=1) or '.'}"
            )
        if name in FIXED:
            raise ValueError(f"hp_space names {name!r}, which trials cannot differ in: {FIXED[name]}. Leave it out.")
        setattr(copied, name, _converted(name, value, getattr(args, name)))
    if isinstance(args, MultiTurnConfig):
        check_values(copied)
    return copied


def _converted(name: str, value: Any, before: Any) -> Any:
    if before is None or value is None or isinstance(value, type(before)):
        return value
    kind = type(before)
    try:
        converted = kind(value)
    except (TypeError, ValueError):
        converted = None
    if converted is None or converted != value:
        raise ValueError(f"hp_space gives {name}={value!r}, which is no {kind.__name__} as {name}={before!r} is.")
    return converted


# ---------------------------------------------------------------------------------------------------------- defaults


def default_space(learning_rate: float) -> Callable[[Any], dict[str, Any]]:
    """Make the space of ``learning_rate`` from a tenth to ten times a trainer's own, log-uniform."""
    return lambda trial: {
        "learning_rate": trial.suggest_float("learning_rate", learning_rate / SPREAD, learning_rate * SPREAD, log=True)
    }


def default_metric(trainer: MultiTurnTrainer) -> tuple[str, str]:
    """Return the evaluation's metric that a search compares by default, and its direction.

    ``metric_for_best_model`` and ``greater_is_better`` where they are set; else the reward if there are reward functions
    or no environment, else the return.

    Raises:
        ValueError: Without an evaluation, or if its data sets have no common metric.
    """
    args = trainer.args
    if trainer.engine is None and trainer.eval_dataset is None:
        raise ValueError("hyperparameter_search() compares trials by their evaluation. Pass an `eval_dataset`.")
    if args.metric_for_best_model and not args.metric_for_best_model.endswith("loss"):
        lower = args.greater_is_better is False
        return f"eval_{args.metric_for_best_model.removeprefix('eval_')}", "minimize" if lower else "maximize"
    rows = trainer.eval_dataset if trainer.engine is None else trainer.setup.eval_rows
    if isinstance(rows, dict):
        raise ValueError(
            f"The data sets of the evaluation have no common metric. Set metric_for_best_model to that of one, such as "
            f"'{next(iter(rows))}_return', or pass a compute_objective."
        )
    rewarded = trainer.engine is None or len(trainer.setup.reward_funcs) > 1
    return ("eval_reward" if rewarded else "eval_return"), "maximize"


def value_of(metric: str) -> Callable[[dict[str, float]], float]:
    """Make the objective that is a metric of the evaluation."""

    def objective(metrics: dict[str, float]) -> float:
        if metric not in metrics:
            there = ", ".join(sorted(name for name in metrics if name.startswith("eval_")))
            raise ValueError(f"metric_for_best_model: the evaluation has no {metric!r}. Choose one of {there}.")
        return metrics[metric]

    return objective


@contextmanager
def _off_the_gpu(model: Any) -> Iterator[None]:
    """Keep a model in main memory, so that the trials have the GPU's."""
    device = next(model.parameters()).device
    movable = device.type == "cuda" and not getattr(model, "is_quantized", False)
    if movable:
        model.to("cpu")
    try:
        yield
    finally:
        if movable:
            model.to(device)


# ------------------------------------------------------------------------------------------------------------ search


def search(
    trainer: MultiTurnTrainer,
    recipe: TrainerRecipe,
    *,
    hp_space: Callable[[Any], dict[str, Any]] | None,
    compute_objective: Callable[[dict[str, float]], Any] | None,
    n_trials: int,
    direction: str | list[str] | None,
    backend: Any,
    hp_name: Callable[[Any], str] | None,
    options: dict[str, Any],
) -> Any:
    """Search for ``trainer.hyperparameter_search``, which describes the arguments.

    Args:
        trainer: The trainer, which is not trained.
        recipe: Makes the trainers of the trials.
        hp_space: See there.
        compute_objective: See there.
        n_trials: See there.
        direction: See there.
        backend: See there.
        hp_name: See there.
        options: Further options of optuna.
    """
    name = str(getattr(backend, "value", backend or BACKEND))
    if name != BACKEND:
        raise ValueError(f"backend must be {BACKEND!r}, got {name!r}: each trial is a trainer in this process.")
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ImportError("backend='optuna' needs optuna: pip install 'agile-trainers[optuna]'.") from error
    if n_trials < 1:
        raise ValueError(f"n_trials must be at least 1, got {n_trials}.")
    if (jobs := options.pop("n_jobs", 1)) != 1:
        raise ValueError(f"n_jobs must be 1, got {jobs}: trials share this process and its device.")
    if compute_objective is None:
        metric, best = default_metric(trainer)
        if direction not in (None, best):
            raise ValueError(
                f"direction must be {best!r} for {metric!r}, got {direction!r}. Leave direction unset, or pass a "
                "compute_objective."
            )
        compute_objective, direction = value_of(metric), best
    directions = [direction] if isinstance(direction, str) else list(direction or ())
    if not directions or not set(directions) <= {"minimize", "maximize"}:
        raise ValueError(
            f"direction must be 'minimize' or 'maximize' with a compute_objective, or a list of these; got {direction!r}."
        )
    optimize: dict[str, Any] = {
        key: options.pop(key) for key in ("timeout", "gc_after_trial", "callbacks") if key in options
    }
    catch = options.pop("catch", ())
    base = Path(trainer.args.output_dir)
    found = HyperparameterSearch(
        recipe,
        hp_space or default_space(trainer.args.learning_rate),
        compute_objective,
        directions,
        lambda trial: base / (hp_name(trial) if hp_name else f"run-{trial.number}"),
        (FloatingPointError, *([catch] if isinstance(catch, type) else catch)),
    )
    lender = None if trainer.engine is None else trainer.sampler
    with _off_the_gpu(trainer.model), shared_engine(trainer.args, lender=lender):
        study = found.run(n_trials, options, optimize)
    return None if study is None else _best(study, several=len(directions) > 1)


def _best(study: Any, *, several: bool) -> BestRun | list[BestRun]:
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        states = ", ".join(f"{trial.number}: {trial.state.name.lower()}" for trial in study.trials)
        raise RuntimeError(
            f"No trial of the search was completed ({states}). Narrow hp_space, or look at the log above."
        )
    if several:
        return [BestRun(str(trial.number), trial.values, trial.params) for trial in study.best_trials]
    best = study.best_trial
    return BestRun(str(best.number), best.value, best.params, study)
