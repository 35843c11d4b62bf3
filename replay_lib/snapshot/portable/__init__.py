"""Snapshots without a pickle: safetensors and JSON, each file sealed by its sha256."""
