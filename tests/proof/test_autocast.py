"""Autocast on meta: the published lists, what reaches the kernels, and the life of cast weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memest.calibration.running.cpu_memory import mark, measure
from memest.events import Category, Phase
from memest.trace.cuda.autocast import CUDA, autocast_on_meta
from memest.trace.cuda.cpu_ops import CPU_LISTS, cpu_operators
from memest.trace.cuda.cuda_ops import kernel_handlers
from memest.trace.cuda.in_place import in_place_handlers
from memest.trace.inputs.batch import realise
from memest.trace.losses.loss import loss_for
from memest.trace.recorder import Recorder
from memest.trace.training import TracePlan, trace_training
from support.cases import GPU, twin
from support.real_memory import differences, run_of_trace

# AT_FORALL_FP32 of ATen/autocast_mode.h, torch 2.13 and 2.14; norm and friends are in other lists
FP32 = """_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist
cosh cosine_embedding_loss cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm
hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_sqrth log log10 log1p log2
logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm
nll_loss
nll_loss2d nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar
pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan
triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d""".split()


def test_our_lists_are_the_installed_torch_s():
    named = CUDA.lower | CUDA.optional_dtype | CUDA.append_dtype | CUDA.promote | CUDA.banned

    # one is of builds for CUDA alone, one came with torch 2.14
    absent = {"_cudnn_rnn", "linalg_matrix_sqrth"} - set(CUDA.registered_operators())
    assert named | set(FP32) == set(CUDA.registered_operators()) | absent
    assert not named & set(FP32)
    assert CPU_LISTS.lower | CPU_LISTS.promote <= set(CPU_LISTS.registered_operators())


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x @ x, torch.float16),
        (lambda x: functional.linear(x, x, x[0]), torch.float16),
        (lambda x: functional.conv1d(x[None], x[:, :, None]), torch.float16),
        (lambda x: torch.einsum("ij,jk->ik", x, x), torch.float16),
        (lambda x: torch.baddbmm(x[None], x[None], x[None]), torch.float16),
        (lambda x: functional.scaled_dot_product_attention(*[x[None, None]] * 3), torch.float16),
        (lambda x: (x @ x).exp(), torch.float32),
        (lambda x: (x @ x) ** 2, torch.float32),
        (lambda x: (x @ x).softmax(-1), torch.float32),
        (lambda x: (x @ x).softmax(-1, dtype=torch.float16), torch.float16),
        (lambda x: (x @ x).log_softmax(-1), torch.float32),
        (lambda x: (x @ x).sum(), torch.float32),
        (lambda x: (x @ x).norm(), torch.float32),
        (lambda x: (x @ x).norm(dim=1), torch.float32),
        (lambda x: functional.layer_norm(x @ x, (8,)), torch.float32),
        (lambda x: functional.cross_entropy(x @ x, x.argmax(1)), torch.float32),
        (lambda x: functional.mse_loss(x @ x, x @ x), torch.float32),
        (lambda x: functional.gelu(x @ x), torch.float16),
        (lambda x: (x @ x).mean(), torch.float16),
        (lambda x: (x @ x) + x, torch.float32),
        (lambda x: torch.cat([x @ x, x @ x]), torch.float16),
        (lambda x: torch.addcmul(x, x @ x, x @ x), torch.float32),
        (lambda x: functional.embedding(x.argmax(1), x), torch.float32),
    ],
)
def test_results_have_the_dtype_of_cuda_s_autocast(call, expected):
    with autocast_on_meta(Recorder(), (2, 13)), torch.autocast("cuda", dtype=torch.float16):
        assert call(torch.empty(8, 8, device="meta")).dtype == expected


def test_binary_cross_entropy_is_refused_as_cuda_refuses_it():
    x = torch.empty(4, device="meta")
    with (
        autocast_on_meta(Recorder(), (2, 13)),
        torch.autocast("cuda"),
        pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
    ):
        functional.binary_cross_entropy(x, x)


def test_rms_norm_is_cast_since_it_joined_the_list():
    x = torch.empty(4, 8, device="meta", dtype=torch.float16)
    for version, dtype in (((2, 11), torch.float16), ((2, 13), torch.float32)):
        with autocast_on_meta(Recorder(), version), torch.autocast("cuda"):
            assert functional.rms_norm(x, (8,)).dtype == dtype


def test_outside_a_region_nothing_is_cast():
    x = torch.empty(4, 8, device="meta")
    with autocast_on_meta(Recorder(), (2, 13)):
        assert (x @ x.t()).dtype == torch.float32
        with torch.autocast("cuda"), torch.autocast("cuda", enabled=False):
            assert (x @ x.t()).dtype == torch.float32


# -- what reaches the kernels of whole models -----------------------------------------------------

MATMULS = (
    "aten.mm. aten.addmm. aten.bmm. aten.baddbmm. aten.convolution. aten._scaled_dot_product_flash "
    "aten._scaled_dot_product_efficient aten._scaled_dot_product_cudnn"
).split()
# _log_softmax is not among them: cross_entropy asks for the logits' own dtype, and that wins
IN_FP32 = (
    "aten._softmax. aten.native_layer_norm. aten.native_group_norm. aten.pow. "
    "aten.exp. aten.log. aten.rsqrt. aten.nll_loss_forward. aten.mse_loss. "
    "aten.linalg_vector_norm. aten.cumsum."
).split()


class _Guard:
    """Follows the autocast regions, and looks at every operator inside them."""

    def __init__(self, monkeypatch):
        self.seen = {"low": 0, "fp32": 0}
        self.wrong = []
        self._regions = []
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
        dispatch = Recorder.__torch_dispatch__

        def entered(region):
            if region.device == "cuda":
                self._regions.append(region._enabled)
            return enter(region)

        def left(region, *error):
            if region.device == "cuda":
                self._regions.pop()
            return leave(region, *error)

        def dispatched(recorder, func, types, args=(), kwargs=None):
            out = dispatch(recorder, func, types, args, kwargs)
            if self._regions and self._regions[-1] and torch.is_grad_enabled():
                self._look(recorder, str(func), args, out)
            return out

        monkeypatch.setattr(torch.autocast, "__enter__", entered)
        monkeypatch.setattr(torch.autocast, "__exit__", left)
        monkeypatch.setattr(Recorder, "__torch_dispatch__", dispatched)

    def _look(self, recorder, name, args, out):
        if name.startswith(tuple(MATMULS)):
            self.seen["low"] += 1
            if any(isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in args):
                self.wrong.append(f"{name} sees fp32 in {recorder.current_module}")
        if name.startswith(tuple(IN_FP32)):
            first = out[0] if isinstance(out, (tuple, list)) else out
            self.seen["fp32"] += first.is_floating_point()
            if first.dtype in (torch.float16, torch.bfloat16):
                self.wrong.append(f"{name} returns half in {recorder.current_module}")


@pytest.mark.parametrize(
    ("model", "setup"),
    [
        ("bert", {}),
        ("bert", {"attn_implementation": "eager"}),
        ("deberta", {}),
        ("gpt2", {}),
        ("llama-gqa", {"checkpointing": "full"}),
        ("llama-gqa", {"checkpointing": "full", "use_reentrant": True}),
        ("gemma2", {"precision": "bf16"}),
        ("bloom", {}),
        ("t5", {}),
        ("bart", {"padded": True}),
        ("vit", {}),
        ("swin", {}),
        ("convnext", {}),
        ("clip", {}),
        ("whisper", {}),
        ("wav2vec2", {"precision": "bf16"}),
    ],
)
def test_kernels_of_a_region_see_the_right_dtypes(model, setup, monkeypatch):
    twins = twin(model, **{"precision": "fp16", "loop": "trainer", **setup})
    guard = _Guard(monkeypatch)
    trace_training(
        twins.built_model.model,
        twins.setup,
        make_batch=lambda: realise(twins.plans),
        loss_of=loss_for(twins.built_model),
        gpu=GPU,
        plan=TracePlan(steps=1),
    )

    assert guard.wrong == []
    assert guard.seen["low"] > 8
    assert guard.seen["fp32"] > 2


# -- the life of cast weights ---------------------------------------------------------------------


class _Twice(torch.nn.Module):
    """One weight used twice, one frozen, one only with checkpointing."""

    def __init__(self, device: str) -> None:
        super().__init__()
        make = {"device": device, "bias": False}
        self.shared = torch.nn.Linear(64, 64, **make)
        self.frozen = torch.nn.Linear(64, 64, **make).requires_grad_(requires_grad=False)
        self.inner = torch.nn.Linear(64, 64, **make)
        self.reentrant = False

    def forward(self, x):
        x = self.shared(self.shared(x))
        x = self.frozen(self.frozen(x))
        return checkpoint(lambda y: self.inner(y.tanh()).tanh(), x, use_reentrant=self.reentrant)


WEIGHT = 64 * 64 * 2


def _copies(trace):
    """Allocation numbers of cast weights."""
    return [
        i for i in range(trace.num_allocations) if trace.category(i) is Category.AUTOCAST_COPIES
    ]


def _alive_at_marks(trace, numbers):
    """How many of these allocations live at each mark."""
    alive, out = set(), []
    for kind, index in trace.decode():
        if kind == 3:
            out.append((str(trace.marks[index].phase), len(alive & set(numbers))))
        elif kind == 0:
            alive.add(index)
        elif kind == 1:
            alive.discard(index)
    return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_cast_weights_live_as_long_as_their_region_or_their_node(reentrant):
    recorder = Recorder({**in_place_handlers(), **kernel_handlers()})
    model = _Twice("meta")
    model.reentrant = reentrant
    x = torch.empty(16, 64, device="meta", requires_grad=True)
    with autocast_on_meta(recorder, (2, 13)), recorder:
        recorder.mark(Phase.FORWARD, 1, 1)
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
            recorder.mark(Phase.CLIP, 1, 1)  # still inside the region
        recorder.mark(Phase.BACKWARD, 1, 1)
        out.float().sum().backward()
        recorder.mark(Phase.ZERO_GRAD, 1, 1)

    trace = recorder.trace
    copies = _copies(trace)
    # shared once, frozen at each of its two uses, inner in the region and again in its recompute
    assert len(copies) == 1 + 2 + 2
    assert _alive_at_marks(trace, copies) == [
        ("forward", 0),
        # the frozen copies live because their nodes saved them
        ("clip", 4),
        # the copy that nothing saved died with the region
        ("backward", 3),
        ("zero_grad", 0),
    ]


def test_without_a_graph_the_region_s_end_frees_them_all():
    recorder = Recorder()
    model = _Twice("meta")
    x = torch.empty(16, 64, device="meta")
    with autocast_on_meta(recorder, (2, 13)), recorder, torch.no_grad():
        recorder.mark(Phase.FORWARD, 1, 1)
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.autocast("cuda", dtype=torch.float16):
                model(x)
            recorder.mark(Phase.CLIP, 1, 1)  # a nested region's end clears nothing
        recorder.mark(Phase.ZERO_GRAD, 1, 1)

    copies = _copies(recorder.trace)
    alive = _alive_at_marks(recorder.trace, copies)
    assert alive == [("forward", 0), ("clip", 2), ("zero_grad", 0)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_cpu_s_own_cache_behaves_the_same(reentrant):
    """The same module on the CPU, under PyTorch's autocast, and on meta with the CPU's lists."""

    def go(model, x, region, begin):
        begin(Phase.FORWARD)
        with region:
            out = model(x)
        begin(Phase.BATCH)
        gradient = torch.ones_like(out)
        begin(Phase.BACKWARD)
        out.backward(gradient)
        begin(Phase.ZERO_GRAD)

    def make(device):
        model = _Twice(device)
        model.reentrant = reentrant
        return model, torch.rand(16, 64, device=device, requires_grad=True)

    def really(begin):
        go(*make("cpu"), torch.autocast("cpu", dtype=torch.bfloat16), begin)

    really(lambda phase: None)  # checkpoint's first call ever leaves its frame to the collector
    real = measure(lambda: really(lambda phase: mark(f"{phase} 1 1")))
    recorder = Recorder({**in_place_handlers(), **kernel_handlers()})

    def begin(phase):
        recorder.mark(phase, 1, 1)
        if phase is Phase.ZERO_GRAD:
            recorder.forget()

    with cpu_operators(), autocast_on_meta(recorder, (2, 13), CPU_LISTS), recorder:
        go(*make("meta"), torch.autocast("cuda", dtype=torch.bfloat16), begin)
    trace = run_of_trace(recorder.trace)

    states = 5056  # checkpoint keeps the random state on the host
    real.events = [e for e in real.events if abs(e.nbytes) != states]
    assert sum(e.nbytes == WEIGHT for e in trace.events) >= 5
    assert differences(real, trace, at_least=512) == []


def test_operators_that_other_libraries_register_are_left_to_them():
    """As torchvision registers its own under the same key when it is imported."""
    library = torch.library.Library("memest_other", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("double", torch.library.fallthrough_kernel, "AutocastCUDA")
    try:
        assert not [name for name in CUDA.registered_operators() if "double" in name]
        with autocast_on_meta(Recorder(), (2, 13)), torch.autocast("cuda", dtype=torch.float16):
            made = torch.ops.memest_other.double(torch.empty(3, device="meta"))
            product = torch.empty(3, 3, device="meta") @ torch.empty(3, 3, device="meta")
        assert (made.shape, made.dtype, product.dtype) == ((3,), torch.float32, torch.float16)
    finally:
        library._destroy()
