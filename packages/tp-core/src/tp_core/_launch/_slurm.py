"""What Slurm's variables mean."""

import re
from collections.abc import Mapping

from tp_core.errors import LaunchEnvironmentError

__all__ = ["derive_port", "expand_counts", "expand_hosts", "is_step"]

_SPECIAL_STEPS = 0xFFFF_FFF0
"""From here on step numbers mean something else than a step that srun started: the batch script,
the shell of salloc, the step that adopts ssh logins (slurm.h)."""

_FIRST_PORT, _PORTS = 15_000, 16_384  # below Linux' ephemeral ports, which begin at 32,768


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task; scripts of sbatch and shells of salloc are not.

    Example:
        >>> is_step({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"})
        False
    """
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdecimal() and int(step) < _SPECIAL_STEPS


def expand_counts(text: str) -> list[int]:
    """Return one count per node from Slurm's short form.

    Raises:
        LaunchEnvironmentError: The text is not in that form.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            msg = f"{text!r} is not a list of tasks per node; it should look like '2(x3),1'"
            raise LaunchEnvironmentError(msg)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Return the host names of Slurm's short form.

    Raises:
        LaunchEnvironmentError: The text is not in that form.

    Example:
        >>> expand_hosts("node[001-003,7],gpu1")
        ['node001', 'node002', 'node003', 'node7', 'gpu1']
    """
    words = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+", text)
    if not words or ",".join(words) != text.strip():
        raise _bad_hosts(text)
    return [host for word in words for host in _expand_word(word, text)]


def _expand_word(word: str, text: str) -> list[str]:
    head, bracket, rest = word.partition("[")
    if not bracket:
        return [word]
    inside, _, tail = rest.partition("]")
    tails = _expand_word(tail, text)
    hosts: list[str] = []
    for piece in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _bad_hosts(text)
        width = len(match[1])
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            hosts += [f"{head}{number:0{width}d}{end}" for end in tails]
    return hosts


def _bad_hosts(text: str) -> LaunchEnvironmentError:
    msg = f"{text!r} is not a list of hosts; it should look like 'node[001-004,7],gpu1'"
    return LaunchEnvironmentError(msg)


def derive_port(job: int, step: int) -> int:
    """Return a port that every task of the step computes alike, and other steps hardly ever.

    Example:
        >>> derive_port(1, 0)
        15097
    """
    return _FIRST_PORT + (job * 97 + step) % _PORTS
