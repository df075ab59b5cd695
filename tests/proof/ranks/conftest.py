from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small decoder of four heads."""
    return decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    """The same, whose head has the weight of the embeddings."""
    return decoder(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def decoder(path, **more):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=512, max_position_embeddings=4096, architectures=["LlamaForCausalLM"], **more,
    )  # fmt: skip
    config.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    """A small mixture of eight experts."""
    from transformers import MixtralConfig

    path = tmp_path_factory.mktemp("mixture")
    config = MixtralConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=8, vocab_size=512, max_position_embeddings=256,
        architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(path)
    return str(path)
