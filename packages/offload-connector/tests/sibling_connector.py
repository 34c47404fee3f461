"""A connector to stand beside ours: it claims tokens of resumed requests, wherever it is told to."""

from typing import ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class SiblingConnector(KVConnectorBase_V1, SupportsHMA):
    claims: ClassVar[int] = 0
    """Tokens it offers for every preempted request."""
    served: ClassVar[list] = []
    """(request id, tokens) that it was told to load."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.num_preemptions and self.claims > num_computed_tokens:
            return min(self.claims, request.num_tokens - 1) - num_computed_tokens, False
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.served.append((request.request_id, num_external_tokens))

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass
