"""What the coverage tests share: the coverage tool, and small models of every family."""

from __future__ import annotations

import pytest

from memest.catalog.models import catalogue
from memest.catalog.resolve import ModelSource
from memest.config.setup import Setup
from memest.trace.inputs.batch import plan_batch, realise
from memest.trace.losses.loss import loss_for
from memest.trace.model.build import build_model
from memest.trace.training import trace_training
from memest.workspaces.operator_call import GpuTraits
from support.tools import load_tool

A100 = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)


@pytest.fixture(scope="session")
def tool():
    return load_tool("coverage")


@pytest.fixture(scope="session")
def small(tool):
    """``small("bert-base-uncased")`` is the source of that model with two layers."""
    entries = {entry.id: entry for entry in catalogue()}

    def make(model_id, **changes):
        config = tool.reduced_config(entries[model_id].config()) | changes
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
