"""Callbacks that change or watch a run. Adding or removing one in the YAML is the ablation."""

from rollplex.callbacks.environment_logger import EnvironmentLogger
from rollplex.callbacks.export_model import ExportModel
from rollplex.callbacks.graceful_stop import GracefulStop
from rollplex.callbacks.group_streaming import GroupStreaming
from rollplex.callbacks.memory_report import MemoryReport
from rollplex.callbacks.phase_offload import PhaseOffload
from rollplex.callbacks.prediction_writer import PredictionWriter
from rollplex.callbacks.prefill_reuse import PrefillReuse
from rollplex.callbacks.prefix_overlap import PrefixOverlap
from rollplex.callbacks.progress import PhaseProgressBar
from rollplex.callbacks.rollout_logger import RolloutLogger
from rollplex.callbacks.shared_weights import SharedWeights
from rollplex.callbacks.timeline_logger import TimelineLogger

__all__ = [
    "EnvironmentLogger",
    "ExportModel",
    "GracefulStop",
    "GroupStreaming",
    "MemoryReport",
    "PhaseOffload",
    "PhaseProgressBar",
    "PredictionWriter",
    "PrefillReuse",
    "PrefixOverlap",
    "RolloutLogger",
    "SharedWeights",
    "TimelineLogger",
]
