"""Models that supervised games have taught the form of an answer, each trained once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PrinterCallback


def taught(folder: Path, trainer_of: Callable[[Path, Path], Any]) -> Path:
    """Return the folder of a taught model.

    Args:
        folder: Holds it, and the untrained model.
        trainer_of: Makes the trainer, of the folders for the untrained and for the taught model; called if it is not there.
    """
    output = folder / "sft"
    if not (output / "done").is_file():
        trainer = trainer_of(folder / "untrained", output)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model()
        (output / "done").touch()
    return output
