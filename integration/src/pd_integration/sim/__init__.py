"""A deterministic simulator: the real scheduler and the real connector on a hostile device.

Real: vLLM's schedulers with the recompute mixin, its KV cache manager, MultiConnector and output aggregator, both
sides of the offload connector, block-mapper, and npu-copy's engine and stream backend. Simulated, in one process, on a
virtual clock and from one seed: the devices of all ranks with their streams, the forwards, a P/D connector beside ours,
the clients, and the failures.
"""
