# Public headers of the runtime; all others belong to the core.
set(TESSERA_TORCH_HEADERS
  activation_checkpoint.h calls.h checkpointer.h collectives.h ddp.h deferred_init.h distributed_sampler.h fsdp.h
  grad_scaler.h lr_scheduler.h mesh.h norms.h optim.h optimizer_in_backward.h optimizer_ref.h parameter.h
  shard_options.h snapshot.h sync_batchnorm.h tensor_value.h trace.h training_state.h training_writer.h unit_controls.h
  pytorch
  detail)

# Headers that stand in another one now. Programs may include them by their old names until version 0.2.
set(TESSERA_OLD_HEADERS
  buffers.h=unit_controls.h
  cached_store.h=copy.h
  checkpointer_functions.h=checkpointer.h
  detail/parameters_of.h=detail/tensors_of.h
  device_memory.h=io.h
  dtype.h=layout.h
  environment.h=library.h
  gc.h=run_directory.h
  group_checkpoint.h=restore.h
  join.h=ddp.h
  kinds.h=convert.h
  local_cache.h=stores.h
  log.h=library.h
  module_ref.h=parameter.h
  new_directory.h=stores.h
  olmo_save.h=save_options.h
  optimizer_state.h=stateful.h
  param_groups.h=lr_scheduler.h
  parameter_names.h=restore.h
  prepare_store.h=stores.h
  pytorch/comm_hooks.h=pytorch/fully_sharded_data_parallel.h
  pytorch/full_params.h=pytorch/state_dict.h
  random_state.h=checkpointer.h
  safetensors_set.h=save_options.h
  save_part.h=data_files.h
  scan.h=verify.h
  state_digests.h=verify.h
  store_capabilities.h=stores.h
  store_copy.h=stores.h
  store_hold.h=stores.h
  trainer_state.h=stateful.h
  upload.h=copy.h
  version.h=library.h
)
