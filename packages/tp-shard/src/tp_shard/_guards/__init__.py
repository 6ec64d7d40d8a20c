"""What torch and other libraries would silently do wrong with a shard: taught, or refused by name.

Importing this package notes what is to be replaced when groups are formed, see ``_groups/_patches``;
importing it replaces nothing.
"""

from tp_shard._guards import _ddp as _ddp
from tp_shard._guards import _refusals as _refusals
