"""The check before the first step: on a piece of the batch, the split model computes what the whole one does.

Every rank runs the step on the whole piece, then on its slice, and compares the loss, the outputs and the
gradients. A difference is named by the first module with another output. So what crosses positions outside
of attention shows (convolutions, state-space layers, norms over the sequence, positions that begin at 0),
and what cannot be proved is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core import tree_leaves
from tp_core.compare import (
    Bound,
    ComputedTypes,
    Recording,
    TensorPlace,
    coarsest,
    distance,
    norm_of,
    nudged,
    relative_error,
    undisturbed,
)
from tp_core.data import SampleRows, StepOutput
from tp_core.errors import ModelError
from tp_core.random import capture_rng_state, preserve_rng_state

from tp_context._inputs import InputScheme, input_schemes, splitting, windows_of
from tp_context._patches import patched
from tp_context._slices import (
    BatchSequences,
    Cut,
    Cuts,
    OtherSizes,
    _named_tensors,
    differing_dim,
    map_sequences,
    sizes_of_others,
    take_slices,
    work_of,
)
from tp_context._split_state import split_states

Step = Callable[[nn.Module, Any], StepOutput]
Join = Callable[[Any, Cuts], Any]


class SequenceRanks(NamedTuple):
    """The ranks of a sequence: their process group, this rank in it, their number.

    Attributes:
        group: The ranks that share a sequence; ``None`` for all.
        rank: This rank among them.
        size: Their number.
        together: The ranks that run a step together, as each holds parts of others' weights: all that must
            reach one decision. ``None`` for all.
        attention: The algorithm of attention, as `ContextOptions.attention` names it.
    """

    group: ProcessGroup | None
    rank: int
    size: int
    together: ProcessGroup | None
    attention: str = "all-gather"

    def cuts(
        self,
        model: nn.Module,
        batch: Any,
        sequences: BatchSequences,
        before: Callable[[object], None] | None = None,
        others: OtherSizes = OtherSizes(),  # noqa: B008 - it is frozen
    ) -> Cuts:
        """Return the cuts of a batch's sequences, of which ``before`` hears of each exchange."""
        work = work_of(batch, sequences, windows_of(model))
        of_batch = sizes_of_others(batch, sequences)
        cuts = []
        for length in sequences.lengths:
            avoid = others.beside(length) | of_batch
            cuts.append(Cut(length, self.rank, self.size, self.group, before, work.get(length), avoid))
        return Cuts(cuts, self.attention)

    def all_gather(self, value: object) -> list[Any]:
        """Return the objects of all ranks that run a step together. Collective: one all-gather of them."""
        objects: list[Any] = [None] * dist.get_world_size(self.together)
        dist.all_gather_object(objects, value, group=self.together)
        return objects

    @property
    def sequence(self) -> int:
        """A number of the sequence: the first of the ranks that share it."""
        if self.group is None:
            return 0
        return int(dist.get_global_rank(self.group, 0))

    def of_sequence(self, value: object) -> list[Any]:
        """Return the objects of the ranks of this rank's sequence. Collective: :meth:`all_gather`'s."""
        return [v for sequence, v in self.all_gather((self.sequence, value)) if sequence == self.sequence]


class _OthersEndedError(Exception):
    """Raised on ranks that wait for one that has ended its step already."""


class _Sketch(NamedTuple):
    """Sums of a gradient's elements with drawn signs, and the coarser types that have all of its digits."""

    sums: Tensor
    coarse: tuple[torch.dtype, ...] = ()


class _Draw(NamedTuple):
    """One call that draws random numbers.

    Attributes:
        module: The name of the module that runs.
        shapes: The shapes of what is drawn.
    """

    module: str
    shapes: list[torch.Size]


class _Scan(NamedTuple):
    """One call that accumulates over a dimension, as a cumulative sum does.

    Attributes:
        module: The name of the module that runs.
        function: The name of the function.
        size: The size of the dimension.
    """

    module: str
    function: str
    size: int


class _StepRun(NamedTuple):
    """The results of a step.

    Attributes:
        outputs: Those of modules, in the order in which they end.
        inputs: What modules take, in the order in which they begin.
        returned: The numbers that the step returns.
        gradients: Sketches of the gradients.
        dtypes: The types in which the step computes.
        shapes: Those of tensors that the step returns, before slices are joined.
        dropout_shapes: Those of what dropout gets, in the order of calls.
        other_sizes: Those of what might have been a slice, and was none.
        draws: The calls that draw random numbers, beside dropout.
        scans: The calls that accumulate over a dimension.
        generators: The states of generators at its end.
    """

    outputs: dict[TensorPlace, Tensor]
    returned: dict[str, float]
    gradients: dict[str, _Sketch]
    dtypes: frozenset[torch.dtype]
    shapes: Mapping[tuple[str, int], torch.Size]
    dropout_shapes: Sequence[torch.Size]
    other_sizes: frozenset[int] = frozenset()
    inputs: Mapping[TensorPlace, Tensor] = {}
    draws: Sequence[_Draw] = ()
    scans: Sequence[_Scan] = ()
    generators: Mapping[str, Any] = {}


class SliceProof(NamedTuple):
    """What the check has proved of a model on slices.

    Attributes:
        scheme: What the model is given of whole sequences.
        dims_of_dropout: As `Cuts.dims_of_dropout`.
        dims_of_outputs: As `Cuts.dims_of_outputs`.
        others: The sizes of what is no sequence.
    """

    scheme: InputScheme
    dims_of_dropout: Mapping[int, Sequence[int]]
    dims_of_outputs: Mapping[tuple[str, int], Sequence[int]]
    others: OtherSizes

    def mark(self, cuts: Cuts) -> None:
        """Let the cuts of a batch know the dimensions."""
        cuts.dims_of_dropout = self.dims_of_dropout
        cuts.dims_of_outputs = self.dims_of_outputs


def prove(
    step: Step,
    model: nn.Module,
    batch: Any,
    sequences: BatchSequences,
    *,
    ranks: SequenceRanks,
    tokens: int,
    join: Join,
    compares_gradients: bool = True,
) -> SliceProof | str:
    """Return the proof by the first scheme that has one, or the sentence that says why none has.

    All ranks that run the step together return the same.

    Args:
        step: The user's step.
        model: The plain model.
        batch: The batch, whole.
        sequences: Its sequences.
        ranks: The ranks of a sequence.
        tokens: The number of tokens of the piece; 0 to choose it.
        join: Joins the outputs of all slices, as in a step.
        compares_gradients: Whether gradients are compared, too.

    Collectives: those of the step on slices, each after an exchange of descriptions, so that no rank waits
    for another one that has failed.
    """
    short, where = shorten(batch, sequences, tokens or 8 * ranks.size + 5, ranks.size)
    _mask_ends(short)
    with undisturbed(model), patched(drops=False):
        run = partial(_run, step, model, gradients=compares_gradients)
        try:
            whole = run(short, _as_it_is)
            failed = ""
        except Exception as error:  # noqa: BLE001 - whatever the user's step raises
            whole = _StepRun({}, {}, {}, frozenset(), {}, [])
            failed = f"{type(error).__name__}: {error}"
        said = ranks.all_gather((failed, whole.dtypes, whole.other_sizes))
        failures = [failure for failure, *_ in said if failure]
        if failures:
            return (
                f"the step fails on a piece of {where.lengths} tokens of the first batch, on which backend "
                f"'context' compares the split model with the whole one ({failures[0]:.300}); "
                "give a longer piece with the option check_tokens"
            )
        # In the coarsest type on any rank: all of them run once more, or none.
        dtypes = frozenset[torch.dtype]().union(*(types for _, types, _ in said))
        whole = near = whole._replace(dtypes=dtypes)
        if coarsest(dtypes) != torch.float64:
            near = run(short, _as_it_is, nudge=coarsest(dtypes))
        # Without gradients of whole sequences, which the sizes below have, too.
        sizes = frozenset[int]().union(*(of_rank for *_, of_rank in said)) - set(where.lengths)
        others = OtherSizes(sizes, where.lengths)
        best = (-1, "")
        has_positions = any("position_ids" in name for name, _ in _named_tensors(batch))
        for scheme in input_schemes(model, has_positions=has_positions):
            cuts = ranks.cuts(model, short, where, partial(_compare_exchanges, ranks), others)
            slices = take_slices(short, where, cuts)
            progress, problem = _try(run, model, slices, whole, near, scheme, cuts, ranks, join)
            if not problem:
                others = OtherSizes(sizes | cuts.other_sizes, where.lengths)
                return SliceProof(scheme, cuts.dims_of_dropout, cuts.dims_of_outputs, others)
            best = max(best, (progress, problem), key=lambda pair: pair[0])
    return best[1]


def _as_it_is(output: Any) -> Any:
    return output


def _compare_exchanges(ranks: SequenceRanks, what: object) -> None:
    """Raise unless ranks of a sequence are about to exchange the same: one of them may have failed."""
    everyones = ranks.all_gather((ranks.sequence, what))
    ended = [said for kind, said in everyones if kind == "end"]
    if ended:
        problems = [said for said in ended if said[1]]
        raise _OthersEndedError(problems[0] if problems else (0, _UNEVEN))
    of_one: dict[int, object] = {}  # by sequence; others may be shorter
    for sequence, said in everyones:
        if of_one.setdefault(sequence, said) != said:
            problem = f"ranks exchange different tensors: {of_one[sequence]} and {said}"
            raise _OthersEndedError((0, problem))


def _try(
    run: Callable[..., _StepRun],
    model: nn.Module,
    slices: Any,
    whole: _StepRun,
    near: _StepRun,
    scheme: InputScheme,
    cuts: Cuts,
    ranks: SequenceRanks,
    join: Join,
) -> tuple[int, str]:
    """Run the step on slices; return how far it went, and the problem or nothing: the same on all ranks.

    The cuts then know the dimensions in which what dropout gets, and outputs, differ from those of the whole.
    """

    def join_slices(output: Any) -> Any:
        cuts.dims_of_outputs = _dims_of_outputs(whole.shapes, _shapes(output))
        return join(output, cuts)

    try:
        with splitting(model, cuts, scheme), _announced(model, cuts):
            part = run(slices, join_slices)
        cuts.dims_of_dropout, others = _dims_of_dropout(whole.dropout_shapes, part.dropout_shapes)
        part = part._replace(other_sizes=part.other_sizes | others)
        verdict = _compare(model, whole, near, part, cuts)
    except _OthersEndedError as error:
        return _verdict(error.args[0])
    except Exception as error:  # noqa: BLE001 - whatever the model raises on a slice
        verdict = (0, f"the step fails on a slice of the sequence: {type(error).__name__}: {error!s:.300}")
    everyones = ranks.all_gather(("end", verdict))
    problems = [said for kind, said in everyones if kind == "end" and said[1]]
    if problems:
        return _verdict(min(problems, key=lambda said: int(said[0])))  # the first module that any rank names
    if any(kind != "end" for kind, _ in everyones):
        return 0, _UNEVEN
    sums_of_own = {name: sketch.sums for name, sketch in part.gradients.items()}
    everyones = ranks.of_sequence((sums_of_own, part.other_sizes))
    mean = {name: torch.stack([sums[name] for sums, _ in everyones]).mean(0) for name in part.gradients}
    cuts.other_sizes = frozenset[int]().union(*(sizes for _, sizes in everyones))
    verdicts = ranks.all_gather(_compare_gradients(model, whole, near, mean, part))
    return _verdict(max(verdicts, key=lambda verdict: bool(verdict[1])))


def _verdict(said: Any) -> tuple[int, str]:
    place, problem = said
    return int(place), str(problem)


_UNEVEN = "ranks exchange a different number of tensors"


def _shapes(output: Any) -> dict[tuple[str, int], torch.Size]:
    """Return the shapes of what a step returns, by name and the number of the value under it."""
    shapes: dict[tuple[str, int], torch.Size] = {}
    if isinstance(output, Mapping):
        values = output
    else:
        values = {"loss": output}
    for name, value in values.items():
        if isinstance(value, SampleRows):
            rows = value.pieces
        else:
            rows = value
        for number, leaf in enumerate(tree_leaves(rows)):
            if isinstance(leaf, Tensor):
                shapes[name, number] = leaf.shape
    return shapes


def _dims_of_outputs(
    whole: Mapping[tuple[str, int], torch.Size], part: Mapping[tuple[str, int], torch.Size]
) -> dict[tuple[str, int], Sequence[int]]:
    """Return the dimension of the sequence in each tensor that a step returns, if it has one."""
    both = [key for key in whole if key in part and len(whole[key]) == len(part[key])]
    dims: dict[tuple[str, int], Sequence[int]] = {}
    for key in both:
        dim = differing_dim(whole[key], part[key])
        dims[key] = [] if dim is None else [dim]
    return dims


def _dims_of_dropout(
    whole: Sequence[torch.Size], part: Sequence[torch.Size]
) -> tuple[dict[int, Sequence[int]], set[int]]:
    """Return the dimensions of the sequence in what dropout gets, by the number of dimensions.

    Also the sizes by which another tensor of as many dimensions might be taken for a slice. Nothing is said
    of tensors of which the runs have other numbers: attention has no weights on slices.
    """
    dims: dict[int, Sequence[int]] = {}
    others: set[int] = set()
    for count in {len(shape) for shape in whole}:
        ones, slices = ([shape for shape in run if len(shape) == count] for run in (whole, part))
        if len(ones) != len(slices):
            continue
        seen = [differing_dim(one, other) for one, other in zip(ones, slices, strict=True)]
        dims[count] = sorted({dim for dim in seen if dim is not None})
        for shape, own in zip(ones, seen, strict=True):
            others.update(shape[dim] for dim in dims[count] if dim != own)
    return dims, others


@contextmanager
def _announced(model: nn.Module, cuts: Cuts) -> Iterator[None]:
    """Announce that units of sharded weights will be gathered: another rank may have failed."""
    handles = [
        module.register_forward_pre_hook(partial(_announce, cuts, name), prepend=True)
        for name, module in model.named_modules()
        if hasattr(module, "set_requires_gradient_sync")  # an FSDPModule
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _announce(cuts: Cuts, name: str, *_: object) -> None:
    cuts.announce(("unit", name))


# -- Two runs, compared -----------------------------------------------------------------------------


def _run(
    step: Step,
    model: nn.Module,
    batch: Any,
    join: Callable[[Any], Any],
    *,
    gradients: bool,
    nudge: torch.dtype | None = None,
) -> _StepRun:
    # Before the step: after it, units that stay gathered until the backward pass show copies.
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    dtypes = {p.dtype for p in model.parameters()}
    rounding = nullcontext() if nudge is None else nudged(model, nudge)
    dropout_shapes: list[torch.Size] = []
    other_sizes: set[int] = set()
    # All runs draw the same: numbers of numpy's, as wav2vec2's masks, would be taken for rounding.
    sketches: dict[str, _Sketch] = {}
    # Rounded in the backward pass, too: activation checkpointing repeats forwards there.
    with preserve_rng_state(), rounding:
        with Recording(model, inputs=True) as recording, ComputedTypes() as computed:
            with (
                split_states.changed(dropout_shapes=dropout_shapes, other_sizes=other_sizes),
                _CallWatch(model) as watch,
            ):
                raw = step(model, batch)
            generators = watch.states()
            shapes = _shapes(raw)
            output = join(raw)
        if isinstance(output, Mapping):
            values = output
        else:
            values = {"loss": output}
        loss = values.get("loss")
        if gradients and isinstance(loss, Tensor) and loss.requires_grad:
            sketches = _gradients(loss, trained)
    returned: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            returned[name] = float(value.detach())
        elif isinstance(value, int | float):
            returned[name] = float(value)
    # No numbers: a loss of this rank's tokens is joined only later.
    outputs = {place: one.tensor for place, one in recording.outputs.items() if one.tensor.dim()}
    inputs = {place: one.tensor for place, one in recording.inputs.items() if one.tensor.dim()}
    dtypes |= computed.dtypes
    return _StepRun(
        outputs,
        returned,
        sketches,
        frozenset(dtypes),
        shapes,
        dropout_shapes,
        other_sizes=frozenset(other_sizes),
        inputs=inputs,
        draws=watch.draws,
        scans=watch.scans,
        generators=generators,
    )


_SCANS = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}


class _CallWatch(TorchDispatchMode):
    """Notes what is drawn at random and what accumulates while a model runs, and in which of its modules.

    Attributes:
        draws: The calls that draw, in their order.
        scans: The calls that accumulate over a dimension, in their order.
    """

    supports_higher_order_operators = True  # such as flex_attention, which is passed on

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.draws: list[_Draw] = []
        self.scans: list[_Scan] = []
        devices = {torch.device("cpu"), *(parameter.device for parameter in model.parameters())}
        self._devices = sorted(devices, key=str)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running = [""]  # the names of the modules that run: the model, the innermost last
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, _args: Any) -> None:
        self._running.append(self._names.get(id(module), self._running[-1]))

    def _end(self, *_: object) -> None:
        self._running.pop()

    def states(self) -> dict[str, Any]:
        """Return the states of generators."""
        return capture_rng_state(self._devices)

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = func.name().partition("::")[2].partition(".")[0].rstrip("_")
        if function in _SCANS:
            if len(args) > 1:
                dim = args[1]
            else:
                dim = kwargs["dim"]
            self.scans.append(_Scan(self._running[-1], function, args[0].size(dim)))
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **(kwargs or {}))
        before = self.states()
        result = func(*args, **(kwargs or {}))
        if self.states() != before:  # not attention, which has the tag, and no dropout here
            shapes = [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.draws.append(_Draw(self._running[-1], shapes))
        return result


_PIECE = 2**20
"""Elements at a time: in float64, all of a large gradient would need more memory than the step does."""

_SKETCH = 16
"""The numbers of a sketch, a divisor of `_PIECE`: its norm is off by a fifth, as a rule."""


def _sketched(grad: Tensor | None, seed: int) -> _Sketch:
    """Return sums of a gradient's elements with drawn signs, whose norm is about the gradient's.

    So is the norm of a difference of two sketches. Ranks exchange them where none has a whole gradient.
    """
    sums = torch.zeros(_SKETCH, dtype=torch.float64)
    if grad is None:
        return _Sketch(sums)
    grad = grad.to_dense() if grad.is_sparse else grad
    generator = torch.Generator(grad.device).manual_seed(seed)
    for piece in grad.flatten().split(_PIECE):
        signs = torch.randint(2, piece.shape, generator=generator, device=piece.device, dtype=torch.int8)
        exact = piece.double() * (signs * 2 - 1)
        exact = nn.functional.pad(exact, (0, -len(exact) % _SKETCH))
        sums += exact.view(-1, _SKETCH).sum(0).cpu()
    # Shards may be summed over ranks in a coarser type than theirs: then they have its digits alone.
    coarse = [d for d in (torch.float16, torch.bfloat16) if torch.equal(grad, grad.to(d).to(grad.dtype))]
    return _Sketch(sums, tuple(coarse) if bool(sums.any()) else ())


def _gradients(loss: Tensor, parameters: list[tuple[str, nn.Parameter]]) -> dict[str, _Sketch]:
    """Return sketches of a loss's gradients; of shards their parts on this rank, averaged over all ranks.

    Collective: for shards those of their backward pass.
    """
    sketches: dict[str, _Sketch] = {}
    seeds = {name: seed for seed, (name, _) in enumerate(parameters)}
    if any(_is_shard(parameter) for _, parameter in parameters):
        for _, parameter in parameters:
            parameter.grad = None
        loss.backward()  # torch.autograd.grad would reach gathered copies alone
        for name, parameter in parameters:
            grad = parameter.grad
            if grad is not None and hasattr(grad, "to_local"):
                grad = grad.to_local()
            sketches[name] = _sketched(grad, seeds[name])
        return sketches

    def sketch(grad: Tensor, name: str) -> Tensor | None:
        sketches[name] = _sketched(grad, seeds[name])
        if grad.layout is not torch.strided:
            return None
        return grad.new_zeros(()).expand_as(grad)  # in its place: all together are as large as the model

    handles = [parameter.register_hook(partial(sketch, name=name)) for name, parameter in parameters]
    try:
        torch.autograd.grad(loss, [parameter for _, parameter in parameters], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for name in seeds.keys() - sketches:
        sketches[name] = _sketched(None, 0)
    return {name: sketches[name] for name in seeds}  # in the model's order, not the backward pass's


def _is_shard(parameter: Tensor) -> bool:
    return hasattr(parameter, "to_local")  # a DTensor


def _compare(
    model: nn.Module, whole: _StepRun, near: _StepRun, part: _StepRun, cuts: Cuts
) -> tuple[int, str]:
    """Return the place and the sentence of the first difference, or an empty sentence."""
    bound = Bound.of(whole.dtypes)
    bad = [
        n
        for n, v in whole.returned.items()
        if n != "weight" and not _is_near(v, near.returned.get(n), part.returned.get(n), bound)
    ]
    error_of = partial(_error, whole=whole, near=near, part=part, bound=bound, cuts=cuts)
    is_off = bad or _calls(whole) != _calls(part)
    modules = dict(model.named_modules())
    drawing = _drawing(whole, part)
    if not is_off and not any(error_of(place) for place in whole.outputs if not place.module):
        if drawing is None:
            return len(whole.outputs), _accumulating(whole, part, modules)
        # By chance they make no difference here, as where an expert is drawn among those that are near.
        return len(whole.outputs), (
            f"{drawing or 'the model'!r} ({type(modules[drawing]).__name__}) draws random numbers, which are "
            "others for a slice of the sequence than for the whole"
        )
    for number, place in enumerate(whole.outputs):
        error = error_of(place)
        if error:
            called, where = _cause(place, whole, near, part, bound, cuts)
            why = "it needs tokens or positions that other ranks have, outside of attention"
            if drawing is not None:
                why += ", or draws random numbers, which are others for a slice"
            return number, (
                f"{called or 'the model'!r} ({type(modules[called]).__name__}) computes something else on a "
                f"slice of the sequence than on the whole (a difference of {error:.1e}{where}): {why}"
            )
    values = (
        ", ".join(f"{n} {part.returned.get(n)} and not {whole.returned[n]}" for n in bad) or "other outputs"
    )
    return len(whole.outputs), (
        f"the step returns {values} if its batch is split, though all modules compute the same: it uses "
        "tokens of other ranks after the model, or is a mean over something else than the 'weight' that it "
        "returns"
    )


def _drawing(whole: _StepRun, part: _StepRun) -> str | None:
    """Return the module that draws other numbers for a slice; ``None`` if none does.

    Both runs begin with the same generators. So as many draws of the same shapes are the same numbers.
    """
    for one, other in zip_longest(whole.draws, part.draws):
        if one != other:
            module: str = (one or other).module
            return module
    if whole.generators == part.generators:
        return None
    return ""


def _accumulating(whole: _StepRun, part: _StepRun, modules: Mapping[str, nn.Module]) -> str:
    """Return the sentence of a module that accumulates over the tokens of a slice, or an empty one.

    Experts with a capacity leave out the tokens beyond it: in longer sequences than those of the check.
    """
    for name, module in modules.items():
        scans, of_part = ([scan for scan in run.scans if scan.module == name] for run in (whole, part))
        if len(scans) != len(of_part):  # in a call of the model's own hooks
            continue
        for one, other in zip(scans, of_part, strict=True):
            if one.size != other.size:
                return (
                    f"{name or 'the model'!r} ({type(module).__name__}) accumulates over the tokens of a "
                    f"slice ({one.function}), which makes no difference in the {one.size} of the check, and "
                    "may in longer sequences, as the capacity of experts does"
                )
    return ""


def _cause(
    place: TensorPlace, whole: _StepRun, near: _StepRun, part: _StepRun, bound: Bound, cuts: Cuts
) -> tuple[str, str]:
    """Return the module that computes something else, of which ``place`` is the first output to differ.

    It is the one around a module that is given something else already: attention that is written by hand
    shows in the dropout of its weights, and labels that are shifted in the slice in the table of a decoder.
    """
    runs = [run._replace(outputs=dict(run.inputs)) for run in (whole, near, part)]
    calls = Counter(module for module, _ in _calls(whole))

    def given(module: str, call: int) -> TensorPlace | None:
        taken = (p for p in whole.inputs if (p.module, p.call) == (module, call))
        error_of = partial(_error, whole=runs[0], near=runs[1], part=runs[2], bound=bound, cuts=cuts)
        return next((p for p in taken if error_of(p)), None)

    cause, call, where = place.module, place.call, ""
    while cause and (other := given(cause, call)) is not None:
        around = cause.rpartition(".")[0]
        while around and around not in calls:
            around = around.rpartition(".")[0]
        where = f", in what it passes to {cause.removeprefix(f'{around}.')!r}"
        if not other.tensor[:1].isdecimal():  # it has the name of an argument
            where += f" as {other.tensor!r}"
        cause, call = around, 0
        if calls[around] > 1:  # which of them it was is not known
            break
    return cause, where


def _compare_gradients(
    model: nn.Module, whole: _StepRun, near: _StepRun, mean: Mapping[str, Tensor], part: _StepRun
) -> tuple[int, str]:
    """Compare gradients of the whole with those of slices: the ranks' mean, or this rank's part of shards."""
    shards = {n for n, p in model.named_parameters() if _is_shard(p)}
    most = max((norm_of(sketch.sums) for sketch in whole.gradients.values()), default=0.0)
    for name, (sums, coarse) in whole.gradients.items():
        if name in shards:
            bound = Bound.of([*whole.dtypes, *coarse])
            own = part.gradients[name].sums
        else:
            bound = Bound.of(whole.dtypes)
            own = mean[name]
        if distance(sums, own) > bound.limit(sums, near.gradients[name].sums, most):
            return len(whole.outputs), (
                f"the gradient of {name!r} differs from the whole sequence's, though the loss is: something "
                "differentiates through tokens of other ranks, outside of attention"
            )
    return 0, ""


def _calls(run: _StepRun) -> set[tuple[str, int]]:
    return {(place.module, place.call) for place in run.outputs}


def _error(
    place: TensorPlace, *, whole: _StepRun, near: _StepRun, part: _StepRun, bound: Bound, cuts: Cuts
) -> float:
    """Return the difference of an output beyond rounding, as a share of its norm; 0 if there is none."""
    sliced = part.outputs.get(place)
    if sliced is None:
        # One more output of the same call is no result: the weights of attention, which a split one has not.
        if (place.module, place.call) in _calls(part):
            return 0.0
        return float("inf")
    expected = whole.outputs[place]
    if expected.dim() != sliced.dim():
        return float("inf")
    own = expected
    nudged_own = near.outputs.get(place, expected)
    for dim in range(expected.dim()):
        cut = cuts.of_whole(expected.size(dim))
        if cut is not None and sliced.size(dim) == cut.tokens and cut.tokens != expected.size(dim):
            own = cut.take(own, dim)
            nudged_own = cut.take(nudged_own, dim)
    if own.shape != sliced.shape:
        return 0.0  # rows of routed or flattened tokens: the modules after it show whether they are right
    if distance(own, sliced) <= bound.limit(own, nudged_own):
        return 0.0
    return relative_error(own, sliced)


def _is_near(one: float, near: float | None, other: float | None, bound: Bound) -> bool:
    if other is None:
        return False
    exact = torch.tensor(one, dtype=torch.float64)
    if near is None:
        nudged_one = exact
    else:
        nudged_one = torch.tensor(near, dtype=torch.float64)
    sliced = torch.tensor(other, dtype=torch.float64)
    # A count or a share of 0 is right by the scale of 1.
    return distance(exact, sliced) <= bound.limit(exact, nudged_one, max(1.0, abs(one)))


# -- The piece --------------------------------------------------------------------------------------


def shorten(batch: Any, sequences: BatchSequences, tokens: int, ranks: int) -> tuple[Any, BatchSequences]:
    """Return a piece of each sequence of a batch, with labels that count if there are any."""
    tokens = max(tokens, ranks)
    begins = dict.fromkeys(sequences.lengths, 0)
    for name, tensor in _named_tensors(batch):
        dim = sequences.dims.get(id(tensor))
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

    short = map_sequences(batch, sequences, cut)
    return short, BatchSequences(dims, tuple(sorted(lengths)))


def _mask_ends(batch: Any) -> None:
    """Pad the first row of a piece at its left and the last at its right, so that both are proved."""
    named = dict(_named_tensors(batch))
    mask, labels = named.get("attention_mask"), named.get("labels")
    if labels is not None and (labels.dim() != 2 or labels.is_floating_point()):
        labels = None
    if mask is not None and mask.dim() == 2 and mask.size(1) >= 8:
        ends = [(0, slice(0, 2)), (-1, slice(-3, None))]
        for row, edge in ends[: mask.size(0)]:
            if bool(mask[row].all()):
                mask[row, edge] = 0
                if labels is not None and labels.shape == mask.shape:
                    labels[row, edge] = -100
                    labels[row, 2] = -100  # the shifted label of the last padded token
    # The first label counts where a loss does not shift, and only there: so the two differ.
    if labels is not None and len(counted := labels[labels != -100]):
        labels[:, 0] = counted[0]


def refuse(problem: str, by_size: Sequence[str]) -> ModelError:
    """Return the error of a model that is not proved, on a batch of which tensors were cut for their size."""
    names = ", ".join(map(repr, by_size))
    also = ""
    if names:
        also = (
            f". Tensors of the batch were split because they are as long as the tokens ({names}): if one is "
            "no sequence, name those that are by the option sequence"
        )
    return ModelError(
        f"backend 'context' cannot split the sequences of this model: {problem}{also}. Reach attention by "
        "torch's or transformers' functions or tp_context.attention(), take positions from "
        "tp_context.positions(), gather what needs all tokens with tp_context.gather(), or choose another "
        "backend"
    )
