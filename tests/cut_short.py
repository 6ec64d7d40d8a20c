"""Run programs in forks of one process, which has imported what takes long to import; end some of them early.

    python cut_short.py MODULES < RUNS

Each line of the runs is JSON, ``[folder, program, step]``: the program runs in the folder. Where a step is
given, its process ends before that optimizer step as if its machine were lost. What it prints lies in
``out`` of the folder beside it, in a line of JSON with its exit status for each run on the standard output.
"""

import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

CUT = 9  # the exit status of a program that was ended


def end_before(step):
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    done = 0

    def count(*_):
        nonlocal done
        done += 1
        if done == step:
            os._exit(CUT)

    register_optimizer_step_pre_hook(count)


def run(folder, program, step):
    """Run a program as ``python program`` would in the folder; never returns."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [program]
    for stream in (1, 2):
        os.dup2(os.open("out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    status = 1
    try:
        if step is not None:
            end_before(step)
        runpy.run_path(program, run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is what the program has ended with
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main():
    for module in sys.argv[1].split(","):
        importlib.import_module(module)
    for line in sys.stdin:
        folder, program, step = json.loads(line)
        if not (child := os.fork()):
            run(folder, program, step)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed = Path(folder, "out").read_text(errors="replace")
        Path(folder, "out").unlink()
        print(json.dumps({"status": status, "printed": printed}), flush=True)


if __name__ == "__main__":
    main()
