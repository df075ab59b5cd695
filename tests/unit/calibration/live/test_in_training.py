"""memest inside training runs: real Trainers and loops; the GPU's counters alone are made up."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import memest
from memest.calibration.live import MemestCallback, counters
from memest.calibration.live.attribution import MeasuredPeak, attribute
from memest.calibration.measurement import Status
from memest.calibration.store import MeasurementStore
from memest.errors import ConfigError, DoesNotFitError, MemestError
from memest.report.result import Peak
from memest.units import MIB
from support.nvml import FakeNvml, make_board

WORDS = 97


def tiny(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=64, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Rows(torch.utils.data.Dataset):
    """Samples of different lengths: the collator pads them."""

    def __init__(self, count=24):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        ids = [1 + (index * 7 + i) % (WORDS - 1) for i in range(8 + index % 5)]
        return {"input_ids": ids, "labels": list(ids)}


def collate(samples):
    longest = max(len(s["input_ids"]) for s in samples)
    out = {name: torch.tensor([s[name] + [fill] * (longest - len(s[name])) for s in samples])
           for name, fill in (("input_ids", 0), ("labels", -100))}  # fmt: skip
    return out | {"attention_mask": (out["input_ids"] != 0).long()}


class Spy(transformers.TrainerCallback):
    """Stands for wandb and the others: keeps what is logged."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def trainer_of(tmp_path, callback=None, model=None, dataset=None, **options):
    spy = Spy()
    options = {"max_steps": 4, "per_device_train_batch_size": 3, "report_to": [],
               "use_cpu": True, "logging_steps": 2, "disable_tqdm": True, **options}  # fmt: skip
    args = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), **options)
    trainer = transformers.Trainer(
        model=model or tiny(), args=args, train_dataset=dataset or Rows(), data_collator=collate,
        callbacks=[spy] + ([callback] if callback is not None else []),
    )  # fmt: skip
    return trainer, spy


@pytest.fixture
def store(tmp_path):
    return tmp_path / "kept" / "store.db"


@pytest.fixture
def card(monkeypatch):
    """A T4 whose counters say what they are told: nothing else of torch changes."""
    state = SimpleNamespace(allocated=200 * MIB, reserved=260 * MIB, ooms=0, used=700 * MIB,
                            resets=0, grows=0)  # fmt: skip

    def stats():
        names = {"requested": state.allocated - 512, "allocated": state.allocated,
                 "active": state.allocated, "reserved": state.reserved}  # fmt: skip
        return {f"{n}_bytes.all.peak": v for n, v in names.items()} | {
            "num_alloc_retries": 0, "num_ooms": state.ooms,
        }  # fmt: skip

    def reset():
        state.resets += 1

    properties = SimpleNamespace(
        name="Tesla T4", total_memory=15_828_320_256, major=7, minor=5, uuid="GPU-1",
        multi_processor_count=40, max_threads_per_multi_processor=1024,
    )  # fmt: skip
    total = properties.total_memory
    fakes = {
        "is_initialized": lambda: False, "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties, "memory_stats": lambda *_: stats(),
        "memory_allocated": lambda *_: state.allocated // 2,
        "memory_reserved": lambda *_: state.reserved,
        "max_memory_reserved": lambda *_: state.reserved, "reset_peak_memory_stats": reset,
        "mem_get_info": lambda *_: (total - state.used, total),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    nvml = FakeNvml(
        make_board("GPU-1", used=state.used, processes=[(os.getpid(), state.used)], name="Tesla T4",
              total=16_106_127_360, capability=(7, 5))
    )  # fmt: skip
    monkeypatch.setattr(counters, "open_counters", lambda: counters.CudaCounters(nvml))
    return state


class TestAttribution:
    @pytest.mark.parametrize("seed", range(50))
    def test_the_parts_add_up_to_the_difference_of_the_device(self, seed):
        rng = random.Random(seed)
        a, b = (sorted(rng.randrange(1 << 40) for _ in range(3)) for _ in range(2))
        predicted = Peak(allocated_bytes=a[0], reserved_bytes=a[1], device_bytes=a[2])
        found = attribute(
            predicted, MeasuredPeak(allocated_bytes=b[0], reserved_bytes=b[1], device_bytes=b[2])
        )

        assert found.complete
        assert sum(part.difference_bytes for part in found.parts) == b[2] - a[2]
        assert found.difference_bytes == b[2] - a[2]

    def test_what_was_not_read_stays_unknown(self):
        peak = Peak(allocated_bytes=10, reserved_bytes=20, device_bytes=50)
        found = attribute(peak, MeasuredPeak(allocated_bytes=11, reserved_bytes=24))

        assert [p.difference_bytes for p in found.parts] == [1, 3, None]
        assert (found.complete, found.difference_bytes) == (False, 4)
        assert "process unknown" in str(found)


class TestHistory:
    @pytest.fixture
    def simulated(self, monkeypatch):
        """Histories of the predicted run itself, with one more allocation."""
        from memest.calibration.recording import history
        from support.simulated_run import RealRun, record

        def of(stream, change=lambda run: run):
            recording = record(change(RealRun(stream)))
            return history.history_of(
                recording.content, marks=recording.marks, begin=recording.begin,
                end=recording.end,
            )  # fmt: skip

        return of

    def stream(self):
        found = memest.profile(
            torch.nn.Linear(512, 512), inputs="input:float32[B,512]", loss="mean", loop="plain"
        )
        return found.run(gpu="t4").stream

    @pytest.mark.parametrize("difference", [0, -12_345, 5_000_000])
    def test_the_categories_add_up(self, simulated, difference):
        from memest.calibration.live.attribution import REST, difference_by_category

        stream = self.stream()
        found = difference_by_category(simulated(stream), stream, difference)

        assert sum(found.values()) == difference
        assert set(found) <= {REST}

    def test_what_differs_is_named(self, simulated):
        from memest.calibration.live.attribution import NOT_PREDICTED, difference_by_category
        from memest.events import CATEGORY_ORDER, Category

        stream = self.stream()
        states = [n for n in range(len(stream.sizes))
                  if CATEGORY_ORDER[stream.categories[n]] is Category.OPTIMIZER_STATES
                  and stream.sizes[n] == 512 * 512 * 4]  # fmt: skip
        less = difference_by_category(
            simulated(stream, lambda run: run.drop(states[0])), stream, -512 * 512 * 4
        )
        more = difference_by_category(
            simulated(stream, lambda run: run.insert(states[0], 8 << 20, life=len(stream.events))),
            stream, 8 << 20,
        )  # fmt: skip

        assert less["optimizer states"] == -512 * 512 * 4
        assert more[NOT_PREDICTED] == 8 << 20

    def test_a_run_asks_for_it_and_stops_it_after_three_steps(self, card, monkeypatch, simulated):
        from memest.calibration.recording import history

        calls, kept = [], {}
        monkeypatch.setattr(history, "start_history", lambda n: calls.append("start"))

        def take(device):
            calls.append(("take", run.num_steps))
            return kept["history"]

        monkeypatch.setattr(history, "take_history", take)
        kept["history"] = simulated(self.stream())
        model = torch.nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(model.parameters())
        with memest.measure(model, optimizer, inputs="input:float32[B,512]", loss="mean",
                            gpu="t4", store=False, history=True) as run:  # fmt: skip
            for _ in range(5):
                model(torch.zeros(8, 512)).mean().backward()
                optimizer.step()

        assert calls == ["start", ("take", 3)]
        assert sum(run.by_category.values()) == run.attribution.parts[0].difference_bytes


class TestCallback:
    @pytest.mark.slow
    def test_the_prediction_is_logged_before_the_first_step(self, tmp_path, store, caplog):
        callback = MemestCallback(gpu="t4", store=store)
        trainer, spy = trainer_of(tmp_path, callback)
        trainer.train()

        step, first = spy.logs[0]
        peak = callback.prediction.peak
        assert step == 0
        assert first["memest/predicted_reserved_bytes"] == peak.reserved_bytes
        assert first["memest/predicted_allocated_bytes"] == peak.allocated_bytes
        assert first["memest/predicted_device_bytes"] == peak.device_bytes
        assert callback.measured == MeasuredPeak()
        assert "nothing to measure" in caplog.text
        assert not store.exists()

    @pytest.mark.slow
    def test_the_setup_is_that_of_the_real_run(self, tmp_path):
        callback = MemestCallback(store=False)
        trainer, _ = trainer_of(
            tmp_path, callback, bf16=True, gradient_accumulation_steps=2, optim="sgd",
            max_grad_norm=0.5, gradient_checkpointing=True, weight_decay=0.01,
        )  # fmt: skip
        seen = []
        original = trainer.training_step
        trainer.training_step = lambda model, inputs, *a: (
            seen.append(inputs["input_ids"].shape), original(model, inputs, *a)
        )[1]  # fmt: skip
        trainer.train()
        setup = callback.prediction.setup

        assert (setup.precision, setup.grad_accum, setup.optim) == ("bf16", 2, "sgd")
        assert (setup.max_grad_norm, setup.checkpointing) == (0.5, "full")
        assert (setup.loop, setup.batch) == ("trainer", seen[0][0])

    @pytest.mark.slow
    def test_the_first_batch_that_is_looked_at_is_the_first_that_trains(self, tmp_path):
        from memest.calibration.live import arguments

        looked, trained, draws = [], [], []
        original = arguments.first_batch

        def look(loader):
            before = torch.get_rng_state()
            looked.append(original(loader))
            draws.append(torch.equal(before, torch.get_rng_state()))
            return looked[-1]

        callback = MemestCallback(store=False)
        module = sys.modules["memest.calibration.live.trainer"]
        trainer, _ = trainer_of(tmp_path, callback, seed=3)
        step = trainer.training_step
        trainer.training_step = lambda m, i, *a: (trained.append(i["input_ids"]), step(m, i, *a))[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "first_batch", look)
            trainer.train()

        assert torch.equal(looked[0]["input_ids"], trained[0])
        assert draws == [True]

    @pytest.mark.slow
    def test_training_is_the_same_with_and_without(self, tmp_path):
        losses = []
        for callback in (None, MemestCallback(store=False)):
            trainer, spy = trainer_of(tmp_path, callback, seed=5)
            trainer.train()
            losses.append([logs["loss"] for _, logs in spy.logs if "loss" in logs])

        assert losses[0] == losses[1] != []

    @pytest.mark.slow
    def test_the_answer_is_that_of_the_model_by_its_arguments(self, tmp_path):
        rows = [Rows()[0]] * 12
        callback = MemestCallback(store=False)
        trainer, _ = trainer_of(tmp_path, callback, dataset=rows)
        trainer.train()
        batch = collate(rows[:3])
        own = memest.estimate(tiny(), inputs=batch, loop="trainer", optim=trainer.args.optim.value,
                              weight_decay=0.0, max_grad_norm=1.0)  # fmt: skip

        assert callback.prediction.peak == own.peak
        bf16 = MemestCallback(store=False)
        trainer, _ = trainer_of(tmp_path, bf16, dataset=rows, bf16=True)
        trainer.train()  # accelerate has wrapped the forward by the time it is predicted
        own = memest.estimate(tiny(), inputs=batch, loop="trainer", optim=trainer.args.optim.value,
                              weight_decay=0.0, max_grad_norm=1.0, bf16=True)  # fmt: skip
        assert bf16.prediction.peak == own.peak

    @pytest.mark.slow
    def test_measured_peaks_beside_it_and_a_record(self, tmp_path, store, card):
        callback = MemestCallback(store=store)
        trainer, spy = trainer_of(tmp_path, callback)
        trainer.train()
        logs = dict(itertools.chain.from_iterable(values.items() for _, values in spy.logs))
        predicted = callback.prediction.peak

        assert logs["memest/measured_allocated_bytes"] == 200 * MIB
        assert logs["memest/measured_reserved_bytes"] == 260 * MIB
        assert logs["memest/measured_device_bytes"] == 700 * MIB
        parts = [
            logs[f"memest/difference_{n}_bytes"] for n in ("tensors", "fragmentation", "process")
        ]
        assert sum(parts) == 700 * MIB - predicted.device_bytes
        assert callback.prediction.gpu.name.startswith("Tesla T4")
        assert card.resets == 1
        with MeasurementStore(store) as kept:
            (found,) = kept.measurements()
        assert found.status is Status.OK
        assert (found.reserved_bytes, found.device_bytes) == (260 * MIB, 700 * MIB)
        assert found.environment.gpu == "Tesla T4"
        assert any(str(predicted.reserved_bytes) in remark for remark in found.remarks)

    @pytest.mark.slow
    def test_the_store_lists_it_and_a_fit_can_predict_it(self, tmp_path, store, card):
        callback = MemestCallback(store=store, seq_len=16)
        trainer, _ = trainer_of(tmp_path, callback)
        trainer.train()
        shown = subprocess.run(
            [sys.executable, "-m", "memest", "calibrate", "show", "--store", str(store), "--json"],
            capture_output=True, text=True,
        )  # fmt: skip
        document = json.loads(shown.stdout)["measurements"][0]
        from memest.calibration.fitting.prediction import pair

        with MeasurementStore(store) as kept:
            paired = pair(kept.measurements()[0])
        assert document["case"]["setup"]["batch"] == 3
        assert paired.failure == ""
        assert paired.prediction.allocated_bytes == callback.prediction.peak.allocated_bytes

    @pytest.mark.slow
    def test_new_peaks_are_logged_and_old_ones_are_not_again(self, tmp_path, card):
        class Grows(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 4:
                    card.allocated, card.reserved = 300 * MIB, 400 * MIB

        callback = MemestCallback(store=False)
        trainer, spy = trainer_of(tmp_path, callback, max_steps=7)
        trainer.add_callback(Grows())
        trainer.train()
        steps = [s for s, logs in spy.logs if "memest/measured_reserved_bytes" in logs]

        assert steps == [3, 5]
        assert callback.measured.reserved_bytes == 400 * MIB

    @pytest.mark.slow
    def test_tensors_that_a_loop_keeps_are_told_and_named(self, tmp_path, card, caplog):
        class Keeps(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                card.allocated += 2 * 512

        callback = MemestCallback(store=False)
        trainer, spy = trainer_of(tmp_path, callback, max_steps=12, logging_steps=3)
        trainer.add_callback(Keeps())
        with caplog.at_level(logging.WARNING, logger="memest"):
            trainer.train()
        logged = [(s, logs["memest/allocated_bytes"]) for s, logs in spy.logs
                  if "memest/allocated_bytes" in logs]  # fmt: skip
        (leak,) = [finding for finding in callback.growth.findings if finding.is_leak]

        assert (leak.cause, leak.step_bytes) == ("kept tensors", 512)
        assert logged == [(s, 100 * MIB + 512 * s) for s in (3, 6, 9, 12)]
        assert "memory grows (kept tensors)" in caplog.text
        assert callback.growth.expected.held_bytes > 0

    @pytest.mark.slow
    def test_predictions_of_an_evaluation_are_no_leak(self, tmp_path, card, caplog):
        class Gathers(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 3:
                    trainer.evaluate(Rows())

            def on_prediction_step(self, args, state, control, **kwargs):
                card.allocated += MIB

            def on_evaluate(self, args, state, control, **kwargs):
                card.allocated = 200 * MIB

        callback = MemestCallback(store=False)
        trainer, _ = trainer_of(tmp_path, callback, max_steps=6, per_device_eval_batch_size=2)
        trainer.add_callback(Gathers())
        with caplog.at_level(logging.WARNING, logger="memest"):
            trainer.train()

        assert [finding.cause for finding in callback.growth.findings] == ["evaluation"]
        assert "memory grows" not in caplog.text

    @pytest.mark.slow
    def test_strict_stops_before_the_first_step(self, tmp_path, card):
        trainer, _ = trainer_of(
            tmp_path, MemestCallback(gpu_memory="8MiB", strict=True, store=False)
        )

        with pytest.raises(DoesNotFitError, match=r"will not fit.*max_batch"):
            trainer.train()
        assert trainer.state.global_step == 0
        assert DoesNotFitError.exit_code == 4

    @pytest.mark.slow
    def test_otherwise_it_warns_and_trains(self, tmp_path, card, caplog):
        trainer, _ = trainer_of(tmp_path, MemestCallback(gpu_memory="8MiB", store=False))
        with caplog.at_level(logging.WARNING, logger="memest"):
            trainer.train()

        assert "will not fit" in caplog.text
        assert trainer.state.global_step == 4

    @pytest.mark.slow
    def test_strict_without_a_gpu_says_what_is_missing(self, tmp_path):
        trainer, _ = trainer_of(tmp_path, MemestCallback(strict=True, store=False))
        with pytest.raises(ConfigError, match="name one, gpu='rtx-4090'"):
            trainer.train()

    @pytest.mark.slow("True")
    @pytest.mark.parametrize("strict", [False, True])
    def test_a_prediction_that_fails_breaks_training_only_if_strict(self, tmp_path, strict, caplog):
        class Picks(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Embedding(WORDS, 4)

            def forward(self, input_ids, labels=None, attention_mask=None):
                out = self.layer(input_ids)
                return {"loss": out[out > 0].sum()}

        callback = MemestCallback(gpu="t4", strict=strict, store=False)
        trainer, _ = trainer_of(tmp_path, callback, model=Picks())
        if strict:
            with pytest.raises(MemestError, match="boolean indexing"):
                trainer.train()
            return
        trainer.train()
        assert trainer.state.global_step == 4
        assert "boolean indexing" in caplog.text
        assert "boolean indexing" in callback.problem

    @pytest.mark.slow
    def test_a_stream_is_not_touched_and_asks_for_the_shapes(self, tmp_path, caplog):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter([Rows()[i] for i in range(24)])

        trainer, _ = trainer_of(tmp_path, MemestCallback(store=False), dataset=Stream())
        trainer.train()
        assert "MemestCallback(seq_len=1024)" in caplog.text

    @pytest.mark.slow
    def test_peft_models_train_their_adapters(self, tmp_path):
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        callback = MemestCallback(store=False)
        trainer, _ = trainer_of(tmp_path, callback, model=model)
        trainer.train()

        assert callback.problem == ""
        assert callback.prediction.model.trainable_parameters == trainable

    @pytest.mark.slow
    def test_out_of_memory_is_a_record(self, tmp_path, store, card):
        callback = MemestCallback(store=store)
        trainer, _ = trainer_of(tmp_path, callback)
        original = trainer.training_step

        def fails(*args):
            if trainer.state.global_step == 2:
                card.ooms = 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return original(*args)

        trainer.training_step = fails
        with pytest.raises(torch.OutOfMemoryError):
            trainer.train()
        callback._at_exit()  # what the end of the process does

        with MeasurementStore(store) as kept:
            (found,) = kept.measurements()
        assert found.status is Status.OOM
        assert len(found.steps) == 2


def test_a_long_run_keeps_a_reading_of_every_part_of_it():
    from memest.calibration.live.curve import MemoryCurve

    counters = SimpleNamespace(now=lambda: (5, 7, 9))
    curve = MemoryCurve(counters)
    for step in range(10_001):
        curve.read(step)
    steps = [point.step for point in curve.points]

    assert steps[0] == 0
    assert 512 <= len(steps) <= 1024
    assert len({after - before for before, after in itertools.pairwise(steps)}) == 1
    assert steps[-1] > 9_900
    assert curve.logs()["memest/allocated_bytes"] == 5
    assert curve.points[0].host_bytes > MIB


class TestMeasure:
    def loop(self, run_of, steps=3, fail=None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        with run_of(model, optimizer) as run:
            for number in range(steps):
                x = torch.randn(16, 8)
                loss = torch.nn.functional.mse_loss(model(x), torch.zeros(16, 1))
                loss.backward()
                if fail is not None and number == fail[0]:
                    raise fail[1]
                optimizer.step()
                optimizer.zero_grad()
        return run, model

    def test_shapes_of_the_first_call_are_priced_before_it_runs(self, card, store):
        run, model = self.loop(
            lambda m, o: memest.measure(m, o, loss="mean", store=store, gpu="t4")
        )
        usual = memest.estimate(model, inputs={"input": torch.empty(16, 8)}, loss="mean",
                                optim="adamw_torch", weight_decay=0.01, loop="plain", gpu="t4",
                                max_batch=False)  # fmt: skip

        assert run.num_steps == 3
        assert run.prediction.peak == usual.peak
        assert run.measured == MeasuredPeak(
            allocated_bytes=200 * MIB, reserved_bytes=260 * MIB, device_bytes=700 * MIB
        )
        assert run.attribution.difference_bytes == 700 * MIB - usual.peak.device_bytes
        assert run.record.status is Status.OK
        assert run.logs()["memest/measured_reserved_bytes"] == 260 * MIB
        assert not model._forward_pre_hooks

    @pytest.mark.parametrize(
        ("error", "status"),
        [
            (torch.OutOfMemoryError("CUDA out of memory."), Status.OOM),
            (ValueError("something else"), Status.FAILED),
            (KeyboardInterrupt(), Status.INTERRUPTED),
        ],
    )
    def test_a_body_that_raises_leaves_its_record(self, card, store, error, status):
        inputs = ("input:float32[B,8]",)
        with pytest.raises(type(error)):
            self.loop(lambda m, o: memest.measure(m, o, inputs=inputs, loss="mean", store=store),
                      fail=(1, error))  # fmt: skip
        with MeasurementStore(store) as kept:
            (found,) = kept.measurements()

        assert found.status is status
        assert found.failure.kind == type(error).__name__
        assert len(found.steps) == 1
        assert any(r.name == "oom" for r in found.readings) is (status is Status.OOM)

    def test_without_a_gpu_it_predicts_and_keeps_nothing(self, store, caplog):
        run, _ = self.loop(lambda m, o: memest.measure(m, o, loss="mean", store=store, gpu="t4"))

        assert run.prediction is not None
        assert run.record is None
        assert run.attribution is None
        assert "nothing to measure" in caplog.text
        assert not store.exists()

    def test_strict_stops_the_first_step(self, card):
        with pytest.raises(DoesNotFitError):
            self.loop(lambda m, o: memest.measure(m, o, loss="mean", gpu="t4", gpu_memory="8MiB",
                                                  strict=True, store=False))  # fmt: skip

    def test_an_unknown_optimizer_is_a_warning(self, caplog):
        class Own(torch.optim.AdamW):
            pass

        model = torch.nn.Linear(8, 1)
        optimizer = Own(model.parameters())
        with memest.measure(model, optimizer, inputs="input:float32[B,8]", store=False) as run:
            model(torch.zeros(8, 8)).sum().backward()
            optimizer.step()
        assert "name it with optim=" in run.problem
        assert "name it with optim=" in caplog.text
        assert run.num_steps == 1

    def test_an_autocast_region_around_the_call_is_seen_and_does_not_hold_for_the_trace(self):
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        with memest.measure(model, optimizer, loss="mean", store=False) as run:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.zeros(8, 8)).sum()
            loss.backward()
            optimizer.step()
        usual = memest.estimate(
            model, inputs={"input": torch.empty(8, 8)}, loss="mean", optim="sgd", bf16=True,
            loop="plain", weight_decay=0.0,
        )  # fmt: skip

        assert run.prediction.setup.precision == "bf16"
        assert run.prediction.peak == usual.peak

    @pytest.mark.slow
    def test_accelerate_s_loop(self):
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True)
        model = tiny()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        batch = collate([Rows()[0]] * 3)
        with memest.measure(model, optimizer, store=False) as run:
            for _ in range(2):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        assert run.problem == ""
        assert run.prediction.setup.loop == "accelerate"
        assert run.num_steps == 2


def test_importing_memest_loads_neither_torch_nor_transformers():
    code = """
import sys, memest, memest.calibration.live
print('torch' in sys.modules, 'transformers' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]
