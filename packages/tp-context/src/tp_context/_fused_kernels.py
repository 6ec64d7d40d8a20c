"""The table of torch's fused attention kernels: which one can do what, and how it is called.

A fused kernel keeps no scores. All of these return log-sum-exps with the output, by which attention to some
keys is joined with attention to others. The backward pass of each takes both as arguments: with those of all
keys, it returns exactly what a block of keys adds to the gradients. So a causal mask over slices that begin
anywhere is a block without a mask and a square one, and needs no mask in memory.

What no kernel does is computed in tiles of a few rows, whose scores are in memory: `kernel_for` logs why.

Source: Dao, "FlashAttention-2", 2023.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from tp_core.errors import StepError
from tp_core.output import get_logger

from tp_context._attention_inputs import Inputs, Rules

_log = get_logger("tp_context")


class AttentionBlock(NamedTuple):
    """The arguments of a kernel: tensors of shape (batch, heads, queries or keys, features).

    ``added`` is an additive mask of shape (batch, heads, queries, keys). If ``is_causal``, there are as
    many queries as keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    added: Tensor | None
    is_causal: bool
    scale: float | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A fused kernel of torch, of the devices that have it.

    Attributes:
        name: Its name in documents and in the estimate.
        device: The dispatch key of its devices.
        backend: The choice of ``torch.nn.attention.sdpa_kernel`` that allows it.
        dtypes: The types of queries, keys and values.
        forward: Returns the output and the log-sum-exps (batch, heads, queries) of a block.
        backward: Returns the gradients of queries, keys and values, from the output's gradient, a block, the
            output and log-sum-exps.
        most_features: The most features of a head.
        multiple: What the features are a multiple of; others are padded with zeros.
        takes_masks: Whether it takes additive masks.
        takes_other_values: Whether values may have another number of features.
        shares_keys: Whether several heads of queries may share one of keys; otherwise keys are repeated.
        is_deterministic: Whether gradients are the same in each run.
        allows: torch's own check of a device and its driver, by ``torch.backends.cuda``.
    """

    name: str
    device: str
    backend: SDPBackend
    dtypes: tuple[torch.dtype, ...]
    forward: Callable[[AttentionBlock], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, AttentionBlock, Tensor, Tensor], tuple[Tensor, ...]]
    most_features: int = 2**31
    multiple: int = 1
    takes_masks: bool = False
    takes_other_values: bool = False
    shares_keys: bool = True
    is_deterministic: bool = True
    allows: Callable[[Any], bool] | None = None

    def refusal(self, wanted: "Wanted") -> str:
        """Return why it cannot do an attention; nothing if it can."""
        if wanted.dtype not in self.dtypes:
            return f"it does not take {wanted.dtype}"
        if max(wanted.features, wanted.of_values) > self.most_features:
            return f"it takes at most {self.most_features} features of a head"
        if wanted.features != wanted.of_values and not self.takes_other_values:
            return "values have other features than keys"
        if wanted.mask is not None and not self.takes_masks:
            return "it takes no mask"
        # The kernels of CUDA read a mask as they read the queries.
        if wanted.mask not in (None, torch.bool, wanted.dtype) and self.multiple > 1:
            return f"the mask has another type than the queries, {wanted.mask}"
        if not self.is_deterministic and _is_strict():
            return "its gradients may differ between runs, which torch.use_deterministic_algorithms forbids"
        return ""


def _is_strict() -> bool:
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return not torch.is_deterministic_algorithms_warn_only_enabled()


class Wanted(NamedTuple):
    """What decides which kernel can do an attention; ``mask`` is the type of its mask, if there is one."""

    device_type: str
    dtype: torch.dtype
    features: int
    of_values: int
    mask: torch.dtype | None = None


# -- Calls -------------------------------------------------------------------------------------------
#
# All of them are private in torch 2.13, and a test notices if one goes: no public function returns the
# log-sum-exps of a mask, or takes those of all keys for the gradients of some.


def _flash_of_cpu(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *block[:3], 0.0, block.is_causal, attn_mask=block.added, scale=block.scale
    )
    return found


def _flash_of_cpu_backward(
    grad: Tensor, block: AttentionBlock, out: Tensor, sums: Tensor
) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *block[:3], out, sums, 0.0, block.is_causal, attn_mask=block.added, scale=block.scale
    )
    return grads


def _flash(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *block[:3], 0.0, block.is_causal, False, scale=block.scale
    )
    return out, sums


def _flash_backward(grad: Tensor, block: AttentionBlock, out: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
    counts = block.query.size(2), block.key.size(2)
    seed = block.query.new_zeros(2, dtype=torch.uint64)  # nothing is drawn
    offset = block.query.new_zeros(0, dtype=torch.uint64)
    grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, *block[:3], out, sums, None, None, *counts, 0.0, block.is_causal, seed, offset,
        scale=block.scale,
    )  # fmt: skip
    return grads


_ROWS_OF_SUMS = 32
"""The kernel's log-sum-exps have a multiple of so many rows."""


def _efficient(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *block[:3], block.added, True, 0.0, block.is_causal, scale=block.scale
    )
    return out, sums[..., : block.query.size(2)]


def _efficient_backward(grad: Tensor, block: AttentionBlock, out: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
    missing = -sums.size(-1) % _ROWS_OF_SUMS
    sums = F.pad(sums, (0, missing), value=torch.inf)  # weights of zero, as the kernel itself pads them
    nothing = block.query.new_zeros((), dtype=torch.int64)
    needs = [True, True, True, False]
    found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, *block[:3], block.added, out, sums, nothing, nothing, 0.0, needs, block.is_causal,
        scale=block.scale,
    )  # fmt: skip
    return tuple(found[:3])


def _cudnn(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *block[:3], None, True, 0.0, block.is_causal, False, scale=block.scale
    )
    return out, sums.reshape(block.query.shape[:3])


def _cudnn_backward(grad: Tensor, block: AttentionBlock, out: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
    counts = block.query.size(2), block.key.size(2)
    nothing = block.query.new_zeros((), dtype=torch.int64)
    grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, *block[:3], out, sums[..., None], nothing, nothing, None, None, None, *counts, 0.0,
        block.is_causal, scale=block.scale,
    )  # fmt: skip
    return grads


def _overrideable(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    out, sums, *_ = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(
        *block[:3], block.added, 0.0, block.is_causal, False, scale=block.scale
    )
    return out, sums


def _overrideable_backward(
    grad: Tensor, block: AttentionBlock, out: Tensor, sums: Tensor
) -> tuple[Tensor, ...]:
    counts = block.query.size(2), block.key.size(2)
    nothing = block.query.new_zeros((), dtype=torch.int64)
    needs = [True, True, True, False]
    found = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward(
        grad, *block[:3], block.added, needs, out, sums, None, None, *counts, 0.0, block.is_causal,
        nothing, nothing, scale=block.scale,
    )  # fmt: skip
    return tuple(found[:3])


# -- The table ---------------------------------------------------------------------------------------


_HALVES = (torch.float16, torch.bfloat16)

KERNELS = (
    Kernel(
        "flash",
        "CPU",
        SDPBackend.FLASH_ATTENTION,
        (*_HALVES, torch.float32, torch.float64),
        _flash_of_cpu,
        _flash_of_cpu_backward,
        takes_masks=True,
    ),
    Kernel(
        "flash",
        "CUDA",
        SDPBackend.FLASH_ATTENTION,
        _HALVES,
        _flash,
        _flash_backward,
        most_features=256,
        multiple=8,
        allows=torch.backends.cuda.can_use_flash_attention,
    ),
    Kernel(
        "efficient",
        "CUDA",
        SDPBackend.EFFICIENT_ATTENTION,
        (*_HALVES, torch.float32),
        _efficient,
        _efficient_backward,
        multiple=8,
        takes_masks=True,
        takes_other_values=True,
        shares_keys=False,
        is_deterministic=False,
        allows=torch.backends.cuda.can_use_efficient_attention,
    ),
    Kernel(
        "cuDNN",
        "CUDA",
        SDPBackend.CUDNN_ATTENTION,
        _HALVES,
        _cudnn,
        _cudnn_backward,
        most_features=128,
        multiple=8,
        takes_other_values=True,
        is_deterministic=False,
        allows=torch.backends.cuda.can_use_cudnn_attention,
    ),
    Kernel(
        "fused",
        "PrivateUse1",
        SDPBackend.OVERRIDEABLE,
        (*_HALVES, torch.float32),
        _overrideable,
        _overrideable_backward,
        takes_masks=True,
    ),
)


def refusals(wanted: Wanted) -> dict[str, str]:
    """Return the kernels of a type of device in torch's order, each with why it cannot do it, or nothing."""
    return {kernel.name: kernel.refusal(wanted) for kernel in _of_device(wanted.device_type)}


def _of_device(device_type: str) -> Iterator[Kernel]:
    key = torch._C._dispatch_key_for_device(device_type)
    order = torch._C._get_sdp_priority_order()  # which `sdpa_kernel` may change
    for kernel in sorted(KERNELS, key=lambda kernel: order.index(kernel.backend.value)):
        if kernel.device == key and (kernel.backend is not SDPBackend.OVERRIDEABLE or _is_overridden(key)):
            yield kernel


def _is_overridden(key: str) -> bool:
    """Return whether a backend of torch has brought its own attention: the operator is there in any case."""
    name = "aten::_scaled_dot_product_fused_attention_overrideable"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


_ENABLED: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.OVERRIDEABLE: torch._C._get_overrideable_sdp_enabled,
}


def _beyond_kernels(inputs: Inputs, rules: Rules) -> str:
    """Return why no kernel of any device can do an attention; nothing if one may."""
    if rules.by_hand:
        return "biases by position, sinks and soft caps of scores are computed as transformers does"
    if rules.dropout:
        return "dropout of weights has the mask of one device, which no kernel takes"
    if inputs.mask is not None and inputs.mask.requires_grad:
        return "no kernel has the gradient of a mask here"
    if not all(t.numel() for t in inputs[:3]):
        return "it is empty"
    return ""


def kernel_for(inputs: Inputs, rules: Rules) -> Kernel | None:
    """Return the kernel for an attention; ``None`` if its scores are to be computed in tiles.

    Raises:
        StepError: ``torch.nn.attention.sdpa_kernel`` allows nothing that can do it.
    """
    query, _, value, mask = inputs[:4]
    device = query.device
    why = _beyond_kernels(inputs, rules)
    reasons = {}
    if not why:
        of_mask = None if mask is None else mask.dtype
        wanted = Wanted(device.type, query.dtype, query.size(-1), value.size(-1), of_mask)
        needs_grad = any(t.requires_grad for t in inputs[:3])
        for kernel in _of_device(device.type):
            reason = kernel.refusal(wanted)
            if not _ENABLED[kernel.backend]():
                reason = "torch.nn.attention.sdpa_kernel leaves it out"
            elif not reason:
                reason = _refusal_here(kernel, wanted, device, needs_grad=needs_grad)
            if not reason:
                return kernel
            reasons[kernel.name] = reason
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        why = why or "there are none of this device"
        if not torch.backends.cuda.math_sdp_enabled():
            msg = (
                f"no kernel that torch.nn.attention.sdpa_kernel allows can do this attention ({why}); allow "
                "SDPBackend.MATH, for scores in tiles"
            )
            raise StepError(msg)
    _say_why(device.type, why)
    return None


@lru_cache(maxsize=256)
def _say_why(device_type: str, why: str) -> None:
    _log.info("attention on %s in tiles, with scores in memory, not by a fused kernel: %s", device_type, why)


def _refusal_here(kernel: Kernel, wanted: Wanted, device: torch.device, *, needs_grad: bool) -> str:
    """Return why a kernel does not run on a device; nothing if it does."""
    if not _is_allowed(kernel, wanted, device, needs_grad=needs_grad):
        return "this device and this torch do not have it"
    if kernel.backend is SDPBackend.OVERRIDEABLE and not _returns_sums(kernel, wanted.dtype, device):
        return "what it returns beside the output are no log-sum-exps"
    return ""


@lru_cache(maxsize=256)
def _is_allowed(kernel: Kernel, wanted: Wanted, device: torch.device, *, needs_grad: bool) -> bool:
    """Return whether torch allows a kernel, for queries and values of these types and features."""
    if kernel.allows is None:
        return True
    key, value = (
        _with_features(torch.zeros(1, 1, 64, n, dtype=wanted.dtype, device=device), kernel.multiple)
        for n in (wanted.features, wanted.of_values)
    )
    with torch.enable_grad():  # some cards have the forward alone
        key.requires_grad_(needs_grad)
        return kernel.allows(torch.backends.cuda.SDPAParams(key, key, value, None, 0.0, False, False))


@lru_cache(maxsize=64)
def _returns_sums(kernel: Kernel, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a kernel returns log-sum-exps: those of torch do, and this one is a third party's."""
    query, key = torch.arange(2 * 4 * 8, device=device).view(2, 1, 1, 4, 8).sin().to(dtype)
    out, sums = kernel.forward(AttentionBlock(query, key, key, None, False, 1.0))
    scores = (query @ key.mT).float()
    expected = scores.logsumexp(-1), scores.softmax(-1) @ key.float()
    return all(
        found.shape == right.shape and torch.allclose(found.float(), right, rtol=0.05, atol=0.05)
        for found, right in zip((sums, out), expected, strict=True)
    )


# -- Blocks by a kernel ------------------------------------------------------------------------------


def attend_to_block(kernel: Kernel, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Return a block's output and log-sum-exps; of a row that sees nothing they are 0 and -inf."""
    features = block.value.size(-1)
    out, sums = kernel.forward(_suited(kernel, block))
    out = out[..., :features]
    if block.added is not None:  # kernels say 0, NaN or the mean of values
        hidden = (block.added == -torch.inf).all(-1)
        sums = sums.masked_fill(hidden, -torch.inf)
        out = out.masked_fill(hidden[..., None], 0.0)
    return out, sums


def block_gradients(
    kernel: Kernel, grad: Tensor, block: AttentionBlock, out: Tensor, sums: Tensor
) -> tuple[Tensor, ...]:
    """Return what a block adds to the gradients of queries, keys and values, with the results of all keys."""
    key_heads = block.key.size(1)
    features = [t.size(-1) for t in block[:3]]
    padded = [_with_features(t, kernel.multiple) for t in (grad, out)]
    # A kernel may read log-sum-exps as if they had no gaps.
    found = kernel.backward(padded[0], _suited(kernel, block), padded[1], sums.contiguous())
    grads = [t[..., :n] for t, n in zip(found, features, strict=True)]
    if grads[1].size(1) != key_heads:
        shared = grads[1].size(1) // key_heads
        grads[1:] = [t.unflatten(1, (key_heads, shared)).sum(2) for t in grads[1:]]
    return tuple(grads)


def _suited(kernel: Kernel, block: AttentionBlock) -> AttentionBlock:
    """Return a block as a kernel takes it."""
    query, key, value, added, _, scale = block
    if scale is None:
        scale = query.size(-1) ** -0.5
    if not kernel.shares_keys and key.size(1) != query.size(1):
        shared = query.size(1) // key.size(1)
        key, value = (t.repeat_interleave(shared, 1) for t in (key, value))
    if added is not None and kernel.multiple > 1:
        added = _aligned(added).expand(*query.shape[:3], -1)
    query, key, value = (_with_features(t, kernel.multiple) for t in (query, key, value))
    return AttentionBlock(query, key, value, added, block.is_causal, scale)


def _with_features(tensor: Tensor, multiple: int) -> Tensor:
    """Return a tensor with a multiple of so many features, beside each other in memory as kernels take them.

    The CPU's kernel reads others without an error (torch 2.13): its caller has to look.
    """
    missing = -tensor.size(-1) % multiple
    if missing:
        return F.pad(tensor, (0, missing))
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


_COLUMNS = 16
"""The rows of a mask begin at multiples of so many numbers in memory, as CUDA's kernel reads them."""


def _aligned(added: Tensor) -> Tensor:
    """Return a mask with its rows where a kernel can read them."""
    count = added.size(-1)
    missing = -count % _COLUMNS
    if missing:
        return F.pad(added, (0, missing))[..., :count]
    # Some keys of a larger mask may be as many, and begin anywhere in its rows.
    steps = zip(added.stride()[:-1], added.shape[:-1], strict=True)
    places = [added.storage_offset(), *(step for step, n in steps if n > 1)]
    if added.stride(-1) == 1 and not any(place % _COLUMNS for place in places):
        return added
    return added.clone(memory_format=torch.contiguous_format)
