"""What a command refuses: one paragraph on stderr that says what to do, and an exit code."""

import json

import pytest

from support.commands import check_refused

TINY = "prajjwal1/bert-tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder that traces in no time: MODEL of the lines below."""
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"],
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("estimate MODEL --fp16 --bf16", 2, ["exclude each other"]),
        ("estimate MODEL --fp16 --dtype float16", 2, ["--dtype float32"]),
        ("estimate MODEL --batch 0", 2, ["--batch 0", "1 to 1,048,576"]),
        ("estimate MODEL --batch -1", 2, ["--batch -1"]),
        ("estimate MODEL --batch 99999999999999999999", 2, ["out of range"]),
        ("estimate MODEL --batch abc", 2, ["'abc' is not a whole number", "--batch 8"]),
        ("estimate MODEL --seq-len 4k", 2, ["'4k' is not a whole number", "--seq-len 4096"]),
        ("estimate MODEL --optim adam8bit", 2, ["Did you mean 'adamw_8bit'?", "--help optimizer"]),
        ("estimate ./train_me.py", 2, ["cannot be read: there is no such script."]),
        ("compare MODEL --vs flash", 2, ["What says it: attn-implementation=flash_attention_2."]),
        ("fits MODEL --gpu t4 --effective-batch 32", 2, ["memest max-batch and memest advise"]),
        ("estimate MODEL --max-seq-length 2k", 2, ["--max-seq-length '2k' is not a whole"]),
        (
            "estimate MODEL --per_device_train_batch_size=x",
            2,
            ["--per_device_train_batch_size 'x'"],
        ),
        ("estimate MODEL --max_seq_length 65", 2, ["Use --max_seq_length 64 or less"]),
        ("estimate MODEL --batch", 2, ["needs a value"]),
        ("sweep MODEL --batch 1:16:x2", 2, ["--over batch=1:16:x2"]),
        ("estimate MODEL --method qlora", 2, ["write --qlora, with --method or without"]),
        ("estimate MODEL --gpu --by layer", 2, ["--gpu needs a value"]),
        ("estimate MODEL --method sf", 2, ["Did you mean 'sft'?"]),
        ("estimate MODEL --seq-len 99999999999", 2, ["out of range"]),
        ("estimate MODEL --bach 4", 2, ["--bach", "Did you mean --batch"]),
        ("estimate MODEL --per-device-batch-sise 4", 2, ["--per-device-batch-size"]),
        ("estimate MODEL extra", 2, ["extra is more than the command takes", "behind --"]),
        ("fits MODEL t4", 2, ["A GPU is named by --gpu t4."]),
        ("env t4", 2, ["t4 is more than the command takes. `memest env --help`"]),
        ("estimate MODEL --save-steps 5", 2, ["What a save takes, --with save says"]),
        ("estimate MODEL --seq-len 128-1024", 2, ["lengths that differ are a file's, --lengths"]),
        ("estimate MODEL --host-memory 94G", 2, ["may be 94GiB", "or 94GB"]),
        ("estimate MODEL --input x:float32[B,...]", 2, ["stands for the extents"]),
        ("gpus t4,a100", 5, ["--gpu t4 --gpu a100"]),
        ("fits MODEL --gpu t4 --fp8", 2, ["training in 8 or 4 bits is not priced"]),
        ("fits --gpu t4 -- python no_such.py --bf16", 2, ["no_such.py is not here, and its"]),
        (
            "estimate https://huggingface.co/meta-llama/Llama-3.1-8B/tree/main",
            2,
            ["name the model as its page does, meta-llama/Llama-3.1-8B."],
        ),
        ("estimate https://huggingface.co/datasets/tatsu-lab/alpaca", 2, ["is a data set: name"]),
        ("estimate datasets/imdb", 2, ["is a data set: name"]),
        ("estimate https://huggingface.co/spaces/a/b", 2, ["is an address, and of no model"]),
        ("estimate https://modelscope.cn/models/Qwen/Qwen3-8B/x", 2, ["does, Qwen/Qwen3-8B."]),
        ("estimate MODEL --optim adamm", 2, ["'adam'"]),
        ("estimate MODEL --optim adamw_apex_fused", 2, ["not modelled yet"]),
        ("estimate MODEL --checkpointing ful", 2, ["none, full, every_n:K"]),
        ("estimate MODEL --checkpointing-kwargs {x", 2, ["not valid JSON"]),
        ("estimate MODEL --dtype float8", 2, ["bfloat16"]),
        ("estimate MODEL --software torch=x", 2, ["is no version"]),
        ("estimate MODEL --freeze (", 2, ["not a regular expression"]),
        ("estimate MODEL --fp16=maybe", 2, ["--fp16"]),
        ("estimate MODEL --by foo", 2, ["category, layer, time"]),
        ("estimate MODEL --depth 0 --by layer", 2, ["at least 1"]),
        ("estimate MODEL --depth 3", 2, ["--by layer"]),
        ("estimate MODEL --depth x", 2, ["whole number"]),
        ("estimate MODEL --gpu rtx4900", 5, ["nearest names: rtx-4090, "]),
        ("estimate MODEL --gpu zzzz", 5, ["zzzz", "memest gpus"]),
        ("estimate MODEL --gpu kaggle", 5, ["--gpu p100", "--gpu 2xt4"]),
        ("estimate MODEL --gpu 8xh100 --num-gpus 4", 2, ["says 8 GPUs", "--num-gpus 4"]),
        ("estimate MODEL --gpu 8xh100 --gpu a100", 2, ["8xh100 (8)", "a100 (no number)"]),
        ("estimate MODEL --gpu 24GB --gpu-memory 20GiB", 2, ["24GB", "20GiB", "drop one"]),
        ("sweep TINY --over gpu=2xt4,t4 --num-gpus 4", 2, ["says 2 GPUs", "--num-gpus 4"]),
        ("estimate MODEL --gpu-memory 12x", 2, ["--gpu-memory", "80GiB"]),
        ("estimate MODEL --gpu-memory 0", 2, ["leaves no memory"]),
        ("estimate MODEL --device-context=-5", 2, ["--device-context"]),
        ("estimate MODEL --device-context 5", 2, ["is 5 bytes", "--device-context 450MiB"]),
        ("estimate", 2, ["MODEL"]),
        ("estimat x", 2, ["estimate"]),
        ("--foo", 2, ["--foo"]),
        ("estimate no-such-model-anywhere", 5, ["memest models"]),
        ("estimate ./nowhere/config.json", 2, ["does not exist"]),
        ("fits bert-base-uncased", 2, ["--gpu"]),
        ("models no-such-model-anywhere", 5, ["memest models"]),
        ("gpus no-such-gpu", 5, ["memest gpus"]),
        ("gpus --local h100", 2, ["not both"]),
        ("gpus --by x", 2, ["--by"]),
        ("max-batch", 2, ["MODEL"]),
        ("max-batch TINY", 2, ["needs a GPU", "--gpu rtx-4090", "--gpu-memory 24GiB"]),
        ("max-batch TINY --gpu zzzz", 5, ["zzzz", "memest gpus"]),
        ("max-batch no-such-model-anywhere --gpu t4", 5, ["memest models"]),
        ("max-batch TINY --gpu t4 --of lenght", 2, ["'lenght'", "batch, seq-len, image-size"]),
        ("max-batch TINY --gpu t4 --gpu-memory much", 2, ["--gpu-memory", "'much'"]),
        ("max-batch TINY --gpu t4 -n 0", 2, ["--effective-batch 0"]),
        ("max-batch TINY --gpu t4 -n 8 --grad-accum 2", 2, ["drop one"]),
        ("max-batch TINY --gpu t4 --optimm sgd", 2, ["Did you mean --optim"]),
        ("sweep", 2, ["MODEL"]),
        ("sweep TINY", 2, ["--over batch=1,2,4", "memest estimate prajjwal1/bert-tiny"]),
        ("sweep TINY --over bach=1,2", 2, ["'bach'", "Did you mean batch"]),
        ("sweep TINY --over batch", 2, ["names no values", "batch=..."]),
        ("sweep TINY --over batch=1,x", 2, ["'x' is not a whole number"]),
        ("sweep TINY --over batch=1,0", 2, ["--batch 0 is out of range"]),
        ("sweep TINY --over batch=8:1", 2, ["runs backwards"]),
        ("sweep TINY --over batch=1:9999999", 2, ["more than 100,000 values"]),
        ("sweep TINY --over batch=1,2 --batch 4", 2, ["drop one of the two"]),
        ("sweep TINY --over batch=1,2 --csv --json", 2, ["--out grid.json"]),
        ("sweep TINY --over batch=1,2 --metric vram", 2, ["device, allocated, reserved, headroom"]),
        ("sweep TINY --over batch=1,2 --metric headroom", 2, ["--gpu rtx-4090"]),
        ("sweep TINY --over batch=1,2 --out grid.txt", 2, [".csv, .jsonl, .json, .html, .png"]),
        ("sweep TINY --over batch=1,2 --out nowhere/grid.csv", 2, ["the folder nowhere"]),
        ("sweep TINY --over batch=1,2 --heatmap grid.csv", 2, [".html, .png"]),
        ("sweep TINY --over batch=1,2 --jobs 0", 2, ["--jobs 0"]),
        ("sweep TINY --over batch=1,2 --jobs many", 2, ["'many' is not a whole number"]),
        ("sweep TINY --over batch=1,2 --gpu zzzz", 5, ["zzzz", "memest gpus"]),
        ("sweep TINY no-such-model-anywhere --over batch=1,2", 5, ["memest models"]),
        ("sweep TINY --over batch=1:3000 --out grid.png", 2, ["3,000 cells", ".html"]),
        ("sweep TINY --over batch=1,2 --optimm sgd", 2, ["Did you mean --optim"]),
        ("compare TINY --batch 2 --seq-len 32", 2, ["nothing to compare with"]),
        (
            "compare TINY --batch 2 --seq-len 32 --vs chekpointing",
            2,
            ["Did you mean checkpointing"],
        ),
        ("compare TINY --batch 2 --seq-len 32 --vs fp16 --bacth 3", 2, ["Did you mean --batch"]),
        ("compare prajjwal1/bert-tin prajjwal1/bert-mini", 5, ["prajjwal1/bert-tiny"]),
        ("compare TINY --batch 2 --seq-len 32 --vs fp16 --gpu t44", 5, ["t4"]),
        ("compare", 2, ["Missing argument"]),
        ("advise TINY --seq-len 32 --gpu t4", 2, ["--effective-batch 64"]),
        ("advise TINY --seq-len 32 -n 8", 2, ["needs a GPU"]),
        (
            "advise TINY --seq-len 32 -n x --gpu t4",
            2,
            ["--effective-batch 'x' is not a whole number"],
        ),
        ("advise TINY --seq-len 32 -n 8 --gpu t4 --batch 4", 2, ["what memest advise looks for"]),
        ("advise TINY --seq-len 32 -n 8 --gpu t44", 5, ["t4"]),
        ("advise prajjwal1/bert-tin -n 8 --gpu t4", 5, ["prajjwal1/bert-tiny"]),
    ],
)
def test_what_cannot_be_is_one_paragraph(cli, model, line, code, words):
    places = {"MODEL": model, "TINY": TINY}
    done = cli(*(places.get(word, word) for word in line.split()))
    check_refused(done, code, *words)
