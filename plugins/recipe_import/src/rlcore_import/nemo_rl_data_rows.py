"""NeMo-RL's keys of data sets and environments without a counterpart, each with the reason."""

from rlcore_import.nemo_rl_reasons import LOGS, SPEED, UNREAD, VIDEO
from rlcore_import.source import Dropped, rows

ALL_ROWS = "all rows are taken"
DATA_ROWS: tuple[Dropped, ...] = (
    *rows("no such data set", "train validation default", prefix="data"),
    *rows(SPEED, "num_workers train.download_dir train.use_preserving_dataset validation.download_dir", prefix="data"),
    *rows(SPEED, "validation.use_preserving_dataset default.download_dir default.use_preserving_dataset", prefix="data"),
    *rows("rows come from all sets as they are merged", "use_multiple_dataloader", prefix="data", changes_meaning=True),
    *rows("rows come from all sets as they are merged", "num_prompts_per_dataloader", prefix="data", changes_meaning=True),
    *rows("rows are taken in their order, or shuffled", "custom_dataloader", prefix="data", changes_meaning=True),
    *rows(
        "what is learned begins behind the template's beginning of an answer",
        "add_generation_prompt",
        prefix="data",
        changes_meaning=True,
        neutral=(True,),
    ),
    *rows("the tokenizer and its template say so", "add_bos", prefix="data", changes_meaning=True, neutral=(True,)),
    *rows(
        "an answer that is learned ends with the tokenizer's end",
        "add_eos",
        prefix="data",
        changes_meaning=True,
        neutral=(True,),
    ),
    *rows(UNREAD, "add_system_prompt dataset_name prompt_file", prefix="data"),
    *rows("of the held-out share alone", "train.seed validation.seed default.seed", prefix="data"),
    *rows("data.*.limit takes the first rows", "train.max_samples", prefix="data", changes_meaning=True),
    *rows("data.*.limit takes the first rows", "validation.max_samples", prefix="data", changes_meaning=True),
    *rows("data.*.limit takes the first rows", "default.max_samples", prefix="data", changes_meaning=True),
    *rows("each row comes once an epoch", "train.repeat", prefix="data", changes_meaning=True, neutral=(1,)),
    *rows(ALL_ROWS, "allowed_problem_types verifiable_only require_valid", prefix="data.train", changes_meaning=True),
    *rows(ALL_ROWS, "allowed_problem_types verifiable_only require_valid", prefix="data.validation", changes_meaning=True),
    *rows(ALL_ROWS, "allowed_problem_types verifiable_only require_valid", prefix="data.default", changes_meaning=True),
    *rows(
        "a message of the row",
        """
        train.system_key train.system_prompt validation.system_key validation.system_prompt default.system_key
        default.system_prompt
        """,
        prefix="data",
        changes_meaning=True,
    ),
    *rows(
        "the field tools of a row",
        "train.tool_key validation.tool_key default.tool_key",
        prefix="data",
        changes_meaning=True,
        neutral=("tools",),
    ),
    *rows(
        "answers are taken as they are",
        "train.extract_answer validation.extract_answer default.extract_answer",
        prefix="data",
        changes_meaning=True,
        neutral=(True,),
    ),
    *rows(
        "answers get what rollout.max_response_tokens leaves",
        "train.min_generation_tokens validation.min_generation_tokens default.min_generation_tokens",
        prefix="data",
        changes_meaning=True,
    ),
    *rows(VIDEO, "num_frames video_sampling_style video_target_num_patches", prefix="data.train", changes_meaning=True),
    *rows(VIDEO, "video_temporal_patch_size video_maintain_aspect_ratio", prefix="data.train", changes_meaning=True),
    *rows(
        VIDEO,
        """
        num_frames video_sampling_style video_target_num_patches video_temporal_patch_size video_maintain_aspect_ratio
        """,
        prefix="data.validation",
        changes_meaning=True,
    ),
    *rows(VIDEO, "num_frames video_sampling_style video_target_num_patches", prefix="data.default", changes_meaning=True),
    *rows(VIDEO, "video_temporal_patch_size video_maintain_aspect_ratio", prefix="data.default", changes_meaning=True),
    *rows("each row comes once an epoch", "validation.repeat default.repeat", prefix="data", neutral=(1,)),
)
ENVIRONMENT_ROWS: tuple[Dropped, ...] = (
    *rows(SPEED, "math.num_workers dapo.num_workers math_multi_reward.num_workers clevr-cogent.num_workers", prefix="env"),
    *rows(SPEED, "geometry3k.num_workers mmpr-tiny.num_workers refcoco.num_workers vlm.num_workers", prefix="env"),
    *rows(SPEED, "reward_model.resources.gpus_per_node reward_model.resources.num_nodes", prefix="env"),
    *rows(SPEED, "reward_model.dynamic_batching.enabled reward_model.sequence_packing.enabled", prefix="env"),
    *rows(SPEED, "max_model_len offload_optimizer_for_logprob processor max_grad_norm", prefix="env.reward_model"),
    *rows(SPEED, "logprob_batch_size", prefix="env.reward_model"),
    *rows(SPEED, "_v2 activation_checkpointing context_parallel_size cpu_offload", prefix="env.reward_model.dtensor_cfg"),
    *rows(SPEED, "custom_parallel_plan enabled sequence_parallel", prefix="env.reward_model.dtensor_cfg"),
    *rows(SPEED, "tensor_parallel_size", prefix="env.reward_model.dtensor_cfg"),
    *rows(
        'rewards of a function: environment.name = "function"',
        """
        clevr-cogent.reward_functions geometry3k.reward_functions mmpr-tiny.reward_functions refcoco.reward_functions
        vlm.reward_functions
        """,
        prefix="env",
        changes_meaning=True,
    ),
    *rows(
        "answers are compared by their text", "math_multi_reward.math_verify_impl", prefix="env", neutral=("hf_math_verify",)
    ),
    *rows(LOGS, "should_log_nemo_gym_responses", prefix="env"),
    *rows("the data name the environment", "should_use_nemo_gym", prefix="env"),
    *rows("a sample that its agent flags is trained on", "should_mask_flagged_samples", prefix="env", changes_meaning=True),
    *rows(
        "a reward model has one label",
        "reward_model.reward_model_cfg.enabled reward_model.reward_model_cfg.reward_model_type",
        prefix="env",
        neutral=(True, "bradley_terry"),
    ),
    *rows("environment.reward_model.path has the weights", "reward_model.checkpoint_path", prefix="env", changes_meaning=True),
    *rows("turns and rewards of a game that is not here", "sliding_puzzle_game.*", prefix="env", changes_meaning=True),
)
