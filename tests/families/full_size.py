"""Plan a model of full size in a process of its own: python full_size.py FOLDER TARGET WORKERS prints seconds and peak bytes as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

began = time.monotonic()

from kogc.compile_passes import plan  # noqa: E402  (importing counts)
from kogc.dump import Dump  # noqa: E402
from kogc.frontend import huggingface  # noqa: E402
from kogc.targets import load_target  # noqa: E402

if __name__ == "__main__":
    folder, target, workers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    huggingface.MODEL_TYPES = {}  # Llama through Transformers, too
    model = huggingface.load_folder(folder)
    planned = plan(model, model.dtype, workers, load_target(target), Dump(None), lambda step, done, total: None)
    facts = {"seconds": time.monotonic() - began, "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    print(json.dumps(facts | {"context": model.context, "layers": planned.program.meta["layers"], "lines": planned.rendered.source.count("\n")}))
