"""A callback for tp: it ends a run once the accuracy is high enough."""

from tp_core.plugins import Callback, NamedCallback, hookimpl

tp_contract = 1


class Enough(Callback):
    """Stops after the first validation whose accuracy reaches the goal."""

    def __init__(self, goal=0.9):
        self.goal = goal

    def on_validation_end(self, run, metrics):
        if metrics["accuracy"] >= self.goal:
            run.stop(f"an accuracy of {metrics['accuracy']:.3f} is enough")


@hookimpl
def tp_callbacks():
    return [NamedCallback("enough", "Ends a run once it is good enough.", Enough)]
