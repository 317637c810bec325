#!/usr/bin/env bash
# Unrun under Slurm. tests/test_deploy.py runs it with stand-ins for srun and memascend, and
# tests/integration/test_nodes.py trains on two machines by its launch lines.
#
# sbatch deploy/slurm_nodes.sh train.py ds.json [options of train.py]     4 nodes of 8 GPUs
#
# ds.json has "nvme_path": "@SWAP@", which becomes a folder of this job on each node's own drive.
# `memascend config --nvme-path @SWAP@ > ds.json` writes it.
#SBATCH --job-name=memascend
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=256G
#SBATCH --time=24:00:00
set -euo pipefail

# One launcher on each node, which starts a rank for each of its GPUs. All meet at the first node.
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"
NNODES="$SLURM_JOB_NUM_NODES"
NPROC_PER_NODE="${SLURM_GPUS_ON_NODE:-8}"
export MASTER_ADDR MASTER_PORT NNODES NPROC_PER_NODE

# sbatch runs a copy of this file: the launcher is found where the job was submitted.
launch="${MEMASCEND_LAUNCH:-$SLURM_SUBMIT_DIR/deploy/launch_node.sh}"
srun --kill-on-bad-exit=1 bash "$launch" "$@"
