"""Decode graphs as ONNX models. Needs the ``onnx`` package (``pip install 'kogc[onnx]'``)."""
