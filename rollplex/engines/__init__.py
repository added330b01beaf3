"""What generates responses. vLLM itself is imported only when a `VLLMEngine` starts."""

from rollplex.engines.base import EngineContext, RolloutEngine, WindowState
from rollplex.engines.remote_engine import RemoteEngine
from rollplex.engines.torch_engine import TorchEngine
from rollplex.engines.vllm_engine import VLLMEngine

__all__ = ["EngineContext", "RemoteEngine", "RolloutEngine", "TorchEngine", "VLLMEngine", "WindowState"]
