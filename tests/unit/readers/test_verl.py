"""verl's launch command: what of it is the actor's GPU, and what is refused by name."""

from __future__ import annotations

import pytest
import yaml

import memest
from memest.readers.values import Bounded, Saving

PPO = "algorithm.adv_estimator=gae critic.model.path=gpt2"
MAIN = "python3 -m verl.trainer.main_ppo"
A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
GRPO = f"algorithm.adv_estimator=grpo {M}.path=gpt2 {A}.ppo_micro_batch_size_per_gpu=4"


def run_of(said="", start=GRPO):
    return memest.read_command(f"{MAIN} {start} {said}")


def missed(run):
    return " ".join(map(str, run.not_modelled))


def test_what_nobody_names_is_verl_s_default():
    run = run_of()

    assert run.model == "gpt2"
    assert run.options == {
        "method": "grpo", "log_probs": "verl", "loop": "plain",
        "batch": 4, "grad_accum": 8, "seq_len": 1024, "completion_len": 512, "num_gpus": 8,
        "fsdp": "full_shard", "fsdp_version": 1, "fsdp_mixed_precision": True,
        "precision": "bf16", "dtype": "float32", "optim": "adamw_torch", "max_grad_norm": 1.0,
        "checkpointing": "full", "use_reentrant": False,
        "attn_implementation": "flash_attention_2", "kl_beta": 0.0,
        "engine": "vllm", "engine_share": 0.5, "engine_sleeps": True, "engine_gpus": 2,
        "alloc_conf": "expandable_segments:True",
    }  # fmt: skip
    assert not run.not_modelled


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # 256 prompts of 5 answers over 8 GPUs
        (f"{R}.n=5", {"grad_accum": 40, "num_generations": 5}),
        (f"{R}.n=5 trainer.nnodes=2", {"num_gpus": 16, "grad_accum": 20}),
        ("trainer.n_gpus_per_node=4", {"num_gpus": 4, "grad_accum": 16}),
        ("data.max_prompt_length=100 data.max_response_length=300",
         {"seq_len": 400, "completion_len": 300}),
        (f"{A}.use_kl_loss=True", {"kl_beta": 0.001}),
        (f"{A}.use_kl_loss=True {A}.kl_loss_coef=0.01", {"kl_beta": 0.01}),
        (f"{A}.strategy=fsdp2 {A}.fsdp_config.reshard_after_forward=False",
         {"fsdp_version": 2, "fsdp": "shard_grad_op"}),
        (f"{A}.strategy=fsdp2 {A}.fsdp_config.fsdp_size=4", {"fsdp_shard_size": 4}),
        (f"{A}.strategy=fsdp2 {A}.fsdp_config.offload_policy=True", {"fsdp_offload": True}),
        (f"{A}.fsdp_config.model_dtype=bf16", {"dtype": "bfloat16"}),
        (f"{A}.fsdp_config.param_offload=True", {"engine_moves": "model"}),
        (f"{A}.fsdp_config.param_offload=True {A}.fsdp_config.optimizer_offload=True",
         {"engine_moves": "both"}),
        (f"{R}.tensor_model_parallel_size=1 {R}.gpu_memory_utilization=0.7",
         {"engine_gpus": 1, "engine_share": 0.7}),
        (f"{M}.enable_gradient_checkpointing=False", {"checkpointing": "none"}),
        (f"+{M}.override_config.attn_implementation=sdpa", {"attn_implementation": "sdpa"}),
        (f"{A}.optim.clip_grad=0.2", {"max_grad_norm": 0.2}),
        (f"{R}.log_prob_micro_batch_size_per_gpu=8", {"scored_at_once": 8}),
        ("algorithm.adv_estimator=rloo", {"method": "rloo"}),
        ("algorithm.adv_estimator=reinforce_plus_plus", {"method": "grpo"}),
        (f"{A}.strategy=fsdp2 {M}.lora_rank=32",
         {"lora_r": 32, "lora_alpha": 16, "lora_target_modules": "all-linear", "fsdp_version": 2}),
    ],
)  # fmt: skip
def test_what_is_named_is_read(said, expected):
    run = run_of(said)

    assert {name: run.options[name] for name in expected} == expected
    assert not run.not_modelled


def test_an_engine_that_stays_awake_and_mixed_precision_that_is_off():
    run = run_of(f"{R}.free_cache_engine=False +{A}.fsdp_config.mixed_precision.param_dtype=fp32")

    assert "engine_sleeps" not in run.options
    assert "fsdp_mixed_precision" not in run.options
    assert run.options["precision"] == "fp32"


def test_micro_batches_of_tokens_are_priced_full():
    """32 of 1,024 tokens into pieces of at most 5,000: 8 of them, and shorter ones may fill one."""
    run = run_of(
        f"{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=5000 "
        f"{R}.log_prob_max_token_len_per_gpu=10000"
    )

    assert (run.options["batch"], run.options["grad_accum"]) == (5, 8)
    assert run.options["scored_at_once"] == 10
    assert "priced are 5 of the longest, 5,120" in missed(run)
    (remark,) = run.not_modelled
    assert type(remark.why) is Bounded  # and so leaves no verdict open


def test_micro_batches_that_are_priced_much_fuller_leave_it_open_that_a_run_does_not_fit():
    run = run_of(f"{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=1100")

    assert (run.options["batch"], run.options["grad_accum"]) == (2, 32)
    (remark,) = run.not_modelled
    assert type(remark.why) is Saving


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # 32,768 tokens hold all 32 answers of a step; which trainer's sizes are named is the same
        ("", {"critic": "actor", "critic_batch": 32, "batch": 4}),
        ("critic.ppo_micro_batch_size_per_gpu=2", {"critic_batch": 32}),
        ("+critic.ppo_infer_max_token_len_per_gpu=4096", {"critic_batch": 4}),
        ("critic.ppo_mini_batch_size=64", {"critic_batch": 8}),
        (f"{R}.n=2 data.max_response_length=1536", {"critic_batch": 16, "num_generations": 2}),
        ("critic.model.path=Qwen/Qwen3-0.6B", {"critic": "Qwen/Qwen3-0.6B"}),
        ("critic.fsdp.param_offload=True", {"critic_moves": "model"}),
        ("critic.model.fsdp_config.optimizer_offload=True", {"critic_moves": "optimizer"}),
        ("critic.fsdp.param_offload=True critic.fsdp.optimizer_offload=True",
         {"critic_moves": "both"}),
        (f"{A}.strategy=fsdp2 critic.strategy=fsdp2", {"fsdp_version": 2}),
        (f"{A}.fsdp_config.model_dtype=bf16 critic.fsdp.model_dtype=bfloat16",
         {"dtype": "bfloat16"}),
    ],
)  # fmt: skip
def test_a_critic_is_read(said, expected):
    run = run_of(f"{PPO} {said}")

    assert {name: run.options[name] for name in expected} == expected
    assert run.options["method"] == "grpo"
    # that a micro-batch is full leaves no verdict open
    assert {type(remark.why) for remark in run.not_modelled} == {Bounded}
    assert "verl 0.9.1 fills the critic's micro-batches" in missed(run)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("critic.fsdp.model_dtype=bf16", "critic has bfloat16 there, and is priced as the actor"),
        (f"{A}.fsdp_config.model_dtype=bf16", "critic has float32 there"),
        ("critic.model.enable_gradient_checkpointing=False", "critic has false there"),
        ("critic.model.use_remove_padding=False", "critic has false there"),
        ("critic.model.enable_activation_offload=True", "a critic that takes less"),
        ("critic.optim.optimizer=SGD", "critic has sgd there"),
    ],
)
def test_what_a_critic_has_otherwise_is_named(said, words):
    assert words in missed(run_of(f"{PPO} {said}"))


def test_no_critic_without_its_estimate():
    assert "critic" not in run_of(f"{PPO} critic.enable=False").options
    assert "critic" not in run_of("critic.model.path=gpt2").options


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("algorithm.adv_estimator=gae", "no critic.model.path.*write critic.model.path=gpt2"),
        ("critic.enable=True", "no critic.model.path"),
        (f"{PPO} critic.strategy=fsdp2", "critic under fsdp2 beside an actor under fsdp .*=fsdp"),
        (f"{PPO} critic.strategy=megatron", "a critic under megatron"),
        (f"{PPO} {A}.strategy=fsdp2", "Write critic.strategy=fsdp2"),
        (f"{PPO} critic.model.lora_rank=8", "adapters is not priced.*critic.model.lora_rank=0"),
        (f"{PPO} critic.fsdp.ulysses_sequence_parallel_size=2", "Ulysses is not priced"),
        (f"{PPO} critic.ulysses_sequence_parallel_size=2", "Ulysses is not priced"),
        (f"{PPO} data.max_prompt_length=40000", "32768 is less than the 40512 .*=40512"),
        (f"{A}.strategy=megatron", "megatron is not priced.*strategy=fsdp2"),
        ("--config-name=ppo_megatron_trainer.yaml", "Megatron-Core .*strategy=fsdp2"),
        ("model_engine=megatron", "Megatron-Core"),
        (f"{A}.ulysses_sequence_parallel_size=2", "Ulysses is not priced"),
        (f"{A}.fsdp_config.ulysses_sequence_parallel_size=2", "Ulysses is not priced"),
        (f"{A}.fsdp_config.fsdp_size=1", "whole on every GPU.*fsdp_size=-1"),
        (f"+{A}.fsdp_config.mixed_precision.param_dtype=fp16", "float16 .*param_dtype=bf16"),
        (f"{A}.fsdp_config.model_dtype=fp7", "'fp7' is no dtype"),
        (f"{R}.name=hf", "hf is not priced: vllm and sglang are"),
        (f"{A}.ppo_micro_batch_size_per_gpu=5", "5 does not divide the 32 answers.*=1"),
        (f"{A}.ppo_micro_batch_size_per_gpu=null", "without which verl stops"),
        (f"{A}.ppo_mini_batch_size=7", "do not divide among 8 GPUs"),
        (f"{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=900", "less than the 1024 tok"),
        ("trainer.n_gpus_per_node=1", "verl's default of .*tensor_model_parallel_size.*=1"),
    ],
)
def test_what_is_not_priced_is_refused_by_its_name(said, words):
    with pytest.raises(memest.ConfigError, match=words) as refused:
        run_of(said)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (f"{A}.entropy_coeff=0.001", "softmax of all logits"),
        (f"{A}.calculate_entropy=True", "softmax of all logits"),
        (f"{R}.temperature=0.7", "logits are divided by it"),
        (f"{M}.use_remove_padding=False", "once more without the padding"),
        (f"{M}.use_fused_kernels=True", "without all logits"),
        (f"{R}.name=sglang", "what it computes with comes on top"),
        (f"{M}.lora_rank=8", "priced is FSDP2"),
        (f"{A}.optim.optimizer=Lion", "torch.optim.Lion is not priced"),
        ("reward.reward_model.enable=True", "a reward model by an engine of its own"),
        (f"{A}.fsdp_config.quantum_offload=True", "memest does not know it"),
    ],
)
def test_what_is_not_modelled_is_named(said, words):
    run = run_of(said)

    assert len(run.not_modelled) == 1
    assert words in missed(run)


def test_what_changes_no_size_is_not_named():
    run = run_of(
        f"{A}.entropy_coeff=0 {R}.log_prob_micro_batch_size_per_gpu=4 {A}.optim.lr=1e-6 "
        f"data.train_batch_size=1024 trainer.logger=[console] {R}.temperature=1.0 "
        "actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False"
    )

    assert not run.not_modelled


def test_a_configuration_of_hydra_s_is_read_and_the_command_counts_above_it(tmp_path):
    """Its own shape: sections, and keys that refer to others, which are as their defaults."""
    document = {
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"n_gpus_per_node": 4},
        "data": {"max_prompt_length": 256, "max_response_length": 256},
        "actor_rollout_ref": {
            "model": {"path": "gpt2"},
            "actor": {
                "strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 8,
                "rollout_n": "${oc.select:actor_rollout_ref.rollout.n,1}",
            },
            "rollout": {"n": 2, "prompt_length": "${oc.select:data.max_prompt_length,512}"},
        },
    }  # fmt: skip
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document))

    alone = memest.read_config(path)
    named = memest.read_command(
        f"{MAIN} --config-path={tmp_path} --config-name=mine {A}.ppo_micro_batch_size_per_gpu=2"
    )

    assert (alone.model, alone.options["batch"], alone.options["grad_accum"]) == ("gpt2", 8, 16)
    assert (named.options["batch"], named.options["grad_accum"]) == (2, 64)
    assert named.options["num_gpus"] == 4


def test_references_are_followed_and_those_that_cannot_be_are_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "algorithm: {adv_estimator: grpo}\n"
        "data: {train_batch_size: 64, max_prompt_length: '${data.longest}', longest: 100}\n"
        "trainer: {n_gpus_per_node: 8, default_local_dir: 'out/${now:%H}'}\n"
        "actor_rollout_ref:\n  model: {path: gpt2}\n  actor:\n"
        "    ppo_mini_batch_size: ${data.train_batch_size}\n"
        "    ppo_micro_batch_size_per_gpu: 4\n    use_kl_loss: ${mine.kl}\n"
    )
    run = memest.read_config(path)

    assert (run.options["grad_accum"], run.options["seq_len"]) == (2, 612)
    (remark,) = run.not_modelled
    assert "use_kl_loss" in str(remark)
    assert "${mine.kl} is not followed" in str(remark)


def test_entries_of_the_configuration_go_with_the_model_and_not_with_its_critic():
    run = run_of(f"+{M}.override_config.n_layer=4")
    assert run.model == "gpt2?n_layer=4"
    assert not run.not_modelled
    assert "part of the model" in missed(run_of(f"+{M}.override_config.text_config.n_layer=4"))

    start = f"{PPO} {M}.path=gpt2 {A}.ppo_micro_batch_size_per_gpu=4"
    assert run_of("", start).options["critic"] == "actor"
    assert run_of(f"+{M}.override_config.n_layer=4", start).options["critic"] == "gpt2"
    own = run_of("+critic.model.override_config.n_layer=4", start)
    assert "critic's own configuration" in missed(own)


def test_a_configuration_that_is_not_here_leaves_the_verdict_open():
    assert "is not here" in missed(run_of("--config-name=theirs"))


def test_variables_of_the_data_do_not_matter_and_those_of_sizes_do(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(f"{MAIN} {GRPO} data.train_files=$HOME/a.parquet trainer.logger=$LOGGER\n")
    assert memest.read_config(path).options["batch"] == 4

    path.write_text(f"{MAIN} {GRPO} data.max_prompt_length=$LONGEST\n")
    with pytest.raises(memest.ConfigError, match=r"LONGEST=\.\.\."):
        memest.read_config(path)
