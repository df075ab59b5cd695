"""Allocations that kernels make behind the operators: a registry of small sourced rules."""
