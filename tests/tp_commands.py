"""Every installed sub-command of `tp`, by the words that it is called with."""

from tp_core.cli._main import build_app  # private: no public name lists the commands that are installed

__all__ = ["COMMANDS", "options"]


def _commands():
    """Return what can be called: the words of each command, and its parameters."""
    app = build_app()
    context = app.make_context("tp", ["doctor"], resilient_parsing=True)
    found = {}
    queue = [((name,), app.get_command(context, name)) for name in app.list_commands(context)]
    while queue:
        words, command = queue.pop()
        inner = getattr(command, "commands", None)
        if inner:
            queue += [((*words, name), below) for name, below in inner.items()]
        else:
            found[" ".join(words)] = command
    return found


def options(command):
    return [text for p in command.params for text in [*p.opts, *p.secondary_opts] if text.startswith("--")]


COMMANDS = _commands()
