"""A session for programs that are a trainer themselves.

It is opened on the backend that :func:`tp_core.discovery.select` chooses.
"""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_trainer._opening._session import open_session as open_session
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, {"tp_trainer._opening._session": ["open_session"]})
