"""Which of PyTorch's tests of DistributedDataParallel laconic need not pass, and why.

A test that stands in neither table must pass.
"""

from __future__ import annotations

REFUSED = {
    "test_DistributedDataParallel_requires_grad": "no trainable parameter",
    "test_ddp_create_graph": r"create_graph=True",
    "test_ddp_unused_params_rebuild_buckets_exception": "find_unused_parameters=False promises",
    "test_ddp_multiple_nested_unused_params_error": "find_unused_parameters=False promises",
    "test_ddp_apply_optim_in_backward": "_apply_optimizer_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": "_apply_optimizer_in_backward",
}
"""Refused by design: the test must end with a LaconicError whose text matches this pattern. DDP also raises in the
first, third and fourth, as RuntimeError and in other words."""

_COMM_HOOKS = (
    "DDP's communication hooks; laconic takes the place of such a hook, and its strategy says how gradients are "
    "exchanged"
)
_IGNORED = "DDP's list of ignored parameters and buffers"
_LOGGING = "DDP's logging data"
_REDUCER = "attributes of DDP's reducer"
_STATIC = "errors of static_graph=True, a promise laconic does not need"
_JOIN = "DDP's own join() and its configuration"
_MIXED = "DDP's mixed_precision argument"
_SYNC_BN = "SyncBatchNorm works on GPUs only, with DDP too"
_GPU = "the test asks for the index of a GPU, so on CPUs it fails with DDP too"
_BUFFERS = (
    "DDP's forward_sync_buffers=False and the deprecated argument broadcast_buffers; laconic always takes rank 0's "
    "buffers"
)

NOT_APPLICABLE = {
    "test_ddp_comm_hook_logging": _COMM_HOOKS,
    "test_ddp_hook_parity_allreduce": _COMM_HOOKS,
    "test_ddp_hook_parity_allreduce_process_group": _COMM_HOOKS,
    "test_ddp_hook_parity_powerSGD": _COMM_HOOKS,
    "test_ddp_hook_parity_post_localSGD": _COMM_HOOKS,
    "test_ddp_hook_pickling_powerSGD": _COMM_HOOKS,
    "test_accumulate_gradients_no_sync_allreduce_hook": _COMM_HOOKS,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _COMM_HOOKS,
    "test_ddp_python_error_logged": _COMM_HOOKS,
    "test_ddp_buffer_hook_allreduce_return_future": _COMM_HOOKS,
    "test_ddp_buffer_hook_allreduce": _COMM_HOOKS,
    "test_ddp_broadcast_buffer_via_hook": _COMM_HOOKS,
    "test_get_data_parallel_params": _IGNORED,
    "test_ddp_apply_optim_in_backward_ignored_params": _IGNORED,
    "test_ddp_native_mixed_precision_ignored_params": _IGNORED,
    "test_ddp_ignore_params_arg": _IGNORED,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _IGNORED,
    "test_ddp_logging_data_cpu": _LOGGING,
    "test_ddp_logging_data_gpu": _LOGGING,
    "test_different_graph_across_ranks": _LOGGING,
    "test_sync_bn_logged": _LOGGING,
    "test_verify_model_across_rank_with_logger": _LOGGING,
    "test_ddp_profiling_torch_profiler": "needs a count of DDP's own operations in a profile",
    "test_ddp_control_flow_same_across_ranks": _REDUCER,
    "test_ddp_control_flow_different_across_ranks": _REDUCER,
    "test_detect_ddp_is_actually_static": _REDUCER,
    "test_ddp_build_debug_param_to_name_mapping": _REDUCER,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": _REDUCER,
    "test_ddp_sync_module_states": _REDUCER,
    "test_ddp_bucket_cap_mb_list": _REDUCER,
    "test_skip_all_reduce_unused_parameters": _REDUCER,
    "test_static_graph_api_cpu": _STATIC,
    "test_invalid_static_graph": _STATIC,
    "test_ddp_grad_div_uneven_inputs": _JOIN,
    "test_ddp_join_model_equivalence": _JOIN,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _JOIN,
    "test_ddp_uneven_inputs": _JOIN,
    "test_ddp_uneven_input_join_disable": _JOIN,
    "test_ddp_uneven_input_exception": _JOIN,
    "test_ddp_join_respects_forward_sync_buffers_false": _JOIN,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_device_mesh_initialization": "DDP's device_mesh argument",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false": _BUFFERS,
    "test_ddp_broadcast_buffers_deprecation_warning": _BUFFERS,
    "test_DistributedDataParallel_SyncBatchNorm": _SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_half": _SYNC_BN,
    "test_ddp_device": _GPU,
}
"""Name of the test, and what it asks for that laconic does not have by design or no CPU has."""
