"""Host memory as the libraries take it: each case in a process of its own, against the rules.

Measured is what the process itself has (``RssAnon``), sampled while it works, and for all pages,
those of mapped files among them, the high-water mark of the kernel. A few MiB of a library's own
and of the heap's ends are nobody's rule: hence the tolerance.
"""

import json
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("transformers")

from memest.config.options import setup_from_options
from memest.estimation.checkpoint_rules import largest_file, resuming, saving
from memest.estimation.host_facts import HostFacts, HostRule, WeightFacts
from memest.estimation.host_rules import loading
from memest.units import MIB

TOLERANCE = 0.05
OWN_BYTES = 24 * MIB

METER = """
import gc, json, re, sys, threading, time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

torch.set_num_threads(1)
FOLDER = sys.argv[1]
NAMES = "VmHWM|VmRSS|RssAnon|RssFile"


def read():
    with open("/proc/self/status") as file:
        return {k: int(v) * 1024 for k, v in re.findall(rf"({NAMES}):\\s+(\\d+)", file.read())}


class Measured:
    def __enter__(self):
        gc.collect()
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the high-water mark begins anew
            self.has_mark = True
        except OSError:
            self.has_mark = False
        self.before, self.own, self.stopped = read(), 0, False
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        while not self.stopped:
            self.own = max(self.own, read()["RssAnon"] - self.before["RssAnon"])
            time.sleep(0.001)

    def __exit__(self, *_):
        self.stopped = True
        self.thread.join()
        mark = read()["VmHWM"] - self.before["VmRSS"]
        self.all = mark if self.has_mark else None


def say(measured, **more):
    print(json.dumps({"own": measured.own, "all": measured.all, **more}))


def weights(model):
    return [
        {"name": n, "elements": p.numel(), "kept_bytes": p.nbytes}
        for n, p in model.named_parameters()
    ]
"""
MAKE = """
config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
                     num_attention_heads=8, num_key_value_heads=8, vocab_size=16000)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(FOLDER)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of 169 MiB in bfloat16."""
    path = tmp_path_factory.mktemp("checkpoint")
    measure(MAKE, path)
    return path


def measure(code, *arguments):
    """What the last line of a script says that runs in a process of its own."""
    script = f"{METER}\n{textwrap.dedent(code)}"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None


def facts_of(said, file_item=2, loaded_item=2, **more):
    rows = tuple(
        WeightFacts(
            name=row["name"],
            elements=row["elements"],
            file_bytes=row["elements"] * file_item,
            loaded_bytes=row["elements"] * loaded_item,
            kept_bytes=row["kept_bytes"],
            trains=True,
        )
        for row in said["weights"]
    )
    whole = sum(row.kept_bytes for row in rows)
    values = {"weight_bytes": whole, "state_bytes": 0, "largest_state": 0, "whole_states": 0}
    return HostFacts(weights=rows, gradient_bytes=0, **{**values, **more})


def process_bytes(rule):
    """What a rule says of the first process."""
    assert isinstance(rule, HostRule)
    return max(sum(part.nbytes for part in moment) for moment in rule.moments)


def agrees(measured, predicted):
    return abs(measured - predicted) <= TOLERANCE * predicted + OWN_BYTES


def test_weights_that_keep_their_dtype_are_views_of_the_mapped_file(folder):
    said = measure(
        """
        AutoModelForCausalLM.from_pretrained(FOLDER)  # modules that load with the first model
        with Measured() as measured:
            model = AutoModelForCausalLM.from_pretrained(FOLDER)
            total = sum(parameter.sum().item() for parameter in model.parameters())
        say(measured, weights=weights(model))
        """,
        folder,
    )
    rule = loading(setup_from_options(), facts_of(said))

    assert process_bytes(rule) == 0
    assert said["own"] <= OWN_BYTES
    if said["all"] is not None:
        assert agrees(said["all"], rule.mapped)


@pytest.mark.slow
def test_weights_of_another_dtype_are_copies(folder):
    said = measure(
        """
        AutoModelForCausalLM.from_pretrained(FOLDER)  # modules that load with the first model
        with Measured() as measured:
            model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        say(measured, weights=weights(model))
        """,
        folder,
    )
    facts = facts_of(said, loaded_item=4)
    rule = loading(setup_from_options(dtype="float32"), facts)

    assert process_bytes(rule) == facts.whole_weights
    assert agrees(said["own"], process_bytes(rule))


@pytest.mark.slow
@pytest.mark.parametrize("limit_mib", [50_000, 60])
def test_saving_has_all_tensors_of_a_file_on_the_host(folder, tmp_path, limit_mib):
    said = measure(
        f"""
        import safetensors.torch

        model = AutoModelForCausalLM.from_pretrained(FOLDER)
        plain = safetensors.torch._to_ndarray
        # what .to("cpu") does to a tensor of a GPU
        safetensors.torch._to_ndarray = lambda tensor: plain(tensor.clone())
        with Measured() as measured:
            model.save_pretrained(sys.argv[2], max_shard_size={limit_mib * MIB})
        say(measured, weights=weights(model))
        """,
        folder,
        tmp_path,
    )
    facts = facts_of(said)
    predicted = largest_file((w.kept_bytes for w in facts.weights), limit_mib * MIB)

    assert agrees(said["own"], predicted)
    if limit_mib > 1000:
        assert process_bytes(saving(setup_from_options(), facts)) == predicted


OPTIMIZER = """
model = AutoModelForCausalLM.from_pretrained(FOLDER)
file = f"{sys.argv[2]}/optimizer.pt"
optimizer = torch.optim.AdamW(model.parameters())
"""


@pytest.mark.slow
def test_states_are_saved_where_they_lie_and_read_whole(folder, tmp_path):
    written = measure(
        OPTIMIZER
        + """
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
optimizer.step()
optimizer.zero_grad()
states = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
with Measured() as measured:
    torch.save(optimizer.state_dict(), file)
say(measured, weights=weights(model), states=states)
""",
        folder,
        tmp_path,
    )
    read = measure(
        OPTIMIZER
        + """
with Measured() as measured:
    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
say(measured)
""",
        folder,
        tmp_path,
    )
    rule = resuming(setup_from_options(), facts_of(written, state_bytes=written["states"]))

    assert written["own"] <= OWN_BYTES  # on a CPU nothing is copied
    assert process_bytes(rule) == written["states"]
    assert agrees(read["own"], process_bytes(rule))


@pytest.mark.slow
def test_a_checkpoint_is_read_as_views_of_the_mapped_file(folder):
    said = measure(
        """
        import safetensors.torch

        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        with Measured() as measured:
            state = safetensors.torch.load_file(f"{FOLDER}/model.safetensors", device="cpu")
            model.load_state_dict(state, False)
        say(measured, weights=weights(model))
        """,
        folder,
    )
    assert said["own"] <= OWN_BYTES


@pytest.mark.slow
def test_optimizers_of_bitsandbytes_copy_what_they_are_given():
    pytest.importorskip("bitsandbytes")
    said = measure(
        """
        import bitsandbytes

        parameter = torch.nn.Parameter(torch.zeros(16, 1024))
        optimizer = bitsandbytes.optim.AdamW8bit([parameter])
        with Measured() as measured:
            state = {name: torch.ones(64 << 20, dtype=torch.uint8) for name in ("state1", "state2")}
            group = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": {0: state}, "param_groups": group})
        say(measured, weights=[])
        """,
        "",
    )
    rule = resuming(
        setup_from_options(optim="adamw_8bit"), facts_of(said, state_bytes=2 * 64 * MIB)
    )

    assert agrees(said["own"], process_bytes(rule))


@pytest.mark.slow
def test_a_full_checkpoint_of_fsdp2_is_whole_on_the_first_process_alone(tmp_path):
    said = measure(
        """
        import os

        import torch.distributed as dist
        import torch.multiprocessing as processes
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.fsdp import fully_shard


        def work(rank, results, rendezvous):
            dist.init_process_group(
                "gloo", rank=rank, world_size=2, init_method=f"file://{rendezvous}"
            )
            mesh = dist.init_device_mesh("cpu", (2,))
            layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(32)]
            model = torch.nn.Sequential(*layers)
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            options = StateDictOptions(
                full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True
            )
            with Measured() as measured:
                state = get_model_state_dict(model, options=options)
            results[rank] = measured.own
            dist.barrier()


        context = processes.get_context("fork")
        results = context.Array("q", [0, 0])
        arguments = (results, f"{FOLDER}/rendezvous")
        workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(json.dumps({"own": list(results), "all": None}))
        """,
        tmp_path,
    )
    weight = 1024 * 1024 * 4
    weights = [
        {"name": f"{i}.weight", "elements": 1024**2, "kept_bytes": weight} for i in range(32)
    ]
    facts = facts_of({"weights": weights}, shards=2)
    rule = saving(setup_from_options(fsdp="full_shard", num_gpus=2), facts)
    first, other = said["own"]

    assert process_bytes(rule) == 32 * weight
    assert agrees(first, 32 * weight)
    assert other < first / 2  # a few tensors at a time: what is gathered lies on the CPU here
