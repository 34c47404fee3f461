"""The command line has to run on a host that has neither vLLM nor torch."""

import subprocess
import sys

WITHOUT_ENGINES = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_the_package_imports_neither_vllm_nor_torch():
    done = run("import offload_connector, offload_connector.config, sys; print({'vllm', 'torch'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


def test_the_connector_is_there_under_its_name():
    import offload_connector
    from offload_connector import RecomputeCPUOffloadConnector

    assert offload_connector.RecomputeCPUOffloadConnector is RecomputeCPUOffloadConnector


def test_without_vllm_the_connector_names_the_versions_that_work():
    done = run(WITHOUT_ENGINES + "from offload_connector import RecomputeCPUOffloadConnector")
    assert "ImportError: offload-connector needs vLLM 0.23 to 0.32" in done.stderr


def test_an_unknown_name_is_an_attribute_error():
    done = run("import offload_connector; print(hasattr(offload_connector, 'Nothing'))")
    assert done.stdout.strip() == "False", done.stderr
