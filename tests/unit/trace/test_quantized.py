"""Quantised bases: bytes against formulas, the load phase, and what kernels take on CUDA."""

from __future__ import annotations

import json
import math
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.resolve import resolve_model
from memest.config.setup import Setup, Software
from memest.errors import ConfigError
from memest.events import ALLOC, FREE, MARK, Category, Phase
from memest.trace.cuda.bitsandbytes import bitsandbytes_handlers
from memest.trace.legacy.bitsandbytes import bitsandbytes_as_before
from memest.trace.meta_model import build
from memest.trace.model.quantization import bitsandbytes, code_tables, companions, quantize_weight
from memest.trace.recorder import Recorder
from memest.trace.session import trace_built
from memest.units import MIB
from memest.workspaces.operator_call import OpCall, TensorSpec
from memest.workspaces.registry import workspaces_of

A100 = traits(find_gpu("a100"))
LORA = {"peft_type": "LORA", "r": 8}
NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip
NESTED = {**NF4, "bnb_4bit_use_double_quant": True}


def built(model, **setup):
    setup = Setup(**{"batch": 1, "seq_len": 64, "dtype": "bfloat16", "loop": "plain", **setup})
    return build(setup, resolve_model(model), None, None, None), setup


def loaded(model, **setup):
    """What is alive when the load phase ends, its peak, and the trace."""
    run, setup = built(model, **setup)
    trace = trace_built(run, setup, A100)
    alive, now, peak = set(), 0, 0
    for kind, index in trace.decode():
        if kind == MARK and trace.marks[index].phase is not Phase.LOAD:
            break
        if kind == ALLOC:
            alive.add(index)
            now += trace.sizes[index]
        elif kind == FREE:
            alive.discard(index)
            now -= trace.sizes[index]
        peak = max(peak, now)
    return alive, peak, trace


def static(model, **setup):
    alive, _, trace = loaded(model, **setup)
    parameters = [i for i in alive if trace.category(i) is Category.PARAMETERS]
    return sum(-(-trace.sizes[i] // 512) * 512 for i in parameters)


LLAMA = "meta-llama/Meta-Llama-3-8B"


class TestStatic:
    """Llama-3-8B as transformers and bitsandbytes load it, in blocks of 512 bytes."""

    @pytest.mark.slow
    def test_an_8b_base_in_four_bits(self):
        assert round(static(LLAMA, quantization=NESTED) / MIB, 1) == 5438.6
        assert round(static(LLAMA, quantization=NF4) / MIB, 1) == 5748.6

    @pytest.mark.slow
    def test_preparing_makes_float32_of_embeddings_head_and_norms(self):
        plain = static(LLAMA, quantization={**NESTED, "prepare": False}, adapter=LORA)
        prepared = static(LLAMA, quantization=NESTED, adapter=LORA)

        elements = 2 * 128256 * 4096 + 65 * 4096
        assert prepared - plain == 2 * elements

    def test_counts_are_of_weights_not_of_bytes(self):
        whole, _ = built("prajjwal1/bert-tiny", loop="plain")
        four, _ = built("prajjwal1/bert-tiny", quantization=NF4)

        assert whole.counts[0] == four.counts[0]
        assert four.counts[3] < whole.counts[3]


def four_bit_bytes(num_out, num_in, *, nested, itemsize=1):
    """The tensors of one weight by the library's own sizes (blocks of 64, of 256 if nested)."""
    n = num_out * num_in
    blocks = math.ceil(n / 64)
    packed = (n + 1) // (2 * itemsize) * itemsize
    if not nested:
        return sorted([packed, 4 * blocks, 64])
    return sorted([packed, blocks, 4 * math.ceil(blocks / 256), 4, 64, 1024])


@pytest.mark.parametrize("shape", [(4096, 4096), (100, 30), (33, 65), (7, 1)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_a_weight_is_of_the_tensors_of_the_formula(shape, nested, storage):
    num_out, num_in = shape
    with torch.device("meta"):
        layer = bitsandbytes().nn.Linear4bit(
            num_in, num_out, bias=False, compress_statistics=nested, quant_type="nf4",
            quant_storage=storage,
        )  # fmt: skip
    with code_tables():
        quantize_weight(layer, torch.empty(shape, dtype=torch.bfloat16, device="meta"))

    found = sorted([layer.weight.nbytes, *(t.nbytes for t in companions(layer))])
    assert found == four_bit_bytes(num_out, num_in, nested=nested, itemsize=storage.itemsize)


def test_loading_peaks_above_what_stays():
    """The last weights arrive in half precision beside all that is there, and so do casts."""
    model = "meta-llama/Llama-3.2-1B?num_hidden_layers=2"
    alive, peak, trace = loaded(model, quantization=NESTED, adapter=LORA)

    stays = sum(trace.sizes[i] for i in alive)
    embedding = 128256 * 2048 * 2
    assert stays + embedding * 0.9 < peak < stays + embedding * 1.1


def test_no_table_of_codes_is_left_on_meta():
    """The library keeps its tables for the process: a real model beside us must not find ours."""
    tables = bitsandbytes().functional.name2qmap
    before = dict(tables)
    loaded("prajjwal1/bert-tiny", quantization=NESTED)

    assert tables == before
    assert not any(table.is_meta for table in tables.values())


def test_a_bias_that_the_first_forward_casts_is_uncast_in_every_trace():
    run, setup = built("facebook/opt-125m?num_hidden_layers=2", quantization=NESTED, adapter=LORA)

    first, second = (trace_built(run, setup, A100) for _ in range(2))

    assert list(first.events) == list(second.events)
    assert first.sizes == second.sizes


def test_products_of_8_bits_do_not_tell_of_each_cast(caplog):
    run, setup = built(
        "facebook/opt-125m?num_hidden_layers=1", quantization={"load_in_8bit": True}, adapter=LORA
    )

    trace_built(run, setup, A100)

    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [NESTED, NF4, {"load_in_8bit": True}])
def test_a_live_model_is_what_is_built_by_name(quantization, tmp_path):
    import memest

    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, vocab_size=500,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    real = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"},
        quantization_config=transformers.BitsAndBytesConfig(**quantization),
    )  # fmt: skip
    real = peft.prepare_model_for_kbit_training(real, use_gradient_checkpointing=False)
    real = peft.get_peft_model(real, peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    before = {n: (p.dtype, p.device.type) for n, p in real.named_parameters()}

    live = memest.estimate(real, batch=2, seq_len=64)
    named = memest.estimate(
        str(tmp_path), batch=2, seq_len=64, lora_r=4, dtype="bfloat16", quantization=quantization,
        checkpointing="none",
    )  # fmt: skip

    assert live.model.parameter_bytes == named.model.parameter_bytes
    assert live.model.parameters == named.model.parameters
    assert live.model.trainable_parameters == named.model.trainable_parameters
    assert live.peak.allocated_bytes == named.peak.allocated_bytes
    assert {n: (p.dtype, p.device.type) for n, p in real.named_parameters()} == before


class TestCheckpointsThatAreQuantized:
    @pytest.fixture
    def folder(self, tmp_path):
        def write(quantization):
            config = resolve_model("meta-llama/Llama-3.2-1B").config
            changes = {"num_hidden_layers": 2, "vocab_size": 256}
            changes["quantization_config"] = quantization
            (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
            return str(tmp_path)

        return write

    @pytest.mark.slow
    def test_they_are_taken_as_they_are(self, folder):
        own = {"quant_method": "bitsandbytes", "_load_in_4bit": True, **NESTED}
        alive, peak, trace = loaded(folder(own), adapter=LORA)
        asked, more, _ = loaded(folder(None), adapter=LORA, quantization=NESTED)

        sizes = [sorted(t.sizes[i] for i in a) for a, t in ((alive, trace),)]
        assert sum(sizes[0]) > 0
        assert len(alive) == len(asked)
        # nothing arrives in half precision: the peak of loading is lower by one such weight
        assert peak < more

    def test_the_trainer_needs_adapters_for_them(self, folder):
        with pytest.raises(ConfigError, match="--lora-r 16"):
            built(folder({"quant_method": "bitsandbytes", **NF4}), loop="trainer")

    def test_other_formats_are_named_and_not_guessed(self, folder):
        run, _ = built(folder({"quant_method": "exl2", "bits": 4}))
        assert any("quantised by exl2, which is not modelled" in said for said in run.card.remarks)


class TestGemm4bit:
    @staticmethod
    def call(rows, num_out, num_in, dtype="bfloat16", *, nested=False, blocksize=64):
        blocks = math.ceil(num_out * num_in / 64)
        scales = TensorSpec((blocks,), (1,), "uint8")
        kwargs = (("absmax_8bit", scales),) if nested else ()
        out = TensorSpec((rows, num_out), (num_out, 1), dtype)
        args = (
            TensorSpec((rows, num_in), (num_in, 1), dtype),
            TensorSpec((num_out * num_in // 2, 1), (1, 1), "uint8"),
            (num_out, num_in), TensorSpec((blocks,), (1,), "float32"), blocksize, "nf4",
        )  # fmt: skip
        return OpCall("bitsandbytes.gemm_4bit.default", args, kwargs, (out,), "main")

    def test_many_rows_dequantize_the_weight(self):
        found = workspaces_of(self.call(4096, 14336, 4096), A100)
        assert [h.nbytes for h in found if h.label == "dequantised weight"] == [2 * 14336 * 4096]

    def test_nested_scales_are_dequantized_first_and_moved(self):
        found = workspaces_of(self.call(4096, 4096, 4096, nested=True), A100)
        scales = 4 * 4096 * 4096 // 64
        assert [h.nbytes for h in found[:3]] == [scales, scales, 2 * 4096 * 4096]
        assert all(h.results_before == 0 for h in found[:3])

    @pytest.mark.parametrize(
        ("rows", "dtype", "gpu", "blocksize", "fused"),
        [
            (4, "bfloat16", "a100", 64, True),
            (5, "bfloat16", "a100", 64, False),
            (7, "float32", "a100", 64, True),
            (8, "float32", "a100", 64, False),
            (7, "float16", "v100", 64, True),
            (7, "bfloat16", "t4", 64, True),
            (7, "float16", "t4", 64, False),
            (4, "bfloat16", "a100", 2048 * 3, False),
        ],
    )
    def test_few_rows_do_not(self, rows, dtype, gpu, blocksize, fused):
        call = self.call(rows, 4096, 4096, dtype, blocksize=blocksize)
        found = workspaces_of(call, traits(find_gpu(gpu)))
        assert (found == ()) is fused


class TestEarlierReleases:
    """What ``--software bitsandbytes=...`` changes, on one layer."""

    @staticmethod
    def run(version):
        setup = Setup(
            quantization=NF4, loop="plain", software=Software.parse(f"bitsandbytes={version}")
        )
        with torch.device("meta"):
            layer = bitsandbytes().nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.float32)
        with code_tables():
            quantize_weight(layer, torch.empty(128, 64, dtype=torch.bfloat16, device="meta"))
        start = torch.empty(16, 64, device="meta", requires_grad=True)
        recorder = Recorder()
        with bitsandbytes_as_before(setup), recorder:
            recorder.mark(Phase.FORWARD, 1, 1)
            x = start + 1
            number = recorder.allocation_of(x)
            out = layer(x)
            del x
            freed = number << 2 | FREE in recorder.trace.events
            out.sum().backward()
        assert start.grad.shape == start.shape
        return freed, recorder.trace.sizes

    @pytest.mark.parametrize(("version", "dropped"), [("0.42", False), ("0.43", True)])
    def test_until_0_42_the_input_was_kept(self, version, dropped):
        assert self.run(version)[0] is dropped

    def test_until_0_49_the_weight_was_dequantized_as_loaded_and_cast(self):
        _, before = self.run("0.49")
        _, now = self.run("0.50")
        half, full = 2 * 128 * 64, 4 * 128 * 64

        # once more each: in forward, where one kernel hides the weight since 0.50
        assert (before.count(half), now.count(half)) == (2, 1)
        assert before.count(full) - now.count(full) == 1


class TestInt8:
    """LLM.int8 on CUDA, one layer: what is made on the way, in order."""

    @staticmethod
    def births(dtype, threshold=6.0, num_in=64):
        rows, num_out = 32, 48
        with torch.device("meta"):
            layer = bitsandbytes().nn.Linear8bitLt(
                num_in, num_out, bias=False, has_fp16_weights=False, threshold=threshold
            )
        recorder = Recorder(bitsandbytes_handlers())
        quantize_weight(layer, torch.empty(num_out, num_in, dtype=torch.float16, device="meta"))
        x = torch.empty(rows, num_in, dtype=dtype, device="meta", requires_grad=True)
        with recorder:
            recorder.mark(Phase.FORWARD, 1, 1)
            out = layer(x)
        assert out.dtype == dtype
        return recorder.trace

    @pytest.mark.parametrize(
        ("dtype", "threshold", "num_in", "sizes"),
        [
            (torch.bfloat16, 6.0, 64, "2mk 4m mk 2mk mk 1 4mn 2mn 2mn"),
            (torch.float16, 6.0, 64, "4m mk 2mk mk 1 4mn 2mn"),
            (torch.float16, 0.0, 64, "4m mk 4mn 2mn"),
            # lengths that cuBLAS refuses are multiplied in float32
            (torch.float16, 0.0, 63, "4m mk 4mn 4mk 4nk 4mn 4mn 2mn"),
        ],
        ids=["over float16 and int32", "no copies", "nothing is searched", "in float32"],
    )
    def test_what_a_layer_makes(self, dtype, threshold, num_in, sizes):
        extents = {"m": 32, "k": num_in, "n": 48}

        def size_of(term):
            factors = [extents[letter] for letter in term if letter.isalpha()]
            return math.prod(factors, start=int(term.strip("mkn") or 1))

        trace = self.births(dtype, threshold, num_in)
        assert trace.sizes == [size_of(term) for term in sizes.split()]


class TestRefusals:
    def test_a_quantized_head_cannot_be_copied_and_trained(self):
        with pytest.raises(ConfigError, match="--llm-int8-skip-modules classifier"):
            built("prajjwal1/bert-tiny", quantization=NF4, adapter=LORA)

    @pytest.mark.slow
    def test_a_prepared_base_alone_has_nothing_to_train(self):
        run, setup = built("prajjwal1/bert-tiny", quantization={**NF4, "prepare": True})
        with pytest.raises(ConfigError, match="--lora-r 16"):
            trace_built(run, setup, A100)

    def test_only_models_of_transformers_are_quantized(self, monkeypatch):
        module = type(sys)("tiny_factory")
        module.make = lambda: torch.nn.Linear(8, 8)
        monkeypatch.setitem(sys.modules, "tiny_factory", module)
        with pytest.raises(ConfigError, match="models of transformers"):
            built("tiny_factory:make", quantization=NF4, dtype="auto")
