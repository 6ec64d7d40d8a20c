"""The registration of our workers as a backend of joblib, where it is installed."""

from tp_core.errors import ConfigError


def register_joblib() -> None:
    """Make ``joblib.parallel_config("tp")`` run joblib's work, scikit-learn's too, on our workers.

    Raises:
        ConfigError: joblib is not installed.

    Example:
        >>> register_joblib()
        >>> with joblib.parallel_config("tp", n_jobs=2):
        ...     joblib.Parallel()(joblib.delayed(abs)(i) for i in (-1, -2))
        [1, 2]
    """
    try:
        from joblib.parallel import register_parallel_backend
    except ImportError as error:
        msg = "joblib is not installed; pip install joblib"
        raise ConfigError(msg) from error
    from tp_runner._joblib_backend import TpBackend

    register_parallel_backend("tp", TpBackend)
