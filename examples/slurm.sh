#!/bin/bash
# Train on several machines with Slurm: one launch per machine, which accelerate joins to one run.
#
#     sbatch examples/slurm.sh agile-trainers' options, for example:
#     sbatch examples/slurm.sh grpo --model_name_or_path Qwen/Qwen2.5-7B-Instruct --environment agile:wordle ...
#
# A job that is requeued resumes by itself (--resume_from_checkpoint auto).
#SBATCH --job-name=agile-trainers
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
set -euo pipefail

GPUS=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
CONFIG=${CONFIG:-accelerate_configs/ddp.yaml}
export MAIN_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=290 # torchrun kills the processes 30 s after SIGTERM otherwise; torch 2.12 or later

# $SLURM_NODEID must be read on each machine, so the command is quoted. It keeps the order of the machines over a requeue
# only if the node list is the same; a checkpoint on disks of the machines' own (--save_on_each_node) is refused otherwise.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch \
    --config_file "'"$CONFIG"'" --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * '"$GPUS"'))" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$MAIN_IP" --main_process_port "$MAIN_PORT" \
    --module agile_trainers.cli.train "$@"' bash "$@" --resume_from_checkpoint auto
