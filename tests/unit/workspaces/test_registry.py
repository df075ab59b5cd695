from __future__ import annotations

import sys

import pytest

from memest.workspaces.operator_call import GpuTraits, OpCall
from memest.workspaces.registry import all_rules, has_rule, rule, workspaces_of


class TestRule:
    def test_second_rule_for_an_operator_raises(self):
        has_rule("aten.sum.default")  # loads the rules
        with pytest.raises(ValueError, match=r"aten\.sum already has a rule.*reduction"):
            rule("aten.sum")(lambda call, gpu: ())

    def test_refused_registration_leaves_nothing_behind(self):
        with pytest.raises(ValueError, match="already has a rule"):
            rule("aten.never_heard_of", "aten.sum")(lambda call, gpu: ())
        assert not has_rule("aten.never_heard_of.default")

    @pytest.mark.parametrize("name", ["sum", "aten.max.dim.extra"])
    def test_names_that_are_no_operator_raise(self, name):
        with pytest.raises(ValueError, match="names no operator"):
            rule(name)(lambda call, gpu: ())


class TestLookUp:
    def test_packet_rules_cover_all_overloads(self):
        assert has_rule("aten.sum.dim_IntList")
        assert has_rule("aten.sum.default")

    def test_overload_rules_cover_only_that_overload(self):
        assert has_rule("aten.max.dim")
        assert not has_rule("aten.max.other")

    def test_operators_without_a_rule_allocate_nothing_hidden(self):
        call = OpCall("aten.add.Tensor", (), (), (), "main")
        assert not has_rule(call.op)
        assert workspaces_of(call, GpuTraits((9, 0), 132, 2048)) == ()


class TestDocumentation:
    def test_every_rule_says_formula_source_and_evidence(self):
        for info in all_rules():
            assert info.summary, info.name
            assert info.source, info.name
            assert info.evidence.startswith(("recorded", "source", "memory")), info

    def test_every_operator_is_named_by_one_rule(self):
        ops = [op for info in all_rules() for op in info.ops]
        assert len(ops) == len(set(ops))
        assert "aten.convolution_backward" in ops

    def test_rules_do_not_need_torch(self):
        names = [name for name in sys.modules if name.startswith("memest.workspaces.")]
        assert len(names) > 10
        assert all(not hasattr(sys.modules[name], "torch") for name in names)
