"""Loggers for other packages, against the packages themselves and their local stores."""

import json
import os
import struct
import time

import pytest
from tp_core.errors import ConfigError
from tp_testing import LoggerConformance
from tp_trainer.loggers import MlflowLogger, RunInfo, TensorBoardLogger, WandbLogger

pytestmark = [
    pytest.mark.slow,
    # Of those packages and what they import: none of our business.
    pytest.mark.filterwarnings("ignore"),
]


def test_tensorboard_refuses_a_folder_that_it_cannot_name_and_takes_other_text(tmp_path):
    pytest.importorskip("tensorboard")
    name = os.fsdecode(b"\xff")
    with pytest.raises(ConfigError, match=r"bytes in its name that are no text: .*give TensorBoardLogger"):
        TensorBoardLogger(tmp_path / name).open(RunInfo())
    logger = TensorBoardLogger(tmp_path / "good")
    logger.open(RunInfo(hyperparameters={"data": name}, environment={"folder": name}))
    logger.close("finished")


class TestTensorBoard(LoggerConformance):
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("tensorboard")

    def make(self, folder):
        return TensorBoardLogger()

    def read(self, folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        tags = events.Tags()["scalars"]
        return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}

    def read_hyperparameters(self, folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        found = HParamsPluginData.FromString(content).session_start_info.hparams
        values = {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}
        # What torch writes of a bool or a whole number is a float.
        return values | {"epochs": int(values["epochs"]), "compile": bool(values["compile"])}

    def test_a_run_that_begins_anew_keeps_the_folder_before(self, tmp_path):
        for _ in range(2):
            self._write(tmp_path, [{"loss": 1.0}])
        assert (tmp_path / "tensorboard-1").is_dir()
        assert self.read(tmp_path) == {"loss": [(1, 1.0)]}


@pytest.mark.needs("mlflow")
class TestMlflow(LoggerConformance):
    @pytest.fixture(autouse=True)
    def _settings(self, monkeypatch):
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def make(self, folder):
        return MlflowLogger("tests", tracking_uri=folder.as_uri())

    def run(self, folder):
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=folder.as_uri())
        experiment = client.get_experiment_by_name("tests")
        runs = client.search_runs([experiment.experiment_id])
        return client, runs

    def read(self, folder):
        client, runs = self.run(folder)
        found = {}
        for run in reversed(runs):
            for name in run.data.metrics:
                history = client.get_metric_history(run.info.run_id, name)
                found.setdefault(name, []).extend((metric.step, metric.value) for metric in history)
        return found

    def read_hyperparameters(self, folder):
        return self.run(folder)[1][0].data.params

    @pytest.mark.parametrize(
        ("status", "word"), [("finished", "FINISHED"), ("interrupted", "KILLED"), ("failed", "FAILED")]
    )
    def test_the_run_ends_with_the_word_of_mlflow(self, tmp_path, status, word):
        logger = self.make(tmp_path)
        logger.open(RunInfo(environment={"SLURM_JOB_ID": "17"}, versions={"torch": "2"}))
        logger.close(status)
        [run] = self.run(tmp_path)[1]
        assert run.info.status == word
        assert run.data.tags["environment.SLURM_JOB_ID"] == "17"
        assert run.data.tags["version.torch"] == "2"

    def test_both_parts_of_a_resumed_run_are_one_run(self, tmp_path):
        self.test_a_resumed_run_has_every_step_once(tmp_path, closed=True)
        assert len(self.run(tmp_path)[1]) == 1


@pytest.mark.needs("wandb")
class TestWandb(LoggerConformance):
    @pytest.fixture(autouse=True)
    def _settings(self, monkeypatch):
        monkeypatch.setenv("WANDB_SILENT", "true")

    def make(self, folder):
        import wandb

        quiet = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True)
        return WandbLogger("tests", mode="offline", settings=quiet)

    def records(self, folder):
        from wandb.proto.wandb_internal_pb2 import Record

        for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
            # Its own process writes the file, and is not waited for by the end of an offline run.
            deadline = time.monotonic() + 800
            records = []
            while not any(record.WhichOneof("record_type") == "exit" for record in records):
                assert time.monotonic() < deadline, f"{path} was not finished"
                time.sleep(0.02)
                records = [Record.FromString(data) for data in blocks(path.read_bytes())]
            yield from records

    def read(self, folder):
        """What W&B keeps: of a step that comes twice, the first."""
        found = {}
        for record in self.records(folder):
            if record.WhichOneof("record_type") == "history":
                row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
                step = row.pop("_step")
                for name in row.keys() - {"epoch", "_runtime", "_timestamp"}:
                    value = float(row[name])
                    found.setdefault(name, {}).setdefault(step, value)
        return {name: sorted(values.items()) for name, values in found.items()}

    def read_hyperparameters(self, folder):
        config = {}
        for record in self.records(folder):
            if record.WhichOneof("record_type") == "config":
                config |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.config.update}
        return {name: value for name, value in config.items() if name not in {"run", "_wandb"}}

    def test_both_parts_of_a_resumed_run_have_one_id(self, tmp_path):
        self.test_a_resumed_run_has_every_step_once(tmp_path, closed=True)
        ids = [r.run.run_id for r in self.records(tmp_path) if r.WhichOneof("record_type") == "run"]
        assert len(ids) >= 2
        assert len(set(ids)) == 1


def blocks(data):
    """Yield the records in a file of W&B, which has the blocks of LevelDB's logs."""
    position, whole, parts = 7, 32768, []  # after the file's own header
    while position + 7 <= len(data):  # a record that is being written is left out
        left = whole - position % whole
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):
            return
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in {1, 4}:  # whole, or the last of several
            yield b"".join(parts)
            parts = []
