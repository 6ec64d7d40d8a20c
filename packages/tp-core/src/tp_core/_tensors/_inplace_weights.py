"""Weights that a forward pass writes, so that copies of a model would diverge."""

from torch import nn

from tp_core.errors import ModelError


def check_no_max_norm(model: nn.Module, who: str) -> None:
    """Check that no embedding writes its weight while it looks rows up.

    Args:
        model: The model.
        who: The words for the copies in the message: "each rank", "each device".

    Raises:
        ModelError: An embedding that is trained has a ``max_norm``.
    """
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.max_norm is not None and module.weight.requires_grad:
            what = f"the model's {name!r}" if name else "the model"
            msg = (
                f"{what} ({type(module).__name__}) has max_norm={module.max_norm}, which scales rows of the "
                f"weight while they are looked up: {who} would scale those of its own part of the batch, and "
                "the weights would part. Make it without max_norm, and scale all rows after each optimizer "
                "step, where the weight is whole: "
                f"weight.data = torch.renorm(weight.data, {module.norm_type:g}, 0, {module.max_norm:g})"
            )
            raise ModelError(msg)
