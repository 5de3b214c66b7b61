#!/bin/bash

# Parameters
#SBATCH --job-name=plan-quickstart-3f2a1b
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/runs/quickstart/20250102-030405-3f2a1b/logs/plan/%j_0_log.out
#SBATCH --signal=TERM@0
#SBATCH --time=60

# command
export SUBMITIT_EXECUTOR=slurm
exec @PYTHON@ @JOBS@/plan.py /runs/quickstart/20250102-030405-3f2a1b
