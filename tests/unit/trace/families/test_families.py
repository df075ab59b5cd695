"""One small model of every family of the catalogue trains two steps on meta."""

from __future__ import annotations

import pytest

from memest.catalog.models import catalogue
from memest.config.installed import installed_version
from memest.errors import TraceError

FIRST = {}
for _entry in catalogue():
    FIRST.setdefault(_entry.model_type, _entry)

# most of their weights take part in no step: towers for what the batch has not, unused layers
PARTLY_TRAINED = {"canine": 0.8}
# reads outputs that its text model has not: real steps stop at it as well
STOPS = {("llama4", (5, 24)): "image_outputs"}


@pytest.mark.slow(
    "clap",
    "gemma4",
    "glm4v",
    "longt5",
    "mllama",
    "mobilenet_v2",
    "mobilevit",
    "moonshine",
    "phi3",
    "qwen2_audio",
    "qwen3_5",
    "qwen3_5_moe",
    "swin",
    "swinv2",
    "bigbird_pegasus",
    "blip-2",
    "convnextv2",
    "deepseek_v32",
    "gemma3",
    "gemma3_text",
    "glm_moe_dsa",
    "jamba",
    "led",
    "nemotron_h",
    "qwen2_vl",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
    "recurrent_gemma",
    "sam",
    "segformer",
    "speecht5",
    "vit",
)
@pytest.mark.parametrize("family", sorted(FIRST))
def test_every_family_traces_forward_backward_and_step(tool, family):
    entry = FIRST[family]
    stops = STOPS.get((family, installed_version("transformers")))
    if stops is not None:
        with pytest.raises(TraceError, match=stops):
            tool.trace_entry(entry.id, tool.reduced_config(entry.config()), seq_len=64)
        return
    row = tool.trace_entry(entry.id, tool.reduced_config(entry.config()), seq_len=64)

    assert row["events"] > 100
    assert row["gradient_share"] >= PARTLY_TRAINED.get(family, 0.9), row


PADDED = (
    "bert roberta distilbert deberta-v2 electra llama gpt2 opt gemma2 t5 bart longformer".split()
)


@pytest.mark.parametrize("family", [*PADDED, "big_bird", "mpnet", "xlnet", "falcon", "qwen3_moe"])
def test_padded_batches_trace_too(tool, family):
    entry = FIRST[family]

    row = tool.trace_entry(entry.id, tool.reduced_config(entry.config()), seq_len=64, padded=True)

    assert any("padded" in note for note in row["notes"])


AUTOCAST = "bert llama t5 vit whisper wav2vec2 clip qwen2_vl gemma3 mixtral swin mamba2".split()


@pytest.mark.slow("gemma3", "swin")
@pytest.mark.parametrize("family", AUTOCAST)
def test_mixed_precision_traces_too(tool, family):
    entry = FIRST[family]
    config = tool.reduced_config(entry.config())

    row = tool.trace_entry(entry.id, config, seq_len=64, precision="bf16", dtype="float32")

    assert row["events"] > 100
