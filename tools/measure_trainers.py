"""What TRL's trainers and quantised bases take of a GPU, started as people start them.

    python tools/measure_trainers.py OUT.jsonl --events FOLDER --budget 200
    python tools/measure_trainers.py OUT.jsonl --device cpu --tiny      # a rehearsal

Every case runs in a process of its own: the model of a catalogue's configuration with random
weights, TRL's trainer on synthetic texts of one length, three steps. A line of the output says what
the allocator counted after loading and in each step, and what the driver showed; the folder gets
the allocator's own history. Needs trl, peft, datasets and, for 4-bit and 8-bit weights,
bitsandbytes. ``data/measurements/`` keeps what was measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STEPS = 3
WORDS = 400
"""Different words of the synthetic texts."""

QWEN, LLAMA = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"
LORA = {"r": 16, "target_modules": "all-linear"}


def case(name: str, method: str, model: str = QWEN, **more: Any) -> dict[str, Any]:
    """A case; lengths are of prompt and completion in tokens."""
    usual = {"batch": 2, "prompt": 256, "completion": 256, "dtype": "bfloat16"}
    return {"name": name, "method": method, "model": model, **usual, **more}


CASES = (
    case("qlora-llama-1b", "sft", LLAMA, quantised="nf4", lora=LORA, completion=768),
    case("dpo-full", "dpo"),
    case("grpo-full", "grpo", batch=8, completion=128),
    case("dpo-lora", "dpo", lora=LORA),
    case("qlora-llama-8b", "sft", "meta-llama/Llama-3.1-8B", quantised="nf4", lora=LORA,
         batch=1, completion=768, optim="paged_adamw_8bit"),
    case("dpo-precomputed", "dpo", args={"precompute_ref_log_probs": True}),
    case("sft-full", "sft", completion=768),
    case("sft-float32-bf16", "sft", dtype="float32", completion=768),
    case("sft-chunked", "sft", completion=768, args={"loss_type": "chunked_nll"}),
    case("reward-full", "reward"),
    case("reward-lora", "reward", lora=LORA),
    case("kto-full", "kto", batch=4),
    case("kto-lora", "kto", batch=4, lora=LORA),
    case("orpo-full", "orpo"),
    case("cpo-full", "cpo"),
    case("grpo-lora", "grpo", batch=8, completion=128, lora=LORA),
    case("grpo-beta", "grpo", batch=8, completion=128, args={"beta": 0.04}),
    case("rloo-full", "rloo", batch=8, completion=128),
    case("online-dpo-full", "online-dpo", batch=4, completion=128),
    case("online-dpo-lora", "online-dpo", batch=4, completion=128, lora=LORA),
    case("dpo-no-checkpointing", "dpo", args={"gradient_checkpointing": False}),
    case("dpo-ipo", "dpo", args={"loss_type": ["ipo"]}),
    case("dpo-qlora", "dpo", LLAMA, quantised="nf4", lora=LORA),
    case("lora-int8", "sft", LLAMA, quantised="int8", lora=LORA, completion=768),
    case("adamw-8bit", "sft", completion=768, optim="adamw_bnb_8bit"),
    case("paged-8bit", "sft", completion=768, optim="paged_adamw_8bit"),
    case("liger-sft", "sft", completion=768, args={"use_liger_kernel": True}),
    case("liger-dpo", "dpo", args={"use_liger_kernel": True}),
    case("qlora-double", "sft", LLAMA, quantised="nf4", double=True, lora=LORA, completion=1792),
    case("qlora-no-checkpointing", "sft", LLAMA, quantised="nf4", lora=LORA, completion=768,
         args={"gradient_checkpointing": False}),
    case("dpo-float32-bf16", "dpo", dtype="float32"),
    case("dpo-accumulated", "dpo", args={"gradient_accumulation_steps": 2}),
    case("grpo-several-steps", "grpo", batch=4, completion=128,
         args={"gradient_accumulation_steps": 2, "num_generations": 4}),
    case("dpo-long", "dpo", batch=1, prompt=1024, completion=1024, args={"max_length": 4096}),
)  # fmt: skip
"""Most telling first: what a budget cuts off is least missed."""

_WRITE = ("grpo", "rloo", "online-dpo")
"""Methods whose trainers have completions written."""

_LOAD_A_REFERENCE = ("dpo", "kto", "rloo", "grpo")
"""Methods whose trainers load the reference model once more from where the model came from."""


def main() -> None:
    """Measure all cases, or the one that standard input describes."""
    tiny = {"tiny": True, "prompt": 8, "completion": 8}
    run_cases(CASES, measure, lambda described: described | tiny, __file__, __doc__)


def run_cases(
    cases: Sequence[dict[str, Any]],
    measure_one: Callable[[dict[str, Any], str, Path | None], dict[str, Any]],
    made_tiny: Callable[[dict[str, Any]], dict[str, Any]],
    script: str,
    about: str,
) -> None:
    """The command line of a script that measures cases, each in a process of its own.

    Args:
        cases: each with a name.
        measure_one: the line of a case, of a device and the folder of histories.
        made_tiny: a case for a rehearsal.
        script: its file, which measures one case where it is asked to.
        about: its docstring.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--events", type=Path, help="folder for histories")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--timeout", type=float, default=90, help="seconds of one case")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="for a rehearsal: as small as can be")
    parser.add_argument("--only", help="part of the cases' names")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row = measure_one(json.load(sys.stdin), options.device, options.events)
        print("\n" + json.dumps(row))
        return
    end = time.monotonic() + options.budget
    for described in cases:
        if options.only and options.only not in described["name"]:
            continue
        if time.monotonic() > end:
            break
        asked = made_tiny(described) if options.tiny else described
        row = in_own_process(asked, options, script)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(asked["name"], row.get("reserved_bytes"), row.get("failure", "")[-300:], flush=True)


def in_own_process(
    asked: dict[str, Any], options: argparse.Namespace, script: str
) -> dict[str, Any]:
    """The line of a case; what fails is a line too."""
    command = [sys.executable, script, str(options.out), "--one", "--device", options.device]
    command += ["--events", str(options.events)] if options.events else []
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=options.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**asked, "failure": f"more than {options.timeout:g} s"}
    seconds = round(time.monotonic() - began, 1)
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        return {**asked, "failure": done.stderr[-2000:], "seconds": seconds}
    return {**json.loads(last), "seconds": seconds}


def be_a_checkout() -> None:
    """``memest.calibration`` and ``memest.data`` of a checkout, where memest is not installed."""
    checkout = str(Path(__file__).resolve().parents[1])
    sys.path.insert(0, checkout)
    import memest

    if importlib.util.find_spec("memest.calibration") is None:
        memest.__path__.append(checkout)


# -- one case -------------------------------------------------------------------------------------


def measure(asked: dict[str, Any], device: str, events: Path | None) -> dict[str, Any]:
    """Train three steps and say what was counted."""
    be_a_checkout()
    import torch

    on_gpu = device == "cuda"
    if on_gpu:
        torch.zeros(1, device="cuda")
    context = used_bytes() if on_gpu else 0
    folder = Path(tempfile.mkdtemp())
    marks: list[Any] = []
    if on_gpu and events is not None:
        begin_history(marks)
    model = load(asked, device, folder)
    gc.collect()
    loaded = counted() if on_gpu else {}
    steps: list[dict[str, int]] = []
    trainer = trainer_for(asked, model, device, folder)
    trainer.add_callback(_watch(steps, marks, on_gpu=on_gpu))
    del model
    ready = counted() if on_gpu else {}
    trainer.train()
    row = {
        **asked,
        "status": "ok",
        "loaded": loaded,
        "ready": ready,
        "steps": steps,
        "software": software(),
        "class": type(trainer).__name__,
    }
    return row | taken(asked, marks, context, events) if on_gpu else row


def begin_history(marks: list[Any]) -> None:
    """The allocator records, and the load is the first mark."""
    from memest.calibration.recording.history import mark_counters, start_history

    start_history(2_000_000)
    marks.append(("load", 0, 0, mark_counters()))


def taken(
    asked: dict[str, Any], marks: list[Any], context: int, events: Path | None
) -> dict[str, Any]:
    """What a case took of the GPU; its history is written where there is a folder for it."""
    import torch

    from memest.calibration.recording.history import take_history, write_history

    row: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "context_bytes": context,
        "device_bytes": used_bytes(),
        "reserved_at_end_bytes": torch.cuda.memory_reserved(),
    }
    if events is not None:
        row["history"] = name = uuid.uuid4().hex
        events.mkdir(parents=True, exist_ok=True)
        history = take_history(0, marks, run=asked["name"], case=asked)
        write_history(events / f"{name}.jsonl.gz", history)
    return row


def _watch(steps: list[dict[str, int]], marks: list[Any], *, on_gpu: bool) -> Any:
    from transformers import TrainerCallback

    from memest.calibration.recording.history import mark_counters

    class Watch(TrainerCallback):
        """Marks where steps begin; reads counters where they end."""

        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if on_gpu:
                marks.append(("forward", state.global_step + 1, 1, mark_counters()))

        def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
            steps.append(counted() if on_gpu else {})

    return Watch()


def counted() -> dict[str, int]:
    """The allocator's counters now."""
    import torch

    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "allocated_peak": torch.cuda.max_memory_allocated(),
        "reserved_peak": torch.cuda.max_memory_reserved(),
    }


def used_bytes() -> int:
    """What the driver shows as used on the device."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def software() -> dict[str, str]:
    """Releases that matter."""
    names = "torch transformers trl peft accelerate bitsandbytes datasets liger-kernel".split()
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def load(asked: dict[str, Any], device: str, folder: Path) -> Any:
    """The model on the device; quantised ones come from a checkpoint that is written first."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        BitsAndBytesConfig,
    )

    from memest.catalog.resolve import resolve_model

    entries = dict(resolve_model(asked["model"]).config)
    kind = entries.pop("model_type")
    if asked.get("tiny"):
        entries |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
                    "vocab_size": 600, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "head_dim": 16}  # fmt: skip
    for name in ("dtype", "torch_dtype", "layer_types", "rope_scaling"):
        entries.pop(name, None)
    config = AutoConfig.for_model(kind, **entries)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, 2
    auto: Any = AutoModelForCausalLM
    if asked["method"] == "reward":
        auto, config.num_labels = AutoModelForSequenceClassification, 1
    dtype = getattr(torch, asked["dtype"])
    build_on = "cpu" if asked.get("quantised") and device == "cpu" else device
    torch.manual_seed(0)
    with torch.device(build_on):
        model = auto.from_config(config, dtype=dtype)
    if not asked.get("quantised"):
        if asked["method"] in _LOAD_A_REFERENCE:
            model.save_pretrained(folder / "checkpoint")
            model.config._name_or_path = str(folder / "checkpoint")
        return model
    model.save_pretrained(folder / "checkpoint")
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if asked["quantised"] == "int8":
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=asked["quantised"],
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=asked.get("double", False),
        )
    place = {"": 0} if device == "cuda" else "cpu"
    return auto.from_pretrained(
        folder / "checkpoint", dtype=dtype, quantization_config=how, device_map=place
    )


def trainer_for(asked: dict[str, Any], model: Any, device: str, folder: Path) -> Any:
    """TRL's trainer with its own defaults, but for what keeps a run short and quiet."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    names = {
        "sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO",
        "rloo": "RLOO", "orpo": "ORPO", "cpo": "CPO", "online-dpo": "OnlineDPO",
    }  # fmt: skip
    method, word = asked["method"], names[asked["method"]]
    home: Any = trl
    if not hasattr(trl, f"{word}Trainer"):
        from importlib import import_module

        home = import_module(f"trl.experimental.{method.replace('-', '_')}")
    rl = method in _WRITE
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": asked["batch"],
        "max_steps": STEPS,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "optim": asked.get("optim", "adamw_torch_fused"),
        "use_cpu": device == "cpu",
        "bf16": True,
    }
    if method == "online-dpo":
        length = asked["prompt"] + asked["completion"]
        arguments |= {"max_new_tokens": asked["completion"], "max_length": length}
    elif rl:
        arguments |= {"max_completion_length": asked["completion"], "num_generations": 4}
    elif method != "reward":
        arguments["max_length"] = asked["prompt"] + asked["completion"] + 8
    arguments |= asked.get("args", {})
    more: dict[str, Any] = {}
    if asked.get("lora"):
        task = "SEQ_CLS" if method == "reward" else "CAUSAL_LM"
        more["peft_config"] = LoraConfig(task_type=task, **asked["lora"])
    if rl:
        more["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    rows = [texts(asked, number) for number in range(64)]
    return getattr(home, f"{word}Trainer")(
        model=model,
        args=getattr(home, f"{word}Config")(**arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(folder),
        **more,
    )


def texts(asked: dict[str, Any], number: int) -> dict[str, Any]:
    """One example of the method's own form."""
    import random

    draw = random.Random(number)  # noqa: S311 - texts that can be made again

    def words(count: int) -> str:
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(count))

    method, prompt = asked["method"], words(asked["prompt"])
    length = asked["completion"]
    if method == "sft":
        return {"text": words(asked["prompt"] + length)}
    if method in _WRITE:
        return {"prompt": prompt}
    if method == "kto":
        return {"prompt": prompt, "completion": " " + words(length), "label": number % 2 == 0}
    if method == "reward":
        return {"chosen": f"{prompt} {words(length)}", "rejected": f"{prompt} {words(length)}"}
    return {"prompt": prompt, "chosen": " " + words(length), "rejected": " " + words(length)}


def tokenizer(folder: Path) -> Any:
    """Words w0, w1 ... as tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    vocabulary = {word: index for index, word in enumerate(special)}
    vocabulary |= {f"w{index}": len(special) + index for index in range(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
    )
    wrapped.save_pretrained(folder / "tokenizer")
    return wrapped


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
