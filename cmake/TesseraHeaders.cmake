# Public headers of the runtime; all others belong to the core.
set(TESSERA_TORCH_HEADERS
  activation_checkpoint.h buffers.h checkpointer.h checkpointer_functions.h collectives.h ddp.h deferred_init.h
  distributed_sampler.h fsdp.h grad_scaler.h join.h lr_scheduler.h mesh.h module_ref.h norms.h optim.h
  optimizer_in_backward.h optimizer_ref.h param_groups.h parameter.h random_state.h shard_options.h snapshot.h
  sync_batchnorm.h tensor_value.h trace.h training_state.h unit_controls.h
  pytorch
  detail)
