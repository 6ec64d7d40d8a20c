"""Numbers in a run of MLflow."""

import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tp_core.errors import ConfigError
from tp_core.messages import check_installed
from tp_core.plugins import Logger, RunInfo, RunStatus

from tp_trainer._peer_names import explain_fields

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

# The server refuses a whole call of more entries, or with a longer name or text.
_MOST_METRICS = 1000
_MOST_WORDS = 100  # parameters, or tags
_LONGEST_NAME = 250
_LONGEST_PARAM = 500  # characters; newer servers take 6000
_LONGEST_TAG = 5000
_PATIENCE_S = 5.0  # between two calls
T = TypeVar("T")

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_REFUSED = re.compile(r"[^\w\-. :/]")


@explain_fields
class MlflowLogger(Logger):
    """Logs to MLflow, under one run for all parts of a resumed run.

    Hyperparameters are parameters of the run; environment, versions and selection are tags. A resumed run
    keeps its id, and steps that MLflow already has are not logged again. Numbers are sent together, every few
    seconds and at checkpoints. Characters that MLflow refuses in names become "_";
    names and texts that are too long for it are cut.

    Args:
        experiment: The experiment, created if it does not exist.
        run_name: The name of the run.
        tracking_uri: The server or the store; by default the environment's.

    Raises:
        ConfigError: The package mlflow is not installed; or, in :meth:`open`, the store cannot be used.
    """

    name: ClassVar[str] = "mlflow"

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        check_installed("mlflow", by="MlflowLogger", extra="tp-trainer[mlflow]")
        self._experiment, self._run_name, self._uri = experiment, run_name, tracking_uri
        self._client: MlflowClient | None = None
        self._id: str | None = None
        self._pending: list[Metric] = []
        self._sent_at = 0.0
        self._resumed = False
        self._last: dict[str, int] = {}  # the newest step that MLflow has of each name

    def open(self, info: RunInfo) -> None:
        """Start the run, or resume it.

        Raises:
            ConfigError: The store cannot be used.
        """
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            self._client = MlflowClient(tracking_uri=self._uri)
            self._resumed = self._id is not None and info.resumed
            if self._resumed:
                self._client.update_run(self._id, status="RUNNING")
            else:
                self._begin(self._client, info)
        except MlflowException as error:
            msg = f"MlflowLogger cannot use its store: {error}"
            raise ConfigError(msg) from error
        self._sent_at = time.monotonic()

    def _begin(self, client: "MlflowClient", info: RunInfo) -> None:
        from mlflow.entities import Param, RunTag

        existing = client.get_experiment_by_name(self._experiment)
        if existing is None:
            experiment = client.create_experiment(self._experiment)
        else:
            experiment = existing.experiment_id
        tags = {
            **{f"environment.{name}": value for name, value in info.environment.items()},
            **{f"version.{name}": value for name, value in info.versions.items()},
            "selection": info.selection,
        }
        run = client.create_run(experiment, run_name=self._run_name)
        self._id = run.info.run_id
        # By name: a parameter cannot change, and two of them may have one name once MLflow takes it.
        params = {_name(key): str(value)[:_LONGEST_PARAM] for key, value in info.hyperparameters.items()}
        for some in _batches([Param(*item) for item in params.items()], _MOST_WORDS):
            client.log_batch(self._id, params=some)
        for some in _batches([RunTag(_name(k), str(v)[:_LONGEST_TAG]) for k, v in tags.items()], _MOST_WORDS):
            client.log_batch(self._id, tags=some)

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:  # noqa: ARG002
        """Buffer numbers, and send the buffer every few seconds."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for full_name, value in numbers.items():
            name = _name(full_name)
            if step > self._newest(name):
                self._pending.append(Metric(name, float(value), now, step))
        if len(self._pending) >= _MOST_METRICS or time.monotonic() - self._sent_at > _PATIENCE_S:
            self._send()

    def _newest(self, name: str) -> int:
        """Return the last step of ``name`` that the run had logged before its resume; -1 for none."""
        if not self._resumed or self._client is None:
            return -1
        if name not in self._last:
            history = self._client.get_metric_history(self._id, name)
            self._last[name] = max((metric.step for metric in history), default=-1)
        return self._last[name]

    def _send(self) -> None:
        pending, self._pending = self._pending, []
        self._sent_at = time.monotonic()
        if self._client is not None:
            for some in _batches(pending, _MOST_METRICS):
                self._client.log_batch(self._id, metrics=some)

    def event(self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int) -> None:  # noqa: ARG002
        """Set a tag to the latest event of its kind."""
        if self._client is not None and self._id is not None:
            value = str({"step": step, **facts})[:_LONGEST_TAG]
            self._client.set_tag(self._id, _name(f"last_{kind}"), value)

    def close(self, status: RunStatus) -> None:
        self._send()
        if self._client is not None and self._id is not None:
            self._client.set_terminated(self._id, _STATUS[status])
            self._client = None

    def state_dict(self) -> dict[str, Any]:
        """Send the rest, and return the id of the run."""
        self._send()
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]


def _name(name: str) -> str:
    return _REFUSED.sub("_", name)[:_LONGEST_NAME]


def _batches(entries: list[T], most: int) -> Iterator[list[T]]:
    return (entries[start : start + most] for start in range(0, len(entries), most))
