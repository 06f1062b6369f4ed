"""The private language model of an edge device: ONNX Runtime, numpy and a tokenizer; no torch."""
