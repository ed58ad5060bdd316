"""NeMo-RL's keys of data sets and environments without a counterpart, each with the reason."""

from rlcore_import.nemo_rl_reasons import LOGS, SPEED, UNREAD, VIDEO
from rlcore_import.source import Dropped, differs, same

IMAGES = "env.clevr-cogent env.geometry3k env.mmpr-tiny env.refcoco"
SETS = "data.train data.validation data.default"
DATA_ROWS: tuple[Dropped, ...] = (
    *same("data", "no such data set", "train validation default"),
    *same("data", SPEED, "num_workers"),
    *same(SETS, SPEED, "download_dir use_preserving_dataset"),
    *differs("data", "rows come from all sets as they are merged", "use_multiple_dataloader num_prompts_per_dataloader"),
    *differs("data", "rows are taken in their order, or shuffled", "custom_dataloader"),
    *differs("data", "what is learned begins behind the template's beginning of an answer", "add_generation_prompt", True),
    *differs("data", "the tokenizer and its template say so", "add_bos", True),
    *differs("data", "an answer that is learned ends with the tokenizer's end", "add_eos", True),
    *same("data", UNREAD, "add_system_prompt dataset_name prompt_file"),
    *same(SETS, "of the held-out share alone", "seed"),
    *differs(SETS, "data.*.limit takes the first rows", "max_samples"),
    *differs("data", "each row comes once an epoch", "train.repeat", 1),
    *differs(SETS, "all rows are taken", "allowed_problem_types verifiable_only require_valid"),
    *differs(SETS, "a message of the row", "system_key system_prompt"),
    *differs(SETS, "the field tools of a row", "tool_key", "tools"),
    *differs(SETS, "answers are taken as they are", "extract_answer", True),
    *differs(SETS, "answers get what rollout.max_response_tokens leaves", "min_generation_tokens"),
    *differs(SETS, VIDEO, "num_frames video_sampling_style video_target_num_patches"),
    *differs(SETS, VIDEO, "video_temporal_patch_size video_maintain_aspect_ratio"),
    *same("data", "each row comes once an epoch", "validation.repeat default.repeat", 1),
)
ENVIRONMENT_ROWS: tuple[Dropped, ...] = (
    *same("env.math env.dapo env.math_multi_reward env.vlm", SPEED, "num_workers"),
    *same(IMAGES, SPEED, "num_workers"),
    *same("env", SPEED, "reward_model.resources.gpus_per_node reward_model.resources.num_nodes"),
    *same("env", SPEED, "reward_model.dynamic_batching.enabled reward_model.sequence_packing.enabled"),
    *same("env.reward_model", SPEED, "max_model_len offload_optimizer_for_logprob processor max_grad_norm"),
    *same("env.reward_model", SPEED, "logprob_batch_size"),
    *same("env.reward_model.dtensor_cfg", SPEED, "_v2 activation_checkpointing context_parallel_size cpu_offload"),
    *same("env.reward_model.dtensor_cfg", SPEED, "custom_parallel_plan enabled sequence_parallel"),
    *same("env.reward_model.dtensor_cfg", SPEED, "tensor_parallel_size"),
    *differs(f"{IMAGES} env.vlm", 'rewards of a function: environment.name = "function"', "reward_functions"),
    *same("env", "answers are compared by their text", "math_multi_reward.math_verify_impl", "hf_math_verify"),
    *same("env", LOGS, "should_log_nemo_gym_responses"),
    *same("env", "the data name the environment", "should_use_nemo_gym"),
    *differs("env", "a sample that its agent flags is trained on", "should_mask_flagged_samples"),
    *same(
        "env",
        "a reward model has one label",
        "reward_model.reward_model_cfg.enabled reward_model.reward_model_cfg.reward_model_type",
        True,
        "bradley_terry",
    ),
    *differs("env", "environment.reward_model.path has the weights", "reward_model.checkpoint_path"),
    *differs("env", "turns and rewards of a game that is not here", "sliding_puzzle_game.*"),
)
