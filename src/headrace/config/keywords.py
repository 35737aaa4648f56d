"""Keywords of LLM and AsyncLLM, for editors and type checkers.

Written by tools/golden.py from SETTINGS: change them there.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class SettingKeywords(TypedDict, total=False):
    """Every setting but the model, with its type."""

    dtype: Literal["auto", "bfloat16", "float32"]
    """Compute type: bfloat16, float32, or auto (the checkpoint's; float16 becomes bfloat16)."""

    quantization: Literal["none", "int8", "int4", "w8a8", "fp8_rowwise"]
    """Weights rounded as they load: none, int8 (a scale per output), int4 (a scale per 64 inputs); w8a8: int8, and
    activations row by row, so that prompts are computed faster; fp8_rowwise: the same in FP8, of feed-forward layers
    alone, on a GPU."""

    max_model_len: str | int | None
    """Longest sequence, prompt and answer together, in tokens, as 8192 or 128k."""

    attention_backend: Literal["auto", "reference", "cpu", "triton"]
    """Attention kernels: auto, reference (slow truth), cpu (C++) or triton (everything on a CUDA device)."""

    chat_template: str | None
    """File with a chat template (Jinja) in place of the model's own."""

    threads: int | None
    """CPU threads of the engine. Default: all cores that it may use (affinity, CPU quota)."""

    lora_modules: str | None
    """Adapters (LoRA) that requests may name as their model: name=folder, several with commas between them
    (docs/adapters.md)."""

    kv_cache_tokens: str | int | None
    """KV in fast memory on each rank, in tokens, as 16384 or 128k (k is 1,024). Default: a quarter of what is free; on
    a GPU what the weights and a largest step leave."""

    kv_cache_dtype: Literal["auto", "int8", "bfloat16", "float32"]
    """Type of the cached keys and values: auto (the compute type, by name too) or int8 (half of bfloat16, lossy)."""

    kv_cache_prefault: bool
    """Touch all of the KV cache's memory at start, so that no request waits for the system to map it."""

    recurrent_states: int | None
    """Recurrent states in memory, for models that have them: one for each running sequence, the rest for prefixes.
    Default: what fits in an eighth of the free memory, at most 4 for each of max_sequences; where a state takes at most
    half of a chunk, one for each chunk too."""

    enable_prefix_caching: bool
    """Share and keep the KV of common prefixes."""

    max_pinned_share: float
    """Share of the KV cache that pinned prefixes may hold together."""

    max_batch_tokens: str | int
    """Most tokens computed in one step. Default (0): 2048, on a GPU 8192, with several context ranks 16384."""

    max_sequences: int
    """Most sequences running at once."""

    scheduling_policy: Literal["fair", "fcfs"]
    """Whose prompt is computed next: fair (tenants take turns by weight; within a tenant by priority, then as they
    came, much shorter ones first) or fcfs (as they came)."""

    async_scheduling: bool
    """On a GPU: launch a step while the one before still runs, wherever its tokens can be chosen there."""

    seed: int
    """Seed of requests that bring none."""

    speculative: str
    """Draft tokens, and verify several in a step; answers are the same to the bit. off. ngram: what followed the same
    tokens earlier in prompt and answer. suffix: in earlier answers of the same tenant, too. These pay where answers
    repeat: quotes, edits of code, structured data. MODEL: a small model of the same vocabulary drafts, given as the
    model is."""

    num_speculative_tokens: int
    """Most tokens drafted for a sequence in one step. How many pay is measured."""

    kv_offloading_size: str | float
    """Host memory for KV that leaves the pool, as 16 (GiB) or 500MiB; with --offload-schedule, for all of the KV."""

    kv_host_format: Literal["raw", "int8", "int4"]
    """How KV is stored in host memory: raw (no loss), int8 or int4."""

    kv_offload_disk_size: str | float
    """Room for KV on disk, as 32 (GiB) or 1.5TiB."""

    kv_disk_format: Literal["raw", "int8", "int4"]
    """How KV is stored on disk: raw (no loss), int8 or int4."""

    kv_offload_path: str | None
    """Directory for KV on disk, which survives a restart; none: nothing on disk; auto: the user's cache directory,
    where serve keeps KV unless told otherwise. With --offload-schedule, of a file with all of the KV."""

    kv_remote_size: str | float
    """GiB that KV may take remotely, with --kv-tenant-quota; 0: the server decides (its maxmemory)."""

    kv_remote_format: Literal["raw", "int8", "int4"]
    """How KV is stored remotely: raw (no loss), int8 or int4."""

    kv_remote_url: str | None
    """Valkey or Redis server for KV, as redis://HOST:PORT/DB."""

    kv_offload_activations: Literal["auto", "on", "off"]
    """Store the inputs of the K and V projections too: auto (where they are smaller than K and V), on, off."""

    kv_offload_timeout_s: float
    """Longest time that a call to a tier may take; then it is left alone."""

    kv_offload_queue_mb: str | int
    """MiB that may wait to be written to each tier."""

    kv_offload_write: Literal["auto", "ended", "idle", "sparing"]
    """When KV is written to tiers: ended (as a request ends), idle (while nothing is computed), sparing (ended if that
    costs less than 2 % of computing, else idle). auto: ended; sparing in the user's cache directory."""

    kv_tenant_quota: float
    """Share of each tier that no other tenant can take from one (cache_salt)."""

    kv_link_gbps: float | None
    """Emulate a link of so many GB/s to where KV is kept. For experiments."""

    kv_link_latency_ms: float
    """Latency of the emulated link, per transfer."""

    offload_schedule: Literal["off", "row", "column", "auto"]
    """Decode on KV that stays outside the pool: row (latency), column (throughput), auto; off: KV comes back."""

    offload_batches: int
    """Batches into which the column schedule divides the sequences of a step."""

    offload_staging_mb: str | int
    """MiB of fast memory through which KV passes while it is streamed."""

    offload_x_resident: bool
    """Keep the inputs of the K and V projections in fast memory while KV is streamed (half of KV in MHA)."""

    weight_offload: bool
    """Keep the weights outside too and load each layer's when it is computed."""

    expert_offload_path: str | None
    """Directory of a file in which the experts of a model lie, mapped, where a step reads those that it meets."""

    expert_memory_size: str | float | None
    """Memory on each rank for the experts that are used most, as 8 (GiB) or 500MiB, while all lie in a file. Default:
    half of what the other weights leave free. A GPU needs it: its own memory for those in use."""

    context_parallel_size: int
    """Ranks that share the tokens of a sequence and its KV cache."""

    tensor_parallel_size: int
    """Ranks that share the weights, within each context rank."""

    distributed_backend: Literal["mp", "ray"]
    """Who starts the ranks: mp (this process, or torchrun where it did) or ray (a Ray cluster)."""

    prefill_strategy: Literal["auto", "single", "gather", "chain", "ring-kv", "ring-q"]
    """How several ranks compute a prompt: auto (as the planner says), single (one rank all of it, with all cores of its
    host's ranks), gather (even blocks, all-gather of K and V), chain (KV-Runahead: rank i the i-th block, later ones
    shorter), ring-kv (ring pass-KV: two of 2N shards each, equal areas), ring-q (ring pass-Q: as ring-kv, but keys
    stay)."""

    strategy_rule: Literal["cost", "alg1", "alg5", "heuristic"]
    """How the planner chooses: cost (predicted time), or between the rings alg1, alg5 or heuristic."""

    parallel_table: str | None
    """Table that `headrace tune` wrote for this machine, model and group."""

    rank_interface: str
    """IPv4 address that ranks bind to talk to each other."""

    rank_transport: Literal["auto", "nccl", "host"]
    """How ranks on GPUs exchange tensors: nccl (each has a GPU to itself), host (through pinned memory), or auto (nccl
    where it can be)."""

    rank_timeout_s: float
    """Seconds of silence after which a rank counts as lost."""

    sessions_dir: str | None
    """Directory in which sessions are saved by name (docs/cache.md). Without it none are."""

    sessions_size: str | float
    """GiB that the saved sessions of all tenants take at most."""

    sessions_tenant_share: float
    """Part of sessions_size that the sessions of one tenant take at most."""

    sessions_per_tenant: int
    """Sessions that one tenant may have saved at a time."""

    host: str
    """Address the server binds."""

    port: int
    """Port the server binds."""

    api_key: str | None
    """Key that clients must send as 'Authorization: Bearer KEY' (all routes but /health)."""

    api_keys_file: str | None
    """TOML file of API keys by tenant, each with its limits and chunks of its own (docs/keys.md). SIGHUP reads it
    again."""

    served_model_name: str | None
    """Name of the model in the API; several, separated by commas, and patterns with *, as in 'tiny,claude-*'. Default:
    the model as given."""

    max_connections: int | None
    """Connections open at once; then idle ones make room. Default: as file descriptors allow, at most 10,000."""

    max_queued_requests: int
    """Requests that may wait; more are refused with 429."""

    max_queued_tokens: str | int
    """Prompt tokens that may wait; more are refused with 429."""

    cache_control_pins: int
    """Prefixes that one caller's cache_control breakpoints keep in the cache, the latest; 0: none."""

    response_store_mb: str | int
    """MiB of memory for responses of /v1/responses that are kept for previous_response_id; 0: none."""

    log_level: Literal["auto", "debug", "info", "warning", "error"]
    """Least level of log lines. auto: info for serve, warning for other commands."""

    log_format: Literal["text", "json"]
    """json: each log line is a JSON object, with times in UTC and figures as fields."""

    log_requests: Literal["off", "ends", "params", "text"]
    """Log each request: as it ends; params: also as it arrives, with its parameters; text: and the beginning of prompt
    and answer, which may be personal data."""

    log_interval_s: float
    """Seconds between status lines while busy, and between lines about refused requests."""

    public_prefix_file: str | None
    """Text file, such as a system prompt: requests of all cache_salts share the chunks of a prompt that begins with it.
    Several: separated by colons."""

    sse_keepalive_s: float
    """A stream that has nothing to tell for so many seconds, as during a long prefill, sends a comment, so that proxies
    keep it open; 0: never."""

    on_disconnect: Literal["stop", "finish"]
    """When a client leaves during its prefill: stop at once, or finish the prefill, so that its retry finds it cached.
    A few at a time, and only while no other request waits."""

    shutdown_timeout_s: float
    """After SIGTERM or ctrl-c requests under way may go on for so many seconds; what is left is then ended."""

    stable_system_prompt: bool
    """On /v1/messages: keep out of the system text what Anthropic's coding client changes in it (a billing header, the
    date, git's status), so that prefixes are shared."""

    replay_answers: bool
    """Remember the tokens of answers and read them again by these in the conversation's next turn, so that its prefix
    stays cached. A prompt's tokens then depend on what the server remembers (docs/server.md)."""

    tool_call_parser: str
    """How the model writes calls of tools: hermes, qwen3_coder, seed_oss, glm45, minimax_m2, deepseek_v3, deepseek_v31,
    llama3_json, mistral, nemotron_json, hunyuan_a13b, cohere, lfm2, olmo3, pythonic, openai, json, or none (calls stay
    text). auto: as its chat template says."""

    reasoning_parser: str
    """How the model writes its reasoning: think, hunyuan_a13b, mistral, seed_oss, cohere, harmony, or none (it stays
    text). auto: as its chat template says."""

    restart: bool
    """Start the engine again after a failure; without it the server ends with code 1."""

    engine_timeout_s: float
    """An engine process silent for so many seconds counts as hung and is killed."""

    step_timeout_s: float | None
    """An engine whose step takes more seconds counts as hung and ends. Default: 600 on a GPU, which may hang without an
    error; on a CPU steps may take as long as they do."""
