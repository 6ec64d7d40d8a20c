"""What the registry has of tp-runner, for tests that need the thing itself."""

from tp_core.plugins import registry


def engine_of(name):
    """Return the engine of a name."""
    return next(found.item for found in registry.engines() if found.item.name == name)


def app_of(name):
    """Return the sub-command of ``tp`` of a name."""
    return next(found.item for found in registry.commands() if found.item.name == name).load()
