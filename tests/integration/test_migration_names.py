"""The tables of names for those who come from other trainers: each name of tp exists, and each of theirs."""

import ast
import dataclasses
import importlib
import inspect
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import tp_core
import tp_launch
import tp_trainer
from tp_core.errors import ConfigError
from tp_trainer import Callback, Loop, Trainer, callbacks, loggers, tuning

from tests.tp_commands import COMMANDS, options

PAGE = Path(__file__).parents[2] / "docs" / "migration-names.md"
OF_FIT = {*inspect.signature(Trainer.fit).parameters}
# What the examples call theirs: a value that the reader has.
THEIRS = {
    *("batch", "dataset", "download", "flag", "found", "items", "loader", "loss", "make", "model"),
    *("optimizer", "print"),
    *(
        "metrics",
        "numbers",
        "rows",
        "run",
        "sampler",
        "scheduler",
        "scores",
        "step",
        "targets",
        "tensor",
        "train",
        "value",
    ),
}


def tables():
    """Return the rows of each section: what is there, and what is here."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
        found[title] = [row for row in rows if row[1] != "here"]
    return found


TABLES = tables()
SPANS = sorted(
    {span for rows in TABLES.values() for _, here in rows for span in re.findall(r"`([^`]+)`", here)}
)


class _Names(ast.NodeVisitor):
    """Resolves every name, attribute and keyword of an expression, and raises where one does not exist."""

    def __init__(self):
        self.roots = {
            "trainer": Trainer,
            "loop": Loop,
            "torch": torch,
            "tp_trainer": tp_trainer,
            "tp_launch": tp_launch,
        }
        self.roots |= {"tp_core": tp_core, "Trainer": Trainer, "fit": Trainer.fit, "Callback": Callback}
        for module in (tp_trainer, callbacks, loggers):
            self.roots |= {name: getattr(module, name) for name in module.__all__}
        self.roots["DataLoader"] = torch.utils.data.DataLoader
        self.roots["run"] = tp_trainer.RunView

    def found(self, node):
        if isinstance(node, ast.Name):
            assert node.id in self.roots or node.id in THEIRS, f"what is {node.id}?"
            return self.roots.get(node.id)
        assert isinstance(node, ast.Attribute), ast.dump(node)
        owner = self.found(node.value)
        if owner is None:
            assert isinstance(node.value, ast.Name), ast.dump(node)
            return None  # of what is the reader's
        if (owner, node.attr) == (Loop, "ends_step"):
            return None  # an attribute of the object, which a test below has
        found = getattr(owner, node.attr)
        if isinstance(found, property):
            found = inspect.get_annotations(found.fget, eval_str=True)["return"]
        return found

    def visit_Attribute(self, node):
        if not isinstance(node.value, ast.Call):
            self.found(node)
        self.generic_visit(node)

    def visit_Name(self, node):
        self.found(node)

    def visit_Call(self, node):
        self.generic_visit(node)
        called = self.found(node.func)
        try:
            parameters = inspect.signature(called).parameters
        except (TypeError, ValueError):  # a name of the reader's; one that is not written in Python
            return
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            for keyword in node.keywords:
                assert keyword.arg in parameters, f"{ast.unparse(node.func)} has no {keyword.arg}"


def check(span):
    """Raise unless what a code span names exists."""
    if span.startswith("tp "):
        words = span.split()
        flags = [word for word in words if word.startswith("--")]
        assert set(flags) <= set(options(COMMANDS[words[1]]))
        return
    if found := re.fullmatch(r"(\w+)=(.*)", span):  # an option of fit
        assert found[1] in OF_FIT, f"fit has no {found[1]}"
        if found[2]:
            _Names().visit(ast.parse(found[2], mode="eval"))
        return
    try:
        tree = ast.parse(span)
    except SyntaxError:
        tree = ast.parse(f"{span}: pass")  # the head of a with
    _Names().visit(tree)


def test_every_name_of_ours_exists():
    for span in SPANS:
        if not re.fullmatch(r'"\w+"|del', span):
            try:
                check(span)
            except (AssertionError, AttributeError) as error:
                error.add_note(f"in the span {span!r}")
                raise


def test_errors_answer_names_of_the_page_with_what_exists():
    theirs = {name for rows in TABLES.values() for there, _ in rows for name in re.findall(r"`(\w+)`", there)}
    answered = []
    for name in theirs - {*inspect.signature(Trainer).parameters}:
        for take in (lambda name: Trainer(**{name: None}), partial(getattr, Trainer())):
            try:
                take(name)
            except (ConfigError, AttributeError) as error:
                answered += str(error).split("; write ")[1:]
    assert len(answered) >= 50
    for answer in answered:
        check(answer)


@pytest.mark.parametrize(
    "wrong",
    [
        "Profilr('a')",
        "DdpOptions(static=True)",
        "checkpoint=Checkpoint('a')",
        "epoch=5",
        "fit(clip=1.0)",
        "loop.logg(loss=loss)",
        "torch.optim.Adan(lr=1)",
        "tp launch --nodes 2",
        "trainer.prepair(model)",
        "trainer.session.barier()",
    ],
)
def test_a_name_that_does_not_exist_is_noticed(wrong):
    with pytest.raises((AssertionError, AttributeError)):
        check(wrong)


def test_a_loop_says_whether_a_batch_ends_a_step():
    with Trainer(devices="cpu", progress=False) as trainer, trainer.loop([1], epochs=1) as loop:
        assert hasattr(loop, "ends_step")


def test_every_row_has_an_answer():
    assert {title: len(rows) > 15 for title, rows in TABLES.items()} == dict.fromkeys(TABLES, True)
    for there, here in (row for rows in TABLES.values() for row in rows):
        assert there
        assert "`" in here or here.startswith(("none", "nothing")), here


def named(title):
    """Return the names of another library in a table."""
    return [span for there, _ in TABLES[title] for span in re.findall(r"`([^`]+)`", there)]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("accelerate", "Accelerator"),
        pytest.param("lightning_fabric", "Fabric", marks=pytest.mark.needs("lightning_fabric")),
    ],
)
def test_their_methods_exist(module, name):
    found = getattr(importlib.import_module(module), name)
    given = named("Accelerate" if name == "Accelerator" else name)
    assert [each for each in given if not hasattr(found, each)] == []
    assert len(given) > 25


@pytest.mark.needs("pytorch_lightning")
def test_every_flag_of_lightnings_trainer_is_in_the_table():
    lightning = importlib.import_module("pytorch_lightning")
    assert sorted(named("Flags of Lightning's Trainer")) == sorted(
        inspect.signature(lightning.Trainer).parameters
    )


@pytest.mark.slow
def test_their_training_arguments_exist():
    transformers = importlib.import_module("transformers")
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    given = named("Hugging Face's TrainingArguments")
    assert [name for name in given if name not in known] == []
    assert len(given) > 60


def test_tuning_is_where_the_page_says():
    assert {"dry_run", "largest_batch_size"} <= set(tuning.__all__)
