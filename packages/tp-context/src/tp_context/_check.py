"""The check before the first step: on a piece of the batch, the split model computes what the whole one does.

Every rank runs the step on the whole piece, then on its slice, and compares the loss, the outputs and the
gradients. A difference is named by the first module whose output differs. So what crosses positions outside
of
attention is found (convolutions, state-space layers, norms over the sequence, positions that begin at 0), and
what cannot be proved is refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from tp_core import tree_leaves
from tp_core.data import StepOutput
from tp_core.errors import ModelError

from tp_context._attention import doors
from tp_context._inputs import Way, splitting, ways_of
from tp_context._slices import Cut, Cuts, Found, _named_tensors, map_sequences

Step = Callable[[nn.Module, Any], StepOutput]
Join = Callable[[Any, Cuts], Any]

# Models of transformers compute norms and softmax in float32, also those in float64.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 3e-4}
_ROUGH = 5e-2  # in half precision


class Ranks(NamedTuple):
    """The ranks of a sequence: their process group, this rank in it, their number."""

    group: ProcessGroup | None
    rank: int
    size: int

    def all_gather(self, value: object) -> list[Any]:
        """Return all ranks' objects. Collective: one all-gather of pickled objects."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


class _OthersEndedError(Exception):
    """Raised on ranks that wait for one whose step has ended already."""


class _Run(NamedTuple):
    """The results of a step: outputs by module as they end, the returned numbers, sums of gradients."""

    outputs: list[tuple[str, list[Tensor]]]
    returned: dict[str, float]
    gradients: dict[str, tuple[float, float]]


def prove(
    step: Step, model: nn.Module, batch: Any, found: Found, *, ranks: Ranks, tokens: int, join: Join
) -> Way | str:
    """Return the first way by which the split model is proved, or the sentence that says why there is none.

    All ranks of the group return the same.

    Args:
        step: The user's step.
        model: The plain model.
        batch: The batch, whole.
        found: Its sequences.
        ranks: The ranks of a sequence.
        tokens: The number of tokens of the piece; 0 to choose it.
        join: Joins the outputs of all slices, as in a step.

    Collectives: those of the step on slices, each after an exchange of descriptions, so that no rank waits
    for
    another one that has failed.
    """
    short, where = shorten(batch, found, tokens or 8 * ranks.size + 5, ranks.size)
    _mask_ends(short)
    with _undisturbed(model), doors(drops=False):
        state = torch.get_rng_state()
        try:
            whole = _run(step, model, short, lambda output: output)
            failed = ""
        except Exception as error:  # noqa: BLE001 - whatever the user's step raises
            whole, failed = _Run([], {}, {}), f"{type(error).__name__}: {error}"
        failures = [f for f in ranks.all_gather(failed) if f]
        if failures:
            return (
                f"the step fails on a piece of {where.lengths} tokens of the first batch, on which backend "
                f"'context' compares the split model with the whole one ({failures[0]:.300}); "
                "give a longer piece with the option check_tokens"
            )
        best = (-1, "")
        has_positions = any("position_ids" in name for name, _ in _named_tensors(batch))
        for way in ways_of(model, has_positions=has_positions):
            torch.set_rng_state(state)
            progress, problem = _try(step, model, short, where, whole, way, ranks, join)
            if not problem:
                return way
            best = max(best, (progress, problem), key=lambda pair: pair[0])
    return best[1]


def _try(
    step: Step,
    model: nn.Module,
    batch: Any,
    found: Found,
    whole: _Run,
    way: Way,
    ranks: Ranks,
    join: Join,
) -> tuple[int, str]:
    """Run the step on slices; return how far it went, and the problem or nothing, alike on all ranks."""

    def before(what: object) -> None:
        everyones = ranks.all_gather(("exchange", what))
        if any(kind == "end" for kind, _ in everyones):
            raise _OthersEndedError(next(said for kind, said in everyones if kind == "end"))
        if any(other != everyones[0] for other in everyones):
            msg = f"ranks exchange different tensors: {everyones[0][1]} and {everyones[-1][1]}"
            raise _OthersEndedError(msg)

    cuts = Cuts([Cut(n, ranks.rank, ranks.size, ranks.group, before) for n in found.lengths])
    sliced = map_sequences(batch, found, lambda t, dim: _cut_of(cuts, t, dim).take(t, dim))
    try:
        with splitting(model, cuts, way):
            part = _run(step, model, sliced, lambda output: join(output, cuts))
        verdict = _compare(model, whole, part, cuts)
    except _OthersEndedError as error:
        said = error.args[0]
        return said if isinstance(said, tuple) else (0, str(said))
    except Exception as error:  # noqa: BLE001 - whatever the model raises on a slice
        verdict = (0, f"the step fails on a slice of the sequence: {type(error).__name__}: {error!s:.300}")
    everyones = ranks.all_gather(("end", verdict))
    for kind, said in everyones:
        if kind != "end":
            return verdict if verdict[1] else (0, "ranks exchange a different number of tensors")
        if said[1]:
            return (int(said[0]), str(said[1]))
    sums = torch.tensor([s for s, _ in part.gradients.values()], dtype=torch.float64)
    if len(sums):
        total = sum((torch.tensor(s, dtype=torch.float64) for s in ranks.all_gather(sums.tolist())), 0 * sums)
        return _compare_gradients(model, whole, total / ranks.size)
    return 0, ""


def _cut_of(cuts: Cuts, tensor: Tensor, dim: int) -> Cut:
    cut = cuts.of_whole(tensor.size(dim))
    assert cut is not None  # noqa: S101 - `lengths` are those of the tensors
    return cut


# -- Two runs, compared -----------------------------------------------------------------------------


def _run(step: Step, model: nn.Module, batch: Any, join: Callable[[Any], Any]) -> _Run:
    outputs: list[tuple[str, list[Tensor]]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            # No numbers: a loss of this rank's tokens is joined only later.
            leaves = [t for t in _tensors(output) if t.is_floating_point() and t.dim()]
            outputs.append((name, [t.detach() for t in leaves]))

        return hook

    handles = [m.register_forward_hook(note(n)) for n, m in model.named_modules()]
    try:
        output = join(step(model, batch))
    finally:
        for handle in handles:
            handle.remove()
    values = output if isinstance(output, Mapping) else {"loss": output}
    returned = {
        name: float(value.detach() if isinstance(value, Tensor) else value)
        for name, value in values.items()
        if (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, int | float)
    }
    loss = values.get("loss")
    gradients: dict[str, tuple[float, float]] = {}
    if isinstance(loss, Tensor) and loss.requires_grad:
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, [p for _, p in trained], allow_unused=True)
        for (name, _), grad in zip(trained, found, strict=True):
            if grad is None:
                gradients[name] = (0.0, 0.0)
                continue
            generator = torch.Generator(grad.device).manual_seed(len(gradients))
            signs = torch.randint(2, grad.shape, generator=generator, device=grad.device, dtype=torch.int8)
            dense = grad.to_dense() if grad.is_sparse else grad
            product = float((dense.double() * (signs.double() * 2 - 1)).sum())
            gradients[name] = (product, float(dense.double().norm()))
    return _Run(outputs, returned, gradients)


def _compare(model: nn.Module, whole: _Run, part: _Run, cuts: Cuts) -> tuple[int, str]:
    """Return the place and the sentence of the first difference, or an empty sentence."""
    limit = _limit(model)
    bad = [
        n for n, v in whole.returned.items() if n != "weight" and not _near(v, part.returned.get(n), limit)
    ]
    root = [i for i, (name, _) in enumerate(whole.outputs) if not name]
    is_off = bad or len(whole.outputs) != len(part.outputs)
    if not is_off:
        for i in root:
            is_off = is_off or _difference(whole.outputs[i][1], part.outputs[i][1], cuts) > limit
    if not is_off:
        return 0, ""
    modules = dict(model.named_modules())
    for place, (one, other) in enumerate(zip(whole.outputs, part.outputs, strict=False)):
        difference = _difference(one[1], other[1], cuts) if one[0] == other[0] else float("inf")
        if difference > limit:
            module = modules[one[0]]
            return place, (
                f"{one[0] or 'the model'!r} ({type(module).__name__}) computes something else on a slice of "
                "the "
                f"sequence than on the whole (a difference of {difference:.1e}): it needs tokens or "
                "positions "
                "that other ranks have, outside of attention"
            )
    values = (
        ", ".join(f"{n} {part.returned.get(n)} and not {whole.returned[n]}" for n in bad) or "other outputs"
    )
    return len(whole.outputs), (
        f"the step returns {values} if its batch is split, though all modules compute the same: it uses "
        "tokens of "
        "other ranks after the model, or is a mean over something else than the 'weight' that it returns"
    )


def _compare_gradients(model: nn.Module, whole: _Run, total: Tensor) -> tuple[int, str]:
    limit, most = _limit(model), max((n for _, n in whole.gradients.values()), default=0.0)
    for (name, (product, norm)), found in zip(whole.gradients.items(), total.tolist(), strict=True):
        if not abs(found - product) <= limit * (norm + 1e-2 * most) * 10:
            return len(whole.outputs), (
                f"the gradient of {name!r} is not that of the whole sequence, though the loss is: something "
                "differentiates through tokens of other ranks, outside of attention"
            )
    return 0, ""


def _difference(one: Sequence[Tensor], other: Sequence[Tensor], cuts: Cuts) -> float:
    """Return the largest difference of a module's outputs, relative to their size; 0 if it is not clear."""
    worst = 0.0
    for whole, part in zip(one, other, strict=False):
        own = whole
        if whole.dim() != part.dim():
            return float("inf")
        for dim in range(whole.dim()):
            cut = cuts.of_whole(whole.size(dim))
            if cut is not None and part.size(dim) == cut.tokens and cut.tokens != whole.size(dim):
                own = cut.take(own, dim)
        if own.shape != part.shape:
            continue  # rows of routed or flattened tokens: the modules after it show whether they are right
        size = own.nan_to_num().abs().max().double() if own.numel() else 1.0
        same = (own - part).double().abs() / (size + 1e-30)
        same[own.isnan() & part.isnan()] = 0.0
        worst = max(worst, float(same.nan_to_num(nan=torch.inf).max()) if own.numel() else 0.0)
    return worst


def _limit(model: nn.Module) -> float:
    dtypes = {p.dtype for p in model.parameters()}
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return _ROUGH
    return max((_TOLERANCE.get(d, _ROUGH) for d in dtypes), default=_TOLERANCE[torch.float32])


def _near(one: float, other: float | None, limit: float) -> bool:
    if other is None:
        return False
    return (
        one == other
        or (math.isnan(one) and math.isnan(other))
        or abs(one - other) <= limit * (abs(one) + 1e-3)
    )


def _tensors(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor)]


# -- The piece --------------------------------------------------------------------------------------


def shorten(batch: Any, found: Found, tokens: int, ranks: int) -> tuple[Any, Found]:
    """Return a piece of each sequence of a batch, with labels that count if there are any."""
    tokens = max(tokens, ranks)
    begins = dict.fromkeys(found.lengths, 0)
    for name, tensor in _named_tensors(batch):
        dim = found.dims.get(id(tensor))
        if name == "labels" and dim == 1 and tensor.dim() == 2 and tensor.size(1) > tokens:
            counted = (tensor != -100).sum(0).double()
            within = counted.unfold(0, tokens, 1).sum(-1)
            begins[tensor.size(1)] = int(within.argmax())
    dims: dict[int, int] = {}
    lengths = set()

    def cut(tensor: Tensor, dim: int) -> Tensor:
        length = tensor.size(dim)
        piece = tensor.narrow(dim, begins[length], min(tokens, length))
        last = tensor.dim() - 1
        if dim == last - 1 and last >= 2 and tensor.size(last) in begins:  # a mask of queries and keys
            keys = tensor.size(last)
            piece = piece.narrow(last, begins[keys], min(tokens, keys))
        piece = piece.clone()
        dims[id(piece)] = dim
        lengths.add(piece.size(dim))
        return piece

    short = map_sequences(batch, found, cut)
    return short, Found(dims, tuple(sorted(lengths)))


def _mask_ends(batch: Any) -> None:
    """Pad the first row of a piece at its left and the last at its right, so that both are proved."""
    named = dict(_named_tensors(batch))
    mask, labels = named.get("attention_mask"), named.get("labels")
    if labels is not None and (labels.dim() != 2 or labels.is_floating_point()):
        labels = None
    if mask is not None and mask.dim() == 2 and mask.size(1) >= 8:
        for row, edge in [(0, slice(0, 2)), (-1, slice(-3, None))][: mask.size(0)]:
            if bool(mask[row].all()):
                mask[row, edge] = 0
                if labels is not None and labels.shape == mask.shape:
                    labels[row, edge] = -100
                    labels[row, 2] = -100  # the shifted label of the last padded token
    # The first label counts where a loss does not shift, and only there: so the two differ.
    if labels is not None and len(counted := labels[labels != -100]):
        labels[:, 0] = counted[0]


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore generators and buffers afterwards: a check leaves no trace."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def refuse(problem: str) -> ModelError:
    """Return the error of a model that is not proved."""
    return ModelError(
        f"backend 'context' cannot split the sequences of this model: {problem}. Reach attention by torch's "
        "or "
        "transformers' functions or tp_context.attention(), take positions from tp_context.positions(), "
        "gather "
        "what needs all tokens with tp_context.gather(), or choose another backend"
    )
