"""Settings every test runs under (set before anything else is imported) and the fixtures that rooms share."""

import atexit
import os
import shutil
import tempfile


# Offline, and with a cache of its own in each process: no test depends on what a developer has downloaded, and
# parallel workers do not write the same remote-code modules.
_hf_home = tempfile.mkdtemp(prefix="normalign-tests-")
atexit.register(shutil.rmtree, _hf_home, ignore_errors=True)

os.environ.update(
    HF_HOME=_hf_home,
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_EVALUATE_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    MPLBACKEND="Agg",
    NO_COLOR="1",
)
