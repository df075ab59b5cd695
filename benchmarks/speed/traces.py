"""Cases: tracing real models on meta."""

from __future__ import annotations

import json

from speed.case import Bench, Case, Work


def two_steps(model: str, **options: object) -> Work:
    """Two whole steps with their updates of a model that is built before."""
    from memest.catalog.gpus import find_gpu, traits
    from memest.catalog.resolve import resolve_model
    from memest.config.setup import Setup
    from memest.trace.meta_model import build
    from memest.trace.session import trace_built
    from memest.trace.training import TracePlan

    setup = Setup(num_steps=2, seq_len=512, **options)
    gpu, plan = traits(find_gpu("a100")), TracePlan()
    meta_model = build(setup, resolve_model(model), None, None, None)

    def work() -> None:
        assert trace_built(meta_model, setup, gpu, plan).events

    return work


def bert(bench: Bench) -> Work:
    work = two_steps("bert-large-uncased", batch=4, loop="plain", optim="adamw_torch_loop")
    work()  # libraries load what they load late
    return work


def llama_405b(bench: Bench) -> Work:
    return two_steps("meta-llama/Llama-3.1-405B", batch=1, checkpointing="full")


def family(bench: Bench) -> Work:
    """Traces at several sizes become formulas of batch and length."""
    import memest

    path = bench.folder / "four-layers.json"
    config = {
        "model_type": "bert", "hidden_size": 256, "num_attention_heads": 4,
        "num_hidden_layers": 4, "intermediate_size": 1024, "vocab_size": 30522,
    }  # fmt: skip
    path.write_text(json.dumps(config))

    def work() -> None:
        # another size of vocabulary is another model, to the store and to the traces
        config["vocab_size"] += 1
        path.write_text(json.dumps(config))
        profile = memest.profile(str(path), batch=8, seq_len=128, task="masked-lm")
        profile.spot(gpu="a100", vary=("batch", "seq_len"))
        assert profile.traces_made > 2

    work()
    return work


CASES = (
    Case("trace", "two steps of bert-large (24 layers, batch 4 × 512) traced", "meta-1", bert),
    Case("family", "a family in batch and length grown around a 4-layer BERT", "meta-1", family),
    Case("trace-405b", "two steps of a 405B Llama (126 layers, checkpointing) traced",
         "meta-1", llama_405b, long=True),
)  # fmt: skip
