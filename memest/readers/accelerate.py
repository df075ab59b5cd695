"""accelerate's YAML, as ``accelerate config`` writes it, and the flags of ``accelerate launch``.

Source: accelerate 1.15: ``commands/config/config_args.py``, ``commands/launch.py``,
``utils/dataclasses.py``.
"""

from __future__ import annotations

from memest.errors import ConfigError, closest
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key
from memest.readers.sharding import (
    ON_DISK,
    note_shared_layers,
    read_deepspeed_value,
    read_fsdp,
)
from memest.readers.values import Bounded, Either

__all__ = ["ACCELERATE"]

_TYPES = """NO MULTI_GPU FSDP DEEPSPEED MEGATRON_LM MULTI_CPU MULTI_XPU MULTI_NPU MULTI_MLU
    MULTI_HPU XLA TP""".split()
_IGNORED_KEYS = by_key(
    {
        "how processes are started": """machine_rank main_process_ip main_process_port rdzv_backend
            rdzv_conf same_network main_training_function enable_cpu_affinity tpu_env tpu_name
            tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm commands command_file deepspeed_hostfile
            deepspeed_multinode_launcher role max_restarts monitor_interval
            num_cpu_threads_per_process log_dir tee deepspeed_exclusion_filter
            deepspeed_inclusion_filter quiet debug module no_python""",
        "where it runs": "compute_environment",
        "num_processes counts the processes of all machines": "num_machines",
        "which GPUs, not how many processes": "gpu_ids",
        "for TPUs": "downcast_bf16",
    }
)
_UNMODELLED_KEYS = {
    "fp8_config": Either("fp8"),
    "use_cpu": Bounded("training on the CPU; a GPU is priced"),
    "cpu": Bounded("training on the CPU; a GPU is priced"),
    "mpirun_config": "several CPUs",
}


def _processes(keys: DocumentKeys) -> None:
    kind, processes = _kind(keys), keys.whole("num_processes")
    if kind == "NO" and processes not in (None, 1):
        keys.miss("num_processes", Bounded("distributed_type NO starts one process; one is priced"))
        processes = None
    if processes == -1:
        keys.miss("num_processes", "-1: the launch command says how many; --num-gpus says it")
    elif processes is not None:
        keys.set("num_gpus", processes, "num_processes")
        # num_processes counts those of all machines, as evenly as they go
        machines = keys.document.get("num_machines")
        if isinstance(machines, int) and 1 < machines <= processes:
            keys.set("processes_per_node", -(-processes // machines), "num_machines")
            keys.take("num_machines")
    elif kind == "NO":
        keys.default("num_gpus", 1)
    _precision(keys)
    _deepspeed(keys, kind)
    part = keys.part("fsdp_config")
    if kind == "FSDP":
        read_fsdp(keys, part, True, "fsdp_config", version=1, wraps=False)
    else:
        part.ignore_all(f"distributed_type is {kind or 'another one'}")
        keys.absorb(part)
    if kind == "MEGATRON_LM":
        keys.pass_over(("megatron_lm_config",), "counted with distributed_type")
    else:
        keys.pass_over(("megatron_lm_config",), f"distributed_type is {kind or 'another one'}")
    _dynamo(keys)
    _parallelism(keys, kind)


_ULYSSES_KEYS = dict.fromkeys(
    "sp_backend sp_seq_length sp_seq_length_is_variable".split(),
    "with sp_size: DeepSpeed's, and --seq-len is the length",
)


def _parallelism(keys: DocumentKeys, kind: str) -> None:
    """``ParallelismConfig``: copies of what ``dp_shard`` and ``cp`` share, and who shares more."""
    part = keys.part("parallelism_config").without_prefix("parallelism_config_")
    sizes = {
        name: value if isinstance(value, int) and value > 1 else 1
        for name, value in part.document.items()
    }
    for name in part.document:
        value = part.take(name)
        if value in (None, 1, False) or name == "dp_replicate_size":
            part.ignore(name, "off" if sizes[name] == 1 else "with dp_shard_size")
        elif name == "cp_comm_strategy" and sizes.get("cp_size", 1) > 1:
            part.offer("cp_rotate", value, name, "how keys and values are rotated")
        elif name == "sp_attn_implementation" and sizes.get("sp_size", 1) > 1:
            part.offer("attn_implementation", value, name, f"attention {value}")
        elif name in _ULYSSES_KEYS and sizes.get("sp_size", 1) > 1:
            part.ignore(name, _ULYSSES_KEYS[name])
        elif not name.endswith("_size"):
            part.ignore(name, "off")
        elif name == "sp_size" and kind != "DEEPSPEED":
            why = f"sp_size {value}: DeepSpeed's, which distributed_type is not"
            part.miss(name, Either(why))
        elif name == "dp_shard_size":
            part.ignore(name, "what num_processes leaves")
        else:
            keyword = {"tp_size": "tp", "cp_size": "cp", "sp_size": "sp"}.get(name, name)
            part.offer(keyword, value, name, f"{name} {value}: this parallelism")
    shards = sizes.get("dp_shard_size", 1)
    if sizes.get("tp_size", 1) > 1 and kind == "FSDP" and shards > 1:
        note_shared_layers(part, "tp_size")
    elif sizes.get("tp_size", 1) > 1 and kind == "MULTI_GPU" and shards > 1:
        # what it is told of a model that from_pretrained has sharded
        part.set("fsdp", "full_shard", "dp_shard_size")
    if sizes.get("dp_replicate_size", 1) > 1 and shards > 1:
        part.set("fsdp_shard_size", shards * sizes.get("cp_size", 1), "dp_shard_size")
    keys.absorb(part)


def _kind(keys: DocumentKeys) -> str:
    value = keys.scalar("distributed_type")
    if value is None:
        return ""
    # YAML 1.1 reads an unquoted NO as false
    text = "NO" if value is False else str(value).upper()
    if text not in _TYPES:
        matches = closest(text, _TYPES)
        hint = f" Did you mean {matches[0]}?" if matches else ""
        raise ConfigError(
            f"{keys.where('distributed_type')} {value!r} is not known.{hint} Legal: "
            f"{', '.join(_TYPES)}."
        )
    if text in ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO"):
        keys.ignore("distributed_type", f"{text}: decides which settings count")
    else:
        # these may share the model between devices, the others are other devices
        shares = text in ("MEGATRON_LM", "TP", "XLA")
        why = f"{text}: priced as GPUs with DDP"
        keys.miss("distributed_type", Either(why) if shares else Bounded(why))
    return text


def _precision(keys: DocumentKeys) -> None:
    value = keys.scalar("mixed_precision")
    if value is None:
        return
    text = "no" if value is False else str(value).lower()
    if text == "fp8":
        keys.miss("mixed_precision", Either("fp8: priced as bf16"))
        text = "bf16"
    keys.set("precision", "fp32" if text == "no" else text, "mixed_precision")


_DEEPSPEED = by_key(
    {
        "changes no tensor of a step": """zero3_init_flag zero3_save_16bit_model
            deepspeed_multinode_launcher deepspeed_hostfile offload_optimizer_nvme_path
            offload_param_nvme_path deepspeed_moe_layer_cls_names deepspeed_inclusion_filter
            deepspeed_exclusion_filter"""
    }
)
_OFFLOAD_KEYS = {
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
}
_CHECKED_KEYS = {"gradient_accumulation_steps": "grad_accum", "gradient_clipping": "max_grad_norm"}


def _deepspeed(keys: DocumentKeys, kind: str) -> None:
    part = keys.part("deepspeed_config")
    if kind != "DEEPSPEED":
        part.ignore_all(f"distributed_type is {kind or 'another one'}")
        keys.absorb(part)
        return
    file = part.take("deepspeed_config_file")
    if file is not None:
        read_deepspeed_value(part, "deepspeed_config_file", file)
        for key in ("zero_stage", *_OFFLOAD_KEYS, *_CHECKED_KEYS):
            if part.take(key) is not None:
                part.ignore(key, "the DeepSpeed file says it")
    else:
        stage = part.set_from("zero_stage", Key("zero", "whole", 2))
        for key, option in _OFFLOAD_KEYS.items():
            device = part.take(key)
            if device in (None, "none", False):
                if device is not None:
                    part.ignore(key, "off")
                continue
            if str(device) != "cpu":
                part.miss(key, ON_DISK)
            if stage != 0:
                part.set(option, True, key)
        for key, option in _CHECKED_KEYS.items():
            value = part.take(key)
            if value == "auto":
                part.ignore(key, "auto: the run's own")
            elif value not in (None, "none"):
                part.set(option, value, key, checked=True)
    part.ignore_rest(_DEEPSPEED, {})
    keys.absorb(part)


def _dynamo(keys: DocumentKeys) -> None:
    part = keys.part("dynamo_config")
    backend = part.scalar("dynamo_backend")
    flat = keys.scalar("dynamo_backend")
    holder = keys if backend is None else part
    backend = flat if backend is None else backend
    if backend is not None and str(backend).lower() not in ("no", "false", "none"):
        why = Either("compilation fuses operators; eager is priced")
        holder.offer("torch_compile", True, "dynamo_backend", why)
    elif backend is not None:
        holder.ignore("dynamo_backend", "off")
    part.ignore_all("how it compiles")
    keys.absorb(part)


ACCELERATE = KeyTable(
    readers=(_processes,), ignored_keys=_IGNORED_KEYS, unmodelled_keys=_UNMODELLED_KEYS
)
"""What becomes of the keys of accelerate's configuration."""
