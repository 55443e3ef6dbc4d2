"""What every test shares: a cache folder of its own, and the real models that are too large for the repository."""

import os
from pathlib import Path

import pytest

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_configure(config: pytest.Config) -> None:
    """Keep built kernels in pytest's cache: fast again next time, and nothing left in the user's own cache."""
    if "KOGC_CACHE_DIR" not in os.environ:
        os.environ["KOGC_CACHE_DIR"] = str(config.cache.mkdir("kogc"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF: `KOGC_SMOLLM2`, else the folder where `.ci/smollm2` puts it.

    Where it is absent the test is skipped, or fails under `CI=true`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("KOGC_SMOLLM2") or cache / "kogc-tests" / SMOLLM2_FILE)
    if path.is_file():
        return path
    reason = f"no SmolLM2 at {path}; run .ci/smollm2, or set KOGC_SMOLLM2"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
