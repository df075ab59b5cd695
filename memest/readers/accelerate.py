"""accelerate's YAML, as ``accelerate config`` writes it, and the flags of ``accelerate launch``.

Source: accelerate 1.15: ``commands/config/config_args.py``, ``commands/launch.py``,
``utils/dataclasses.py``.
"""

from __future__ import annotations

from memest.errors import ConfigError, closest
from memest.readers.sharing import read_deepspeed_value, read_fsdp
from memest.readers.sheet import Sheet

__all__ = ["read_accelerate"]

_TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_CPU", "MULTI_XPU",
          "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "XLA", "TP")  # fmt: skip
_REASONS = dict.fromkeys(
    """machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf same_network
    main_training_function enable_cpu_affinity tpu_env tpu_name tpu_zone tpu_use_cluster
    tpu_use_sudo tpu_vm commands command_file deepspeed_hostfile deepspeed_multinode_launcher
    mpirun_config role max_restarts monitor_interval num_cpu_threads_per_process log_dir tee
    deepspeed_exclusion_filter deepspeed_inclusion_filter quiet debug module
    no_python""".split(),
    "how processes are started",
) | {
    "compute_environment": "where it runs",
    "num_machines": "num_processes counts the processes of all machines",
    "gpu_ids": "which GPUs, not how many processes",
    "use_cpu": "off",
    "cpu": "off",
    "downcast_bf16": "for TPUs",
}
_MATTERS = {
    "megatron_lm_config": "Megatron-LM",
    "fp8_config": "fp8",
    "parallelism_config": "tensor, context and sequence parallelism",
    "use_cpu": "training on the CPU; a GPU is priced",
    "cpu": "training on the CPU; a GPU is priced",
    "mpirun_config": "several CPUs",
}
_DEEPSPEED = dict.fromkeys(
    "zero3_init_flag zero3_save_16bit_model deepspeed_multinode_launcher deepspeed_hostfile "
    "offload_optimizer_nvme_path offload_param_nvme_path deepspeed_moe_layer_cls_names "
    "deepspeed_inclusion_filter deepspeed_exclusion_filter".split(),
    "changes no tensor of a step",
)


def read_accelerate(sheet: Sheet) -> None:
    """Fill in a sheet of accelerate's configuration.

    Raises:
        ConfigError: a value that accelerate would refuse too.
    """
    kind = _kind(sheet)
    processes = sheet.whole("num_processes")
    if kind == "NO" and processes not in (None, 1):
        sheet.miss("num_processes", "distributed_type NO starts one process; one is priced")
        processes = None
    if processes == -1:
        sheet.miss("num_processes", "-1: the launch command says how many; --num-gpus does here")
    elif processes is not None:
        sheet.say("num_gpus", processes, "num_processes")
    elif kind == "NO":
        sheet.default("num_gpus", 1)
    _precision(sheet)
    _deepspeed(sheet, kind)
    part = sheet.part("fsdp_config")
    if kind == "FSDP":
        read_fsdp(sheet, part, True, "fsdp_config", version=1)
    elif part.document:
        sheet.ignore("fsdp_config", f"distributed_type is {kind or 'another one'}")
    if kind == "MEGATRON_LM":
        sheet.miss("distributed_type", "Megatron-LM")
    _dynamo(sheet)
    _parallelism(sheet, kind)
    sheet.ignore_rest(_REASONS, _MATTERS)


_OF_ULYSSES = dict.fromkeys(
    "sp_backend sp_seq_length sp_seq_length_is_variable".split(),
    "with sp_size: DeepSpeed's, and --seq-len is the length",
)


def _parallelism(sheet: Sheet, kind: str) -> None:
    """``ParallelismConfig``: copies of what ``dp_shard`` and ``cp`` share, and who shares more."""
    part = sheet.part("parallelism_config")
    names = {key: key.removeprefix("parallelism_config_") for key in part.document}
    sizes = {
        name: value if isinstance(value := part.document[key], int) and value > 1 else 1
        for key, name in names.items()
    }
    for key, name in names.items():
        value = part.take(key)
        if value in (None, 1, False) or name == "dp_replicate_size":
            part.ignore(key, "off" if sizes[name] == 1 else "with dp_shard_size")
        elif name == "cp_comm_strategy" and sizes.get("cp_size", 1) > 1:
            part.offer("cp_rotate", value, key, "how keys and values are rotated")
        elif name == "sp_attn_implementation" and sizes.get("sp_size", 1) > 1:
            part.offer("attn_implementation", value, key, f"attention {value}")
        elif name in _OF_ULYSSES and sizes.get("sp_size", 1) > 1:
            part.ignore(key, _OF_ULYSSES[name])
        elif not name.endswith("_size"):
            part.ignore(key, "off")
        elif name == "sp_size" and kind != "DEEPSPEED":
            part.miss(key, f"sp_size {value}: DeepSpeed's, which distributed_type is not")
        elif name == "dp_shard_size":
            part.ignore(key, "what num_processes leaves")
        else:
            keyword = {"tp_size": "tp", "cp_size": "cp", "sp_size": "sp"}.get(name, name)
            part.offer(keyword, value, key, f"{name} {value}: this parallelism")
    copies, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    if copies > 1 and shards > 1:
        key = next(key for key, name in names.items() if name == "dp_shard_size")
        part.say("fsdp_shard_size", shards * sizes.get("cp_size", 1), key)
    sheet.absorb(part)


def _kind(sheet: Sheet) -> str:
    value = sheet.scalar("distributed_type")
    if value is None:
        return ""
    # YAML 1.1 reads an unquoted NO as false
    text = "NO" if value is False else str(value).upper()
    if text not in _TYPES:
        near = closest(text, _TYPES)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{sheet.place('distributed_type').origin} {value!r} is not known.{hint} Legal: "
            f"{', '.join(_TYPES)}."
        )
    if text in ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO"):
        sheet.ignore("distributed_type", f"{text}: decides which settings count")
    else:
        sheet.miss("distributed_type", f"{text}: priced as GPUs with DDP")
    return text


def _precision(sheet: Sheet) -> None:
    value = sheet.scalar("mixed_precision")
    if value is None:
        return
    text = "no" if value is False else str(value).lower()
    if text == "fp8":
        sheet.miss("mixed_precision", "fp8: priced as bf16")
        text = "bf16"
    sheet.say("precision", "fp32" if text == "no" else text, "mixed_precision")


def _deepspeed(sheet: Sheet, kind: str) -> None:
    part = sheet.part("deepspeed_config")
    if kind != "DEEPSPEED":
        if part.document:
            sheet.ignore("deepspeed_config", f"distributed_type is {kind or 'another one'}")
        return
    file = part.take("deepspeed_config_file")
    if file is not None:
        read_deepspeed_value(part, "deepspeed_config_file", file)
        for key in ("zero_stage", "offload_optimizer_device", "offload_param_device",
                    "gradient_accumulation_steps", "gradient_clipping"):  # fmt: skip
            if part.take(key) is not None:
                part.ignore(key, "the DeepSpeed file says it")
    else:
        stage = part.whole("zero_stage")
        if stage is None:
            part.default("zero", 2)
        else:
            part.say("zero", stage, "zero_stage")
        for key, option in (
            ("offload_optimizer_device", "offload_optimizer"),
            ("offload_param_device", "offload_param"),
        ):
            device = part.take(key)
            if device in (None, "none", False):
                if device is not None:
                    part.ignore(key, "off")
                continue
            if str(device) != "cpu":
                part.miss(key, f"{device}: priced as cpu")
            if stage != 0:
                part.say(option, True, key)
        for key, option in (
            ("gradient_accumulation_steps", "grad_accum"),
            ("gradient_clipping", "max_grad_norm"),
        ):
            value = part.take(key)
            if value not in (None, "auto", "none"):
                part.say(option, value, key, checked=True)
            elif value == "auto":
                part.ignore(key, "auto: the run's own")
    part.ignore_rest(_DEEPSPEED, {})
    sheet.absorb(part)


def _dynamo(sheet: Sheet) -> None:
    part = sheet.part("dynamo_config")
    backend = part.scalar("dynamo_backend")
    flat = sheet.scalar("dynamo_backend")
    key = "dynamo_backend" if flat is not None else "dynamo_config"
    backend = flat if backend is None else backend
    if backend is not None and str(backend).lower() not in ("no", "false", "none"):
        sheet.offer("torch_compile", True, key, "compilation fuses operators; eager is priced")
    elif backend is not None:
        sheet.ignore(key, "off")
    part.ignore_rest(dict.fromkeys(part.document, "how it compiles"), {})
    sheet.absorb(part)
