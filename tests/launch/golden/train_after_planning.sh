#!/bin/bash

# Parameters
#SBATCH --dependency=afterok:12
#SBATCH --job-name=train-quickstart-3f2a1b
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/runs/quickstart/20250102-030405-3f2a1b/logs/train/%j_0_log.out
#SBATCH --signal=TERM@0

# command
export SUBMITIT_EXECUTOR=slurm
exec @PYTHON@ @JOBS@/train.py /runs/quickstart/20250102-030405-3f2a1b
