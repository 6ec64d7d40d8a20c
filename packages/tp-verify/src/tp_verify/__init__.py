"""Proves a parallel training equal to one device, or names the first place where it parts."""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_verify._report import Finding as Finding
    from tp_verify._report import VerifyReport as VerifyReport
    from tp_verify._strategy import Strategy as Strategy
    from tp_verify._verify import verify as verify

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_verify._report": ["Finding", "VerifyReport"],
            "tp_verify._verify": ["verify"],
            "tp_verify._strategy": ["Strategy"],
        },
    )
