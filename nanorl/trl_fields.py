"""The fields of GRPOConfig in TRL 1.16: defaults of those that from_trl.py translates, and why the others have no
counterpart here."""

from __future__ import annotations

# What is translated: field -> its default in TRL 1.16, by what its value must be.
CHOICES = {
    "loss_type": ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),  # the first is the default
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "vllm_importance_sampling_mode": ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"),
}
SWITCHES = {
    "use_bias_correction_kl": True,
    "mask_truncated_completions": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "use_cpu": False,
    "bf16": None,
}
COUNTS = {
    "num_generations": 8,
    "num_iterations": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "max_completion_length": 512,
}
NUMBERS = {
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "temperature": 1.0,
    "learning_rate": 1e-6,
    "seed": 42,
    "max_steps": -1,
    "save_steps": 500,
    "eval_steps": None,
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,  # the old name of clip_max
}
DEFAULTS = {name: choices[0] for name, choices in CHOICES.items()} | SWITCHES | COUNTS | NUMBERS | {"output_dir": None}
SIZES = {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"}
RENAMED = {  # field -> our option, of the same meaning
    "max_completion_length": "max_new_tokens",
    "temperature": "temperature",
    "learning_rate": "learning_rate",
    "seed": "seed",
    "output_dir": "out",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
}
# why there is no counterpart -> fields
WITHOUT = {
    "the model is built here, or loaded as it is": "model_init_kwargs trust_remote_code router_aux_loss_coef "
    "disable_dropout cast_lm_head_to_fp32 neftune_noise_alpha",
    "training samples from the whole distribution, which is the one that is scored": "top_p top_k min_p "
    "generation_kwargs repetition_penalty",
    "sampling has one path, in this process": "cache_implementation use_cache vllm_mode vllm_model_impl "
    "vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port "
    "vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size "
    "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
    "problems, prompts and rewards are the task's": "remove_unused_columns shuffle_dataset chat_template_kwargs "
    "reward_weights multi_objective_aggregation max_tool_calling_iterations label_names train_sampling_strategy "
    "length_column_name ignore_data_skip data_seed dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
    "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
    "a task makes new problems for ever: say --steps": "num_train_epochs",
    "responses are padded to the longest of the batch": "pad_to_multiple_of",
    "belongs to a loss that is not here": "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos "
    "vespo_k_neg vespo_lambda_neg label_smoothing_factor",
    "the reference is frozen": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "the losses have no entropy term and mask no tokens by entropy": "top_entropy_quantile entropy_coef "
    "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    "no loss drops a response for being far off-policy": "off_policy_mask_threshold",
    "the optimizer is Muon with AdamW, its rate constant and then linear to 0": "optim optim_args optim_target_modules "
    "weight_decay adam_beta1 adam_beta2 adam_epsilon lr_scheduler_type lr_scheduler_kwargs warmup_steps",
    "gradients are scaled down to a norm of at most 1": "max_grad_norm",
    "every mean has the denominator of the whole batch anyway": "average_tokens_across_devices",
    "float16 is too narrow for the bound on ratios: --dtype bfloat16": "fp16 fp16_full_eval",
    "precision is --dtype for everything": "bf16_full_eval tf32",
    "memory and speed, not the result: --micro-batch bounds memory": "activation_checkpointing "
    "activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile "
    "torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config torch_empty_cache_steps "
    "auto_find_batch_size skip_memory_metrics",
    "one process on one device": "ds3_gather_for_generation accelerator_config parallelism_config "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp "
    "fsdp_config deepspeed local_rank log_on_each_node save_on_each_node",
    "every step is logged to metrics.jsonl, samples to samples.txt and samples.html": "log_completions log_multimodal "
    "num_completions_to_print log_unique_prompts log_completions_hub_repo logging_strategy logging_steps "
    "logging_first_step logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm "
    "report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id",
    "evaluation is on held-out problems, one response each: --eval-every, --eval-problems": "num_generations_eval "
    "eval_strategy eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches "
    "eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics do_eval do_predict",
    "checkpoints: --save-every, and --resume goes on from the last": "save_only_model save_strategy save_total_limit "
    "enable_jit_checkpoint load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint "
    "restore_callback_states_from_checkpoint",
    "nothing is uploaded": "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
    "hub_revision",
    "the same seed gives the same run anyway": "full_determinism",
    "there is no such switch": "do_train debug",
}
REASONS = {name: reason for reason, names in WITHOUT.items() for name in names.split()}
