#!/usr/bin/env bash
# Starts the ranks of one node; slurm.sh, slurm_nodes.sh and pytorchjob.yaml run it. Unrun on several
# machines: tests/integration/test_nodes.py runs it twice on one.
#
# launch_node.sh train.py ds.json [options of train.py]
#
# MASTER_ADDR, MASTER_PORT, NNODES, NPROC_PER_NODE and the node's number are in the environment:
# NODE_RANK, else Slurm's SLURM_NODEID, else Kubeflow's RANK.
set -euo pipefail

script="$1" config="$2"
shift 2
node="${NODE_RANK:-${SLURM_NODEID:-${RANK:?no number of this node: set NODE_RANK}}}"

# The site's local scratch; a network share would carry every byte of a step.
scratch="${SLURM_TMPDIR:-${SCRATCH_LOCAL:-${TMPDIR:-/tmp}}}"
folder="$(mktemp -d "$scratch/memascend-${SLURM_JOB_ID:-job}-XXXXXX")"
trap 'rm -rf "$folder"' EXIT

# Raised as far as the site allows: memory beyond it is used without page lock.
ulimit -l "$(ulimit -H -l)"

# "@SWAP@" becomes a folder of this job; a JSON without it names a folder that each node has.
if grep -q @SWAP@ "$config"; then
    swap="$folder/swap"
    mkdir "$swap"
else
    swap="$(sed -n 's/.*"nvme_path": *"\([^"]*\)".*/\1/p' "$config" | sed -n 1p)"
fi
sed "s|@SWAP@|$swap|g" "$config" > "$folder/ds.json"
memascend doctor --path "${swap:?"$config" has no nvme_path: memascend config --nvme-path @SWAP@}"

# One rank for each GPU. --deepspeed is the Trainer's; CONFIG_OPTION="" gives the file alone.
option="${CONFIG_OPTION---deepspeed}"
torchrun --nnodes "$NNODES" --node_rank "$node" --nproc_per_node "$NPROC_PER_NODE" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
    "$script" ${option:+"$option"} "$folder/ds.json" "$@"
