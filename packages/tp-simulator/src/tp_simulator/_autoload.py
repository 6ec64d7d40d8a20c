"""What torch calls at the end of `import torch`, in every process of an environment that has this package."""

import os


def autoload() -> None:
    """Activate the devices that ``SIM_DEVICES`` asks for; without it, do nothing.

    Raises:
        ValueError: ``SIM_DEVICES`` is no number.
    """
    text = os.environ.get("SIM_DEVICES", "")
    if text in {"", "0"}:
        return
    if not text.isdecimal():
        msg = f"SIM_DEVICES is the number of simulated devices, such as 2, and not {text!r}"
        raise ValueError(msg)
    from tp_simulator._activation import activate

    activate(int(text))
