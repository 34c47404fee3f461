"""Names that belong to others, known here without importing them: vLLM's, and the recompute scheduler's."""

CONNECTOR = "RecomputeCPUOffloadConnector"
MULTI = "MultiConnector"
CHILDREN = "connectors"

TRANSFER_KEYS = (
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)
"""The fields of vLLM's KVTransferConfig."""

ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICY = "kv_load_failure_policy"
POLICIES = ("recompute", "fail")

FLAG = "recompute_scheduler_enable"
SECTION = "scheduler_config"
FALLBACK = "recompute_fallback"
FALLBACKS = ("local", "resend")
MAX_LOCAL_TOKENS = "recompute_fallback_max_local_tokens"
