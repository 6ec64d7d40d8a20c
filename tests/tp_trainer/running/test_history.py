"""What a program does with the history of a run: columns, a table, curves, a page, a notebook's view."""

import json
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_trainer import EpochRecord, History, LogOptions, Trainer

from tests.reference_training import mean_square

HISTORY = History(
    (
        EpochRecord(1, 8, 64, 0.5, 0.1, {"loss": 2.0, "<b>": 1.0}, {"loss": 3.0}),
        EpochRecord(2, 16, 64, 0.5, 0.05, {"loss": 1.0, "<b>": 2.0}),
    )
)


def fit(**settings):
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    with Trainer(devices="cpu", progress="auto") as trainer:
        return trainer.fit(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=mean_square, **settings
        )


def test_its_columns_have_a_value_for_each_epoch():
    columns = HISTORY.to_dict()
    assert columns["epoch"] == [1, 2]
    assert columns["loss"] == [2.0, 1.0]
    assert columns["val_loss"] == [3.0, None]
    assert columns["learning_rate"] == [0.1, 0.05]
    assert json.loads(json.dumps(columns)) == columns
    assert History(()).to_dict() == {}


def test_it_prints_as_a_table_and_says_how_to_get_the_weights(tmp_path):
    head, first, second = str(HISTORY).splitlines()
    assert head.split() == [
        "epoch",
        "steps",
        "samples",
        "seconds",
        "learning_rate",
        "loss",
        "<b>",
        "val_loss",
    ]
    assert first.split() == ["1", "8", "64", "0.5", "0.1", "2", "1", "3"]
    assert second.split() == ["2", "16", "64", "0.5", "0.05", "1", "2"]  # no validation
    assert len(head) == len(first)
    assert str(History(())) == "no epoch has ended"
    last = str(fit(checkpoint=tmp_path)).splitlines()[-1]
    assert f"tp convert {tmp_path} model.safetensors writes the weights of the newest" in last


def test_a_resumed_run_with_nothing_left_says_so(tmp_path, capsys):
    for said in ("", "nothing is left to do: 1 of 1 epochs are done"):
        fit(checkpoint=tmp_path, resume="auto", epochs=1)
        assert said in capsys.readouterr().err
    fit(checkpoint=tmp_path, resume="auto", epochs=2)
    assert "nothing is left" not in capsys.readouterr().err


def test_it_is_a_table_of_pandas():
    pytest.importorskip("pandas")
    table = HISTORY.to_dataframe()
    assert table.index.name == "epoch"
    assert table.loc[2, "loss"] == 1.0
    assert table["val_loss"].isna().tolist() == [False, True]
    assert len(History(()).to_dataframe()) == 0


def test_without_pandas_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"needs pandas.*pip install 'tp-trainer\[pandas\]'"):
        HISTORY.to_dataframe()


def test_it_draws_a_chart_for_each_metric_with_its_validation(tmp_path):
    figure = HISTORY.plot()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "learning_rate", "<b>"]
    training, validation = figure.axes[0].lines
    assert training.get_xydata().tolist() == [[8, 2], [16, 1]]
    assert validation.get_xydata().tolist() == [[8, 3]]
    HISTORY.plot("loss").savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("history", "names", "words"),
    [
        (HISTORY, ["accuracy"], "no numbers called 'accuracy'; it has loss, learning_rate, <b>"),
        (History(()), [], "none, as no epoch ended"),
    ],
)
def test_it_draws_no_numbers_that_are_not_there(history, names, words):
    with pytest.raises(ConfigError, match=words):
        history.plot(*names)


def test_the_page_of_a_run_that_logged_its_steps_is_that_of_its_folder(tmp_path):
    history = fit(epochs=2, checkpoint=tmp_path / "run", log=LogOptions("jsonl", every_steps=1))
    page = history.report()
    assert page == tmp_path / "run" / "report.html"
    assert "finished" in page.read_text()
    assert "begins" in page.read_text()


def test_the_page_of_a_run_without_a_record_has_the_curves_of_its_epochs(tmp_path):
    page = HISTORY.report(tmp_path / "page.html").read_text()
    assert page.count("<svg") == 3
    assert "What happened" not in page
    assert "1970" not in page
    with pytest.raises(ConfigError, match=r"needs a place: history.report\('run.html'\)"):
        HISTORY.report()


def test_the_folder_of_a_history_is_that_of_the_run_wherever_the_program_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = fit(epochs=1, checkpoint="run")
    assert history.folder == Path(tmp_path / "run")
    assert history == History(history.epochs)  # wherever the same numbers were made


@pytest.mark.slow
def test_a_notebook_shows_a_table_and_curves_in_colors_of_its_own():
    shown = HISTORY._repr_html_()
    assert shown.count("<tr>") == 3
    assert "<th>&lt;b&gt;</th>" in shown
    assert "<td>3</td>" in shown
    assert shown.count("<svg") == 3
    assert "currentColor" in shown
    assert "<svg" not in History(HISTORY.epochs[:1])._repr_html_()  # a point is not a curve


def test_a_notebook_without_matplotlib_shows_the_table(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    shown = HISTORY._repr_html_()
    assert "<table>" in shown
    assert "<svg" not in shown


def test_a_record_is_made_again_of_its_dict():
    record = EpochRecord(2, 16, 64, 0.5, 0.1, MappingProxyType({"loss": 1.5}), {"accuracy": 0.75})
    found = record.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert EpochRecord(**found) == record
