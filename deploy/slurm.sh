#!/usr/bin/env bash
# Unrun under Slurm. tests/test_deploy.py runs it with stand-ins for torchrun and memascend.
#
# sbatch deploy/slurm.sh train.py ds.json [options of train.py]     one node
#
# ds.json has "nvme_path": "@SWAP@", which becomes a folder of this job on the node's own drive.
# `memascend config --nvme-path @SWAP@ > ds.json` writes it.
#SBATCH --job-name=memascend
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=24:00:00
set -euo pipefail

export MASTER_ADDR=127.0.0.1 MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"
export NNODES=1 NODE_RANK=0 NPROC_PER_NODE="${SLURM_GPUS_ON_NODE:-1}"
# The option of a loop of your own; the Trainer's is --deepspeed.
export CONFIG_OPTION="${CONFIG_OPTION---deepspeed_config}"

# sbatch runs a copy of this file: the launcher is found where the job was submitted. It is in this
# job's process group: scancel reaches every rank.
exec bash "${MEMASCEND_LAUNCH:-$SLURM_SUBMIT_DIR/deploy/launch_node.sh}" "$@"
