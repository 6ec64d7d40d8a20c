"""The spellings of easycore's runners: a program written for them changes its import lines alone.

from easycore.common.config import CfgNode                          from tp_runner.compat import CfgNode
from easycore.common.parallel import OrderedRunner, UnorderedRunner   from tp_runner.compat import ...
from easycore.torch.parallel import OrderedRunner, UnorderedRunner    from tp_runner.compat import ...
"""

from tp_runner import CfgNode, OrderedRunner, UnorderedRunner

__all__ = ["CfgNode", "OrderedRunner", "UnorderedRunner"]
