"""What tests of launches need."""

from tests.launches import (  # noqa: F401 - fixtures
    free_port,
    gone,
    here,
    signals_are_left_as_they_were,
    tp,
    until,
)
