"""A KV connector that moves nothing: it records the calls of the preemption hook and answers as told."""

from typing import ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class SilentConnector(KVConnectorBase_V1, SupportsHMA):
    """Without the hook."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

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


class RecordingConnector(SilentConnector):
    answer = False
    calls: ClassVar[list] = []

    @classmethod
    def reset(cls):
        cls.answer = False
        cls.calls = []

    def update_state_before_preempt(self, request, block_ids, num_computed_tokens):
        self.calls.append(
            (request.request_id, [list(ids) for ids in block_ids], num_computed_tokens, request.status.name)
        )
        return self.answer


def transfer_config(kv_role="kv_consumer"):
    return {"kv_connector": "RecordingConnector", "kv_connector_module_path": "recording_connector", "kv_role": kv_role}
