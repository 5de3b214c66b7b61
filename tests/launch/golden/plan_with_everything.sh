#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --constraint='a100|h100'
#SBATCH --cpus-per-task=8
#SBATCH --exclude=node7
#SBATCH --hint=nomultithread
#SBATCH --job-name=plan-quickstart-3f2a1b
#SBATCH --mail-type=END,FAIL
#SBATCH --mem=8G
#SBATCH --nice=0
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/my runs/it'"'"'s $HOME/quickstart/20250102-030405-3f2a1b/logs/plan/%j_0_log.out'
#SBATCH --partition=cpu
#SBATCH --qos=long
#SBATCH --signal=TERM@0
#SBATCH --time=90

# setup
trap 'code=$?; echo "a line of launcher.slurm.setup failed with $code: $BASH_COMMAND" >&2; exit $code' ERR
module purge
module load cuda/12.4  # the site's
trap - ERR
export NCCL_DEBUG=WARN
export NCCL_IB_TIMEOUT=22
export TITLE='say "it'"'"'s $HOME"'

# command
export SUBMITIT_EXECUTOR=slurm
exec @PYTHON@ @JOBS@/plan.py '/my runs/it'"'"'s $HOME/quickstart/20250102-030405-3f2a1b'
