"""Pages on ideas and on conventions: ``memest help TOPIC``, each one on a screen."""

from __future__ import annotations

from memest.cli.exit_codes import ExitCode
from memest.cli.topic import Topic
from memest.cli.topics_of_names import TOPICS_OF_NAMES

__all__ = ["TOPICS", "find_topic"]


TOPICS: dict[str, Topic] = {
    "peaks": Topic(
        "allocated, reserved, device: three meters, three numbers",
        """
A run has three peaks, because three meters look at different things.

allocated | What tensors take: torch.cuda.max_memory_allocated().
reserved | What PyTorch's allocator took from the driver for them. It keeps what tensors gave
    back, and lends it again: torch.cuda.max_memory_reserved().
device | What nvidia-smi shows for the process: reserved, and the CUDA context with its kernels.

The device peak decides whether a run fits. The breakdown says what is alive at the allocated
peak, which is one moment of the step: mostly early in the backward pass, when the activations
are still there.

See also: memest help fragmentation, memest help context.
""",
        "allocated reserved device peak",
    ),
    "breakdown": Topic(
        "what the rows of the report are",
        """
parameters | The weights. 4 bytes each in float32, 2 in half precision.
gradients | As large as the weights that train.
optimizer states | What the optimizer keeps for each weight that trains.
activations | What the forward pass keeps for the backward pass. They grow with batch and
    length; everything above does not.
autocast copies | Half-precision copies of float32 weights (--fp16, --bf16).
temporaries | Results that an operator needs for a moment.
workspaces | What kernels and libraries (cuBLAS) allocate for themselves.
inputs | The batch itself.
rounding | The allocator hands out multiples of 512 bytes.

Rows add up to the allocated peak. memest estimate MODEL --by layer says which layers they
belong to, --by time when they are there.
""",
        "parameters gradients activations workspaces temporaries rows",
    ),
    "range": Topic(
        "why a peak is a range, and how sure it is",
        """
What tensors take is computed, and hardly leaves room. What libraries choose, in which order
blocks come, and what the driver takes is not. So each peak has a range.

Allocated and reserved: how far measured runs of the kind lay from what is predicted for them. '90%
of runs alike' is a promise counted on runs; for kinds that few or none measured (adapters, several
GPUs, compiled) the range is wider, and claims less or nothing.
Device: the same, and the least and most that CUDA's context, kernels and NCCL's buffers are known
to take. It claims a level with a calibration of your card alone.

Narrow it: --device-context takes what nvidia-smi shows on your card after one small tensor.
memest calibrate run and memest calibrate fit measure the rest.
""",
        "interval accuracy uncertainty",
    ),
    "verdicts": Topic(
        "fits, tight, does not fit, cannot say",
        """
From best to worst; more memory never makes it worse.

fits | The upper end of the range is below what the GPU has.
fits by releasing cache | Tensors surely fit. What the allocator caches besides may not: it gives
    it back on the way, which costs time.
tight | It may run and may not: too close to call, or a library decides (workspaces of
    convolutions, vLLM's CUDA graphs). Try it with a few steps, or save some more.
cannot say | The run does something that is not priced, and what is priced is not too much
    already; or what is too much may not be taken. The report names it.
does not fit | Out of memory even if everything takes the least it may.

max-batch calls a size safe that fits. The largest that may run goes beyond: it runs if context
and kernels take what is expected.

What a GPU has is what PyTorch can get of it: a little less than on the box. Other processes on
the card come on top; memest does not know of them.

For scripts: memest help exit-codes.
""",
        "tight verdict cannot-say does-not-fit",
    ),
    "accumulation": Topic(
        "batch, micro-batch, accumulation",
        """
A GPU works on one micro-batch at a time (--batch). With --grad-accum 4 the gradients of four of
them are added before the optimizer steps, so the model learns as from a batch of 4 times the
size. On several GPUs it is that times their number.

Activations are those of one micro-batch. A small micro-batch with accumulation therefore takes
much less memory than one large batch, and learns the same (but for batch norm); it takes a
little longer.

It is not free: gradients stay from one micro-batch to the next, so they are there in the
forward pass too. At the same --batch, accumulation takes more memory than none: the size of the
gradients at most.

memest advise MODEL --gpu NAME --effective-batch 64 looks for the fastest way to a batch of 64.
""",
        "micro-batch effective-batch gradient-accumulation grad-accum",
    ),
    "half-precision": Topic(
        "fp16, bf16, and why they may take more memory",
        """
--fp16 and --bf16 are autocast: weights, gradients and optimizer states stay float32. Matrix
products work on half-precision copies of the weights, which live until the backward pass has
used them: 2 bytes for each of these weights, on top.

What becomes smaller is the activations, and they grow with the batch. So autocast saves memory
at large batches and costs some at small ones. It is mostly used because it is faster.

--dtype bfloat16 is something else: the weights themselves are loaded in half precision, and
with them gradients and states are half as large. That changes how the model trains.
--master-weights keeps a float32 copy besides.

Side by side: memest compare gpt2 --batch 1 --vs fp16 --vs dtype=bfloat16
""",
        "fp16 bf16 autocast mixed-precision precision dtype",
    ),
    "checkpointing": Topic(
        "activation (gradient) checkpointing",
        """
The backward pass needs what the forward pass computed. With --checkpointing only the input of
each layer is kept, and the layer runs forward once more when its backward comes: about one
forward pass more a step, so up to a third more time.

Memory for activations falls from all layers to one layer and the inputs of the others. Weights,
gradients and states stay. The larger the batch, the more it helps; at a small batch the weights
decide, and little is gained.

--checkpointing | every layer (full)
--checkpointing every_n:2 | every second layer
--checkpointing selective | by operator, as torchtitan does

It is called gradient_checkpointing by transformers. No file is written: checkpoints of weights
on disk have nothing to do with it.
""",
        "recompute gradient-checkpointing activation-checkpointing",
    ),
    "optimizers": Topic(
        "what an optimizer keeps for each weight",
        """
AdamW keeps two numbers for each weight that trains. In float32 a weight then takes 16 bytes: 4
itself, 4 for its gradient, 8 for its states. A model of 7 billion weights needs 112 GB before
the first activation.

adamw_torch | 8 bytes for each float32 weight: two numbers in the weight's dtype
adamw_8bit | some 2 bytes (bitsandbytes)
paged_adamw_8bit | the same, and they may move to the host
adafactor | rows and columns in place of every number: little
sgd | none; 4 bytes with momentum

Weights that do not train (--freeze, LoRA) have neither gradients nor states. Stepping takes
memory for a moment too: adamw_torch_foreach works on all weights at once, adamw_torch_fused
needs next to nothing.
""",
        "adam adamw optimizer optimizer-states optim",
    ),
    "lora": Topic(
        "LoRA and QLoRA",
        """
LoRA (--peft lora, --lora-r 16) freezes the model and trains two thin matrices beside its
layers. Gradients and optimizer states are those of the thin matrices: next to nothing.

What stays: the weights of the model, and most activations, because the backward pass still goes
through the frozen layers. A long sequence costs what it did.

QLoRA (--qlora) also holds the frozen weights in 4 bits: half a byte each and their scales, in
place of 2 or 4 bytes. Layers are unpacked one at a time as they are used. Embeddings, head and
norms are not quantised.

Side by side: memest compare MODEL --bf16 --vs peft=lora --vs qlora
""",
        "qlora peft adapters adapter quantisation quantization",
    ),
    "preferences": Topic(
        "DPO and the other methods that learn from preferred answers",
        """
--method dpo, ipo, kto, orpo, cpo, simpo or reward is what is trained for, as TRL's trainers do it:
bf16 autocast and checkpointing are on unless --precision and --checkpointing say otherwise.

--batch | Pairs of answers (kto: answers): two sequences each.
--seq-len | Prompt and answer together.
the reference | DPO, IPO and KTO ask a second model, as large as the first in weights and without
    gradients. With adapters it is the same model, its adapters off: nothing on top.
    --precompute-ref-log-probs keeps none.
--log-probs | How many scores are held at once: fused (TRL 1.15 and later), logits (TRL 1.6 to
    1.13), float32 (LLaMA-Factory).

For example: memest estimate Qwen/Qwen3-8B --method dpo --qlora --gpu l40s

Methods that write their own answers: memest help rollouts.
""",
        "preference dpo ipo kto orpo cpo simpo reward rlhf",
    ),
    "rollouts": Topic(
        "GRPO and RLOO: runs that write what they learn from",
        """
--method grpo or rloo is what is trained for, as TRL's trainers do it:
bf16 autocast and checkpointing are on unless --precision and --checkpointing say otherwise.

--batch | Completions of one micro-batch on one GPU, not prompts.
--seq-len | Prompt and completion; --completion-len is the completion's part, left out half.
--kl-beta | Where it is not 0, a reference model stands beside the one that trains (with adapters
    it is the same one).
--engine model | The model writes with generate: a cache of keys and values, which may be the peak.
--engine vllm | vLLM on the same GPU takes its share, --engine-share; with --engine-sleeps it gives
    that back while the model trains.
--engine server | vLLM elsewhere.

--critic MODEL | verl's PPO: a critic, or actor for one like it, trains in turn (--log-probs verl).

verl's runs are read from their command, memest fits run_ppo.sh: its step under FSDP, its critic, an
engine in a process of its own. memest advise finds the largest share that each plan leaves vLLM.

For example: memest estimate Qwen/Qwen3-0.6B --method grpo --gpu rtx-4090
""",
        "rollout grpo rloo ppo critic vllm verl sglang generation completions reinforcement",
    ),
    "images": Topic(
        "models that read images and text: what is priced",
        """
memest estimate Qwen/Qwen2.5-VL-7B-Instruct --bf16 --checkpointing --gpu h100 is a step on images
and answers, as SFTTrainer or the Trainer trains: one image a sample.

--seq-len | All tokens of a sample, those of its image among them.
--image-size 448 | Side of an image, which decides how many tokens it is.
--frozen-parts vision,projector | Parts that do not train; the rest does.
--lora-r 16 --lora-target-modules all-linear | Adapters, in the tower too; with --frozen-parts
    vision, not there.

Not priced: several images a sample, films, and --method dpo, grpo and the others with images, whose
pixels stand beside prompts and completions. What can be asked in their place:

the text alone | --method grpo --task causal-lm, where the family has that head (gemma3); else a
    text model of that size (Qwen/Qwen2.5-7B-Instruct). Images come on top.
a step on images | the same model without --method.
""",
        "image vision vlm vision-language multimodal",
    ),
    "diffusers": Topic(
        "diffusion models, such as Stable Diffusion",
        """
A pipeline is several models, and how they train is written in a script: neither has a name that
says it. So you give a function that makes the models, and the step:

memest estimate sd:build --step sd:step --input 'pixels:float32[B,3,512,512]' --input
    'ids:int64[B,77]' --batch 4 --fp16 --loop accelerate --gpu rtx-4090

sd:build | In sd.py, build() returns {"vae": ..., "text": ..., "unet": ...}, made from their
    configurations (from_config), without weights. What does not train is
    .requires_grad_(False).eval().to(torch.float16) there.
sd:step | step(models, batch) returns the loss: encode, add noise, models.unet(...), compare.
LoRA | In build(): unet.add_adapter(LoraConfig(...)); checkpointing likewise:
    unet.enable_gradient_checkpointing().

Priced is all that build() returns and step() runs: VAE, text encoders, UNet or transformer, and a
copy for EMA if it is among them. Not priced are pictures drawn to validate, and what is encoded
before the first step. Stages over several GPUs are another matter: memest help sharding.
""",
        "diffusion pipeline pipelines stable-diffusion sdxl flux unet vae dreambooth",
    ),
    "sharding": Topic(
        "DDP, ZeRO, FSDP: what several GPUs share",
        """
The answer is for one GPU. --batch is that of one GPU.

DDP | Every GPU has the whole model, and buckets for gradients besides: more memory than one GPU
    alone.
--zero 1 | Optimizer states are cut in pieces, one for each GPU.
--zero 2 | Gradients too.
--zero 3 | Weights too. A layer is gathered when it is used.
--fsdp full_shard | As ZeRO-3, by PyTorch.
--fsdp shard_grad_op | As ZeRO-2: weights stay whole from forward to backward.
--fsdp-offload | Pieces wait in host memory (ZeRO: --offload-optimizer).
--tp 2, --pp 2 | Each layer is cut in two; or the layers, in two stages.

DDP, ZeRO and FSDP cut no activations: each GPU has those of its own batch. What is gathered is
there whole for a moment, so eight GPUs do not mean an eighth of the memory.

Side by side: memest stages MODEL --num-gpus 8 --bf16
""",
        "fsdp zero ddp deepspeed several-gpus",
    ),
    "logits": Topic(
        "the output of a language model, which may be the peak",
        """
A language model ends in a score for each word of its vocabulary at each position: batch x
length x vocabulary numbers. With 8 x 512 tokens and 128,256 words that is 525 million; in
float32, as the loss takes them, 1.96 GiB. Their gradient is as large.

That is why small models with large vocabularies take more than their size suggests, and why
checkpointing does not help there: the logits are in no layer.

--use-liger-kernel | a loss that never holds all of them (Liger)
--fused-loss cce | the same by cut cross-entropy; others: --help attention
a smaller --batch | with accumulation
""",
        "loss vocabulary liger",
    ),
    "attention": Topic(
        "eager, sdpa, flash: what attention keeps",
        """
Attention compares each token with each: length x length numbers for each head. Twice the length
is four times of them.

eager | Makes these matrices and keeps them for the backward pass.
sdpa | PyTorch's own. It chooses a kernel: flash and memory-efficient ones never hold the
    matrices, the math kernel does.
flash_attention_2 | The package flash-attn: it holds none either.

Left out (auto), it is what transformers would take. Padding and some models keep sdpa from its
flash kernel; the report says under 'Assumed' which kernel it is.
""",
        "sdpa flash flash-attention eager",
    ),
    "lengths": Topic(
        "tokens, padding, the longest sample",
        """
Activations grow with batch x length. The length is that of the batch after padding: its longest
sample decides for all of them. A run that worked for a hundred steps can still run out of
memory when the longest samples meet.

--seq-len is that length; left out it is 512, or what the model allows. With --lengths FILE or
--dataset FILE memest counts your samples, and answers for the largest batch there can be.

--group-by-length and --pad-to-multiple-of change how much is padding; --padding-free and
--packing do away with it.
""",
        "padding packing seq-len sequence-length tokens",
    ),
    "fragmentation": Topic(
        "why more is reserved than allocated",
        """
PyTorch asks the driver for large pieces and cuts tensors out of them. What a tensor gives back
stays with PyTorch, for the next one that fits. The driver, nvidia-smi and other processes see
it as taken.

Holes that no tensor fits in are fragmentation. They grow where sizes change from step to step.
memest plays the allocator as it works, so its reserved peak has them.

--expandable-segments | one piece that grows, with fewer holes:
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
--alloc-conf CONF | any other value of that variable

A recording of your own run, hole by hole: memest replay run.pickle
""",
        "allocator caching expandable-segments",
    ),
    "context": Topic(
        "the CUDA context: memory that no tensor has",
        """
A process that uses a GPU takes some hundred MiB before its first tensor: the CUDA context.
Kernels are loaded when they are first used, and take more. Neither is in
torch.cuda.memory_allocated() or in memory_reserved().

How much depends on the card, the driver and PyTorch. memest has a table of published readings,
with a range. Your own is better. In Python:

torch.ones(1).cuda() | then read nvidia-smi, and pass --device-context 480MiB
""",
        "cuda-context kernels device-context nvidia-smi",
    ),
    "out-of-memory": Topic(
        "what to try when a run does not fit",
        """
In the order of what they cost; what each one brings depends on the run.

a smaller micro-batch | --batch 2 --grad-accum 4: some time
flash attention | --attn-implementation flash_attention_2, where the report names eager or the
    math kernel: nothing
a fused loss | --use-liger-kernel: nothing, for language models
checkpointing | --checkpointing: up to a third more time
a small optimizer | --optim adamw_8bit: hardly anything
LoRA, QLoRA | --peft lora, --qlora: another way to train
more GPUs | --num-gpus 4 --fsdp full_shard

Below the report of a run that does not fit, memest estimate says which of them make it fit.
memest advise looks for the fastest way, memest max-batch for the largest batch, memest
explain-oom LOG reads PyTorch's message, memest explain-growth RECORD what a run keeps.
""",
        "oom memory savings",
    ),
    "growth": Topic(
        "memory that grows from step to step",
        """
A run needs the same memory in every step once the first ones are over. Where it grows, something
is kept: losses or outputs in a list, graphs, predictions of an evaluation; or samples are longer.

memest explain-growth run.pickle | a recording of some ten steps: which line of code keeps what
memest explain-growth memory.csv --gpu a100 | a log, a row a step: whether it grows, and when the
    card is full
memest explain-growth train.log | what ms-swift, Ultralytics, mmengine or torchtitan printed

A recording is made by torch.cuda.memory._record_memory_history() before the steps, and
torch.cuda.memory._dump_snapshot("run.pickle") behind them.
""",
        "leak leaks grows snapshot",
    ),
    "how": Topic(
        "how memest comes to its numbers",
        """
It runs the training steps without a GPU and without weights: on PyTorch's meta device, where
tensors have shapes and no numbers. The model, autograd and the optimizer are the real ones.
Every tensor that is made and let go is written down.

Where CUDA works otherwise than meta (attention kernels, autocast, cuBLAS) that is made up for,
from the sources. The list of events is then played through a copy of PyTorch's allocator, which
gives the reserved peak.

A model is traced once: what a run takes at other batches and lengths, and on other GPUs, is
computed from that (memest cache). For well-known models it comes with memest.
""",
        "trace tracing method meta",
    ),
    "host-memory": Topic(
        "what a run takes of the machine, not the card",
        """
Every process of a run loads, saves and resumes, and those of a node share its memory.

loading | Weights are views of the file until they go to the GPU. What is cast on the CPU is a
    copy: FSDP2 with --bf16 makes float32 weights in every process.
training | What is offloaded, and batches that wait.
saving | Weights of a file, or all of them on the process that writes; ZeRO-1 and ZeRO-2 under the
    Trainer clone all weights in every process.
resuming | The optimizer's states, whole, where one process trains.

memest estimate MODEL --with save,resume --host-memory 64GiB has a line a phase and a verdict. Not
counted are Python, libraries, CUDA's own host memory, and the page cache of mapped files.
""",
        "host ram saving resuming checkpoint node",
    ),
    "exit-codes": Topic(
        "what scripts can rely on",
        "\n"
        + "".join(f"{int(code)} | {code.meaning}\n" for code in ExitCode)
        + "\nData goes to standard output, everything else to standard error.\n",
    ),
    "environment": Topic(
        "variables that are read",
        """
MEMEST_CACHE | folder of step profiles (memest cache says where)
MEMEST_HOME | folder of calibrations and measurements
HF_HOME, HF_TOKEN, HF_HUB_OFFLINE | as the Hugging Face hub takes them
COLUMNS, NO_COLOR | width and colours of reports and helps
""",
    ),
    **TOPICS_OF_NAMES,
}
"""By name."""


def find_topic(word: str) -> str | None:
    """The name of the topic that a word leads to."""
    word = word.lower().replace("_", "-")
    return next((name for name, x in TOPICS.items() if word in (name, *x.also.split())), None)
