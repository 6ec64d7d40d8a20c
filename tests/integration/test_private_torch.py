"""Private names of torch that our packages use: each has its reason here, and is still there.

A release of torch may take any of them away. Then this fails, beside whatever depends on it.
"""

import ast
import importlib
import inspect
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.elastic.agent.server import api as agent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.utils import store
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for package in (
        "tp-context",
        "tp-data",
        "tp-core",
        "tp-dp-gather",
        "tp-launch",
        "tp-pipeline",
        "tp-runner",
        "tp-shard",
        "tp-trainer",
        "tp-tuple",
        "tp-verify",
    )
    for path in sorted((ROOT / "packages" / package / "src").rglob("*.py"))
]

REASONS = {
    "torch._C.DisableTorchFunctionSubclass": "a guarded weight says its dtype, as a plain tensor does",
    "torch.optim.optimizer._global_optimizer_post_hooks": "a trial step of an optimizer calls no hook",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "as above",
    "torch._C.DisableTorchFunction": "operators are recorded below what subclasses of tensors make of them",
    "torch._C._are_functorch_transforms_active": "what torch.func differentiates",
    "torch._C._disabled_torch_function_impl": "functions of probes are seen as operators",
    "torch.Tensor._make_wrapper_subclass": "a probe has a shape and no memory",
    "torch._dynamo.utils.counters": "how many graphs were compiled",
    "torch._assert_async": "a wrong target ends a compiled graph without waiting for the device",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": "marks of shards stay",
    "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState": "what backward needs stays gathered",
    "torch._C._distributed_c10d.FakeWork": "what a collective of tensors without numbers returns",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message": "hooks of the caller's",
    "torch._C._autograd._top_saved_tensors_default_hooks": "whether a checkpoint or a caller has hooks",
    "torch._C._get_function_stack_at": "whether the caller is in a mode, which only its own thread has",
    "torch._C._len_torch_dispatch_stack": "whether the caller is in a mode",
    "torch._C._len_torch_function_stack": "whether the caller is in a mode",
    "torch._C._is_fwd_grad_enabled": "whether a draw is in the forward of a function, as a checkpoint's is",
    "torch._sample_dirichlet": "the one draw that torch itself makes in the forward of a function",
    "torch.autograd._is_checkpoint_valid": "a forked process makes its engine anew here",
    "torch._C._current_graph_task_id": "whether a forward runs within a backward pass, for a checkpoint",
    "torch._C._dynamo.eval_frame": "what a mode does to an operator is not compiled by itself",
    "torch._C._nn": "random operators that have no public name",
    "torch._ops.OpOverload": "the type of an operator, which says whether it is random",
    "torch._ops.OpOverloadPacket": "the type of an operator, which says whether it is random",
    "torch.ops.aten._local_scalar_dense.default": "the operator that reads a number off a device",
    "torch.distributed._tools.fake_collectives.non_functional_collectives": "estimates exchange nothing",
    "torch._subclasses.fake_tensor.FakeTensor": "a tensor without values, for which nothing is drawn",
    "torch._C._autograd._get_sequence_nr": "nodes of replicas are numbered alike, whichever thread made them",
    "torch._subclasses.fake_tensor.FakeTensorMode": "a step is run on tensors without memory",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "attention with its log-sum-exps",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "attention with its log-sum-exps",
    "torch.ops.aten._scaled_dot_product_flash_attention": "attention with its log-sum-exps",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": "attention with its log-sum-exps",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "attention with its log-sum-exps",
    "torch.ops.aten._scaled_dot_product_efficient_attention_backward": "attention with its log-sum-exps",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "attention with its log-sum-exps",
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": "attention with its log-sum-exps",
    "torch.ops.aten._scaled_dot_product_fused_attention_overrideable": "the same, of a plugin of torch",
    "torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward": "as above",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether a plugin of torch brought its own attention",
    "torch._C._dispatch_key_for_device": "the kernels of a type of device",
    "torch._C._get_overrideable_sdp_enabled": "what torch.nn.attention.sdpa_kernel allows",
    "torch._C._get_sdp_priority_order": "the order of kernels that torch.nn.attention.sdpa_kernel sets",
    "torch.ops.aten._to_copy.default": "the operator of autocast's copies of weights",
    "torch.utils.data._utils.worker": "iterators read all samples of a shard in a worker, too",
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices": "what optimizers take at once",
    "torch.utils._device.DeviceContext": "a default device is a mode that does not count as one",
    "torch.nn.modules.module._global_forward_hooks": "whether anything collects what a module returns",
    "torch.nn.modules.batchnorm._BatchNorm": "the base of all normalizations with running statistics",
    "torch.nn.modules.batchnorm._NormBase": "the same, and those of instances: forward writes their buffers",
    "torch.utils._python_dispatch.TorchDispatchMode": "how all operators of a forward are seen",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "such a block is run with numbers",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "such a block is run with numbers",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": "such a block is run with numbers",
    "torch.distributed.pipelining._backward._get_grad_fn_or_grad_acc": "inputs first, weights later",
    "torch.distributed.pipelining._backward.construct_reverse_graph": "inputs first, weights later",
    "torch.distributed.pipelining._backward.get_param_groups": "inputs first, weights later",
    "torch.distributed.pipelining._backward.reverse_closure": "inputs first, weights later",
    "torch.distributed.pipelining._backward.stage_backward_weight": "inputs first, weights later",
    "torch.distributed.pipelining.schedules._Action": "the work of a stage",
    "torch.distributed.pipelining.schedules._ComputationType": "the work of a stage",
    "torch.distributed.pipelining.schedules._add_send_recv": "an order without deadlocks",
}
MEMBERS = {
    nn.Module: [
        "_buffers",
        "_call_impl",
        "_compiled_call_impl",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
    ],
    nn.RNNBase: ["_flat_weight_refs", "_flat_weights", "_flat_weights_names"],
    Tensor: ["_version"],
    torch.autograd.graph.Node: ["_sequence_nr", "_set_sequence_nr"],
}


def private(name):
    return name.startswith("_") and not name.startswith("__")


def chain(node):
    """Return ``torch.a.b`` of an expression of attributes, or ``None``."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def used_in(path):
    """Yield the private names of torch that a module names in full."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                if any(map(private, [*node.module.split("."), alias.name])):
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            name = chain(node) or ""
            if name.split(".")[0] == "torch" and any(map(private, name.split("."))):
                yield name


@pytest.mark.slow
def test_every_private_name_has_its_reason():
    """One kernel for many tensors is ``torch._foreach_...``: torch's optimizers call it by that name."""
    used = {name for path in SOURCES for name in used_in(path)}
    # The parts of a longer name are found, too.
    whole = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    assert {name for name in whole if not name.startswith("torch._foreach_")} == REASONS.keys()


def found(name):
    parts = name.split(".")
    module = importlib.import_module("torch")
    for i in range(2, len(parts)):
        try:
            module = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            return reduce(getattr, parts[i - 1 :], module)
    return getattr(module, parts[-1])


def test_every_private_name_is_there():
    missing = []
    for name in REASONS:
        try:
            found(name)
        except AttributeError as error:
            missing.append(f"{name}: {error}")
    assert missing == []


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_private_members_are_there(kind):
    made = {
        nn.RNNBase: lambda: nn.LSTM(1, 1),
        torch.autograd.graph.Node: lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    }.get(kind, kind)()
    assert [name for name in MEMBERS[kind] if not hasattr(made, name)] == []


def test_what_carries_marks_and_names_of_shards_through_torch_is_there():
    """Nodes of a function are of a class of their own; fully_shard replaces parameters; DDP reads a note."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    assert isinstance(Twice.apply(torch.ones(1, requires_grad=True)).grad_fn, Twice._backward_cls)
    assert callable(FSDPParam._init_sharded_param)
    assert callable(FSDPParam.init_unsharded_param)
    assert "_ddp_params_and_buffers_to_ignore" in inspect.getsource(DistributedDataParallel)


def test_a_step_runs_where_ddp_calls_the_module():
    assert "self._run_ddp_forward(*inputs, **kwargs)" in inspect.getsource(DistributedDataParallel.forward)


def test_the_launcher_releases_agents_at_the_key_where_they_wait():
    from tp_launch._host_watch import _BARRIER  # private: it is made of private names of torch

    assert _BARRIER == agent._TERMINAL_STATE_SYNC_ID + store._LAST_MEMBER_CHECKIN


def test_the_launcher_says_where_the_store_of_the_ranks_listens():
    """The handler asks this method of its own for the store, which the launcher replaces."""
    assert "_create_tcp_store_server" in inspect.getsource(DynamicRendezvousHandler.next_rendezvous)


def test_the_lock_of_the_compiler_is_there():
    from torch._dynamo import convert_frame

    with convert_frame.compile_lock:
        pass
