#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --array=0-5%2
#SBATCH --constraint='a100|h100'
#SBATCH --cpus-per-task=8
#SBATCH --exclude=node7
#SBATCH --gres=gpu:a100:4
#SBATCH --hint=nomultithread
#SBATCH --job-name=profile-quickstart-3f2a1b-0004
#SBATCH --mail-type=END,FAIL
#SBATCH --mem=64G
#SBATCH --nice=0
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output='/my runs/it'"'"'s $HOME/quickstart/20250102-030405-3f2a1b/logs/profile/%A_%a_0_log.out'
#SBATCH --partition=gpu
#SBATCH --qos=short
#SBATCH --signal=TERM@0
#SBATCH --time=20

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
exec @PYTHON@ @JOBS@/profile.py '/my runs/it'"'"'s $HOME/quickstart/20250102-030405-3f2a1b' $((4 + SLURM_ARRAY_TASK_ID))
