"""What a checkpoint holds of a model and its optimizer: named tensors, however they are split."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._tensors._digests import DIGEST_SIZE, FileRecord, digest_of, record_of
    from tp_core._tensors._files import read_tensors, tensor_infos, write_tensors
    from tp_core._tensors._slices import TensorInfo
    from tp_core.state._files import (
        TENSORS_FILE,
        TENSORS_FOLDER,
        StoredTensors,
        load_state,
        open_tensors,
        write_whole,
    )
    from tp_core.state._names import named_parameters, plain_name, plain_state
    from tp_core.state._optimizers import optimizer_names
    from tp_core.state._places import Cut, Place, fill_from_whole, whole
    from tp_core.state._plain import from_json, to_json
    from tp_core.state._training import collect_state, load_whole_state, restore_state
    from tp_core.state._values import collect_values, restore_values

__all__ = [
    "DIGEST_SIZE",
    "TENSORS_FILE",
    "TENSORS_FOLDER",
    "Cut",
    "FileRecord",
    "Place",
    "StoredTensors",
    "TensorInfo",
    "collect_state",
    "collect_values",
    "digest_of",
    "fill_from_whole",
    "from_json",
    "load_state",
    "load_whole_state",
    "named_parameters",
    "open_tensors",
    "optimizer_names",
    "plain_name",
    "plain_state",
    "read_tensors",
    "record_of",
    "restore_state",
    "restore_values",
    "tensor_infos",
    "to_json",
    "whole",
    "write_tensors",
    "write_whole",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "._tensors._digests": ["DIGEST_SIZE", "FileRecord", "digest_of", "record_of"],
            "._tensors._files": ["read_tensors", "tensor_infos", "write_tensors"],
            "._tensors._slices": ["TensorInfo"],
            "_files": [
                "TENSORS_FILE",
                "TENSORS_FOLDER",
                "StoredTensors",
                "load_state",
                "open_tensors",
                "write_whole",
            ],
            "_names": ["named_parameters", "plain_name", "plain_state"],
            "_optimizers": ["optimizer_names"],
            "_places": ["Cut", "Place", "fill_from_whole", "whole"],
            "_plain": ["from_json", "to_json"],
            "_training": ["collect_state", "load_whole_state", "restore_state"],
            "_values": ["collect_values", "restore_values"],
        },
    )
