"""Optimizers of other libraries: what they keep, and for which weights.

That their steps allocate on meta what they do on the CPU is shown in ``tests/proof``.
"""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch

import memest
from memest.config.setup import Setup
from memest.config.software import Software
from memest.errors import ConfigError, MissingDependencyError
from memest.trace.cuda.cuda_ops import cuda_handlers, kernel_handlers
from memest.trace.model.roles import roles_of
from memest.trace.optimizers.torch import make_optimizer
from memest.trace.recorder import Recorder

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "vocab_size": 1000, "max_position_embeddings": 256,
}  # fmt: skip


def _model(device, dtype=torch.float32):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        config = AutoConfig.for_model(**LLAMA)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
        if device == "cpu":
            parameter.grad.normal_(generator=generator)
    return model


@pytest.mark.parametrize("wanted", ["all-linear", r".*\.mlp\..*", ("q_proj", "v_proj"), ("mlp",)])
@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
def test_what_is_projected_is_what_the_trainer_projects(name, wanted, tmp_path):
    pytest.importorskip(name.partition("_")[0] + "_torch")
    from transformers import Trainer, TrainingArguments

    model = _model("cpu")
    targets = list(wanted) if isinstance(wanted, tuple) else wanted
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], optim=name, optim_args="rank=32",
        optim_target_modules=targets,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(model=model, args=arguments)
        theirs = trainer.create_optimizer()
    setup = Setup(optim=name, optim_args="rank=32", optim_target_modules=wanted)
    ours = make_optimizer(model, setup, Recorder(), (2, 13))

    names = {id(p): n for n, p in model.named_parameters()}
    assert [[names[id(p)] for p in g["params"]] for g in ours.param_groups] == [
        [names[id(p)] for p in g["params"]] for g in theirs.param_groups
    ]
    assert [g.get("rank") for g in ours.param_groups] == [None, 32]


def test_galore_keeps_two_moments_of_rank_times_the_longer_side():
    pytest.importorskip("galore_torch")
    setup = Setup(
        optim="galore_adamw", optim_args="rank=8", optim_target_modules=".*down_proj", loop="plain"
    )
    model = _model("meta")
    recorder = Recorder({**cuda_handlers(), **kernel_handlers()})
    optimizer = make_optimizer(model, setup, recorder, (2, 13))
    with recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    recorder.forget()
    down = model.model.layers[0].mlp.down_proj.weight  # 128 x 384
    state = optimizer.state[down]

    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (8, 384)
    # the projection is a view of all left singular vectors, which stay alive with it
    assert state["projector"].ortho_matrix.untyped_storage().nbytes() == 4 * 128 * 128


def test_muon_is_for_hidden_matrices():
    model = _model("meta")
    optimizer = make_optimizer(model, Setup(optim="muon"), Recorder(), (2, 13))
    names = {id(p): n for n, p in model.named_parameters()}
    matrices, rest = ([names[id(p)] for p in g["params"]] for g in optimizer.param_groups)

    assert len(matrices) == 2 * 7
    assert all("layers" in name for name in matrices)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(rest)
    with pytest.raises(ConfigError, match=r"since torch 2\.9"):
        Setup(optim="muon", software=Software(torch=(2, 8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_states_of_torchao_are_those_of_its_own_class(bits, dtype):
    optim = pytest.importorskip("torchao.optim")
    sizes = ((64, 64), (63, 65), (100, 1000), (256, 256), (17,))
    parameters = [torch.nn.Parameter(torch.empty(s, device="meta", dtype=dtype)) for s in sizes]
    theirs = getattr(optim, f"AdamW{bits}bit")(parameters, block_size=256)

    def bytes_of(state):
        inner = getattr(state, "tensor_attrs", None)
        found = [state] if inner is None else [getattr(state, name) for name in inner]
        return sum(tensor.nbytes for tensor in found)

    model = torch.nn.ParameterList(parameters)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    ours = make_optimizer(model, Setup(optim=f"adamw_torch_{bits}bit"), Recorder(), (2, 13))
    ours.step()
    for parameter in parameters:
        state = ours.state[parameter]
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            expected = bytes_of(theirs._new_buffer(parameter, signed))
            assert sum(t.nbytes for t in state[name]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_optimi_are_those_of_its_own_class(dtype):
    optimi = pytest.importorskip("optimi")
    parameter = torch.nn.Parameter(torch.zeros(100, 30, dtype=dtype))
    theirs = optimi.StableAdamW([parameter], lr=1e-3, triton=False)
    group, state = theirs.param_groups[0] | {"triton": True}, {}
    theirs._init_state(group, state, parameter)

    twin = torch.nn.Parameter(torch.empty(100, 30, dtype=dtype, device="meta"))
    twin.grad = torch.empty_like(twin)
    ours = make_optimizer(
        torch.nn.ParameterList([twin]), Setup(optim="stable_adamw"), Recorder(), (2, 13)
    )
    ours.step()

    assert {k: v.nbytes for k, v in ours.state[twin].items()} == {
        k: v.nbytes for k, v in state.items() if isinstance(v, torch.Tensor)
    }


def test_roles_see_tied_heads_and_subclasses():
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        tied = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2)
        )
        opt = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("opt", hidden_size=32, ffn_dim=64, num_hidden_layers=1,
                                 num_attention_heads=2, word_embed_proj_dim=32)
        )  # fmt: skip

    assert roles_of(tied).head == {"transformer.wte.weight"}
    assert roles_of(tied).linear == frozenset()  # Conv1D is no nn.Linear, the head is tied
    # learned positions are a subclass of nn.Embedding: isinstance holds for the Trainer as well
    assert any("embed_positions" in name for name in roles_of(opt).embeddings)


def test_a_library_that_is_missing_is_named_with_what_to_install():
    setup = Setup(optim="schedule_free_adamw")
    missing = mock.patch(
        "memest.trace.optimizers.libraries.import_module", side_effect=ImportError("no module")
    )
    with missing, pytest.raises(MissingDependencyError, match="pip install schedulefree"):
        make_optimizer(_model("meta"), setup, Recorder(), (2, 13))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optim": "galore_adamw"}, "add --optim-target-modules all-linear"),
        ({"optim": "sgd", "optim_target_modules": "all-linear"}, "belongs to GaLore and APOLLO"),
        ({"optim": "galore_adamw", "optim_target_modules": "("}, "not a regular expression"),
        ({"optim": "adamw_torch", "optim_args": "rank=8"}, "It takes none"),
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, "It takes momentum, dampening"),
        ({"optim": "sgd", "optim_args": "momentum"}, "not of the form name=value"),
        ({"optim": "lomoo"}, "Did you mean 'lomo'"),
        ({"optim": "adamw_apex_fused"}, "not modelled yet"),
        ({"optim": "adamw_torch_xla"}, "for TPUs"),
        ({"optim": "adam_mini"}, "modelled no more"),
        ({"weight_decay": -0.1}, "0 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        Setup(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optim": "sgd", "optim_args": "momentum=much"}, "not a number"),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, "refuses it"),
        ({"optim": "galore_adamw", "optim_target_modules": "all-linear", "optim_args": "rank=0"},
         "from 1 on"),
        ({"optim": "galore_adamw", "optim_target_modules": "nothing"}, "names no linear layer"),
    ],
)  # fmt: skip
def test_arguments_that_the_optimizer_refuses(options, said):
    if options["optim"].startswith("galore"):
        pytest.importorskip("galore_torch")
    with pytest.raises(ConfigError, match=said):
        make_optimizer(_model("meta"), Setup(**options), Recorder(), (2, 13))


@pytest.mark.slow
def test_momentum_as_the_trainer_takes_it_is_the_optimizer_with_momentum():
    with_momentum = memest.estimate("gpt2?n_layer=1", optim="sgd", optim_args="momentum=0.9")
    named = memest.estimate("gpt2?n_layer=1", optim="sgd_momentum")

    assert with_momentum.peak == named.peak
