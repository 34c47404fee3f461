"""Imported once by multiprocessing's fork server, so that each engine process starts with vLLM at hand."""

import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401

import offload_connector.connector  # noqa: F401
