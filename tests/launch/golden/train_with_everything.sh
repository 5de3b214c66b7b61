#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --comment='it'"'"'s a test'
#SBATCH --constraint='a100|h100'
#SBATCH --contiguous
#SBATCH --cpus-per-task=8
#SBATCH --exclude=node8
#SBATCH --gres=gpu:a100:4
#SBATCH --hint=nomultithread
#SBATCH --job-name=train-quickstart-3f2a1b
#SBATCH --mail-type=END,FAIL
#SBATCH --mem=0
#SBATCH --nice=0
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output='/my runs/it'"'"'s $HOME/quickstart/20250102-030405-3f2a1b/logs/train/%j_0_log.out'
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --signal=TERM@0
#SBATCH --switches=1@10
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
exec @PYTHON@ @JOBS@/train.py '/my runs/it'"'"'s $HOME/quickstart/20250102-030405-3f2a1b'
