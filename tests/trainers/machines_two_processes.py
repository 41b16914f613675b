"""Two processes, each as the only one of a machine, agree on disks and checkpoints; leaves what each of them found.

Usage: torchrun --nproc_per_node 2 machines_two_processes.py OUTPUT
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["LOCAL_RANK"] = "0"  # the first process of its machine

from accelerate import Accelerator
from games import end_process

from agile_trainers.adapters.folders import CheckpointError
from agile_trainers.checkpoints.resuming import agreed_step, check_storage, on_each_disk


def said(function: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except (CheckpointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def main(output: Path) -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index

    def agreed(*held: list[int], older: bool = True) -> Any:
        def find(at_most: int | None) -> int | None:
            return max((step for step in held[rank] if at_most is None or step <= at_most), default=None)

        return said(agreed_step, True, find, older=older)

    def broken() -> int:
        if rank == 1:
            raise CheckpointError("damaged here")
        return 0

    def storage(folder: Path, own: bool) -> Any:
        return said(check_storage, accelerator, SimpleNamespace(output_dir=str(folder), save_on_each_node=own))

    shared, apart = output / "shared", Path("run")
    (output / f"machine-{rank}").mkdir()
    os.chdir(output / f"machine-{rank}")
    found = {
        "one step behind": agreed([1, 2, 3], [1, 2]),
        "no common step but the first": agreed([1, 3], [1, 2]),
        "an older one is not asked for": agreed([1, 3], [1, 2], older=False),
        "one lost all": agreed([], [2]),
        "nothing yet": agreed([], []),
        "by disk": on_each_disk(True, lambda: 10 + rank),
        "by one disk": on_each_disk(rank == 0, lambda: 10 + rank),
        "None is a result": on_each_disk(True, lambda: None),
        "damaged": said(on_each_disk, True, broken),
        "apart": [storage(apart, own) for own in (False, True)],
        "shared": [storage(shared, own) for own in (False, True)],
    }
    accelerator.wait_for_everyone()
    found["left"] = [path.name for folder in (shared, apart) if folder.exists() for path in folder.iterdir()]
    (output / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
