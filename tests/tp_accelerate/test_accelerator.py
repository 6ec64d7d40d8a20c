"""The loops of Accelerate's documents, with its ``Accelerator`` and with tp's: the same numbers."""

import contextlib
import importlib
import re
import types
from pathlib import Path

import accelerate
import pytest
import safetensors.torch
import torch
import tp_accelerate
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, StateError
from tp_testing import run_ranks

from tests.models import perceptron

LIBRARIES = {"accelerate": "accelerate", "tp": "tp_accelerate"}


def data(n=32, batch_size=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=batch_size)


def parts(n=32, batch_size=4):
    model = perceptron(3, 8, 2, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return model, optimizer, data(n, batch_size), schedule


def weights(accelerator, model):
    plain = accelerator.unwrap_model(model)
    return [round(value, 10) for p in plain.parameters() for value in p.flatten().tolist()]


def quick_tour(library, folder):
    """The loop of "Quicktour": a model, an optimizer, a loader, a scheduler; then the evaluation of it."""
    accelerator = library.Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    evaluation = accelerator.prepare(data(26, 4))
    for _ in range(2):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
    model.eval()
    found = []
    for inputs, targets in evaluation:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        found.append(accelerator.gather_for_metrics((predictions, targets)))
    right = sum((p == t).sum().item() for p, t in found)
    total = sum(len(t) for _, t in found)
    return weights(accelerator, model), scheduler.get_last_lr(), right, total


def accumulation(library, folder):
    """The loop of "Performing gradient accumulation", with clipping; an epoch ends within a step."""
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    seen = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(round(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)), 10))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    total = accelerator.reduce(torch.tensor(float(accelerator.process_index + 1)), "sum")
    rows = accelerator.gather(torch.tensor([accelerator.process_index]))
    return weights(accelerator, model), scheduler.get_last_lr(), seen, total.item(), rows.tolist()


def checkpoints(library, folder):
    """The loop of "Checkpointing": states of its own names, one of them loaded, batches of it skipped."""
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = library.Accelerator(cpu=True, project_config=config)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    accelerator.register_for_checkpointing(scheduler)

    def train(batches, saves=False):
        for number, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            if saves and number in (0, 1, 2):
                accelerator.save_state()

    train(loader, saves=True)
    whole = weights(accelerator, model)
    accelerator.load_state()
    train(accelerator.skip_first_batches(loader, 3))
    kept = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
    return whole, weights(accelerator, model), kept


def split_batches(library, folder):
    """Batches that are all processes' together, and the end of an epoch that is no end of a step."""
    accelerator = library.Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False),
    )
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    with accelerator.split_between_processes(list(range(5))) as mine:
        found = accelerator.gather_for_metrics(mine, use_gather_object=True)
    return weights(accelerator, model), scheduler.get_last_lr(), found


def synchronization(library, folder):
    """The loop of "Gradient synchronization": gradients of all batches, reduced in the last."""
    accelerator = library.Accelerator(cpu=True)
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    for number, (inputs, targets) in enumerate(loader):
        is_last = number == len(loader) - 1
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    optimizer.step()
    return weights(accelerator, model)


def early_stopping(library, folder):
    """The loop of "Deferring Executions": a process has all of them stop; then the model is saved."""
    accelerator = library.Accelerator(cpu=True)
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    for seen, (inputs, targets) in enumerate(loader, 1):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        if seen == 3 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    saved = safetensors.torch.load_file(Path(folder, "model.safetensors"))
    return weights(accelerator, model), seen, {name: value.tolist() for name, value in saved.items()}


EXAMPLES = [quick_tour, accumulation, synchronization, checkpoints, early_stopping, split_batches]
PAGE = Path(__file__).parents[2] / "docs" / "accelerate.md"


def run(name, example, folder):
    return example(importlib.import_module(LIBRARIES[name]), str(folder))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_the_loops_of_accelerates_documents_come_to_its_numbers_on_one_rank(example, tmp_path):
    theirs = run("accelerate", example, tmp_path / "accelerate")
    AcceleratorState._reset_state(reset_partial_state=True)  # what it keeps for the whole process
    GradientState._reset_state()
    assert run("tp", example, tmp_path / "tp") == theirs


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_and_on_two(example, tmp_path):
    theirs = run_ranks(run, 2, "accelerate", example, tmp_path / "accelerate")
    assert run_ranks(run, 2, "tp", example, tmp_path / "tp") == theirs


def test_the_page_has_each_of_the_loops():
    rows = re.findall(r"^\| (?!loop|--)([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    titles = [re.findall('"([^"]+)"', example.__doc__) for example in EXAMPLES]
    assert [re.findall('"([^"]+)"', row) for row in rows] == titles


def test_every_name_of_theirs_is_here_or_answered():
    accelerator = tp_accelerate.Accelerator(cpu=True)
    for name in dir(accelerate.Accelerator):
        if name.startswith("_"):
            continue
        if not hasattr(accelerator, name):
            with pytest.raises(AttributeError, match="; with tp, write "):
                getattr(accelerator, name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mixed_precision": "fp16"}, "Trainer\\(precision='fp16-mixed'\\)"),
        ({"mixed_precision": "fp8"}, "'bf16' is, and 'no'"),
        ({"fsdp_plugin": object()}, 'with tp, write Trainer\\(backend="fsdp"'),
        ({"gradient_accumulation": 2}, "did you mean 'gradient_accumulation_steps'"),
        ({"device_placement": False}, "trainer.session"),
        ({"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, "shard\\(index, count\\)"),
        ({"kwargs_handlers": [types.SimpleNamespace()]}, "SimpleNamespace, which is not here"),
    ],
)
def test_what_is_not_here_is_refused_by_name(arguments, said):
    with pytest.raises(ConfigError, match=said):
        tp_accelerate.Accelerator(cpu=True, **arguments)


def test_bfloat16_forwards_return_float32():
    accelerator = tp_accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    seen = []
    plain = nn.Sequential(nn.Linear(3, 2))
    plain[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model = accelerator.prepare(plain)
    assert model(torch.ones(1, 3)).dtype is torch.float32
    assert seen == [torch.bfloat16]


def test_a_state_of_other_objects_is_refused(tmp_path):
    accelerator = tp_accelerate.Accelerator(cpu=True)
    accelerator.prepare(*parts())
    accelerator.save_state(tmp_path)
    other = tp_accelerate.Accelerator(cpu=True)
    other.prepare(parts()[0])
    with pytest.raises(StateError, match="1 optimizers, and 0 were prepared"):
        other.load_state(tmp_path)
    with pytest.raises(StateError, match="there is no state in"):
        other.load_state(tmp_path / "none")


def test_random_numbers_of_other_processes_are_named(tmp_path, caplog):
    accelerator = tp_accelerate.Accelerator(cpu=True)
    accelerator.save_state(tmp_path)
    path = tmp_path / "state.pt"
    state = torch.load(path)
    torch.save(state | {"generators": state["generators"] * 2}, path)
    before = torch.get_rng_state()
    accelerator.load_state(tmp_path)
    assert "was saved on 2 processes, and this run has 1: its random numbers are not continued" in caplog.text
    assert torch.equal(torch.get_rng_state(), before)


def test_trackers_are_loggers_of_tp_and_those_of_theirs(tmp_path):
    accelerator = tp_accelerate.Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("example", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5)}, step=1)
    accelerator.end_training()
    assert '"loss"' in next((tmp_path / "example").glob("*.jsonl")).read_text()
    with pytest.raises(ConfigError, match="no logger of that name; did you mean 'tensorboard'"):
        tp_accelerate.Accelerator(cpu=True, log_with="tensorbord").init_trackers("example")


def test_values_are_padded_to_those_of_the_process_with_most():
    def ragged():
        accelerator = tp_accelerate.Accelerator(cpu=True)
        mine = torch.ones(1, accelerator.process_index + 1)
        padded = accelerator.pad_across_processes(mine, dim=1, pad_index=-1)
        return accelerator.gather(padded).tolist()

    assert run_ranks(ragged, 2)[0] == [[1, -1], [1, 1]]
