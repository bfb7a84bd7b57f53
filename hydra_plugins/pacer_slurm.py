"""Where Hydra looks for launchers; ours is in pacer/command/slurm.py."""

try:
    from pacer.command.slurm import SlurmJobs
except ImportError:  # without the extra `cluster`, conf/hydra/launcher/slurm.yaml says what is missing
    pass
else:

    class SlurmLauncher(SlurmJobs):
        """``hydra/launcher=slurm``"""
