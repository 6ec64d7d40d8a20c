from tp_dp_gather._data_parallel import DataParallel as DataParallel
from tp_dp_gather._functional import data_parallel as data_parallel
from tp_dp_gather._functions import gather as gather
from tp_dp_gather._functions import parallel_apply as parallel_apply
from tp_dp_gather._functions import replicate as replicate
from tp_dp_gather._functions import scatter as scatter
from tp_dp_gather._functions import sort_by_device as sort_by_device
from tp_dp_gather._options import GatherOptions as GatherOptions

__version__: str
