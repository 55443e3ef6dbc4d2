"""Write the F16 GGUF that llama.cpp is given: the same values as in a quantised file, with its metadata and tensor order."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def write_f16(source: Path, target: Path) -> Path:
    """Dequantise ``source`` to ``target`` unless that exists already: matrices in fp16, vectors in fp32."""
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    unfinished = target.with_suffix(".tmp")
    writer = gguf.GGUFWriter(unfinished, arch=_text(reader, "general.architecture"))
    _copy_metadata(reader, writer)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float16 if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(target)


def _text(reader: gguf.GGUFReader, key: str) -> str:
    return reader.fields[key].contents()


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """All entries but those the writer makes itself, and the file type, which is F16 now."""
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type", "general.quantization_version"):
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
