"""Modules of one's own: specifications, losses, steps, factories; nothing of the user's changes."""

from __future__ import annotations

import copy
import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import memest
from memest.config.inputs import module_inputs_of, read_spec
from memest.errors import ConfigError, MemestError, ModelLoadError, TraceError
from memest.events import Category

F = nn.functional


class ConvNet(nn.Module):
    """Convolution, batch norm, a buffer, and a tensor that names its device."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, classes)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.ones(1, device="cuda") * self.scale.cuda()
        if self.training:
            x = x + random.random() + torch.rand(()).item()
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Gpt(nn.Module):
    """nanoGPT's way: tied weights, a mask in a buffer, positions made on the input's device."""

    def __init__(self, width: int = 32, words: int = 61, longest: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Embedding(longest, width)
        self.attend = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).bool())

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None):
        length = idx.shape[1]
        x = self.tokens(idx) + self.positions(torch.arange(length, device=idx.device))
        q, k, v = self.attend(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~self.mask[:length, :length], float("-inf"))
        logits = self.head(scores.softmax(-1) @ v)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def price(model, **options):
    options.setdefault("loop", "plain")
    return memest.estimate(model, gpu="T4", max_batch=False, **options)


IMAGES = ("x:float32[B,3,H,H]", "y:int64[B]")


class TestInputs:
    def test_every_form_of_the_same_batch_gives_the_same_answer(self):
        tensors = {"x": torch.zeros(4, 3, 16, 16), "y": torch.zeros(4, dtype=torch.int64)}
        forms = [
            {"inputs": IMAGES, "dims": {"H": 16}, "batch": 4},
            {"inputs": list(IMAGES), "dims": ["H=16"], "batch": 4},
            {"inputs": {"x": "float32[B,3,16,16]", "y": "int64[B]"}, "batch": 4},
            {"inputs": tensors},
            {"inputs": tuple(tensors.values())},
            {"inputs": {name: t.to("meta") for name, t in tensors.items()}},
            {"inputs": lambda batch: (torch.zeros(batch, 3, 16, 16), torch.zeros(batch).long()),
             "batch": 4},
        ]  # fmt: skip
        answers = [price(ConvNet(), loss="cross_entropy", **form) for form in forms]

        assert {a.setup.batch for a in answers} == {4}
        assert len({a.peak for a in answers}) == 1
        assert len({a.breakdown for a in answers}) == 1

    def test_a_named_loss_is_the_function_of_that_name(self):
        named = price(ConvNet(), inputs=IMAGES, dims={"H": 16}, loss="cross_entropy")
        own = price(
            ConvNet(), inputs=IMAGES, dims={"H": 16},
            loss=lambda outputs, batch: F.cross_entropy(outputs, batch["y"]),
        )  # fmt: skip

        assert named.peak == own.peak

    def test_an_assumed_loss_is_said(self):
        said = price(ConvNet(), inputs=IMAGES, dims={"H": 16})
        none = price(ConvNet(), inputs=IMAGES[:1], dims={"H": 16})

        assert any("cross_entropy (--loss sets it)" in note for note in said.notes)
        assert any("returns no loss" in note for note in none.notes)

    def test_the_batch_of_the_question_counts(self):
        tensors = {"x": torch.zeros(4, 3, 16, 16)}
        asked = [price(ConvNet(), inputs=tensors, **o) for o in ({}, {"batch": 4}, {"batch": 8})]

        assert [a.setup.batch for a in asked] == [4, 4, 8]
        spec = price(ConvNet(), inputs=IMAGES[:1], dims={"H": 16}, batch=8)
        assert spec.peak == asked[2].peak

    @pytest.mark.slow
    def test_lengths_and_batches_vary_by_formula_as_a_trace_has_them(self):
        batch = ("idx:int64[B,S]", "targets:int64[B,S]")
        profile = memest.profile(Gpt(), inputs=batch, loop="plain", gpu=None, seq_len=16)
        found = [profile.spot(batch=b, seq_len=s, vary=("batch", "seq_len"))
                 for b, s in ((2, 16), (5, 32), (9, 48))]  # fmt: skip

        for (b, s), one in zip(((2, 16), (5, 32), (9, 48)), found, strict=True):
            own = memest.profile(Gpt(), inputs=batch, loop="plain").spot(batch=b, seq_len=s)
            assert own.peak == one.peak

    def test_tied_weights_count_once(self):
        result = price(Gpt(), inputs=("idx:int64[B,S]", "targets:int64[B,S]"), seq_len=16)

        assert result.model.parameters == sum(p.numel() for p in Gpt().parameters())
        assert result.setup.seq_len == 16

    def test_nested_batches_arrive_as_they_were_given(self):
        class Takes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 1)

            def forward(self, images, targets=None):
                assert isinstance(images, list)
                assert targets["kind"] == 3
                return sum(self.layer(i).sum() for i in images) + targets["more"][0].sum()

        batch = {
            "images": [torch.zeros(3, 8), torch.zeros(5, 8)],
            "targets": {"kind": 3, "more": (torch.zeros(2),), "nothing": None},
        }
        assert price(Takes(), inputs=batch).model.parameters == 9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "no specification"),
        ("x:float32", "no specification"),
        ("x:flot32[B]", "Did you mean 'float32'"),
        ("x:float32[B,/]", "cannot be read"),
        ("x:float32[B,open()]", "no whole number"),
        ("x:float32[B,1.5]", "no whole number"),
        ("x:float32[B-100]", "not a size"),
        ("x:float32[B,H//(B-8)]", "not a size"),
        ("x:float32[B,Q]", r"--dim Q=N"),
    ],
)
def test_a_specification_that_does_not_do_is_told_so(text, words):
    with pytest.raises(ConfigError, match=words):
        price(nn.Linear(8, 8), inputs=text, dims={"H": 4} if "H" in text else None)


def test_extents_are_arithmetic():
    spec = read_spec("latents: float16 [B, 4, H//8, 2*W+1] = 1")

    assert spec.shape({"B": 2, "H": 64, "W": 3}) == (2, 4, 8, 7)
    assert (spec.dtype, spec.fill) == ("float16", 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_labels": 3}, "--num-labels 3 is for models that memest builds"),
        ({"task": "causal-lm"}, "--task causal-lm is for models"),
        ({"dims": {"Q": 3}}, "no --input has it"),
        ({"dims": {"B": 3}}, "B is --batch"),
        ({"dims": ["Q"]}, "has no value"),
        ({"loss": "cros_entropy"}, "Did you mean 'cross_entropy'"),
        ({"loss": "mse"}, "one target"),
        ({"model_args": {"a": 1}}, "built already"),
        ({"step_fn": 3}, "step_fn is a int"),
        ({"step_fn": lambda model: None}, "cannot be called as a step"),
        ({"step_fn": lambda model, batch: None}, "returned nothing"),
        ({"step_fn": lambda model, batch: model(batch["input"])}, "shape"),
        ({"step_fn": lambda m, b: 0, "loss": "mse"}, "leave --loss out"),
        ({"step_fn": "nowhere_at_all:step"}, "no module nowhere_at_all"),
        ({"inputs": 3}, "inputs is a int"),
        ({"inputs": {"x": object()}}, "not a tensor"),
        ({"inputs": lambda batch: 1 / 0}, "ZeroDivisionError at .*test_own_modules.py"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(MemestError, match=words):
        price(nn.Linear(8, 8), **{"inputs": "input:float32[B,8]", **options})


def test_a_shape_that_does_not_go_with_a_layer_is_told_with_the_layer():
    """Beside what it was fed; a model by name is told that it needs no inputs at all."""
    with pytest.raises(TraceError, match="Invalid channel") as caught:
        memest.estimate(ConvNet(), inputs={"x": "float32[B,4,16,16]"}, loss="mean", batch=2)
    assert "in module conv (Conv2d(3, 8, " in str(caught.value)
    assert "which was fed [2, 4, 16, 16])" in str(caught.value)
    with pytest.raises(TraceError, match="modules of your own: memest knows what GPT2LMHeadModel"):
        memest.estimate("gpt2?n_layer=1", inputs={"x": "float32[B,4]"}, batch=2)


def everything_of(model):
    return {
        "tensors": [
            (n, t.device.type, t.dtype, t.requires_grad, t.data_ptr(), t._version)
            for n, t in (*model.named_parameters(), *model.named_buffers())
        ],
        "values": copy.deepcopy(model.state_dict()),
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [(dict(m._forward_hooks), dict(m._backward_hooks)) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
    }


@pytest.mark.slow("False")
@pytest.mark.parametrize("trainable", [True, False])
def test_nothing_of_the_module_changes_nor_of_the_process(trainable):
    numpy = pytest.importorskip("numpy")
    model = ConvNet()
    model.conv.weight.requires_grad_(trainable)
    model.norm.eval()
    model.head.register_forward_hook(lambda module, args, out: None)
    model.head(torch.zeros(1, 8)).sum().backward()
    before = everything_of(model)
    generators = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].copy()

    price(model, inputs=IMAGES, dims={"H": 16}, loss="cross_entropy")
    memest.max_batch(model, inputs=IMAGES, dims={"H": 16}, loss="cross_entropy", gpu="t4",
                     gpu_memory="1GiB", loop="plain")  # fmt: skip

    after = everything_of(model)
    for name in ("tensors", "modes", "hooks", "attributes"):
        assert before[name] == after[name], name
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name])
    for old, new in zip(before["grads"], after["grads"], strict=True):
        assert (old is None) == (new is None)
        assert old is None or torch.equal(old, new)
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])
    assert (numpy.random.get_state()[1] == generators[2]).all()


def test_weights_are_not_copied():
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 8))
    copied = []
    original = torch.Tensor.__deepcopy__

    def deepcopy(tensor, memo):
        copied.append(tensor.numel())
        return original(tensor, memo)

    torch.Tensor.__deepcopy__ = deepcopy
    try:
        price(model, inputs="input:int64[B,4]")
    finally:
        torch.Tensor.__deepcopy__ = original
    assert copied == []


class TestDataDependence:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            return y[y > 0].sum()

    class Waits(Picks):
        def forward(self, x):
            y = self.layer(x)
            while y.sum().item() < 10:
                y = y * 2
            return y.sum()

    class Asks(Picks):
        def forward(self, x):
            y = self.layer(x)
            return y.sum() * (2 if y.mean().item() > 3 else 1)

    @pytest.mark.slow("Waits")
    @pytest.mark.parametrize("kind", [Picks, Waits])
    def test_what_no_trace_can_know_names_the_line(self, kind):
        with pytest.raises(TraceError, match=r"test_own_modules\.py:\d+, in forward") as error:
            price(kind(), inputs="x:float32[B,8]")
        assert "which no trace can know" in " ".join(str(error.value).split())

    def test_a_value_that_was_guessed_is_said_with_its_line(self):
        notes = price(self.Asks(), inputs="x:float32[B,8]").notes

        assert any("test_own_modules.py" in n and "taken as 1" in n for n in notes)

    def test_a_mask_in_a_buffer_is_known(self):
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)
                self.register_buffer("keep", torch.arange(8) < 3)

            def forward(self, x):
                return self.layer(x)[:, self.keep].sum()

        assert price(Masked(), inputs="x:float32[B,8]").model.parameters == 72

    def test_an_error_of_the_model_names_its_line(self):
        class Wrong(self.Picks):
            def forward(self, x):
                return self.layer(x.T).sum()

        with pytest.raises(TraceError, match=r"test_own_modules\.py:\d+, in forward"):
            price(Wrong(), inputs="x:float32[B,8]", batch=4)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 2)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].sign()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_custom_functions_recurrence_and_recomputation(checkpointed):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 16, batch_first=True)
            self.out = nn.Linear(16, 4)

        def block(self, x):
            x = x + torch.zeros(1, device="cuda")
            return Doubled.apply(self.out(x))

        def forward(self, x):
            x = self.rnn(x)[0]
            if checkpointed:
                x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
            else:
                x = self.block(x)
            return x.sum()

    result = price(Net(), inputs="x:float32[B,5,8]")

    assert result.model.parameters == sum(p.numel() for p in Net().parameters())
    assert any("cuDNN" in said for said in result.notes)


class TestSteps:
    def test_a_step_is_forward_and_loss(self):
        def step(model, batch):
            return F.cross_entropy(model(batch["x"]), batch["y"])

        options = {"inputs": IMAGES, "dims": {"H": 32}, "batch": 16}
        usual = price(ConvNet(), loss="cross_entropy", **options)
        stepped = price(ConvNet(), step_fn=step, **options)

        # outputs die with the step's locals; in the loop of a script they live on
        assert stepped.peak.reserved_bytes == usual.peak.reserved_bytes
        assert stepped.model == usual.model
        assert stepped.peak.allocated_bytes <= usual.peak.allocated_bytes

    def test_a_step_that_does_everything_is_the_plain_loop_written_out(self):
        class Step:
            def optimizers(self, model):
                return torch.optim.AdamW(model.parameters(), weight_decay=0.0)

            def __call__(self, model, batch, optimizer):
                loss = model(batch["x"], batch["y"])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        class Wide(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256))

            def forward(self, x, y):
                return F.mse_loss(self.net(x), y)

        inputs = ("x:float32[B,256]", "y:float32[B,256]")
        own = price(Wide(), inputs=inputs, step_fn=Step(), batch=512)
        loop = price(Wide(), inputs=inputs, optim="adamw_torch", batch=512)

        def of(result, category):
            return sum(r.bytes for r in result.breakdown if r.category is category)

        assert own.peak.allocated_bytes == loop.peak.allocated_bytes
        for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES):
            assert of(own, category) == of(loop, category) > 0
        assert any("AdamW" in note for note in own.notes)

    @pytest.mark.slow
    def test_two_networks_and_two_optimizers(self):
        class Gan:
            def optimizers(self, models):
                return {n: torch.optim.Adam(models[n].parameters()) for n in ("make", "judge")}

            def __call__(self, models, batch, optimizers):
                fake = models.make(torch.randn(len(batch["x"]), 16, device="cuda"))
                for name, (sign, seen) in {"judge": (1, fake.detach()), "make": (-1, fake)}.items():
                    optimizers[name].zero_grad()
                    loss = F.softplus(sign * models.judge(seen)).mean()
                    loss.backward()
                    optimizers[name].step()

        models = {
            "make": nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)),
            "judge": nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)),
        }
        result = price(models, inputs="x:float32[B,32]", step_fn=Gan())
        states = [r.bytes for r in result.breakdown if r.category is Category.OPTIMIZER_STATES]
        tensors = sum(len(list(m.parameters())) for m in models.values())

        assert sum(states) == 2 * result.model.parameter_bytes  # steps are counted on the host
        assert tensors == 8
        with pytest.raises(ConfigError, match="written in the step"):
            price(models, inputs="x:float32[B,32]", step_fn=Gan(), optim="sgd")
        answer = memest.max_batch(models, inputs="x:float32[B,32]", step_fn=Gan(),
                                  gpu="t4", gpu_memory="700MiB")  # fmt: skip
        assert answer.largest > 8

    def test_frozen_parts_of_several_models_neither_train_nor_change_their_mode(self):
        models = {"vae": nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Dropout()).eval(),
                  "text": nn.Embedding(100, 16), "unet": nn.Conv2d(4, 4, 3, padding=1)}  # fmt: skip
        for name in ("vae", "text"):
            models[name].requires_grad_(False)
        modes = []

        def step(m, batch):
            modes.append((m.vae.training, m.unet.training))
            with torch.no_grad():
                latents = m.vae(batch["pixels"]).mul_(0.18)
                text = m.text(batch["ids"]).mean((1, 2))
            noise = torch.randn_like(latents)
            noisy = latents + noise * torch.rand(len(noise), 1, 1, 1, device="cuda")
            return F.mse_loss(m.unet(noisy) + text[:, None, None, None], noise)

        result = price(models, inputs=("pixels:float32[B,3,H,H]", "ids:int64[B,S]"),
                       dims={"H": 64}, seq_len=7, step_fn=step)  # fmt: skip

        assert result.model.trainable_parameters == 4 * 4 * 9 + 4
        assert set(modes) == {(False, True)}


FILES = {
    "nets.py": """
        import torch
        class Net(torch.nn.Module):
            def __init__(self, width, depth=1):
                super().__init__()
                layers = [torch.nn.Linear(width, width) for _ in range(depth)]
                self.layers = torch.nn.Sequential(*layers)
                self.to("cuda")
            def forward(self, x):
                return self.layers(x)
        def build(width=64, depth=1):
            return Net(width, depth)
        instance = Net.__new__(Net); torch.nn.Module.__init__(instance)
        instance.layers = torch.nn.Linear(8, 8)
        def fails():
            return torch.zeros(2) @ torch.zeros(3, 3)
        def step(model, batch):
            return (model(batch["x"]) - batch["x"]).pow(2).mean()
    """,
    "broken.py": "import no_such_package_at_all\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    import textwrap

    for name, text in FILES.items():
        (tmp_path / f"memest_own_{name}").write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("memest_own_")]:
        del sys.modules[name]


class TestFactories:
    def ask(self, name, **options):
        options = {"inputs": "x:float32[B,W]", "dims": {"W": 64}, "loss": "mean", **options}
        return price(f"memest_own_nets:{name}", **options)

    def test_functions_classes_and_instances_of_the_current_directory(self, folder):
        assert str(folder) not in sys.path
        built = self.ask("build", model_args=["depth=3"])
        kind = self.ask("Net", model_args={"width": 64, "depth": 3})

        assert built.peak == kind.peak
        assert built.model.parameters == 3 * (64 * 64 + 64)
        assert self.ask("instance", dims={"W": 8}).model.parameters == 72
        assert sys.modules["memest_own_nets"].instance.layers.weight.device.type == "cpu"

    @pytest.mark.parametrize(
        ("name", "options", "error", "words"),
        [
            ("buidl", {}, ModelLoadError, "Did you mean build"),
            ("Net", {}, ConfigError, "--model-arg width=VALUE"),
            ("build", {"model_args": ["dept=3"]}, ConfigError, "Did you mean 'depth'"),
            ("instance", {"model_args": ["a=3"]}, ConfigError, "is there already"),
            ("fails", {}, ModelLoadError, r"RuntimeError.*memest_own_nets.py:\d+, in fails"),
        ],
    )
    def test_errors_are_shown_as_theirs(self, folder, name, options, error, words):
        with pytest.raises(error, match=words):
            self.ask(name, **options)

    def test_an_import_that_fails_inside_is_theirs(self, folder):
        with pytest.raises(ModelLoadError, match=r"memest_own_broken.py:1.*no_such_package"):
            price("memest_own_broken:x", inputs="x:float32[B,8]")

    def test_nothing_big_is_allocated(self, folder):
        huge = self.ask("build", model_args={"width": 100_000}, dims={"W": 100_000})

        assert huge.model.parameter_bytes > 40_000_000_000

    @pytest.mark.slow
    def test_the_command_line_asks_the_same(self, folder):
        words = ["estimate", "memest_own_nets:build", "--input", "x:float32[B,W]", "--dim", "W=64",
                 "--step", "memest_own_nets:step", "--model-arg", "depth=2", "--loop", "plain",
                 "--batch", "16", "--json"]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "memest", *words], capture_output=True, text=True, cwd=folder
        )
        import json

        assert done.returncode == 0, done.stderr
        asked = json.loads(done.stdout)
        own = self.ask("build", step_fn="memest_own_nets:step", loss=None, batch=16,
                       model_args={"depth": 2})  # fmt: skip
        assert asked["model"]["parameters"] == own.model.parameters
        # no GPU was named on the command line; what tensors ask for is the same on all
        rows = {row["category"]: row["bytes"] for row in asked["breakdown"]}
        assert rows["parameters"] == own.model.parameter_bytes


def test_searches_take_them_too():
    options = {"inputs": IMAGES, "dims": {"H": 16}, "loss": "cross_entropy", "loop": "plain"}
    swept = memest.sweep(ConvNet(), {"batch": [2, 8, 32]}, gpu="t4", **options)
    compared = memest.compare(ConvNet(), ["optim=sgd"], gpu="t4", max_batch=False, **options)
    fits = price(ConvNet(), inputs=IMAGES, dims={"H": 16}, loss="cross_entropy", batch=32)

    assert not swept.failures
    assert swept.points[2].peak == fits.peak
    assert compared is not None


def test_words_travel_to_other_processes_and_tensors_do_not():
    assert module_inputs_of(["x:float32[B]"], "mse", None, ["H=2"], ["d=1"]).travels
    assert not module_inputs_of({"x": torch.zeros(1)}).travels
    assert not module_inputs_of(loss=lambda o, b: o).travels
