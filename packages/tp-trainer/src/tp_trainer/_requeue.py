"""Slurm's queue: where a job that was warned of its end asks to be started again."""

import logging
import os
import subprocess

__all__ = ["requeue"]

log = logging.getLogger("tp_trainer")

_TIMEOUT_S = 60.0


def requeue() -> None:
    """Put this Slurm job back into the queue, to be started again with the same script.

    Outside Slurm nothing is done. A job that Slurm does not let back (``--no-requeue``, no batch job)
    is named in the log, with Slurm's reason.

    Source: the manual of ``scontrol``, "requeue".
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array is not None and task is not None:
        job = f"{array}_{task}"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("job %s could not be put back into Slurm's queue: %s", job, error)
        return
    if done.returncode:
        log.warning("job %s could not be put back into Slurm's queue: %s", job, done.stderr.strip())
    else:
        log.info("job %s is back in Slurm's queue", job)
