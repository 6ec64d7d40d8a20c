from tp_runner import compat as compat
from tp_runner import errors as errors
from tp_runner._cfg import CfgNode as CfgNode
from tp_runner._executor import Executor as Executor
from tp_runner._joblib import register_joblib as register_joblib
from tp_runner._map import map as map
from tp_runner._options import RunnerOptions as RunnerOptions
from tp_runner._pipeline import Pipeline as Pipeline
from tp_runner._runner import OrderedRunner as OrderedRunner
from tp_runner._runner import UnorderedRunner as UnorderedRunner
from tp_runner._stats import RunnerStats as RunnerStats
from tp_runner._stats import StageStats as StageStats
from tp_runner._stats import WorkerStats as WorkerStats
from tp_runner._stream import ResultStream as ResultStream
from tp_runner._workers._identity import WorkerInfo as WorkerInfo
from tp_runner._workers._identity import worker as worker
from tp_runner._workers._item import ItemInfo as ItemInfo
from tp_runner._workers._item import ItemRng as ItemRng
from tp_runner._workers._item import item as item
from tp_runner.errors import ItemTimeoutError as ItemTimeoutError
from tp_runner.errors import NotPicklableError as NotPicklableError
from tp_runner.errors import RunCancelledError as RunCancelledError
from tp_runner.errors import RunnerClosedError as RunnerClosedError
from tp_runner.errors import WorkerDiedError as WorkerDiedError
from tp_runner.errors import WorkerError as WorkerError

__version__: str
