"""``examples/slurm.sh`` starts one launch per machine, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from accelerate.commands.launch import launch_command_parser

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "scontrol": 'test "$*" = "show hostnames gpu[3-4]" && printf "gpu3\\ngpu4\\n"',
    "srun": 'for node in 0 1; do SLURM_NODEID=$node "${@:2}" || exit 1; done',
    "accelerate": 'printf "%s\\n" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@" > "launched-$SLURM_NODEID"',
}


def test_each_machine_is_launched_with_its_rank(tmp_path: Path) -> None:
    for name, body in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        command.chmod(0o755)
    job = {"SLURM_JOB_ID": "77123", "SLURM_JOB_NODELIST": "gpu[3-4]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    given = ["grpo", "--environment_args", '{"level": "easy"}', "--max_turns", "4"]
    subprocess.run(
        ["bash", ROOT / "examples/slurm.sh", *given],
        cwd=tmp_path,
        env={**os.environ, **job, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        check=True,
    )
    for rank in (0, 1):
        words = (tmp_path / f"launched-{rank}").read_text(encoding="utf-8").splitlines()
        # Slurm sends SIGTERM 300 s before the end; torchrun passes it on and kills in time for the end.
        assert (words.pop(0), words.pop(0)) == ("290", "launch")
        options = launch_command_parser().parse_args(words)
        assert (options.num_machines, options.num_processes, options.machine_rank) == (2, 8, rank)
        assert (options.main_process_ip, options.main_process_port) == ("gpu3", 20000 + 77123 % 20000)
        assert options.module and options.training_script == "agile_trainers.cli.train"
        assert options.training_script_args == [*given, "--resume_from_checkpoint", "auto"]
        assert (ROOT / options.config_file).is_file()
