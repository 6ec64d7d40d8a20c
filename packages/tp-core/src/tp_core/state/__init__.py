"""The state of a model and its optimizer in a checkpoint: named tensors, however they are split."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core.modules._parameters import fill_from_whole as fill_from_whole
    from tp_core.modules._parameters import named_parameters as named_parameters
    from tp_core.modules._parameters import plain_name as plain_name
    from tp_core.modules._parameters import plain_state as plain_state
    from tp_core.modules._parameters import whole as whole
    from tp_core.state._files import TENSORS_FILE as TENSORS_FILE
    from tp_core.state._files import TENSORS_FOLDER as TENSORS_FOLDER
    from tp_core.state._files import Cut as Cut
    from tp_core.state._files import SliceBuffer as SliceBuffer
    from tp_core.state._files import load_state as load_state
    from tp_core.state._files import open_tensors as open_tensors
    from tp_core.state._files import slice_of as slice_of
    from tp_core.state._files import write_whole as write_whole
    from tp_core.state._optimizers import hook_steps as hook_steps
    from tp_core.state._optimizers import is_inner_step as is_inner_step
    from tp_core.state._optimizers import is_zero_redundancy as is_zero_redundancy
    from tp_core.state._optimizers import optimizer_names as optimizer_names
    from tp_core.state._plain import from_json as from_json
    from tp_core.state._plain import to_json as to_json
    from tp_core.state._training import collect_state as collect_state
    from tp_core.state._training import collect_values as collect_values
    from tp_core.state._training import load_whole_state as load_whole_state
    from tp_core.state._training import restore_state as restore_state
    from tp_core.state._training import restore_values as restore_values
    from tp_core.tensors._digests import DIGEST_SIZE as DIGEST_SIZE
    from tp_core.tensors._digests import FileRecord as FileRecord
    from tp_core.tensors._digests import digest_of as digest_of
    from tp_core.tensors._digests import record_of as record_of
    from tp_core.tensors._files import read_tensors as read_tensors
    from tp_core.tensors._files import tensor_infos as tensor_infos
    from tp_core.tensors._files import write_tensors as write_tensors
    from tp_core.tensors._safetensors import SafetensorsFiles as SafetensorsFiles
    from tp_core.tensors._safetensors import check_weights_name as check_weights_name
    from tp_core.tensors._safetensors import is_safetensors as is_safetensors
    from tp_core.tensors._safetensors import safetensors_dtype as safetensors_dtype
    from tp_core.tensors._safetensors import split_over_files as split_over_files
    from tp_core.tensors._safetensors import write_safetensors as write_safetensors
    from tp_core.tensors._stored import StoredTensors as StoredTensors
    from tp_core.tensors._stored import TensorInfo as TensorInfo
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.modules._parameters": [
                "fill_from_whole",
                "named_parameters",
                "plain_name",
                "plain_state",
                "whole",
            ],
            "tp_core.state._files": [
                "TENSORS_FILE",
                "TENSORS_FOLDER",
                "Cut",
                "SliceBuffer",
                "load_state",
                "open_tensors",
                "slice_of",
                "write_whole",
            ],
            "tp_core.state._optimizers": [
                "hook_steps",
                "is_inner_step",
                "is_zero_redundancy",
                "optimizer_names",
            ],
            "tp_core.state._plain": ["from_json", "to_json"],
            "tp_core.state._training": [
                "collect_state",
                "collect_values",
                "load_whole_state",
                "restore_state",
                "restore_values",
            ],
            "tp_core.tensors._digests": ["DIGEST_SIZE", "FileRecord", "digest_of", "record_of"],
            "tp_core.tensors._files": ["read_tensors", "tensor_infos", "write_tensors"],
            "tp_core.tensors._safetensors": [
                "SafetensorsFiles",
                "check_weights_name",
                "is_safetensors",
                "safetensors_dtype",
                "split_over_files",
                "write_safetensors",
            ],
            "tp_core.tensors._stored": ["StoredTensors", "TensorInfo"],
        },
    )
