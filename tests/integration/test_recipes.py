"""The commands of the recipes and tutorials do what the pages say, in the order in which they stand there."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from tp_core import LaunchEnvironment

from tests.run_tp import run

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
PAGES = sorted(page for folder in ("recipes", "tutorials") for page in (DOCS / folder).glob("*.md"))
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Which commands the slow part runs of pages that start one program many times; the nightly part runs all.
# Tests below train "contrastive", "fine-tuning", "reinforce" and "segmentation" in one process, as
# test_gan.py does "gan".
# The command of "classes" is in test_identities.py.
SOME = {
    "classes": [],
    "contrastive": [],
    "fine-tuning": [],
    "folder": [0, 1],
    "gan": [],
    "long-documents": [1],
    "reinforce": [],
    "segmentation": [],
    "stages": [1],
    "two_hosts": [0, 6, 7, 8],
}


def commands(page):
    """Return the commands of a page's consoles; those that begin at once, `command &`, end with the last."""
    return [
        line[2:]
        for block in CONSOLE.findall(page.read_text())
        for line in block.splitlines()
        if line[:2] == "$ "
    ]


def cases():
    for page in PAGES:
        if found := commands(page):
            some = [found[n] for n in SOME[page.stem]] if page.stem in SOME else found
            if some:
                # A cluster of Ray's starts when the machine lets it, as in tests/tp_ray.
                mark = pytest.mark.nightly if page.stem == "ray" else pytest.mark.slow
                yield pytest.param(page, some, id=page.stem, marks=mark)
            if some != found:
                yield pytest.param(page, found, id=f"{page.stem}-all", marks=pytest.mark.nightly)


@pytest.mark.takes(40)
@pytest.mark.parametrize(("page", "lines"), list(cases()))
def test_the_commands_of_a_page_run(page, lines, tmp_path):
    if page.stem == "ray":
        pytest.importorskip("ray")
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    scripts = os.pathsep.join(
        [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ["PATH"]]
    )
    environ = os.environ | {"PATH": scripts, "OMP_NUM_THREADS": "1", "TP_STATE_DIR": str(tmp_path / "state")}
    script = "\n".join(["set -e", *lines, "for each in $(jobs -p); do wait $each; done"])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if page.stem == "two_hosts":  # one loss, whatever it ran on
        losses = re.findall(r"epoch 10, loss (\S+)", done.stdout)
        assert len(losses) == (6 if lines == commands(page) else 2)
        assert max(map(float, losses)) - min(map(float, losses)) <= 1.1e-6
    if page.stem == "fine-tuning" and lines == commands(page):
        assert "loaded again: 7" in done.stdout


def load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_pixels_are_found(capsys):
    assert load("segmentation").main(["--epochs", "4"]) > 0.75


@pytest.mark.slow
def test_views_find_each_other(capsys):
    load("contrastive").main(["--epochs", "20"])
    before, after = map(
        float, re.search(r"(0\.\d+) before, (0\.\d+) after", capsys.readouterr().out).groups()
    )
    assert after > before + 0.15


@pytest.mark.takes(60)
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of transformers' own
def test_answers_are_learned_from_packed_chats(tmp_path, capsys):
    program, base = load("fine_tune"), tmp_path / "small"
    program.main(["--make", str(base)])
    given = [str(base), "--data", str(base / "chats.jsonl"), "--out", str(tmp_path / "tuned")]
    # After six epochs it is 0.82 to 0.89, by the seed and by the order in which a processor sums.
    assert program.main([*given, "--pack", "64", "--epochs", "12"]) > 0.95
    assert "loaded again: 7" in capsys.readouterr().out


@pytest.mark.slow
def test_games_last_longer(capfd):
    lengths = load("reinforce").main(["--rounds", "20"])
    assert lengths[-1] > 5 * lengths[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of jupyter's own packages
def test_the_notebook_runs_and_its_cells_are_on_the_page(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "ranks.ipynb", as_version=4)
    shown = re.findall(r"^```py\n(.*?)\n```", (DOCS / "recipes" / "notebooks.md").read_text(), re.M | re.S)
    assert shown == [cell.source for cell in notebook.cells]
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "'single'" in str(notebook.cells[1].outputs)
    assert "'ddp'" in str(notebook.cells[2].outputs)


def launch_options(arguments, environ):
    """Return the options of `tp launch` in a pod, with the variables that the operator sets."""
    words = [re.sub(r"\$\((\w+)\)", lambda name: environ[name[1]], word) for word in arguments]
    assert words[:2] == ["tp", "launch"]
    return words[2:]


def request_of(words, environ, monkeypatch):
    """Return the request that `tp launch` would make of these words."""
    made = []
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stopped = lambda request: made.append(asdict(request)) or _stop()  # noqa: E731 - short
    monkeypatch.setattr("tp_launch._local_run.execute", stopped)
    run(["launch", *words])
    return made[0]


def _stop():
    raise KeyboardInterrupt


def test_the_manifests_of_kubernetes_start_the_ranks_of_a_job(monkeypatch):
    job = yaml.safe_load((EXAMPLES / "cluster" / "pytorchjob.yaml").read_text())
    environ = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23456"}
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        request = request_of(
            launch_options([*container["command"], *container["args"]], environ), {}, monkeypatch
        )
        assert (request["nnodes"], request["node_rank"], request["master_port"]) == ("2", 1, 23456)
        assert (request["script"], request["master_addr"]) == ("train.py", "digits-master-0")
        assert int(request["nproc_per_node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
        assert request["grace_s"] < replica["template"]["spec"]["terminationGracePeriodSeconds"]

    trainer = yaml.safe_load((EXAMPLES / "cluster" / "trainjob.yaml").read_text())["spec"]["trainer"]
    environ = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "digits-node-0-0.digits",
        "PET_MASTER_PORT": "29400",
    }
    request = request_of(launch_options([*trainer["command"], *trainer["args"]], {}), environ, monkeypatch)
    assert (request["nnodes"], request["nproc_per_node"], request["node_rank"]) == ("2", "4", 1)
    assert (request["master_addr"], request["master_port"]) == ("digits-node-0-0.digits", 29400)


def test_the_variables_of_slurm_on_the_page_are_those_that_are_read():
    read = set()

    class Noted(dict):
        def get(self, name, default=None):
            read.add(name)
            return super().get(name, default)

        def __contains__(self, name):
            read.add(name)
            return super().__contains__(name)

    page = (DOCS / "recipes" / "slurm.md").read_text()
    shown = set(re.findall(r"`((?:SLURM|MASTER)_\w+)`", page))
    script = (EXAMPLES / "cluster" / "train.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))
    nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    environ = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "SLURM_STEP_NODELIST": "node[01-02]",
    }
    found = LaunchEnvironment.read(Noted(environ))
    assert shown == {name for name in read if name.startswith(("SLURM", "MASTER"))}
    assert (found.rank, found.world_size, found.local_rank, found.hosts) == (5, nodes * tasks, 1, nodes)
    assert found.master_address == "node01"
