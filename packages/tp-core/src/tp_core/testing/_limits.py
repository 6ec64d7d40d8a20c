"""What an implementation does not do, declared with a reason: such a test is expected to fail."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from tp_core.errors import ConfigError

__all__ = ["DeclaredLimits"]


class DeclaredLimits:
    """A kit whose subclasses may declare limits.

    Attributes:
        limits: What is not done, and why: the reason by the name of the test that asks for it,
            ``{"test_...": "..."}``, with the parameters in brackets where it is one of several. Such a test
            is expected to fail, the report shows the reason, and it is an error if it passes. Nothing else
            is left out.
    """

    limits: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Notice a limit that names no test."""
        super().__init_subclass__(**kwargs)
        for name, reason in cls.limits.items():
            if not hasattr(cls, name.partition("[")[0]):
                msg = f"{cls.__name__} declares a limit of {name!r}, which is none of its tests"
                raise ConfigError(msg)
            if not reason:
                msg = f"the limit of {name!r} that {cls.__name__} declares needs a reason"
                raise ConfigError(msg)

    def subject(self) -> str:
        """Return what to call the implementation under test in reports."""
        return type(self).__name__

    @pytest.fixture(autouse=True)
    def _declared_limits(self, request: pytest.FixtureRequest) -> None:
        reason = self.limits.get(request.node.name) or self.limits.get(request.node.originalname)
        if reason is not None:
            mark = pytest.mark.xfail(reason=f"declared limit of {self.subject()!r}: {reason}", strict=True)
            request.node.add_marker(mark)
