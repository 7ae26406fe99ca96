#!/bin/bash
# Two hosts with eight GPUs each, one process per GPU: ./mpirun.sh host1 host2
# Open MPI 4 is detected by JAX as it is. Open MPI 5 needs JAX 0.12 and `pip install mpi4py`.
set -euo pipefail

[[ $# -eq 2 ]] || { echo "usage: $0 HOST HOST" >&2; exit 2; }

resume=()
if [[ -e saved/jaxpar-checkpoints ]]; then
    resume=(--resume)
fi

# mpirun ends all processes when one of them fails. Rank 0's output alone is worth a terminal:
# the others print nothing unless they fail.
mpirun -n 16 --host "$1:8,$2:8" --bind-to none \
    .venv/bin/jaxpar run train.py --mesh slice=2,fsdp=8 --checkpoint saved "${resume[@]}"
