"""The trainer's evaluations, predictions and gathers over its prepared models and loaders."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from tp_core.data import PreparedLoader
from tp_core.output import get_logger

from tp_trainer._checks import check_callable, check_loader, check_model
from tp_trainer._metrics import Metric, Predictions, check_metrics, evaluate, named_loaders
from tp_trainer._preparation import Preparation
from tp_trainer._running._context import RunContexts
from tp_trainer._running._drift import compare_prepared
from tp_trainer._steps._loaders import gather_rows, gather_with_gradients
from tp_trainer._steps._step import RunStep, Step

log = get_logger("tp_trainer")


class Evaluation:
    """Runs models on loaders without training them, and gathers rows of all ranks.

    Args:
        preparation: Has the session, and prepares models and loaders.
        contexts: Those of the open loops.
    """

    def __init__(self, preparation: Preparation, contexts: RunContexts) -> None:
        self._preparation = preparation
        self._contexts = contexts

    def evaluate(
        self,
        model: nn.Module,
        loader: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        step: Step,
        metrics: Mapping[str, Metric] | None,
        shard: bool,
    ) -> dict[str, Any]:
        """Return the means and metrics of the step on the loaders; see `Trainer.evaluate`."""
        check_model("evaluate()", model)
        check_callable("step", step)
        loaders = named_loaders("loader", loader)
        checked = check_metrics(metrics)
        for each in loaders.values():
            check_loader("loader", each)
        preparation = self._preparation
        prepared = preparation.prepare_model(model)
        session = preparation.session
        compare_prepared(preparation, when="before evaluate()")
        results: dict[str, Any] = {}
        for prefix, each in loaders.items():
            batches = preparation.prepare_loader(each, shard=shard, training=False)
            epoch = batches.next_epoch
            try:
                means = evaluate(
                    session,
                    self._run_step(batches),
                    step,
                    prepared,
                    batches,
                    checked,
                    boundaries=self._contexts.current.boundaries,
                )
            finally:
                batches.set_epoch(epoch)
            if not means and session.is_main:
                log.warning(
                    "evaluate() has no result: the loader has yielded no sample; an iterator, such as a "
                    "generator, is gone through once"
                )
            results |= {prefix + name: value for name, value in means.items()}
        return results

    def predict(self, model: nn.Module, loader: Iterable[Any], step: Step, *, shard: bool) -> Predictions:
        """Return the step's outputs for the samples of a loader; see `Trainer.predict`."""
        check_model("predict()", model)
        check_loader("loader", loader)
        check_callable("step", step)
        preparation = self._preparation
        prepared = preparation.prepare_model(model)
        batches = preparation.prepare_loader(loader, shard=shard, training=False)
        return Predictions(
            preparation.session,
            self._run_step(batches),
            step,
            prepared,
            batches,
            boundaries=lambda: self._contexts.current.boundaries,
        )

    def _run_step(self, batches: PreparedLoader) -> RunStep:
        run = self._preparation.run_step(batches)
        watchdog = self._contexts.current.watchdog
        if watchdog is None:
            return run
        return watchdog.watch(run)

    def gather_rows(self, value: Any, *, batch: Any) -> Any:
        """Return the rows of all data ranks; see `Trainer.gather_for_metrics`."""
        session = self._preparation.open(by="gather_for_metrics()")
        session.check_in_step("gather_for_metrics()")
        return gather_rows(session, value, is_nothing=self._holds_nothing(batch))

    def gather_with_gradients(self, rows: Tensor, *, batch: Any) -> Tensor:
        """Return the rows of all data ranks, with gradients; see `Trainer.all_gather`."""
        session = self._preparation.session
        session.check_in_step("all_gather()", may_meet=True)
        return gather_with_gradients(session, rows, is_nothing=self._holds_nothing(batch))

    def _holds_nothing(self, batch: Any) -> bool:
        shares = self._preparation.shares
        return shares is not None and shares.holds_nothing(batch)
