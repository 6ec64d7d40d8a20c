"""The judges `DebugMode` and `CommDebugMode`: torch's logs of operations and of collectives."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from tp_core.ranks import RankPool
from tp_verify import Strategy

from tests.silentbench._programs import Program
from tests.silentbench._runs import built, is_same, join, make_optimizer, micro_batches


def apart_by_logs(program: Program, pool: RankPool, *, right: bool) -> tuple[str, str]:
    """Return the first operation of a step that returns other numbers than on one device, on the first rank.

    A user logs the step of one device and that of a rank, with the same weights, seed and batch, and asks
    `check_hash_mismatches`. It wants the same operations on the same batch: where a program has others, the
    second value says so.
    """
    return pool.run(_compared, program, right)[0]


def _compared(program: Program, right: bool) -> tuple[str, str]:
    from torch.utils._debug_mode import DebugMode  # not in the oldest torch

    join()
    case = program.case(right=right)
    strategy: Strategy = case["parallel"]
    batch = case["batches"][0]
    whole = built(case, None)
    strategy.seed(0)
    expected = _logged(case, whole, batch)[1]
    model, _ = strategy.prepare(built(case, None), lambda made: make_optimizer(case, made))
    strategy.seed(0)
    logs = []

    def step(module: nn.Module, part: Any) -> Any:
        output, log = _logged(case, module, part)
        logs.append(log)
        return output

    try:
        share = strategy.share(batch)
        if not is_same(share, batch):
            return "", "ranks have other rows or places than one device"
        strategy.backward(model, step, micro_batches(share, case.get("micro", 1)))
        if not logs:
            return "", "the program calls the model without its step"
        found = DebugMode.check_hash_mismatches(expected, logs[0])
    except ValueError as error:  # other operations
        return "", f"ranks call other operations than one device: {error}"
    finally:
        strategy.close()
    return (f"the output of {found[0]['call']}" if found else ""), ""


def _logged(case: Mapping[str, Any], model: nn.Module, batch: Any) -> tuple[Any, list[Any]]:
    """Run a step, and return its output and its log."""
    from torch.utils._debug_mode import DebugMode

    with DebugMode() as mode, DebugMode.log_tensor_hashes():
        output = case["step"](model, batch)
    return output, mode.logs


def collectives(program: Program, pool: RankPool, *, right: bool) -> dict[str, int] | None:
    """Return how often the first rank calls each collective in a step; ``None`` where the mode cannot count.

    Its tracker of modules raises an `IndexError` in torch 2.13 within some calls of a model.
    """
    return pool.run(_counted, program, right)[0]


def _counted(program: Program, right: bool) -> dict[str, int] | None:
    from torch.distributed.tensor.debug import CommDebugMode

    join()
    case = program.case(right=right)
    strategy: Strategy = case["parallel"]
    model, _ = strategy.prepare(built(case, None), lambda made: make_optimizer(case, made))
    strategy.seed(0)
    share = strategy.share(case["batches"][0])
    try:
        with CommDebugMode() as counting:
            strategy.backward(model, case["step"], micro_batches(share, case.get("micro", 1)))
            if "max_norm" in case:
                strategy.clip(model, case["max_norm"])
    except IndexError:
        return None
    finally:
        strategy.close()
    return {str(kind): count for kind, count in counting.get_comm_counts().items()}
