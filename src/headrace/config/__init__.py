"""Settings of the engine and its server, by room, and the facts of a model that every room may need.

Each setting is a field of its room's record. Its flat name (kv_cache_tokens) is a keyword of EngineConfig, a flag
(`--kv-cache-tokens`) and has an environment twin (`HEADRACE_KV_CACHE_TOKENS`); the command line is generated from the
records. Imports no torch.
"""

from headrace.config.attention import AttentionSpec, IndexSpec, RecurrentSpec
from headrace.config.cache import KVDType
from headrace.config.engine import EngineConfig, config_from_env
from headrace.config.fields import Setting, env_name
from headrace.config.model import AttentionBackend, DType, Quantization
from headrace.config.offload import KVTiers, Switch
from headrace.config.ranks import DistributedBackend, PrefillStrategy, StrategyRule
from headrace.config.routing import RoutingSpec
from headrace.config.streaming import KVStreaming, OffloadSchedule
from headrace.config.tiers import OffloadFormat
from headrace.config.together import SETTINGS, Outside

__all__ = [
    "SETTINGS",
    "AttentionBackend",
    "AttentionSpec",
    "DType",
    "DistributedBackend",
    "EngineConfig",
    "IndexSpec",
    "KVDType",
    "KVStreaming",
    "KVTiers",
    "OffloadFormat",
    "OffloadSchedule",
    "Outside",
    "PrefillStrategy",
    "Quantization",
    "RecurrentSpec",
    "RoutingSpec",
    "Setting",
    "StrategyRule",
    "Switch",
    "config_from_env",
    "env_name",
]
