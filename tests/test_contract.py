"""The names, signatures and defaults that scripts written for tinker-cookbook rely on."""

import dataclasses
import importlib
import inspect
import pickle
from typing import Any

import chz
import pytest

from tinker_cookbook import exceptions
from tinker_cookbook.rl import types as rl_types

SIGNATURES = {
    "completers:TokensWithLogprobs": "tokens maybe_logprobs stop_reason='stop'",
    "completers:TinkerTokenCompleter": "sampling_client max_tokens temperature=1.0 context_window=None",
    "completers:TinkerMessageCompleter": "sampling_client renderer max_tokens stop_condition=None temperature=1.0",
    "completers:TokenCompleter.__call__": "self model_input stop max_tokens=None",
    "completers:MessageCompleter.__call__": "self messages",
    "rl.types:StepResult": "reward episode_done next_observation next_stop_condition metrics logs",
    "rl.types:Transition": "ob ac reward episode_done metrics logs",
    "rl.types:Trajectory": "transitions final_ob stop_reason=None",
    "rl.types:InitialObservationOverflow": "reward metrics logs",
    "rl.types:RolloutError": "error_type error_message",
    "rl.types:TrajectoryGroup": "trajectories_G final_rewards_G metrics_G rollout_errors",
    "rl.types:Env.initial_observation": "self",
    "rl.types:Env.step": "self action extra=None",
    "rl.types:EnvGroupBuilder.make_envs": "self",
    "rl.types:EnvGroupBuilder.compute_group_rewards": "self trajectory_group env_group",
    "rl.types:EnvGroupBuilder.cleanup": "self",
    "rl.types:EnvGroupBuilder.logging_tags": "self",
    "rl.types:RLDataset.get_batch": "self index",
    "rl.message_env:MessageStepResult": "reward episode_done next_messages metrics logs next_stop_condition=None",
    "rl.message_env:MessageEnv.step": "self message",
    "rl.message_env:MessageEnv.observe_truncated_response": "self message",
    "rl.message_env:MessageEnv.add_messages": "self messages",
    "rl.message_env:EnvFromMessageEnv": (
        "renderer message_env failed_parse_reward=-1.0 terminate_on_parse_error=True max_trajectory_tokens=None "
        "max_generation_tokens=None context_overflow_reward=-0.1 terminate_on_length=True parse_error_policy=None "
        "rollout_limits=None"
    ),
    "rl.problem_env:ProblemEnv": "renderer convo_prefix=None format_coef=0.1 require_stop_sequence_for_format=True",
    "rl.problem_env:ProblemGroupBuilder": "env_thunk num_envs dataset_name='problems'",
    "rl.data_processing:compute_advantages": "trajectory_groups_P",
    "rl.data_processing:trajectory_to_data": "traj traj_advantage",
    "rl.data_processing:assemble_training_data": "trajectory_groups_P advantages_P",
    "rl.train:train_step": "data_D training_client learning_rate num_substeps loss_fn loss_fn_config=None metrics=None",
    "rl.train:main": "config rollout_executor=None",
    "rl.rollouts:do_single_rollout": "policy env",
    "rl.rollouts:do_group_rollout_and_filter_constant_reward": (
        "sampling_client env_group_builder max_tokens temperature do_remove_constant_reward_groups"
    ),
    "supervised.types:SupervisedDataset.get_batch": "self index",
    "supervised.types:SupervisedDataset.set_epoch": "self seed=0",
    "supervised.data:conversation_to_datum": (
        "conversation renderer max_length train_on_what=<TrainOnWhat.ALL_ASSISTANT_MESSAGES: 'all_assistant_messages'> "
        "reduction='mean'"
    ),
    "supervised.common:datum_from_model_input_weights": "model_input weights max_length=None reduction='none'",
    "eval.evaluators:TrainingClientEvaluator.__call__": "self training_client",
    "eval.evaluators:SamplingClientEvaluator.__call__": "self sampling_client",
    "renderers:Renderer.build_generation_prompt": "self messages role='assistant' prefill=None",
    "renderers:Renderer.build_supervised_example": (
        "self messages train_on_what=<TrainOnWhat.LAST_ASSISTANT_MESSAGE: 'last_assistant_message'>"
    ),
    "renderers:Renderer.build_supervised_examples": (
        "self messages train_on_what=<TrainOnWhat.LAST_ASSISTANT_TURN: 'last_assistant_turn'>"
    ),
    "renderers:Renderer.parse_response": "self response",
    "renderers:Renderer.render_message": "self message ctx",
    "renderers:Renderer.get_stop_sequences": "self",
    "renderers:Renderer.to_openai_message": "self message",
    "renderers:Renderer.create_conversation_prefix_with_tools": "self tools system_prompt=''",
    "renderers:RenderContext": (
        "idx is_last prev_message=None next_message=None last_user_index=-1 in_last_assistant_turn=False"
    ),
    "renderers:get_renderer": "name tokenizer image_processor=None model_name=None",
    "renderers:register_renderer": "name factory",
    "checkpoint_utils:get_last_checkpoint": "log_dir required_key='state_path'",
    "cli_utils:check_log_dir": "log_dir behavior_if_exists",
    "display:colorize_example": "datum tokenizer key='weights'",
}


def lookup(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(f"tinker_cookbook.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """The documented parameters come in this order with these defaults; ours may have more after them."""
    parameters = list(inspect.signature(lookup(name)).parameters.values())
    wanted = SIGNATURES[name].split()
    # A default that holds a space was split: join it again.
    joined: list[str] = []
    for word in wanted:
        if joined and joined[-1].count("<") > joined[-1].count(">"):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    for parameter, expected in zip(parameters, joined, strict=False):
        key, _, default = expected.partition("=")
        assert parameter.name == key
        if default:
            assert repr(parameter.default) == default
    assert len(parameters) >= len(joined)
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in parameters[len(joined) :])


NAMES = {
    "completers": "StopCondition TokenCompleter MessageCompleter",
    "rl.types": "Action Observation Logprobs Metrics Logs ActionExtra RLDatasetBuilder StopReason STOP_METRIC_PREFIX",
    "rl.train": "Config KLReferenceConfig StreamMinibatchConfig AsyncConfig WrappedTrajectoryGroup do_sync_training "
    "do_sync_training_with_stream_minibatch do_async_training prepare_minibatch",
    "rl.data_processing": "remove_constant_reward_groups",
    "rl.metrics": "compute_kl_sample_train compute_post_kl incorporate_kl_penalty discounted_future_sum_vectorized "
    "compute_sampling_client_metrics",
    "rl.metric_util": "compute_trajectory_metrics dataset_to_env_group_builders RLTestSetEvaluator",
    "rl.rollouts": "do_group_rollout RolloutErrorCounter",
    "rl.rollout_runner": "run_rollout RolloutHooks RolloutState SamplingTurnTimeoutError SupportsToolCallLimit "
    "SupportsParseErrorPolicy stop_reason_from_metrics",
    "rl.rollout_limits": "RolloutLimits ParseErrorPolicy TerminationRewardPolicy",
    "rl.rollout_presets": "RolloutConfig simple agentic",
    "rl.rollout_strategy": "FailFast RetryOnFailure MinViableGroup RolloutResult rollout_strategy_from_config",
    "rl.preference_envs": "TournamentPattern get_pairs get_pairs_chunked PairwisePreferenceGroupBuilder",
    "rl.interleaved": "InterleavedRLDatasetBuilder",
    "rl.play_w_env": "ManualPolicy play_env",
    "supervised.types": "SupervisedDatasetBuilder ChatDatasetBuilder ChatDatasetBuilderCommonConfig",
    "supervised.train": "Config main",
    "eval.evaluators": "Evaluator EvaluatorBuilder SamplingClientEvaluatorBuilder",
    "renderers": "Message TextPart ImagePart AudioPart ThinkingPart ToolCall UnparsedToolCall TrainOnWhat ParseTermination "
    "ensure_text ensure_list get_text_content format_content_as_string parse_content_blocks parse_think_blocks "
    "classify_parse_failure Utf8TokenDecoder ToolSpec RenderedMessage",
    "preference.types": "Comparison LabeledComparison ComparisonRenderer PreferenceModel PreferenceModelBuilder",
    "preference.train_dpo": "Config main compute_dpo_loss",
    "distillation.datasets": "TeacherConfig DistillationDatasetConfig CompositeDataset PromptOnlyDatasetBuilder",
    "distillation.train_on_policy": "Config main",
    "distillation.train_off_policy": "Config main",
    "checkpoint_utils": "CheckpointRecord save_checkpoint save_checkpoint_async load_checkpoints_file "
    "CHECKPOINTS_BASE_NAME RENDERER_NAME_METADATA_KEY",
    "cli_utils": "LogdirBehavior model_name_from_argv",
    "display": "format_trajectory to_ints",
    "hyperparam_utils": "get_lr get_lora_param_count get_lora_lr_over_full_finetune_lr",
    "model_info": "ModelAttributes get_model_attributes get_recommended_renderer_name get_recommended_renderer_names",
    "tokenizer_utils": "get_tokenizer register_tokenizer unregister_tokenizer is_tokenizer_registered",
    "utils.ml_log": "setup_logging dump_config Logger",
    "utils.misc_utils": "timed safezip dict_mean all_same split_list concat_lists not_none",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(f"tinker_cookbook.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


DEFAULTS: dict[str, dict[str, Any]] = {
    "rl.train:Config": {
        "eval_every": 20, "save_every": 20, "evaluator_builders": [], "load_checkpoint_path": None, "renderer_name": None,
        "wandb_project": None, "wandb_name": None, "kl_penalty_coef": 0.0, "kl_discount_factor": 0.0,
        "kl_reference_config": None, "loss_fn": "importance_sampling", "loss_fn_config": None, "num_substeps": 1,
        "lora_rank": 32, "temperature": 1.0, "compute_post_kl": False, "remove_constant_reward_groups": False,
        "rollout_error_tolerance": None, "termination": None, "async_config": None, "stream_minibatch_config": None,
        "base_url": None, "ttl_seconds": 604800, "rolling_save_every": 0, "rolling_ttl_seconds": 7200, "max_steps": None,
    },
    "supervised.train:Config": {
        "load_checkpoint_path": None, "renderer_name": None, "learning_rate": 1e-4, "lr_schedule": "linear",
        "num_epochs": 1, "lora_rank": 32, "base_url": None, "evaluator_builders": [], "infrequent_evaluator_builders": [],
        "save_every": 20, "save_every_tokens": 0, "save_every_seconds": 0.0, "eval_every": 10,
        "infrequent_eval_every": 100, "ttl_seconds": 604800, "rolling_save_every": 0, "rolling_ttl_seconds": 7200,
        "async_periodic_saves": False, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "max_steps": None,
        "submit_ahead": 1,
    },
    "preference.train_dpo:Config": {
        "learning_rate": 1e-5, "lr_schedule": "linear", "num_epochs": 1, "dpo_beta": 0.1, "lora_rank": 32,
        "evaluator_builders": [], "infrequent_evaluator_builders": [], "save_every": 20, "eval_every": 10,
        "infrequent_eval_every": 100, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "max_steps": None,
    },
    "distillation.train_on_policy:Config": {
        "temperature": 1.0, "compute_post_kl": False, "lora_rank": 32, "kl_penalty_coef": 1.0, "kl_discount_factor": 0.0,
        "loss_fn": "importance_sampling", "loss_fn_config": None, "num_substeps": 1, "eval_every": 20, "save_every": 20,
    },
    "distillation.train_off_policy:Config": {
        "lora_rank": 32, "n_teacher_targets": 20, "teacher_concurrency": 64, "batch_size": 64, "save_every": 10,
        "eval_every": 20, "max_steps": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_config_defaults(name: str) -> None:
    fields = chz.chz_fields(lookup(name))
    found = {
        key: field._default_factory() if callable(field._default_factory) else field._default
        for key, field in fields.items()
        if key in DEFAULTS[name]
    }
    assert found == DEFAULTS[name]


def test_errors_pickle_and_refine_a_standard_type() -> None:
    kinds = [kind for kind in vars(exceptions).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    ours = [kind for kind in kinds if kind is not exceptions.TinkerCookbookError]
    assert len(ours) > 8
    for kind in ours:
        assert issubclass(kind, exceptions.TinkerCookbookError)
        assert issubclass(kind, ValueError | RuntimeError | TimeoutError | ConnectionError | KeyError)
        copy = pickle.loads(pickle.dumps(kind("what went wrong")))
        assert type(copy) is kind and "what went wrong" in str(copy)


def test_datasets_and_groups_of_scripts_may_be_dataclasses_with_fields_of_any_name() -> None:
    """Scripts declare them with required fields; a method of the same name here would be taken for a default."""
    fields = (
        "batch_size",
        "group_size",
        "renderer",
        "num_envs",
        "answers",
        "datapoints",
        "env_thunk",
        "answer",
        "seed",
    )
    for base in (rl_types.RLDataset, rl_types.EnvGroupBuilder, rl_types.Env):
        assert [name for name in fields if hasattr(base, name)] == []
        made = dataclasses.make_dataclass("OfAScript", [(name, int) for name in fields], bases=(base,), frozen=True)
        assert [field.name for field in dataclasses.fields(made)][-len(fields) :] == list(fields)
