"""One training step, to be launched with one process or two; leaves the gradient and the adapter behind.

Usage: torchrun --nproc_per_node N two_processes.py MODEL OUTPUT '{"option": "value"}'
"""

import json
import sys
from pathlib import Path

import torch
from games import Gradients, make_trainer

if __name__ == "__main__":
    model, output, changes = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    gradients = Gradients()
    trainer = make_trainer(model, output, callbacks=[gradients], num_eval_episodes=5, **changes)
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.accelerator.is_main_process:
        torch.save(
            {
                "processes": trainer.accelerator.num_processes,
                "distributed_type": str(trainer.accelerator.distributed_type),
                "gradients": [{k.removeprefix("module."): v for k, v in step.items()} for step in gradients.steps],
                "adapter": {k: v for k, v in trainer.model.state_dict().items() if "lora" in k},
                "logged": trainer.state.log_history[0],
                "evaluation": metrics,
            },
            output / "result.pt",
        )
