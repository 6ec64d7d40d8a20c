"""Optimizers that cannot be given a part of a parameter."""

import re

from torch.optim import Optimizer

__all__ = ["whole_matrix_optimizer"]

# They divide by norms of a whole matrix, orthogonalise or factorise it, or take products of all parameters.
_WHOLE_MATRIX = re.compile(
    r"muon|adafactor|lbfgs|shampoo|galore|kfac|lamb$|lars$|^(soap|came|apollo|novograd|scion|kron|psgd)$",
    re.IGNORECASE,
)


def whole_matrix_optimizer(optimizer: Optimizer) -> str | None:
    """Return the name of an optimizer's class if its step depends on whole matrices, else ``None``.

    Given a rank's shard of a matrix it would make another update than without splitting. It is known by its
    name, or by that of a class that it is derived from.

    Example:
        >>> weight = torch.zeros(2, 2, requires_grad=True)
        >>> whole_matrix_optimizer(torch.optim.LBFGS([weight]))
        'LBFGS'
        >>> whole_matrix_optimizer(torch.optim.SGD([weight]))
    """
    return next((c.__name__ for c in type(optimizer).__mro__ if _WHOLE_MATRIX.search(c.__name__)), None)
