"""The widths of linear layers, torch's own and those of transformers that keep weights as (in, out)."""

from torch import nn

__all__ = ["is_linear", "is_transposed", "widths"]


def is_transposed(module: nn.Module) -> bool:
    """Whether it is the ``Conv1D`` of transformers, a linear layer whose weight is (in, out)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that a plan can split."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def widths(module: nn.Module) -> tuple[int, int]:
    """Return the input and output features of a linear layer or of an embedding, over all ranks."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = module._parameters["weight"]
    if weight is None:
        raise TypeError(type(module))
    return weight.size(0), weight.size(1)
