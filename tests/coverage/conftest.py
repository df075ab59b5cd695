"""What the coverage tests share: the coverage tool, and small models of every family."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from memest.hidden.call import GpuTraits
from memest.models.catalogue import catalogue
from memest.models.resolve import ModelSource
from memest.setup import Setup
from memest.trace.build import build_model
from memest.trace.inputs import plan_batch, realise
from memest.trace.losses import loss_for
from memest.trace.training import trace_training

A100 = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)


@pytest.fixture(scope="session")
def tool():
    path = Path(__file__).parents[2] / "tools" / "coverage.py"
    spec = importlib.util.spec_from_file_location("coverage_tool", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small(tool):
    """``small("bert-base-uncased")`` is the source of that model with two layers."""
    entries = {entry.id: entry for entry in catalogue()}

    def make(model_id, **changes):
        config = tool.reduced(entries[model_id].config()) | changes
        return ModelSource(kind="file", id=model_id, config=config, provenance="a test")

    return make


@pytest.fixture(scope="session")
def build(small):
    """Build a small model for a setup given by keywords."""

    def make(model_id, *, changes=None, **options):
        setup = Setup(**({"batch": 2} | options))
        return build_model(small(model_id, **(changes or {})), setup), setup

    return make


@pytest.fixture(scope="session")
def trace(build):
    """Trace a small model; returns the built model, the trace and the plans by name."""

    def make(model_id, *, gpu=A100, changes=None, **options):
        built, setup = build(model_id, changes=changes, **options)
        plans, _, notes = plan_batch(built, setup)
        traced = trace_training(
            built.model, setup, make_batch=lambda: realise(plans), loss_of=loss_for(built), gpu=gpu
        )
        traced.notes.extend(notes)
        return built, traced, {plan.name: plan for plan in plans}

    return make
