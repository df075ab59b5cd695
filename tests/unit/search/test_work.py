"""FLOPs agree with torch's own counter, launches with what was executed, and steps add up."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode

import memest
from memest.events import Phase
from memest.profiles.work import NOTHING, Work, _by_mark
from memest.search.cost import Probe
from memest.trace.recorder import Recorder
from memest.workspaces.flops import Arithmetic, arithmetic, counts_flops, flops
from memest.workspaces.operator_call import OpCall, TensorSpec

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, device="meta", dtype=dtype)


def counted(function):
    """The FLOPs of a function by torch's counter."""
    counter = FlopCounterMode(display=False)
    with counter:
        function()
    return counter.get_total_flops()


def recorded(function):
    """The trace of a function, as one phase."""
    recorder = Recorder()
    with recorder:
        recorder.mark(Phase.FORWARD, 1, 1)
        function()
    recorder.forget()
    return recorder.trace


def work(function):
    trace = recorded(function)
    return sum(_by_mark(trace).values(), NOTHING)


q4, k4 = meta(2, 6, 40, 16), meta(2, 6, 56, 16)
OPERATORS = {
    "mm": lambda: aten.mm(meta(3, 5), meta(5, 7)),
    "addmm": lambda: aten.addmm(meta(7), meta(3, 5), meta(5, 7)),
    "bmm": lambda: aten.bmm(meta(2, 3, 5), meta(2, 5, 7)),
    "baddbmm": lambda: aten.baddbmm(meta(2, 3, 7), meta(2, 3, 5), meta(2, 5, 7)),
    "conv1d": lambda: torch.conv1d(meta(2, 4, 50), meta(6, 4, 5), stride=2),
    "conv2d": lambda: torch.conv2d(meta(2, 4, 17, 19), meta(6, 4, 3, 3), meta(6), padding=1),
    "grouped conv2d": lambda: torch.conv2d(meta(2, 4, 9, 9), meta(6, 2, 3, 3), groups=2),
    "transposed conv2d": lambda: torch.conv_transpose2d(meta(2, 4, 9, 9), meta(4, 6, 3, 3)),
    "conv3d": lambda: torch.conv3d(meta(1, 2, 5, 6, 7), meta(3, 2, 2, 2, 2)),
    "efficient": lambda: aten._scaled_dot_product_efficient_attention(q4, k4, k4, None, True),
    "flash": lambda: aten._scaled_dot_product_flash_attention(q4.half(), k4.half(), k4.half()),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_counts_as_torch_counts_it(name):
    function = OPERATORS[name]
    expected = counted(function)
    assert expected > 0
    assert work(function).flops == expected


def test_the_inner_operator_takes_heads_behind_positions():
    # torch's counter reads [B, S, H, D] as if it were [B, H, S, D]
    def forward():
        aten._efficient_attention_forward(
            meta(2, 40, 6, 16), meta(2, 56, 6, 16), meta(2, 56, 6, 16), None, None, None, None,
            None, 0.0, 0,
        )  # fmt: skip

    assert work(forward).flops == 2 * 2 * 6 * 40 * 56 * (16 + 16)


def test_attention_backward_counts_five_products():
    def backward():
        q = meta(2, 6, 40, 16).requires_grad_()
        k = meta(2, 6, 56, 16).requires_grad_()
        v = meta(2, 6, 56, 24).requires_grad_()
        out = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]
        out.sum().backward()

    per_product = 2 * 2 * 6 * 40 * 56
    hand = per_product * (16 + 24) + per_product * (3 * 16 + 2 * 24)
    assert work(backward).flops == counted(backward) == hand


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_backward_is_twice_the_forward(transposed):
    function = torch.conv_transpose2d if transposed else torch.conv2d
    weight_shape = (4, 6, 3, 3) if transposed else (6, 4, 3, 3)

    def both():
        x = meta(2, 4, 9, 9).requires_grad_()
        function(x, meta(*weight_shape).requires_grad_()).sum().backward()

    def forward():
        function(meta(2, 4, 9, 9), meta(*weight_shape))

    assert work(both).flops == 3 * work(forward).flops
    assert work(both).flops == counted(both)


def test_groups_count_once_in_the_weight_gradient_too():
    def both():
        weight = meta(8, 2, 3, 3).requires_grad_()
        torch.conv2d(meta(2, 8, 9, 9).requires_grad_(), weight, groups=4).sum().backward()

    hand = 2 * 2 * 7 * 7 * 8 * 2 * 9
    assert work(both).flops == 3 * hand
    assert counted(both) == 2 * hand + 4 * hand  # torch forgets the groups in that one


def test_packed_attention_meets_the_longest_sample():
    spec = TensorSpec((300, 4, 32), (128, 32, 1), "float16")
    offsets = TensorSpec((4,), (1,), "int32")
    args = (spec, spec, spec, offsets, offsets, 128, 128, 0.0, True, False)
    call = OpCall("aten._flash_attention_forward.default", args, (), (spec,), "main")
    assert flops(call) == 2 * 300 * 4 * 128 * (32 + 32)


def test_what_does_not_count():
    assert not counts_flops("aten.add.Tensor")
    assert counts_flops("aten.mm.default")
    spec = TensorSpec((2, 2), (2, 1), "float32")
    assert flops(OpCall("aten.add.Tensor", (spec, spec), (), (spec,), "main")) == 0


@pytest.mark.parametrize(
    ("op", "dtype", "kind"),
    [
        ("aten.mm.default", "float32", Arithmetic.FULL),
        ("aten.mm.default", "bfloat16", Arithmetic.BF16),
        ("aten._scaled_mm.default", "float8_e4m3fn", Arithmetic.HALF),
        ("aten.mm.default", "float64", Arithmetic.DOUBLE),
        ("aten.convolution.default", "float32", Arithmetic.FULL_CONVOLUTION),
        ("aten.convolution_backward.default", "float16", Arithmetic.HALF),
    ],
)
def test_arithmetic(op, dtype, kind):
    spec = TensorSpec((2, 2), (2, 1), dtype)
    assert arithmetic(OpCall(op, (spec, spec), (), (spec,), "main")) is kind


class TestLaunches:
    @pytest.mark.parametrize(
        ("function", "launches"),
        [
            (lambda: meta(3), 0),
            (lambda: torch.empty_like(meta(3)), 0),
            (lambda: meta(6).view(2, 3).t()[0], 0),
            (lambda: meta(3) + 1, 1),
            (lambda: meta(3).add_(1), 1),
            (lambda: torch.zeros(3, device="meta"), 1),
            (lambda: torch._foreach_add_([meta(3), meta(4)], 1.0), 1),
            (lambda: torch.ones(3) + 1, 0),
            (lambda: aten.mm(meta(3, 5), meta(5, 7)), 1),
        ],
    )
    def test_what_launches_a_kernel(self, function, launches):
        assert work(function).launches == launches

    def test_they_are_counted_by_phase(self):
        recorder = Recorder()
        with recorder:
            x = meta(3)
            recorder.mark(Phase.FORWARD, 1, 1)
            x + 1
            recorder.mark(Phase.BACKWARD, 1, 1)
            x + 1 + 1
        recorder.forget()
        assert recorder.trace.launches == [1, 2]
        works = _by_mark(recorder.trace)
        assert works[1].launches == 2
        assert sum(works.values(), NOTHING).bytes_made == 3 * 12


def test_work_adds_and_multiplies():
    one = Work(flops_by={Arithmetic.FULL: 3, Arithmetic.HALF: 1}, launches=2, bytes_made=5)
    assert (one + one) == 2 * one
    assert (3 * one).flops == 12
    assert sum([one, one], NOTHING).to_dict() == {
        "flops": 8, "flops_by": {"fp32": 6, "half": 2}, "launches": 4, "bytes_made": 10,
    }  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv1d(3, 32, 4, stride=4)
        self.norm = torch.nn.LayerNorm(32)
        self.mixer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(),
                                        torch.nn.Linear(64, 5))  # fmt: skip

    def forward(self, x):
        x = self.norm(self.stem(x).transpose(1, 2))
        return self.head(x + self.mixer(x, x, x)[0]).mean(1)


def test_a_real_model_counts_as_on_the_cpu():
    """Forward and backward with numbers on the CPU, and without on the meta device."""
    torch.manual_seed(0)
    real = Net()
    expected = counted(lambda: real(torch.randn(4, 3, 64)).sum().backward())
    with torch.device("meta"):
        shapes = Net()
    trace = recorded(lambda: shapes(meta(4, 3, 64)).sum().backward())
    assert _by_mark(trace)[0].flops == expected


@pytest.fixture(scope="module")
def tiny():
    own = memest.profile(
        "prajjwal1/bert-tiny", batch=2, seq_len=32, attn_implementation="eager", loop="plain"
    )
    return Probe(own, {})


def test_a_step_of_bert_counts_as_transformers_runs_it(tiny):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    ids, labels = torch.ones(2, 32, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    expected = counted(lambda: model(input_ids=ids, labels=labels).loss.backward())
    assert tiny.work().total.flops == expected


def test_micro_steps_that_were_not_traced_repeat_the_second(tiny):
    one, three, four, nine = (tiny.work(grad_accum=n) for n in (1, 3, 4, 9))
    assert nine.total.flops == 9 * one.total.flops
    step = four.total.launches - three.total.launches
    assert nine.total.launches == three.total.launches + 6 * step
    assert nine.phases[Phase.OPTIMIZER] == one.phases[Phase.OPTIMIZER]
    # accumulating adds one launch for each gradient that is there already
    assert step > one.phases[Phase.FORWARD].launches + one.phases[Phase.BACKWARD].launches


def test_checkpointing_recomputes_in_the_backward(tiny):
    plain, recomputing = tiny.work(), tiny.work(checkpointing="full")
    assert recomputing.phases[Phase.FORWARD].flops == plain.phases[Phase.FORWARD].flops
    extra = recomputing.phases[Phase.BACKWARD].flops - plain.phases[Phase.BACKWARD].flops
    # all of the forward but the pooler and the classifier, which are no layers
    heads = 2 * 2 * 128 * 128 + 2 * 2 * 128 * 2
    assert extra == plain.phases[Phase.FORWARD].flops - heads


def test_autocast_moves_the_products_to_half(tiny):
    half = tiny.work(precision="fp16").total
    assert half.flops == tiny.work().total.flops
    assert half.flops_by[Arithmetic.HALF] > 0.99 * half.flops
