"""A client's personal classifier for inference: exported from the trained model, answered by ONNX Runtime."""
