"""A session around another one."""

from typing import Any

from tp_core._contracts._session import Session


class SessionWrapper(Session):
    """A session around another one, which does what the wrapper does not.

    For a backend that opens another one for the weights, and changes what a step computes.

    Args:
        inner: The session that this one is around.

    Attributes:
        inner: The same.
    """

    def __init__(self, inner: Session) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _forward(name: str) -> Any:
    def forward(self: SessionWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    def read(self: SessionWrapper) -> Any:
        return getattr(self.inner, name)

    def write(self: SessionWrapper, value: Any) -> None:
        setattr(self.inner, name, value)

    if callable(getattr(Session, name, None)):
        return forward
    return property(read, write)


for _name in ("job", "device", "closed", *(n for n in vars(Session) if not n.startswith("_"))):
    setattr(SessionWrapper, _name, _forward(_name))
