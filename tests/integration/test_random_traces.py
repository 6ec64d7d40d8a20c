"""No package seeds a global generator, but where it puts it back or says that it seeds."""

import ast
import re

import pytest

from tests.wheels import ROOT

# What changes the state of a generator that all of a program shares. torch.random.fork_rng restores those of
# the CPU and of CUDA devices alone, so that nothing is to use it.
SEEDING = {"seed_everything", "seed_torch", "seed_device", "seed_generators", "manual_seed_all", "fork_rng"}
RESTORING = {"preserve_rng_state", "preserve_torch_rng_state"}

# Files with a seed outside of such a block, and why it leaves no trace, or is wanted.
ELSEWHERE = {
    "tp_core/random.py": "has the block itself, and seeds for others",
    "tp_core/replicas/_random.py": "the draws of replicas, whose end restores the generator",
    "tp_core/sessions/_optimizer_draws.py": "a step of an optimizer, after which a hook closes the block",
    "tp_core/data/_batches.py": "a worker process of a loader, whose generators are its own",
    "tp_data/_stream.py": "a sample that draws: the loader has the block, or it is a worker process",
    "tp_pipeline/_batch_run.py": "a step of the session, which has the block",
    "tp_runner/_workers/_item.py": "a worker process, or a thread for which `_thread.py` has the block",
    "tp_runner/_workers/_thread.py": "the stack of blocks around an inline worker has it",
    "tp_runner/_workers/_work.py": "the items of a worker, as for `_item.py`",
    "tp_shard/_groups/_random.py": "a fork of a tracker, whose end restores the generator",
    "tp_shard/_verify/_simulate.py": "a simulated rank, of which the caller has the block",
    "tp_accelerate/_states.py": "set_seed() of Accelerate, which is to seed",
    "tp_trainer/_trainer.py": "Trainer(seed=), which says that it seeds",
    "tp_trainer/_preparation.py": "data ranks after the first, when the session of Trainer(seed=) opens",
    "tp_trainer/_running/_state.py": "a resume on other ranks or devices, which the log says",
    "tp_simulator/_torch_sim.py": "the functions of a device's generators, which are to seed",
    "tp_verify/_strategy.py": "a rank of a strategy, in a process of its own",
    "tp_verify/_training_task.py": "a training, in a rank's process or in the caller's block",
}


def seeds_outside_of_blocks(tree):
    """Return the lines that seed outside of a ``with`` that restores the generators."""
    found = []

    def visit(node, *, is_inside):
        if isinstance(node, ast.With):
            names = {called(item.context_expr) for item in node.items}
            is_inside = is_inside or bool(names & RESTORING)
        if isinstance(node, ast.Call) and seeds(node) and (called(node) == "fork_rng" or not is_inside):
            found.append(node.lineno)
        for child in ast.iter_child_nodes(node):
            visit(child, is_inside=is_inside)

    visit(tree, is_inside=False)
    return found


def called(node):
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def seeds(call):
    name = called(call)
    receiver = getattr(call.func, "value", None)
    if name == "manual_seed":  # of a generator that was just made, it is that one's own
        return called(receiver) != "Generator"
    is_module = isinstance(receiver, ast.Name | ast.Attribute) and ast.unparse(receiver).endswith("random")
    return name in SEEDING or (name == "seed" and is_module)


@pytest.fixture(scope="module")
def seeding():
    """The files that seed outside of such a block, and where."""
    found = {}
    for source in (ROOT / "packages").glob("*/src"):
        for file in source.rglob("*.py"):
            text = file.read_text()
            if not re.search("seed|fork_rng", text) or "templates" in file.parts:
                continue  # to parse all files takes seconds
            if lines := seeds_outside_of_blocks(ast.parse(text)):
                found[file.relative_to(source).as_posix()] = lines
    return found


def test_packages_seed_where_they_put_it_back_or_have_a_reason(seeding):
    assert {file: lines for file, lines in seeding.items() if file not in ELSEWHERE} == {}


def test_every_reason_is_of_a_file_that_seeds(seeding):
    assert sorted(ELSEWHERE.keys() - seeding.keys()) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.manual_seed(0)",
        "torch.cuda.manual_seed_all(0)",
        "torch.default_generator.manual_seed(0)",
        "random.seed(0)",
        "np.random.seed(0)",
        "seed_everything(0)",
        "with torch.random.fork_rng(devices=[]): pass",
        "with preserve_rng_state(), torch.random.fork_rng(): pass",
    ],
)
def test_each_kind_of_seed_is_seen(line):
    assert seeds_outside_of_blocks(ast.parse(line)) == [1]


@pytest.mark.parametrize(
    "line", ["with preserve_rng_state(()), x: seed_torch(0)", "g = torch.Generator().manual_seed(0)"]
)
def test_what_leaves_no_trace_is_none(line):
    assert seeds_outside_of_blocks(ast.parse(line)) == []
