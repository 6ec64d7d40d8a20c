"""Where a split dimension goes in torch's operators, as a table by what they do.

A rank has its own features of a tensor. An operator that treats each of them by itself, or goes over other
dimensions, is right on a part, and its result is split in turn: the table says along which dimension. One
that goes over the split dimension takes a part for the whole. So does, until the table has it, any operator
that is not in it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor


class SplitDim(NamedTuple):
    """A dimension of a tensor that is split over ranks.

    Attributes:
        dim: The dimension, counted from the end.
        pieces: The lengths of its pieces, each of which is split for itself: a gate and an up layer in one
            are two, heads that were joined with four samples are four.
        is_weight: Whether it is of a layer's weight or bias.
        shared: Which of the pieces all ranks have, such as the one key head of many query heads; empty for
            none.
    """

    dim: int
    pieces: tuple[int, ...]
    is_weight: bool = False
    shared: tuple[bool, ...] = ()

    def taken(self, start: int, stop: int, step: int = 1) -> "SplitDim | None":
        """Return the pieces from a place to another one; ``None`` if all ranks have all of them.

        Raises:
            TakesPartForWholeError: The places lie within a piece.
        """
        at = 0
        numbers = []
        for i, piece in enumerate(self.pieces):
            if start <= at and at + piece <= stop:
                numbers.append(i)
            at += piece
        pieces = tuple(self.pieces[i] for i in numbers)
        if step != 1 or sum(pieces) != stop - start:
            raise TakesPartForWholeError
        shared = tuple(self.shared[i] for i in numbers if self.shared)
        if shared and all(shared):
            return None
        if not any(shared):
            shared = ()
        return self._replace(pieces=pieces, shared=shared)


class TakesPartForWholeError(Exception):
    """An operator goes over the split dimension, or it is not known that it does not."""


class OperatorCall(NamedTuple):
    """A call of an operator with split tensors.

    Attributes:
        arguments: All arguments, by their names in the operator's schema.
        splits: The split dimensions of the arguments that have one, by name; ``name[i]`` for those in lists.
        results: The tensors that it has returned.
    """

    arguments: Mapping[str, Any]
    splits: Mapping[str, SplitDim]
    results: Sequence[Tensor]

    def one(self, *names: str) -> tuple[Tensor, SplitDim, int]:
        """Return the one split argument, its split dimension, and this counted from the start.

        Raises:
            TakesPartForWholeError: Another argument is split.
        """
        if len(self.splits) != 1:
            raise TakesPartForWholeError
        ((name, split),) = self.splits.items()
        if name not in names:
            raise TakesPartForWholeError
        tensor = self.arguments[name]
        return tensor, split, tensor.dim() + split.dim


Splits: TypeAlias = Sequence[SplitDim | None]
"""The split dimension of each result of an operator; one for all, or ``None`` for one that is whole."""


Rule: TypeAlias = Callable[[OperatorCall], Splits]


def splits_after(func: Any, call: OperatorCall) -> Splits:
    """Return the split dimensions of an operator's results.

    Raises:
        TakesPartForWholeError: The operator goes over the split dimension, or is not in the table.
    """
    rule = _rule(func)
    if rule is None:
        raise TakesPartForWholeError
    splits = rule(call)
    if len(splits) == len(call.results):
        return splits
    return [splits[0]] * len(call.results)


def is_known(func: Any) -> bool:
    """Return whether an operator is in the table."""
    return _rule(func) is not None


def _rule(func: Any) -> Rule | None:
    if func is torch.einsum:
        return _einsum
    namespace, _, name = func._schema.name.partition("::")
    if name.endswith("_") and not name.startswith("__"):
        name = name[:-1]  # the same in place
    rule = None
    if namespace == "aten":
        rule = _RULES.get(name)
    if rule is None and torch.Tag.pointwise in func.tags:
        rule = _each_element
    return rule


# -- What treats each element by itself -----------------------------------------------------------


def _each_element(call: OperatorCall) -> Splits:
    """Of several split arguments all have the same features; others are broadcast."""
    first, *others = call.splits.values()
    if any((other.dim, other.pieces) != (first.dim, first.pieces) for other in others):
        raise TakesPartForWholeError
    if any(result.size(first.dim) != sum(first.pieces) for result in call.results):
        raise TakesPartForWholeError  # one head of this rank is broadcast over several
    return [first]


def _loss(call: OperatorCall) -> Splits:
    if call.arguments.get("reduction", 1) != 0:
        raise TakesPartForWholeError
    return _each_element(call)


def _unrelated(_call: OperatorCall) -> Splits:
    """Make a tensor of a given shape, with the type of an argument."""
    return [None]


# -- What goes over dimensions, which must be others ----------------------------------------------


def _over(
    call: OperatorCall, *, name: str = "dim", default: int | None = None, keeps: bool = False
) -> Splits:
    """Go over one dimension or some; all without them."""
    if "other" in call.arguments:  # the larger one of two tensors
        return _each_element(call)
    tensor, split, at = call.one("self", "input")
    over = call.arguments.get(name, default)
    if over is None or over == []:
        raise TakesPartForWholeError
    if not isinstance(over, list | tuple):
        over = [over]
    dims = {d % tensor.dim() for d in over}
    if at in dims:
        raise TakesPartForWholeError
    if keeps or call.arguments.get("keepdim"):
        return [split]
    return [split._replace(dim=split.dim + sum(d > at for d in dims))]


def _glu(call: OperatorCall) -> Splits:
    """Halve a dimension; the features themselves where two layers of one size were computed as one."""
    _, split, at = call.one("self")
    if call.arguments.get("dim", -1) % call.arguments["self"].dim() != at:
        return [split]
    if len(split.pieces) != 2 or split.pieces[0] != split.pieces[1]:
        raise TakesPartForWholeError
    return [split._replace(pieces=split.pieces[:1], shared=())]


def _last(call: OperatorCall, *, count: int) -> Splits:
    """Go over the last dimensions."""
    _, split, _ = call.one("self", "input")
    if split.dim >= -count:
        raise TakesPartForWholeError
    return [split]


def _layer_norm(call: OperatorCall) -> Splits:
    return _last(call, count=len(call.arguments["normalized_shape"]))


def _batch_norm(call: OperatorCall) -> Splits:
    """Go over all dimensions except the second, the channels; further results have one number a channel."""
    _, split, at = call.one("input")
    if at != 1:
        raise TakesPartForWholeError
    return [split] + [split._replace(dim=-1)] * (len(call.results) - 1)


def _gather(call: OperatorCall) -> Splits:
    """Take or put elements along a dimension, at places of the same shape."""
    over = call.arguments["dim"] % call.arguments["self"].dim()
    if any(call.arguments["self"].dim() + split.dim == over for split in call.splits.values()):
        raise TakesPartForWholeError
    return _each_element(call)


def _index_select(call: OperatorCall) -> Splits:
    return _over(call, keeps=True)


def _index_add(call: OperatorCall) -> Splits:
    """Add or put rows into those of a tensor that are not split."""
    tensor = call.arguments["self"]
    over = call.arguments["dim"] % tensor.dim()
    if set(call.splits) - {"self", "source"} or any(
        tensor.dim() + split.dim == over for split in call.splits.values()
    ):
        raise TakesPartForWholeError
    return _each_element(call)


def _pad(call: OperatorCall) -> Splits:
    _, split, _ = call.one("self")
    pad = call.arguments.get("pad", call.arguments.get("padding"))
    place = 2 * (-split.dim - 1)
    if any(pad[place : place + 2]):
        raise TakesPartForWholeError
    return [split]


# -- Views and copies with other dimensions -------------------------------------------------------


def _view(call: OperatorCall) -> Splits:
    """Find the dimension in which the features are afterwards.

    The split features lie in blocks, which a new shape may cut into further dimensions: the outermost of them
    is split. A size of -1 stands for the dimension whose length differs between ranks. Without it the sizes
    do not say whether two rows of four are two heads or two halves of a vector: they are taken for heads.
    """
    tensor, split, at = call.one("self")
    before = math.prod(tensor.shape[:at])
    after = math.prod(tensor.shape[at + 1 :])
    pieces = split.pieces
    blocks = before
    if len(set(pieces)) == 1 and not split.shared:
        blocks *= len(pieces)
        pieces = pieces[:1]
    block = sum(pieces) * after
    shape = call.results[0].shape
    sizes = list(call.arguments.get("size", call.arguments.get("shape", shape)))
    if tensor.numel() == 0:
        raise TakesPartForWholeError
    # First where a block begins, then where blocks were joined.
    places = sorted(range(len(shape)), key=lambda place: math.prod(shape[:place]) != blocks)
    if -1 in sizes:
        # Where this dimension has features, it is the one.
        inferred = sizes.index(-1)
        inside = math.prod(shape[inferred + 1 :])
        if inside < block <= inside * shape[inferred]:
            places = [inferred]
    if pieces == (1,) and split.dim == -3:
        # One head, of (batch, heads, seq, features): products join it with the batch, and nobody with the
        # sequence, which the sizes would allow.
        places.sort(key=lambda place: math.prod(shape[place + 1 :]) != after)
    for place in places:
        outer = math.prod(shape[:place])
        inner = math.prod(shape[place + 1 :])
        if blocks % outer or any(piece * after % inner for piece in pieces):
            continue
        if outer * shape[place] * inner != blocks * block:
            continue
        joined = blocks // outer
        new = tuple(piece * after // inner for piece in pieces) * joined
        return [split._replace(dim=place - len(shape), pieces=new, shared=split.shared * joined)]
    raise TakesPartForWholeError


def _permute(call: OperatorCall) -> Splits:
    tensor, split, at = call.one("self")
    order = [d % tensor.dim() for d in call.arguments["dims"]]
    return [split._replace(dim=order.index(at) - tensor.dim())]


def _transpose(call: OperatorCall) -> Splits:
    tensor, split, at = call.one("self")
    if tensor.dim() < 2:
        return [split]
    first = call.arguments.get("dim0", 0) % tensor.dim()
    second = call.arguments.get("dim1", 1) % tensor.dim()
    moved = {first: second, second: first}.get(at, at)
    return [split._replace(dim=moved - tensor.dim())]


def _view_as_real(call: OperatorCall) -> Splits:
    _, split, _ = call.one("self")
    return [split._replace(dim=split.dim - 1)]


def _view_as_complex(call: OperatorCall) -> Splits:
    _, split, _ = call.one("self")
    if split.dim == -1:
        raise TakesPartForWholeError
    return [split._replace(dim=split.dim + 1)]


def _expand(call: OperatorCall) -> Splits:
    tensor, split, at = call.one("self")
    if call.results[0].size(split.dim) != tensor.size(at):
        raise TakesPartForWholeError
    return [split]


def _repeat(call: OperatorCall) -> Splits:
    _, split, _ = call.one("self")
    count = call.arguments["repeats"][split.dim]
    return [split._replace(pieces=split.pieces * count, shared=split.shared * count)]


def _unsqueeze(call: OperatorCall) -> Splits:
    tensor, split, at = call.one("self")
    new = call.arguments["dim"] % (tensor.dim() + 1)
    return [split._replace(dim=split.dim - (new > at))]


def _squeeze(call: OperatorCall) -> Splits:
    tensor, split, at = call.one("self")
    dims = call.arguments.get("dim", range(tensor.dim()))
    if not isinstance(dims, Iterable):
        dims = [dims]
    named = {d % tensor.dim() for d in dims}
    squeezed = {d for d in named if tensor.size(d) == 1}
    if at in squeezed:
        raise TakesPartForWholeError  # one head of this rank, of several
    return [split._replace(dim=split.dim + sum(d > at for d in squeezed))]


def _slice(call: OperatorCall) -> Splits:
    tensor, split, at = call.one("self", "src")
    if "src" in call.splits:  # slice_scatter
        raise TakesPartForWholeError
    if call.arguments.get("dim", 0) % tensor.dim() != at:
        return [split]
    size = tensor.size(at)
    start, stop, step = slice(
        call.arguments.get("start"), call.arguments.get("end"), call.arguments.get("step", 1)
    ).indices(size)
    if (start, stop, step) == (0, size, 1):
        return [split]
    return [split.taken(start, stop, step)]


def _split(call: OperatorCall) -> Splits:
    tensor, split, at = call.one("self")
    if call.arguments.get("dim", 0) % tensor.dim() != at:
        return [split] * len(call.results)
    if len(call.results) == 1:
        return [split]
    pieces: list[SplitDim | None] = []
    begin = 0
    for result in call.results:
        end = begin + result.size(split.dim)
        pieces.append(split.taken(begin, end))
        begin = end
    return pieces


def _select(call: OperatorCall) -> Splits:
    """Take one index of a dimension, or each of them."""
    return _over(call, default=0)


def _diagonal(call: OperatorCall) -> Splits:
    tensor, split, at = call.one("self")
    ends = {call.arguments.get(name, i) % tensor.dim() for i, name in enumerate(("dim1", "dim2"))}
    if at in ends:
        raise TakesPartForWholeError
    return [split._replace(dim=split.dim + sum(d > at for d in ends) - 1)]


def _cat(call: OperatorCall) -> Splits:
    tensors = call.arguments["tensors"]
    first = next(iter(call.splits.values()))
    over = call.arguments.get("dim", 0) % call.results[0].dim()
    if over != call.results[0].dim() + first.dim:
        return _each_element(call)
    # Along the split dimension the pieces of all follow each other; of a whole one each rank would have all.
    if len(call.splits) != len(tensors) or any(s.dim != first.dim for s in call.splits.values()):
        raise TakesPartForWholeError
    pieces = tuple(piece for split in call.splits.values() for piece in split.pieces)
    return [first._replace(pieces=pieces, shared=())]


def _stack(call: OperatorCall) -> Splits:
    first, *others = call.splits.values()
    if any((other.dim, other.pieces) != (first.dim, first.pieces) for other in others):
        raise TakesPartForWholeError
    ndim = call.results[0].dim()
    new = call.arguments.get("dim", 0) % ndim
    at = ndim - 1 + first.dim  # in each of the tensors
    return [first._replace(dim=first.dim - (new > at))]


def _index(call: OperatorCall) -> Splits:
    """Take or put at tensors of indices; the features stay, where other dimensions are indexed."""
    tensor = call.arguments["self"]
    indices = call.arguments["indices"]
    if set(call.splits) - {"self", "values"}:
        raise TakesPartForWholeError  # the places themselves are of a part
    if "self" not in call.splits:
        return _index_put_new(call)
    split = call.splits["self"]
    at = tensor.dim() + split.dim
    # A mask of several dimensions stands for as many.
    indexed: list[int] = []
    where = 0
    shapes = []
    for index in indices:
        if index is None:
            where += 1
            continue
        is_mask = index.dtype in {torch.bool, torch.uint8}
        count = index.dim() if is_mask else 1
        indexed += range(where, where + count)
        shape = torch.Size([1]) if is_mask else index.shape
        shapes.append(shape)
        where += count
    if at in indexed and "values" in call.arguments:
        raise TakesPartForWholeError
    if at in indexed:
        return [_indexed_pieces(split, indexed, indices, tensor.size(at))]
    if "values" in call.arguments:  # index_put
        values = call.splits.get("values")
        if values is not None and values.pieces != split.pieces:
            raise TakesPartForWholeError
        return [split]
    new_dims = len(torch.broadcast_shapes(*shapes))
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    behind = sum(d > at for d in indexed)
    dim = split.dim + behind
    if adjacent and behind:
        dim -= new_dims  # the new dimensions stand in the place of the old ones
    return [split._replace(dim=dim)]


def _indexed_pieces(
    split: SplitDim, indexed: Sequence[int], indices: Sequence[Tensor | None], size: int
) -> SplitDim | None:
    """Return the whole pieces that one vector of indices takes out of the split dimension."""
    (index,) = [index for index in indices if index is not None] if len(indexed) == 1 else [None]
    if index is None or index.dim() != 1 or index.dtype in {torch.bool, torch.uint8} or not len(index):
        raise TakesPartForWholeError
    places = [place % size for place in index.tolist()]
    if places != list(range(places[0], places[-1] + 1)):
        raise TakesPartForWholeError
    return split.taken(places[0], places[-1] + 1)


def _index_put_new(call: OperatorCall) -> Splits:
    """Put split values into a tensor that was whole: as it has features where the values have them."""
    split = call.splits["values"]
    tensor = call.arguments["self"]
    if -split.dim > tensor.dim() or len(call.arguments["indices"]) > tensor.dim() + split.dim:
        raise TakesPartForWholeError
    if tensor.size(split.dim) != sum(split.pieces):
        raise TakesPartForWholeError
    return [split]


# -- Products -------------------------------------------------------------------------------------


def _product(call: OperatorCall, *, left: str, right: str, bias: str | None = None) -> Splits:
    """Multiply matrices: rows of the left one, columns of the right one and batches may be split."""
    result = call.results[0]
    dims: set[tuple[int, tuple[int, ...]]] = set()
    split_after = None
    for name, split in call.splits.items():
        tensor = call.arguments[name]
        if split.is_weight:  # another layer's part of a weight
            raise TakesPartForWholeError
        dim = split.dim
        if name in (left, right):
            is_vector = tensor.dim() == 1
            contracted = -1 if name == left or is_vector else -2
            if dim == contracted:
                raise TakesPartForWholeError  # a part of the sum
            if name == left and result.dim() < tensor.dim():
                dim += 1  # a matrix times a vector
        elif name != bias:
            raise TakesPartForWholeError
        dims.add((dim, split.pieces))
        split_after = split._replace(dim=dim)
    if len(dims) != 1:
        raise TakesPartForWholeError
    return [split_after]


def _einsum(call: OperatorCall) -> Splits:
    """Follow the letter of the split dimension through an equation."""
    inputs, _, output = call.arguments["equation"].replace(" ", "").partition("->")
    letters = inputs.split(",")
    if "." in inputs or not output:
        raise TakesPartForWholeError
    by_letter = set()
    for name, split in call.splits.items():
        letter = letters[int(name[name.index("[") + 1 : -1])][split.dim]
        if split.is_weight or letter not in output:
            raise TakesPartForWholeError
        by_letter.add((letter, split.pieces))
    if len(by_letter) != 1:
        raise TakesPartForWholeError
    ((letter, pieces),) = by_letter
    return [SplitDim(output.index(letter) - len(output), pieces)]


def _convolution(call: OperatorCall) -> Splits:
    """Convolve over places; channels may be split where each has a filter of its own."""
    tensor, split, at = call.one("input")
    if at == 0:
        return [split]
    if at != 1 or call.arguments["groups"] != tensor.size(1):
        raise TakesPartForWholeError
    each = call.results[0].size(1) // tensor.size(1)
    return [split._replace(pieces=tuple(piece * each for piece in split.pieces))]


def _attention(call: OperatorCall, *, heads: int = -3) -> Splits:
    """Attend within each sample and head: of shape (batch, heads, seq, features), or with heads behind."""
    first = next(iter(call.splits.values()))
    if {split.dim for split in call.splits.values()} not in ({heads}, {-4}):
        raise TakesPartForWholeError
    query = call.arguments["query"]
    if query.size(first.dim) != sum(first.pieces):  # keys that several queries share
        first = call.splits.get("query", first._replace(pieces=(query.size(first.dim),)))
    return [first] + [None] * (len(call.results) - 1)


def _embedding(call: OperatorCall) -> Splits:
    _, split, _ = call.one("indices")
    return [split._replace(dim=split.dim - 1)]


def _mixes(_call: OperatorCall) -> Splits:
    raise TakesPartForWholeError


def _named(rules: Mapping[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in rules.items() for name in names.split()}


_RULES = _named(
    {
        # Those that torch has not tagged as pointwise.
        _each_element: "copy _to_copy fill masked_fill zero native_dropout _fused_dropout bernoulli normal "
        "uniform exponential random geometric cauchy log_normal zeros_like ones_like full_like empty_like "
        "rand_like randn_like randint_like detach alias lift_fresh contiguous prelu _prelu_kernel "
        "rrelu_with_noise hardswish log_sigmoid_forward real imag complex polar bucketize where _conj "
        "_neg_view resolve_conj resolve_neg conj_physical isin to clone dropout feature_dropout "
        "alpha_dropout requires_grad",
        _loss: "mse_loss huber_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits "
        "soft_margin_loss",
        _unrelated: "new_zeros new_ones new_full new_empty new_empty_strided",
        _over: "sum mean amax amin aminmax argmax argmin prod std var var_mean std_mean linalg_vector_norm "
        "norm logsumexp any all nansum median nanmedian mode count_nonzero max min",
        partial(_over, keeps=True): "cumsum cumprod _cummax_helper cummax cummin logcumsumexp _softmax "
        "_log_softmax _safe_softmax softmax log_softmax unique_dim renorm _fft_c2c",
        partial(_over, default=-1, keeps=True): "sort argsort topk",
        partial(_over, default=-1): "kthvalue",
        partial(_over, name="dims", keeps=True): "flip roll rot90",
        _glu: "glu",
        _layer_norm: "native_layer_norm layer_norm rms_norm _fused_rms_norm",
        _batch_norm: "native_batch_norm batch_norm cudnn_batch_norm _native_batch_norm_legit",
        _gather: "gather scatter scatter_add scatter_reduce take_along_dim",
        _index_select: "index_select",
        _index_add: "index_add index_copy index_reduce index_fill",
        _pad: "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
        "replication_pad2d replication_pad3d",
        partial(
            _last, count=1
        ): "upsample_nearest1d upsample_linear1d avg_pool1d max_pool1d max_pool1d_with_indices "
        "adaptive_avg_pool1d",
        partial(
            _last, count=2
        ): "tril triu upsample_nearest2d upsample_bilinear2d upsample_bicubic2d avg_pool2d "
        "max_pool2d_with_indices _adaptive_avg_pool2d pixel_shuffle pixel_unshuffle im2col col2im "
        "adaptive_max_pool2d",
        _view: "view _unsafe_view reshape _reshape_alias",
        _view_as_real: "view_as_real",
        _view_as_complex: "view_as_complex",
        _permute: "permute",
        _transpose: "transpose t swapaxes swapdims numpy_T",
        _expand: "expand",
        _repeat: "repeat",
        _unsqueeze: "unsqueeze",
        _squeeze: "squeeze",
        _slice: "slice narrow",
        _split: "split split_with_sizes chunk unsafe_split unsafe_chunk unsafe_split_with_sizes tensor_split",
        _select: "select unbind",
        _diagonal: "diagonal",
        _cat: "cat concat concatenate",
        _stack: "stack",
        _index: "index index_put _index_put_impl _unsafe_index _unsafe_index_put",
        partial(_product, left="self", right="mat2"): "mm bmm",
        partial(_product, left="mat1", right="mat2", bias="self"): "addmm _addmm_activation",
        partial(_product, left="batch1", right="batch2", bias="self"): "baddbmm",
        partial(_product, left="self", right="vec"): "mv",
        partial(_product, left="mat", right="vec", bias="self"): "addmv",
        _convolution: "convolution _convolution mkldnn_convolution cudnn_convolution",
        _attention: "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
        partial(_attention, heads=-2): "_flash_attention_forward _efficient_attention_forward",
        _embedding: "embedding",
        # Here for the reader: these go over features, or take one for another.
        _mixes: "native_group_norm group_norm masked_select nonzero unique bincount histc searchsorted "
        "trace dot vdot linalg_svd cdist _cdist_forward take put masked_scatter unfold",
    }
)
"""The rule of each operator by its name, without an overload's or the underscore of one in place."""
