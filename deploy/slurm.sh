#!/usr/bin/env bash
# Unrun under Slurm. tests/test_deploy.py runs it with stand-ins for deepspeed and memascend.
#
# sbatch deploy/slurm.sh train.py ds.json [options of train.py]
#
# ds.json has "nvme_path": "@SWAP@", which becomes a folder of this job on the node's own drive.
#SBATCH --job-name=memascend
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=24:00:00
set -euo pipefail

script="$1" config="$2"
shift 2

# What the site gives as local scratch; a network share would carry every byte of a step.
scratch="${SLURM_TMPDIR:-${SCRATCH_LOCAL:-${TMPDIR:-/tmp}}}"
folder="$(mktemp -d "$scratch/memascend-${SLURM_JOB_ID:-job}-XXXXXX")"
trap 'rm -rf "$folder"' EXIT

# Raised as far as the site allows: memory beyond it is used without page lock.
ulimit -l "$(ulimit -H -l)"

mkdir "$folder/swap"
sed "s|@SWAP@|$folder/swap|g" "$config" > "$folder/ds.json"
memascend doctor --path "$folder/swap"

# One launcher on the node, which starts a rank for each GPU. It is in this job's process group: scancel
# reaches every rank.
deepspeed --num_gpus "${SLURM_GPUS_ON_NODE:-1}" "$script" --deepspeed_config "$folder/ds.json" "$@"
