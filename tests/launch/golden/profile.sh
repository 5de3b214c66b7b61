#!/bin/bash

# Parameters
#SBATCH --array=0-5%2
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --job-name=profile-quickstart-3f2a1b-0004
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/runs/quickstart/20250102-030405-3f2a1b/logs/profile/%A_%a_0_log.out
#SBATCH --signal=TERM@0
#SBATCH --time=60

# command
export SUBMITIT_EXECUTOR=slurm
exec @PYTHON@ @JOBS@/profile.py /runs/quickstart/20250102-030405-3f2a1b $((4 + SLURM_ARRAY_TASK_ID))
