"""An update on images, to be launched with one process or two; leaves gradients behind.

Usage: torchrun --nproc_per_node N images_two_processes.py MODEL OUTPUT '{"case": {}}'
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from games import Gradients, end_process, make_trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from image_models import Gallery


class Half(Gallery):
    """Shows images where the row says so, and words elsewhere."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.shows = bool(options and options["shows"])
        return super().reset(seed)

    def _image(self) -> Any:
        image = super()._image()
        return image if self.shows else "nothing"


def play(model: str, output: Path, changes: dict) -> None:
    """One case. With two processes, the first one has the episodes with images."""
    gradients = Gradients()
    rows = Dataset.from_dict({"shows": [1, 0]})
    trainer = make_trainer(
        model, output, environment=Half, callbacks=[gradients], train_dataset=rows, shuffle_dataset=False,
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")), max_steps=2, **changes,
    )  # fmt: skip
    trainer.train()
    if trainer.accelerator.is_main_process:
        steps = [{k.removeprefix("module."): v for k, v in step.items()} for step in gradients.steps]
        torch.save({"processes": trainer.accelerator.num_processes, "gradients": steps}, output / "result.pt")


if __name__ == "__main__":
    for name, case in json.loads(sys.argv[3]).items():
        play(sys.argv[1], Path(sys.argv[2]) / name, case)
    end_process()
