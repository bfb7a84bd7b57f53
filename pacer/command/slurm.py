"""Sweeps as array jobs of Slurm: submitted by hydra-submitit-launcher, waited for, requeued where they were stopped.

Slurm sends SIGTERM before the time is up (``signal_delay_s``) or when another job takes the place; the job saves its
state, ends with code 75, and its batch script asks for it to be queued again. A job that is cancelled stays so.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from omegaconf import OmegaConf

from pacer.errors import EXIT_REQUEUE, PacerError
from pacer.files import disk_errors
from pacer.work.stopping import check_stop

REQUEUE = f"trap '[ $? = {EXIT_REQUEUE} ] && scontrol requeue $SLURM_JOB_ID' EXIT"
GRACE = 15.0  # seconds in which a shared file system shows what an ended job wrote
log = logging.getLogger(__name__)


class SlurmJobs(SlurmLauncher):
    """Submits a sweep as one array, waits for all its jobs, and names every one that failed."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        import submitit  # as submitit's launcher does: plugins are looked at by every verb

        assert self.config is not None
        folder = Path(str(self.config.hydra.sweep.dir))
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            executor = submitit.AutoExecutor(folder=self.params["submitit_folder"], cluster="slurm")
            executor.update_parameters(**self._parameters())
            numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
            state = Singleton.get_state()
            arguments = [
                (list(o), "hydra.sweep.dir", n, str(n), state) for n, o in zip(numbers, job_overrides, strict=True)
            ]
            jobs = executor.map_array(self, *zip(*arguments, strict=True))
        except (RuntimeError, ValueError, submitit.core.utils.FailedJobError) as error:
            remedy = "see hydra.launcher.* (--cfg hydra), and sinfo for what the cluster has"
            raise PacerError(f"cannot submit to Slurm: {' '.join(str(error).split())}", remedy=remedy) from error
        array = jobs[0].job_id.partition("_")[0]
        log.info("%d jobs in array %s; records and logs: %s, logs in .submitit/%s", len(jobs), array, folder, array)
        for number, overrides in zip(numbers, job_overrides, strict=True):
            log.info("#%d: %s", number, " ".join(filter_overrides(overrides)))
        _wait(jobs)
        return [_outcome(job, overrides) for job, overrides in zip(jobs, job_overrides, strict=True)]

    def _parameters(self) -> dict[str, Any]:
        """What submitit is told: the launcher's settings, and how a stopped job is queued again."""
        own = {key: value for key, value in self.params.items() if key not in ("submitit_folder", "max_num_timeout")}
        own["setup"] = [*(own["setup"] or []), REQUEUE]
        delay = own["signal_delay_s"]
        own["additional_parameters"] = {"requeue": True, "signal": f"TERM@{delay}", **own["additional_parameters"]}
        shared = set(OmegaConf.structured(BaseQueueConf).keys())
        return {key if key in shared else f"slurm_{key}": value for key, value in own.items()}


def _wait(jobs: Sequence[Any]) -> None:
    """Until every job has left its result, or is no more in the queue. Slurm is asked less and less often."""
    started = asked = time.monotonic()
    gone: dict[str, float] = {}  # jobs without a result, and since when they are no more in the queue
    while open_jobs := [job for job in jobs if not job.paths.result_pickle.exists()]:
        now = time.monotonic()
        if all(now - gone.get(job.job_id, now) > GRACE for job in open_jobs):
            return
        check_stop()
        time.sleep(1)
        if now - asked > min(60.0, max(2.0, (now - started) / 10)):
            queued, asked = _queued(), now
            if queued is not None:
                gone = {job.job_id: gone.get(job.job_id, now) for job in open_jobs if job.job_id not in queued}


def _queued() -> set[str] | None:
    """This user's jobs that wait, run or end; None where Slurm does not answer now."""
    command = ["squeue", "--me", "--array", "--noheader", "--format=%i"]
    try:
        return set(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split())
    except (OSError, subprocess.SubprocessError):
        return None


def _outcome(job: Any, overrides: Sequence[str]) -> JobReturn:
    """A job's own return; of one that was killed, a failure that names it."""
    if job.paths.result_pickle.exists():
        outcome, found = job._get_outcome_and_result()
        if outcome == "success":
            returned: JobReturn = found
            if returned.status is JobStatus.FAILED:
                _say(overrides, returned._return_value)
            return returned
        last = str(found).strip().splitlines()[-1]
    else:
        last = "no result: cancelled, out of time or memory"
    error = PacerError(f"job {job.job_id} ended: {last}", remedy=f"see {job.paths.stderr}")
    _say(overrides, error)
    failed = JobReturn(overrides=list(overrides), status=JobStatus.FAILED)
    failed.return_value = error
    return failed


def _say(overrides: Sequence[str], error: Exception) -> None:
    print(f"error: {' '.join(filter_overrides(overrides))}: {error}", file=sys.stderr, flush=True)
