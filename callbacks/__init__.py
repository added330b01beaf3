"""Callbacks that change or watch a run. Adding or removing one in the YAML is the ablation."""

from rollplex.callbacks.group_streaming import GroupStreaming
from rollplex.callbacks.prefix_overlap import PrefixOverlap

__all__ = ["GroupStreaming", "PrefixOverlap"]
