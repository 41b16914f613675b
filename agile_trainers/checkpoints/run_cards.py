"""Writes the model card of a run into every folder that it saves a model to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers.utils import logging
from trl import GRPOTrainer

from agile_trainers.checkpoints.model_card import BEFORE, draw_curve, hyperparameters, model_card, panels, write_card

logger = logging.get_logger(__name__)


@contextmanager
def _losing_only_the_card(folder: Path) -> Iterator[None]:
    """Warn of an error inside the block and go on, since a card must not keep a model from being saved."""
    try:
        yield
    except Exception as error:
        logger.warning(
            "The model card of %s was not written (%s: %s). The model is saved all the same.",
            folder, type(error).__name__, str(error)[:300],
        )  # fmt: skip


class RunCards:
    """Writes model cards on the main process, and keeps what they compare the run with.

    Args:
        trainer: After TRL's own constructor.
        tags: Tags of every card.
        paper: The algorithm's paper, in the form of TRL's ``_paper``.
        record: Makes the record that a card is written from.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        tags: Sequence[str],
        paper: Mapping[str, str],
        record: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._trainer: Any = trainer
        self._tags, self._paper, self._record = tags, paper, record
        self._dataset: str | None = None
        self._picture: tuple[bytes, bytes | None] = b"", None
        """Digest of what the last curve shows, which is as long as the run, and the curve."""
        self.baselines: dict[str, Mapping[str, float]] = {}
        """Results to compare with, by name: ``eval_return``, ``eval_success`` and ``eval_episodes``, as far as known."""

    def note_evaluation(self, prefix: str, metrics: Mapping[str, float]) -> None:
        """Take an evaluation of the untrained policy as a baseline."""
        if prefix == "eval" and self._trainer.state.global_step == 0:
            self.baselines[BEFORE] = dict(metrics)

    def write(
        self,
        folder: Path,
        *,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        """Write ``README.md`` and the learning curve into a folder that holds the model.

        Args:
            folder: Folder of the model.
            model_name: Title. Default: the last part of ``hub_model_id`` for ``output_dir``, else the folder's name.
            dataset_name: Hub id of the rows, if there were any; the cards written later name it too.
            tags: More tags.
        """
        with _losing_only_the_card(folder):
            trainer, output_dir = self._trainer, Path(self._trainer.args.output_dir)
            name, log = folder.absolute().name, trainer.state.log_history
            self._dataset = dataset_name or self._dataset
            if folder.absolute() == output_dir.absolute():
                model_id = trainer.hub_model_id or name
            else:
                model_id = f"{output_dir.absolute().name}/{name}" if name.startswith("checkpoint-") else name
            shown = panels(log, self.baselines)
            digest = sha256(repr(shown).encode()).digest()
            if self._picture[0] != digest:  # a checkpoint needs it twice
                self._picture = digest, draw_curve(shown) if shown else None
            text = model_card(
                name=model_name or (model_id.rpartition("/")[2] if model_id == trainer.hub_model_id else model_id),
                model_id=model_id,
                record=self._record(),
                log_history=log,
                options=hyperparameters(trainer.args),
                tags=sorted({*self._tags, *tags}),
                trainer=type(trainer).__name__,
                dataset=self._dataset,
                paper=self._paper,
                baselines=self.baselines,
                chat=bool(getattr(trainer.processing_class, "chat_template", None)),
            )
            write_card(folder, text, self._picture[1])


def write_card_of_rows(folder: Path, name: str, record: Mapping[str, Any], args: Any, log: Any, rows: str) -> None:
    """Write the model card of a run with one of TRL's trainers on rows.

    Args:
        folder: Folder of the model.
        name: Title, and the folder under which the card loads the model.
        record: See :func:`~agile_trainers.checkpoints.record.record_without_environment`.
        args: The trainer's configuration.
        log: ``trainer.state.log_history``.
        rows: Name of the rows.
    """
    with _losing_only_the_card(folder):
        shown = panels(log)
        text = model_card(
            name=name,
            model_id=name,
            record=record,
            log_history=log,
            options=hyperparameters(args),
            tags=["agile-trainers", record["algorithm"].lower(), "trl"],
            trainer="MultiTurnGRPOTrainer",
            rows=rows,
        )
        write_card(folder, text, draw_curve(shown) if shown else None)
