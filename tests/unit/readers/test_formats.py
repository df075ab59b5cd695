"""Each format's example: what is used with its origin, what is ignored, what is not modelled."""

import dataclasses

import pytest

import memest
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.readers.formats import FORMATS
from memest.readers.torchtune import BUILDERS, model_of_builder

EXPECTED = {
    "training_args.json": (
        "transformers",
        {
            "batch": (4, "per_device_train_batch_size"),
            "precision": ("bf16", "bf16"),
            "grad_accum": (8, "gradient_accumulation_steps"),
            "checkpointing": ("full", "gradient_checkpointing"),
            "weight_decay": (0.01, "weight_decay"),
            "use_reentrant": (False, "gradient_checkpointing_kwargs.use_reentrant"),
            "neftune_noise_alpha": (5.0, "neftune_noise_alpha"),
        },
        {"loop": "trainer"},
        ("warmup_ratio", "fsdp", "per_device_eval_batch_size", "ddp_find_unused_parameters"),
        ("length of samples",),
    ),
    "sft.yaml": (
        "TRL",
        {
            "model": ("Qwen/Qwen3-0.6B", "model_name_or_path"),
            "seq_len": (2048, "max_length"),
            "lora_r": (32, "lora_r"),
            "lora_target_modules": (("q_proj", "v_proj"), "lora_target_modules"),
            "dtype": ("bfloat16", "dtype"),
            "load_in_4bit": (True, "load_in_4bit"),
            "attn_implementation": ("flash_attention_2", "attn_implementation"),
        },
        {
            "lora_alpha": 32,
            "lora_dropout": 0.05,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
            "prepare_kbit": False,
            "precision": "bf16",
            "checkpointing": "full",
            "optim": "auto",
            "fused_loss": "trl-fused",
        },
        ("dataset_name", "eval_strategy", "learning_rate"),
        (),
    ),
    "accelerate_fsdp.yaml": (
        "accelerate",
        {
            "num_gpus": (16, "num_processes"),
            "precision": ("bf16", "mixed_precision"),
            "fsdp": ("shard_grad_op", "fsdp_config.fsdp_reshard_after_forward"),
            "fsdp_offload": (True, "fsdp_config.fsdp_offload_params"),
            "fsdp_wrap": (("LlamaDecoderLayer",), "fsdp_config.fsdp_transformer_layer_cls_to_wrap"),
        },
        {},
        ("use_cpu", "num_machines", "fsdp_config.fsdp_state_dict_type"),
        (),
    ),
    "accelerate_deepspeed.yaml": (
        "accelerate",
        {
            "zero": (2, "deepspeed_config.zero_stage"),
            "num_gpus": (4, "num_processes"),
            "offload_optimizer": (True, "deepspeed_config.offload_optimizer_device"),
            "grad_accum": (8, "deepspeed_config.gradient_accumulation_steps"),
        },
        {},
        ("deepspeed_config.offload_param_device", "compute_environment"),
        (),
    ),
    "accelerate_ddp.yaml": (
        "accelerate",
        {"num_gpus": (8, "num_processes"), "precision": ("fp16", "mixed_precision")},
        {},
        ("main_training_function",),
        ("dynamo_config.dynamo_backend",),
    ),
    "ds_zero2.json": (
        "DeepSpeed",
        {
            "zero": (2, "zero_optimization.stage"),
            "zero_settings": (
                {"overlap_comm": False, "reduce_bucket_size": 500_000_000},
                "zero_optimization",
            ),
        },
        {},
        ("train_micro_batch_size_per_gpu", "steps_per_print", "zero_optimization.reduce_scatter"),
        ("zero_optimization.round_robin_gradients", "number of GPUs"),
    ),
    "axolotl_qlora.yaml": (
        "axolotl",
        {
            "model": ("NousResearch/Llama-3.2-1B", "base_model"),
            "batch": (2, "micro_batch_size"),
            "seq_len": (2048, "sequence_len"),
            "lora_r": (16, "lora_r"),
            "peft": ("lora", "adapter"),
            "optim": ("adamw_bnb_8bit", "optimizer"),
            "precision": ("bf16", "bf16"),
            "dtype": ("bfloat16", "bf16"),
            "attn_implementation": ("flash_attention_2", "flash_attention"),
            "load_in_4bit": (True, "load_in_4bit"),
        },
        {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "use_reentrant": True,
            "bnb_4bit_quant_storage": "bfloat16",
            "prepare_kbit": False,
            "max_grad_norm": 1.0,
            "eval_batch": 2,
        },
        ("datasets", "special_tokens", "lora_model_dir", "loss_watchdog_threshold"),
        ("fused LoRA kernels",),
    ),
    "axolotl_full.yaml": (
        "axolotl",
        {"use_liger_kernel": (True, "liger_fused_linear_cross_entropy")},
        {
            "seq_len": 512,
            "grad_accum": 1,
            "precision": "bf16",
            "dtype": "bfloat16",
            "checkpointing": "none",
            "optim": "adamw_torch_fused",
        },
        ("plugins", "liger_rope"),
        (),
    ),
    "llama_factory_v1_qlora.yaml": (
        "LLaMA-Factory v1",
        {
            "model": ("Qwen/Qwen3-0.6B", "model"),
            "peft": ("lora", "peft_config"),
            "lora_r": (16, "peft_config.r"),
            "lora_target_modules": (("all-linear",), "peft_config.target_modules"),
            "load_in_4bit": (True, "quant_config.quantization_bit"),
            "batch": (2, "micro_batch_size"),
            "grad_accum": (8, "global_batch_size"),
            "seq_len": (4096, "cutoff_len"),
        },
        {
            "loop": "plain",
            "precision": "fp32",
            "lora_dropout": 0.05,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "float16",
            "bnb_4bit_quant_storage": "float16",
            "checkpointing": "full",
            "use_reentrant": False,
            "attn_implementation": "sdpa",
            "optim": "adamw_torch",
        },
        ("train_dataset", "learning_rate", "global_batch_size"),
        ("its loss",),
    ),
    "ms_swift_lora.yaml": (
        "ms-swift",
        {
            "model": ("Qwen/Qwen2.5-7B-Instruct", "model"),
            "peft": ("lora", "tuner_type"),
            "lora_r": (16, "lora_rank"),
            "lora_target_modules": (("all-linear",), "target_modules"),
            "dtype": ("bfloat16", "torch_dtype"),
            "attn_implementation": ("flash_attention_2", "attn_impl"),
            "packing": ("bfd", "packing"),
            "seq_len": (4096, "max_length"),
            "load_in_4bit": (True, "quant_bits"),
            "num_gpus": (4, "ENV.NPROC_PER_NODE"),
            "neftune_noise_alpha": (5, "neftune_noise_alpha"),
        },
        {
            "lora_dropout": 0.05,
            "frozen_parts": ("vision", "projector"),
            "grad_accum": 4,
            "eval_batch": 1,
            "precision": "bf16",
            "checkpointing": "full",
            "use_reentrant": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "prepare_kbit": False,
            "weight_decay": 0.1,
        },
        ("dataset", "split_dataset_ratio", "learning_rate"),
        ("max_pixels", "use_logits_to_keep"),
    ),
    "llama_factory_lora.yaml": (
        "LLaMA-Factory",
        {
            "seq_len": (1024, "cutoff_len"),
            "lora_r": (8, "lora_rank"),
            "load_in_4bit": (True, "quantization_bit"),
            "lora_target_modules": (("all-linear",), "lora_target"),
            "dtype": ("bfloat16", "bf16"),
        },
        {
            "lora_alpha": 16,
            "checkpointing": "full",
            "use_reentrant": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_storage": "bfloat16",
            "prepare_kbit": False,
        },
        ("template", "plot_loss", "trust_remote_code"),
        (),
    ),
    "llama_factory_full.yaml": (
        "LLaMA-Factory",
        {
            "checkpointing": ("none", "disable_gradient_checkpointing"),
            "attn_implementation": ("flash_attention_2", "flash_attn"),
        },
        {"seq_len": 2048, "dtype": "float32"},
        ("deepspeed", "dataset"),
        ("number of GPUs",),
    ),
    "torchtune_lora.yaml": (
        "torchtune",
        {
            "model": ("meta-llama/Llama-3.2-1B", "model._component_"),
            "batch": (4, "batch_size"),
            "seq_len": (1024, "tokenizer.max_seq_len"),
            "lora_r": (64, "model.lora_rank"),
            "lora_target_modules": (
                ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
                "model.lora_attn_modules",
            ),
            "dtype": ("bfloat16", "dtype"),
            "optim": ("adamw_torch_fused", "optimizer._component_"),
            "weight_decay": (0.01, "optimizer.weight_decay"),
            "load_in_4bit": (True, "model._component_"),
            "fused_loss": ("torchtune-linear", "loss"),
        },
        {
            "loop": "plain",
            "precision": "fp32",
            "max_grad_norm": 0.0,
            "use_reentrant": False,
            "autocast_adapter_dtype": False,
            "attn_implementation": "sdpa",
        },
        ("optimizer.lr", "metric_logger", "checkpointer", "enable_activation_offloading"),
        ("model._component_", "the model's code"),
    ),
    "torchtune_full.yaml": (
        "torchtune",
        {
            "model": ("Qwen/Qwen2.5-0.5B", "model._component_"),
            "optim": ("paged_adamw_8bit", "optimizer._component_"),
            "optim_in_backward": (True, "optimizer_in_bwd"),
            "checkpointing": ("full", "enable_activation_checkpointing"),
        },
        {"loop": "plain"},
        ("batch_size_val", "epochs"),
        ("length of samples",),
    ),
    "torchtitan_8b.toml": (
        "torchtitan",
        {
            "model": ("meta-llama/Llama-3.1-8B", "model.flavor"),
            "seq_len": (8192, "training.seq_len"),
            "batch": (1, "training.local_batch_size"),
            "checkpointing": ("selective", "activation_checkpoint.mode"),
        },
        {"precision": "bf16", "dtype": "float32", "weight_decay": 0.1, "loop": "accelerate"},
        ("metrics", "optimizer.lr", "checkpoint"),
        ("data_parallel_shard_degree -1",),
    ),
    "llama3/config_registry.py:llama3_1b": (
        "torchtitan",
        {
            "model": ("meta-llama/Llama-3.2-1B", "model.flavor"),
            "batch": (2, "training.num_tokens_per_microbatch_per_dp_rank"),
            "seq_len": (4096, "training.max_context_length"),
            "checkpointing": ("full", "activation_checkpoint.mode"),
            "num_gpus": (8, "parallelism.data_parallel_shard_degree"),
        },
        {"optim": "adamw_torch_fused", "precision": "bf16"},
        ("training.steps", "optimizer.lr"),
        ("compile.enable",),
    ),
    "adapter_config.json": (
        "peft",
        {"model": ("Qwen/Qwen3-0.6B", "base_model_name_or_path")},
        {},
        (),
        (),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_is_read(examples, name):
    """Each value comes from the key that says it, or is called the framework's default."""
    title, used, defaults, ignored, missed = EXPECTED[name]
    run = memest.read_config(name)
    said = {each.option: each for each in run.values}

    file = name.rpartition("/")[2].partition(":")[0]
    assert run.sources == (f"{file} ({title})",)
    for option, (value, key) in used.items():
        assert (said[option].value, said[option].origin) == (value, f"{file}:{key}"), option
    for option, value in defaults.items():
        assert said[option].value == value, option
        assert said[option].origin.startswith(f"default of {title}"), option
    for keys, remarks in ((ignored, run.ignored), (missed, run.not_modelled)):
        found = [remark.key for remark in remarks]
        for key in keys:
            assert any(one == key or one.endswith((f":{key}", f": {key}")) for one in found), key
        assert all(remark.why for remark in remarks)


@pytest.mark.parametrize("name", EXPECTED)
def test_no_key_is_lost(examples, name):
    """Every key of a document is a value, ignored or not modelled: nothing is silent."""
    if ".py" in name or name == "adapter_config.json":
        pytest.skip("the adapter is taken as a whole, and a function has no keys of its own")
    from memest.readers.documents import read_document

    run = memest.read_config(name)
    told = [each.origin for each in run.values]
    told += [remark.key for remark in (*run.ignored, *run.not_modelled)]
    # said by the value of another key: Liger's parts, the base's kind, what auto means
    silent = {"dtype", "load_in_8bit", "bf16", "fp16", "val_set_size", "fsdp_config", "model",
              "gradient_checkpointing_kwargs", "optimizer", "zero_optimization", "tokenizer",
              "dataset", "training", "parallelism", "compile", "activation_checkpoint",
              "deepspeed_config", "dynamo_config", "clip_grad_norm", "eval_strategy",
              "finetuning_type", "optimizer_in_bwd"}  # fmt: skip
    for key in read_document(examples / name, name):
        shown = any(f"{name}:{key}" in each for each in told)
        assert shown or key in silent, key


def test_the_setup_is_the_one_of_the_same_options(examples):
    """What a file comes to is what its options come to when they are typed."""
    run = memest.read_config("axolotl_qlora.yaml")
    assert run.setup == memest.Setup(
        **{field.name: getattr(run.setup, field.name) for field in dataclasses.fields(Setup)}
    )
    assert run.setup.quantization.double_quant is True
    assert run.setup.adapter.to_dict()["r"] == 16
    assert run.setup.eval_batch == 2
    assert run.setup.checkpointing == "full"


def test_a_format_is_told_by_hand(write):
    """Keys that many formats have tell nothing: the closest is named, and how to say it."""
    name = write("short.yaml", "bf16: true\nlearning_rate: 1.0e-5\n")
    with pytest.raises(ConfigError, match=r"Closest: transformers.*--config-format transformers"):
        memest.read_config(name)
    run = memest.read_config(name, config_format="transformers", seq_len=64)
    assert run.setup.precision == "bf16"
    with pytest.raises(ConfigError, match="Did you mean axolotl"):
        memest.read_config(name, config_format="axolotel")


def test_two_formats_at_once_are_named(write):
    name = write("both.yaml", "cutoff_len: 12\npacking: true\n")
    with pytest.raises(ConfigError, match=r"may be TRL \(packing\) or LLaMA-F"):
        memest.read_config(name)
    assert memest.read_config(name, config_format="llama_factory").setup.seq_len == 12


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.name)
def test_no_mark_is_shared(each):
    for other in FORMATS:
        assert other is each or not each.marks & other.marks


def test_a_model_is_no_configuration(write):
    name = write("config.json", '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ConfigError, match="in place of the model"):
        memest.read_config(name)


def test_builders_lead_to_models_that_memest_has():
    """A builder's model is one of the catalogue, so its answer needs no network."""
    from memest.catalog.models import lookup

    names = [
        *BUILDERS, "qlora_llama3_1_8b", "lora_qwen2_0_5b", "qwen2_5_14b_instruct",
        "qwen3_0_6b_base", "lora_qwen3_32b",
    ]  # fmt: skip
    for name in names:
        found = model_of_builder(name)
        assert found is not None, name
        assert lookup(found) is not None, found
    assert model_of_builder("llama9_1t") is None


def test_galore_of_llama_factory(write):
    name = write(
        "galore.yaml",
        "model_name_or_path: gpt2\nfinetuning_type: full\nstage: sft\nuse_galore: true\n"
        "galore_layerwise: true\ngalore_rank: 128\ncutoff_len: 64\npure_bf16: true\n",
    )
    run = memest.read_config(name)
    assert run.setup.optim == "galore_adamw_layerwise"
    assert run.setup.optim_args == "rank=128,update_proj_gap=200,scale=2.0"
    assert run.setup.optim_target_modules == "all-linear"
    assert run.setup.dtype == "bfloat16"


def test_accelerate_reads_an_unquoted_no(write):
    """YAML 1.1 makes false of NO, which accelerate's own files have too."""
    name = write("a.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\n"
                 "mixed_precision: no\nnum_processes: 1\n")  # fmt: skip
    run = memest.read_config(name)
    assert run.setup.distributed.num_gpus == 1
    assert run.setup.precision == "fp32"


def test_options_of_tomorrow_begin_to_work(write, monkeypatch):
    """What has no option yet is not modelled; with one of that name it is a value."""
    from memest.config.option import Option, Panel
    from memest.readers import mapping, values

    name = write("t.yaml", "per_device_train_batch_size: 2\nuse_unsloth: true\nmax_length: 64\n")
    before = memest.read_config(name)
    assert [r.key for r in before.not_modelled if "use_unsloth" in r.key]
    option = Option(name="use_unsloth", flags=("--use-unsloth",), help="", panel=Panel.KERNELS,
                    field="tf32")  # fmt: skip
    monkeypatch.setattr(values, "OPTIONS", (*values.OPTIONS, option))
    assert values.option_called("use_unsloth") is option
    made = mapping.DocumentKeys({"use_unsloth": True}, source="t.yaml", framework="transformers")
    made.offer_rest()
    assert [each.option for each in made.reading().values] == ["use_unsloth"]


@pytest.mark.parametrize(
    ("plugin", "kind"),
    [
        ("axolotl.integrations.liger.LigerPlugin", ""),
        ("my_company.BigPlugin", "unpriced overpriced"),
        ("axolotl.integrations.spectrum.SpectrumPlugin", "overpriced"),
    ],
)
def test_a_plugin_of_axolotl_is_known_or_named(write, plugin, kind):
    text = f"base_model: gpt2\nsequence_len: 64\nplugins: [{plugin}]\n"
    run = memest.read_config(write("run.yml", text), config_format="axolotl")

    assert bool(run.setup.unpriced) == ("unpriced" in kind)
    assert bool(run.setup.overpriced) == ("overpriced" in kind)
